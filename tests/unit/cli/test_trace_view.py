"""`gyre trace`: trees of whole, broken and unfinished transitions, what of them is covered, and how they are asked for."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from gyre.cli.main import app
from gyre.cli.trace_view.page import render_page
from gyre.cli.trace_view.spans import Spans, parse, read_spans
from gyre.cli.trace_view.text import last_line, print_transition
from gyre.cli.trace_view.tree import NOT_RECORDED, UNFINISHED, Transition, transitions, union
from gyre.runtime.transition_traces import ids_of, transition_id
from rich.text import Text
from typer.testing import CliRunner

BEGIN = 1_700_000_000_000  # ms
Line = tuple[str, str]


def line(process: str, name: str, number: int, start: int, end: int | None, parent: int | None = 0, epoch: int = 1,
         **attributes: Any) -> Line:
    """A span of the transition of cell 0 to `epoch`, times in ms from its begin; number 0 is the root, parent None none."""
    trace, root = ids_of("r", transition_id(0, epoch))

    def identity(number: int) -> str:
        return f"0x{root if number == 0 else number:016x}"

    def at(time: int | None) -> str | None:
        return None if time is None else datetime.fromtimestamp((BEGIN + time) / 1000, UTC).isoformat()

    named = {key.replace("__", "."): value for key, value in attributes.items()}
    error = {"status_code": "ERROR", "description": named.pop("error")} if "error" in named else {"status_code": "UNSET"}
    return process, json.dumps({
        "name": name, "context": {"trace_id": f"0x{trace:032x}", "span_id": identity(number)},
        "parent_id": None if parent is None else identity(parent), "start_time": at(start), "end_time": at(end),
        "status": error, "attributes": named, "links": named.pop("links", [])})


def root(end: int | None, epoch: int = 1, **attributes: Any) -> Line:
    return line("scheduler", "gyre.cell.transition", 0, 0, end, None, epoch, gyre__transition__id=f"cell-0-epoch-{epoch}",
                gyre__cell__id=0, gyre__cell__epoch=epoch, gyre__role__from="rollout", gyre__role__to="train", **attributes)


# As they are written: each span when it begins and when it ends. One call is moved, one is computed again.
STREAM: list[Line] = [
    root(None),
    line("scheduler", "gyre.scheduler.decide", 1, 0, 2),
    line("scheduler", "gyre.scheduler.assign", 2, 2, None),
    line("scheduler", "gyre.scheduler.assign", 2, 2, 5),
    line("rollout", "gyre.fact.delivery", 3, 5, 10, gyre__fact="CellRoleAssigned"),
    line("rollout", "gyre.rollout.release", 4, 10, None, gyre__cell__id=0),
    line("rollout", "gyre.rollout.drain", 5, 11, None, 4),
    line("rollout", "gyre.kv.migrate", 6, 12, None, 5, gyre__execution="x0"),
    line("rollout", "gyre.kv.migrate", 6, 12, 40, 5, gyre__execution="x0", gyre__outcome="moved", gyre__bytes=2_000_000),
    line("rollout", "gyre.kv.migrate", 7, 13, 13, 5, gyre__execution="x1", gyre__outcome="replayed", gyre__reason="short"),
    line("rollout", "gyre.rollout.drain", 5, 11, 41, 4, gyre__moved=1),
    line("engine-0", "gyre.proto.rollout.v1.EngineService/Sleep", 8, 42, 48, 4),
    line("rollout", "gyre.rollout.release", 4, 10, 50, gyre__cell__id=0),
    line("trainer-0", "gyre.fact.delivery", 9, 50, 54, 4, gyre__fact="CellRolloutReleased"),
    line("trainer-0", "gyre.train.join", 10, 54, None),
    line("trainer-0", "gyre.train.join", 10, 54, 90),
    line("scheduler", "gyre.fact.delivery", 11, 90, 100, 10, gyre__fact="CellTrainJoined"),
    root(100, gyre__outcome="completed", gyre__weights__version=3),
]


def only(lines: list[Line]) -> Transition:
    [found] = transitions(parse(lines))
    return found


def printed(found: Transition) -> list[str]:
    lines: list[Text] = []
    print_transition(found, lines.append)
    return [one.plain for one in lines]


def test_a_whole_transition_is_one_tree_that_covers_its_root():
    found = only(STREAM)
    assert [(depth, node.span.name) for depth, node in found.root.walk()][:4] == [
        (0, "gyre.cell.transition"), (1, "gyre.scheduler.decide"), (1, "gyre.scheduler.assign"), (1, "gyre.fact.delivery")]
    assert (found.outcome, found.coverage, found.num_spans, found.num_orphans) == ("completed", 1.0, 12, 0)
    assert found.processes == ("engine-0", "rollout", "scheduler", "trainer-0")
    assert (found.num_bytes, found.roles, found.duration_ns) == (2_000_000, "rollout -> train", 100_000_000)
    text = printed(found)
    assert text[-1] == "trace spans=12 processes=4 coverage=1.000"
    assert any("│  │  ├─ gyre.kv.migrate" in row and "x0  moved" in row and "2.0 MB" in row for row in text), text
    assert any("replayed  short" in row for row in text)


@pytest.mark.parametrize("length", range(1, len(STREAM) + 1))
def test_whatever_was_written_before_a_process_died_is_a_usable_tree(length: int):
    found = only(STREAM[:length])
    ended = {json.loads(text)["context"]["span_id"] for _, text in STREAM[:length]}
    assert found.num_spans == len(ended), "nothing that was written is missing"
    assert found.outcome == ("completed" if length == len(STREAM) else UNFINISHED)
    assert 0.0 <= found.coverage <= 1.0
    assert found.name == "cell-0-epoch-1"
    rows = printed(found)
    assert rows[-1] == last_line(found)
    open_spans = [node.span.name for _, node in found.root.walk() if not node.is_finished]
    assert sum("UNFINISHED" in row for row in rows) == len(open_spans)
    assert render_page([found], "r").count("bar root open") == (length < len(STREAM))


@pytest.mark.parametrize("gone", range(len(STREAM)))
def test_any_line_may_be_missing(gone: int):
    found = only(STREAM[:gone] + STREAM[gone + 1:])
    assert found.num_spans in (11, 12)
    assert printed(found)[-1] == last_line(found)


def test_the_time_of_the_root_in_which_nothing_below_it_ran_is_not_covered_and_named():
    found = only([root(100), line("rollout", "gyre.rollout.release", 1, 10, 40),
                  line("trainer-0", "gyre.train.join", 2, 60, 120)])
    assert found.coverage == pytest.approx(0.7)
    assert [((a - found.root.start_ns) // 10**6, (b - a) // 10**6) for a, b in found.gaps] == [(0, 10), (40, 20)]
    assert "nothing was recorded from +40.0 ms for 20.0 ms" in printed(found)


def test_intervals_that_touch_or_overlap_are_counted_once():
    assert union([(5, 5), (0, 4), (4, 6), (2, 3), (8, 20), (-5, -1)], 1, 10) == [(1, 6), (8, 10)]


def test_a_root_that_was_never_written_is_made_up_over_what_there_is():
    found = only([one for one in STREAM if "gyre.cell.transition" not in one[1]])
    assert (found.outcome, found.has_root, found.name) == (NOT_RECORDED, False, "cell-0-epoch--1")
    assert found.duration_ns == 100_000_000
    assert printed(found)[-1] == "trace spans=11 processes=4 coverage=1.000"


def test_spans_whose_parent_was_not_written_hang_at_the_root():
    found = only([root(100), line("rollout", "gyre.kv.migrate", 6, 12, 40, 5)])
    assert found.num_orphans == 1
    assert [child.span.name for child in found.root.children] == ["gyre.kv.migrate"]
    assert any(row.startswith("lost ") for row in printed(found))


def test_a_clock_that_is_behind_is_moved_with_all_that_depends_on_it():
    late = [root(100), line("rollout", "gyre.rollout.release", 1, -30, 10), line("engine-0", "sleep", 2, -45, 0, 1)]
    found = only(late)
    assert found.moved_ns == {"rollout": 30_000_000, "engine-0": 45_000_000}
    assert [node.start_ns - found.root.start_ns for _, node in found.root.walk()] == [0, 0, 0]
    assert found.coverage == pytest.approx(0.45)
    assert any(row.startswith("clock") and "rollout is behind by 30.0 ms" in row for row in printed(found))


def test_weights_that_were_published_before_the_decision_are_no_sign_of_a_wrong_clock():
    found = only([root(100), line("trainer-0", "gyre.weights.publish", 1, -50, -10, gyre__before=True),
                  line("trainer-0", "gyre.train.release", 2, 0, 100)])
    assert (found.moved_ns, found.coverage) == ({}, 1.0)
    assert any("-50.0 ms" in row and "before the decision" in row for row in printed(found))


def test_a_second_try_is_shown_as_one_beside_the_first_with_its_reason():
    found = only([root(100), line("rollout", "gyre.engine.wake", 1, 0, 40, error="EngineGone: no answer"),
                  line("rollout", "gyre.engine.wake", 2, 40, 100)])
    assert [child.number for child in found.root.children] == [1, 2]
    rows = printed(found)
    assert any("failed: EngineGone: no answer" in row for row in rows)
    assert any(row.endswith("try 2") for row in rows)


def test_a_root_that_another_scheduler_made_again_is_the_same_root():
    again = [("scheduler", line("", "gyre.cell.transition", 0, 5, 100, None, gyre__outcome="completed", gyre__resumed=True)[1])]
    found = only([*STREAM[:-1], *again])
    assert (found.num_spans, found.outcome, found.duration_ns) == (12, "completed", 100_000_000)
    assert any(row.startswith("resumed") for row in printed(found))


def test_steps_batches_and_publications_of_other_traces_are_named():
    trace, span = "0x" + "ab" * 16, "0x" + "cd" * 8
    there = {"context": {"trace_id": trace, "span_id": span}}
    here = {"context": {"trace_id": f"0x{ids_of('r', 'cell-0-epoch-1')[0]:032x}", "span_id": "0x01"}}

    def other(name: str, identity: str, **more: Any) -> Line:
        return "trainer-0", json.dumps({
            "name": name, "context": {"trace_id": trace, "span_id": identity}, "links": more.pop("links", []),
            "start_time": "2026-01-01T00:00:00Z", "end_time": "2026-01-01T00:00:01Z", "attributes": more})

    found = only([other("gyre.burst.open", span, **{"gyre.burst": 4}), other("gyre.train.step", "0x02", links=[here]),
                  root(100, links=[there])])
    assert [one.name for one in found.links] == ["gyre.train.step", "gyre.burst.open"]
    assert any("gyre.burst.open (burst 4, trainer-0)" in row for row in printed(found))


# ---------------------------------------------------------------- files and the command


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory of span files: a whole transition, and one back of which only the beginning is known."""
    directory = tmp_path / "spans"
    directory.mkdir()
    back = line("scheduler", "gyre.cell.transition", 0, 500, None, None, 2, gyre__transition__id="cell-0-epoch-2",
                gyre__cell__id=0, gyre__cell__epoch=2)
    for process, text in [*STREAM, back]:
        with (directory / f"{process}.jsonl").open("a") as file:
            file.write(text + "\n")
    with (directory / "rollout.jsonl").open("a") as file:
        file.write('{"name": "gyre.torn", "context": {"trace')
    return directory


def gyre(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *map(str, words)])
    return result.exit_code, result.output


def test_a_torn_line_is_counted_and_left_out(files: Path):
    spans = read_spans(files)
    assert (spans.num_files, spans.num_unreadable, len(transitions(spans))) == (4, 1, 2)


def test_the_newest_transition_is_shown_or_the_one_that_is_named(files: Path):
    code, text = gyre(files, "--last")
    assert code == 0 and "cell-0-epoch-2" in text and UNFINISHED in text
    assert gyre(files)[1] == text
    code, text = gyre(files, "--transition", "cell-0-epoch-1")
    assert code == 0
    assert text.splitlines()[-1] == "trace spans=12 processes=4 coverage=1.000"


def test_all_transitions_are_listed_in_order(files: Path):
    code, text = gyre(files, "--list")
    assert code == 0
    assert [row.split()[0] for row in text.splitlines()[2:]] == ["cell-0-epoch-1", "cell-0-epoch-2"]


def test_a_transition_nobody_knows_is_answered_with_those_that_are_near(files: Path):
    code, text = gyre(files, "--transition", "cell-0-epoch-7")
    assert code == 2 and "nearest: cell-0-epoch-" in text
    code, text = gyre(files, "--transition", "x")
    assert code == 2 and "cell-0-epoch-2" in text


def test_without_a_run_or_without_spans_it_says_so(tmp_path: Path, files: Path):
    code, text = gyre("--runs", tmp_path / "nowhere")
    assert code == 2 and "no run under" in text
    code, text = gyre("clinik", "--runs", tmp_path)
    assert code == 2 and "no run there" in text
    (tmp_path / "clinic").mkdir()
    (tmp_path / "clinic" / "run.toml").write_text("")
    code, text = gyre("--runs", tmp_path)
    assert code == 2 and "no span files" in text
    code, text = gyre("clinik", "--runs", tmp_path)
    assert code == 2 and "nearest: clinic" in text
    code, text = gyre(files, "--last", "--list")
    assert code == 2 and "choose one" in text
    for path in files.iterdir():
        path.write_text("\n")
    code, text = gyre(files)
    assert code == 2 and "no trace of a role transition" in " ".join(text.split())


def test_the_page_needs_nothing_else_and_has_a_lane_for_each_process(files: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    code, text = gyre(files, "--transition", "cell-0-epoch-1", "--html", page)
    assert code == 0 and "page.html" in text
    html = page.read_text()
    assert "http" not in html and "<script" not in html and "src=" not in html
    assert html.count('class="lane"') == 4
    assert html.split("<section>")[1].count('class="bar ') == 12
    assert gyre(files, "--list", "--html", page)[0] == 0
    for nowhere in (tmp_path / "nowhere" / "page.html", tmp_path, page / "page.html"):
        code, text = gyre(files, "--html", nowhere)
        assert code == 2 and f"{nowhere} cannot be written:" in "".join(text.split("\n"))
    assert not list(tmp_path.parent.glob(".*.new"))
    assert page.read_text().count("<section>") == 2


def test_names_from_a_file_cannot_write_the_page(tmp_path: Path):
    found = only([root(100), line("rollout", "<script>x</script>", 1, 0, 100, gyre__detail="<b>")])
    html = render_page([found], "<i>")
    assert "<script" not in html and "<b>" not in html and "<i>" not in html


def test_other_traces_of_the_same_files_are_left_alone():
    other = json.dumps({"name": "gyre.reward.evaluate", "context": {"trace_id": "0x" + "1" * 32, "span_id": "0x1"},
                        "start_time": "2026-01-01T00:00:00Z", "end_time": "2026-01-01T00:00:01Z"})
    assert transitions(parse([("reward-0", other)])) == []
    assert isinstance(parse([("reward-0", other)]), Spans)
