"""The report is one well-formed file that needs nothing else, whatever a run put into it."""

import re
from dataclasses import replace

import pytest
from gyre.cli.cases import diff, median_task, timed_out, workspace_of_snapshot
from gyre.cli.charts import axis, short
from gyre.cli.ledger import RunLedger
from gyre.cli.markup import Html, el
from gyre.cli.metrics import estimate
from gyre.cli.report import ReportContext, render_report, write_report
from gyre.cli.tree_view.anatomy import anatomy
from gyre.cli.treefile import read_tree, turns
from gyre.contracts import events as e
from gyre.contracts.errors import BrokenBody
from gyre.contracts.ids import execution_id
from gyre.runtime.blobs import DirectoryBlobs
from well_formed import parsed


def ledger_of(facts):
    ledger = RunLedger()
    for fact, time_s in facts:
        ledger.fold(fact, time_s)
    return ledger


@pytest.fixture
def context(written):
    rewards = ledger_of(written.facts).evaluation("before").rewards
    return ReportContext(written.path, written.config, {"do_nothing": 0.0, "random": 0.1, "oracle": 1.0},
                         estimate(rewards.values()), rewards)


def test_a_report_is_well_formed_and_says_everything(written, context):
    write_report(ledger_of(written.facts), context, written.path / "report.html")
    page = (written.path / "report.html").read_text()
    text = " ".join("".join(parsed(page).texts).split())
    for expected in ("Reward on held-out tasks rose from", "learning rate 0", "oracle", "Reward while training",
                     "One held-out task, before and after", "F a 3 <|end|>", "calls: killed while it waited for call 4",
                     "- return total - amount # <i>", "8 of 15 trained, 7 not (max_paths)", "main-summary",
                     "Do the books balance?", "10 of 10", "Two bursts from its middle", "trained 288 (53.3 %)", "Clip share",
                     "Effective sample size", "Staleness", "versions from sampling to training", "Gradient norm",
                     "gyre train examples/clinic/clinic.toml --set 'name=<b>odd</b>'",
                     "proves nothing about"):
        assert expected in text, expected
    assert not list(written.path.glob(".report*"))


def test_a_report_needs_nothing_from_elsewhere(written, context):
    page = render_report(ledger_of(written.facts), context)
    parser = parsed(page)
    assert not parser.tags & {"script", "link", "img", "iframe", "object", "base"}
    assert not {name for name, _ in parser.attributes} & {"src", "href", "srcset", "onload", "onclick", "style"}
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_what_a_run_says_is_escaped(written, context):
    facts = [(replace(fact, reason="<img src=x onerror=alert(1)>") if isinstance(fact, e.RunClosed) else fact, time_s)
             for fact, time_s in written.facts]
    page = render_report(ledger_of(facts), replace(context, config=replace(written.config, name="</style><script>")))
    assert "<img" not in page
    assert "<script" not in page
    assert page.count("</style>") == 1
    parsed(page)


def test_the_same_run_gives_the_same_bytes(written, context):
    assert render_report(ledger_of(written.facts), context) == render_report(ledger_of(written.facts[::-1]), context)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9])
def test_a_run_in_progress_has_a_report(written, context, share):
    facts = written.facts[:int(share * len(written.facts))]
    text = "".join(parsed(render_report(ledger_of(facts), context)).texts)
    assert "nothing is said about learning" in text


def test_missing_books_missing_files_and_missing_tokenizer_are_said(written, context):
    broken = replace(context, run_dir=written.path / "elsewhere")
    facts = [pair for pair in written.facts if not isinstance(pair[0], e.ExecutionScored)]
    text = "".join(parsed(render_report(ledger_of(facts), broken)).texts)
    assert "no blob store any more" in text
    lost = [pair for i, pair in enumerate(written.facts) if i != 5]
    assert isinstance(written.facts[5][0], e.GroupDispatched)
    assert "does not hold" in "".join(parsed(render_report(ledger_of(lost), context)).texts)


def test_a_gain_that_chance_explains_is_not_called_a_gain(written, context):
    level = {"before": 0.5, "after": 0.5}
    facts = []
    for number, (fact, time_s) in enumerate(written.facts):
        if isinstance(fact, e.GroupCompleted) and fact.purpose == "eval":
            reward = level[fact.label] + (0.1 if number % 2 else -0.1)
            fact = replace(fact, outcomes=tuple(replace(o, reward=reward) for o in fact.outcomes))
        facts.append((fact, time_s))
    page = "".join(parsed(render_report(ledger_of(facts), context)).texts)
    assert "does not exceed chance" in page


# ---------------------------------------------------------------- single executions


def test_the_held_out_case_has_the_median_gain(facts):
    ledger = ledger_of(facts)
    before, after = ledger.evaluation("before"), ledger.evaluation("after")
    case = median_task(ledger, before, after)
    gains = sorted(after.rewards[t] - before.rewards[t] for t in before.rewards)
    assert after.rewards[case.task] - before.rewards[case.task] == gains[3]
    assert (case.before.task, case.after.task) == (case.task, case.task)
    assert median_task(ledger, before, ledger.evaluation("never")) is None


def test_the_case_of_a_limit_was_trained_and_scored(facts):
    chosen = timed_out(ledger_of(facts))
    assert chosen.terminated.fact.limit == "calls"
    assert chosen.outcome.num_trained_targets == 8
    assert timed_out(RunLedger()) is None


def test_turns_show_only_what_is_new(written):
    blobs = DirectoryBlobs(written.path / "blobs")
    tree = read_tree(blobs, execution_id("e-before-000", 0))
    shown = list(turns(tree))
    assert [turn.is_fresh for turn in shown] == [True, False, True]
    assert [len(turn.added) for turn in shown] == [12, 5, 12]
    assert [len(turn.output) for turn in shown] == [4, 4, 7]


def test_runs_divide_a_segment_where_sampling_begins_and_ends(written):
    tree = anatomy(read_tree(DirectoryBlobs(written.path / "blobs"), execution_id("e-before-000", 0)))
    assert [(run.num, run.call, run.fate) for run in tree.runs_of(1)] == [
        (4, 0, "path 0"), (5, -1, "context"), (4, 1, "path 0")]
    assert [(run.num, run.call) for run in tree.runs_of(0)] == [(12, -1)]


def test_a_diff_tells_added_removed_and_binary_files():
    lines = diff({"a": b"one\n", "gone": b"x\n", "same": b"s\n"}, {"a": b"two\n", "new": b"y\n", "same": b"s\n"})
    assert {"-one", "+two", "-x", "+y"} <= set(lines)
    assert not [line for line in lines if "same" in line]
    assert diff({"b": b"\xff"}, {"b": b"\xfe"}) == ["@@ b: binary content differs @@"]
    assert diff({}, {"long": b"x\n" * 1000})[-1].endswith("more lines @@")


def test_a_snapshot_that_is_no_tar_is_refused_by_name(tmp_path):
    blobs = DirectoryBlobs(tmp_path)
    with pytest.raises(BrokenBody, match=r"snapshot w/1\.tar"):
        workspace_of_snapshot(blobs, blobs.put("w/1.tar", b"no tar" * 200))


# ---------------------------------------------------------------- markup and charts


def test_text_is_escaped_and_markup_is_not():
    assert el("p", "<b>", Html("<i></i>"), cls='"') == '<p class="&quot;">&lt;b&gt;<i></i></p>'


def test_an_axis_has_round_ticks_around_its_values():
    assert axis(0.13, 0.87).ticks == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert axis(1, 60, 6, snap=False).ticks == (10, 20, 30, 40, 50, 60)
    assert axis(3.0, 3.0).low < 3.0 < axis(3.0, 3.0).high


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (0.25, "0.25"), (1200.0, "1,200"), (2e-6, "2e-6"), (-0.5, "-0.5")])
def test_ticks_are_short(value, text):
    assert short(value) == text
