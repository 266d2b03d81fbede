"""Traces of other tools as trees: the numbers that are known of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from executions import random_calls
from gyre.trajectory.inspection import TreeFile
from gyre.trajectory.portable.deltas import ForeignCall, record_calls
from gyre.trajectory.portable.formats import Counts, Imported, detect, imported, unpacked
from gyre.trajectory.portable.session import Options, Trace
from gyre.trajectory.portable.spelling import spell
from gyre.trajectory.portable.swe_agent import message_lists, shared_messages
from gyre.trajectory.record import CallLog
from gyre.trajectory.tree import build_tree
from gyre.trajectory.workload import Workload, make

DATA = Path(__file__).resolve().parents[2] / "data"
ATIF = DATA / "atif_terminus2/hello-world-context-summarization.trajectory.json"
MARSHMALLOW = DATA / "swe_agent/marshmallow-1867.function_calling_replace_from_source.traj.xz"
REWIND = DATA / "claude_code/dag_compact_after_rewind_preserved.jsonl"
SUB_AGENT = DATA / "claude_code/subagent.jsonl"
SESSIONS = DATA / "prefix_hashes/subagent_traces_with_hashes.jsonl.xz"


def trace(path: Path) -> Trace:
    def beside(name: str) -> bytes | None:
        other = path.parent / name
        return other.read_bytes() if other.exists() else None
    return Trace(path.name, path.read_bytes(), beside)


def read(*paths: Path, options: Options | None = None) -> Imported:
    (one,) = imported([trace(path) for path in paths], options or Options())
    return one


def text_of(file: TreeFile, call: int) -> tuple[str, str]:
    """Prompt and output of a call whose ids are bytes; a role's id as <id>."""
    note, ids, segment = file.calls[call], [], file.calls[call].segment
    while segment >= 0:
        ids = [*file.ids[file.bounds[segment]:file.bounds[segment + 1]].tolist(), *ids]
        segment = int(file.parent[segment])
    whole = ["".join(chr(i) if i < 256 else f"<{i}>" for i in part)
             for part in (ids[:note.prompt_len], ids[note.prompt_len:note.length])]
    return whole[0], whole[1]


# ---------------------------------------------------------------- ATIF


def test_a_session_with_context_summarisation_and_its_three_sub_agents() -> None:
    one = read(ATIF)
    assert Counts.of(one.file) == Counts(calls=10, flat=8832, unique=2660, drawn=1030, targets=960, roots=1, unknown=0)
    assert (one.format, one.unit, one.num_files) == ("harbor", "token", 4)
    assert [note.role_class for note in one.file.calls] == [*["main"] * 3, *["main-summary"] * 3, *["main"] * 4]
    assert {note.agent for note in one.file.calls} == {"main"}
    assert one.file.header.policy == "openai/gpt-4o"
    assert one.file.header.source == f"harbor {ATIF.name}"


def test_the_main_file_alone() -> None:
    one = read(ATIF, options=Options(main_only=True))
    assert Counts.of(one.file) == Counts(calls=7, flat=7192, unique=2320, drawn=690, targets=620, roots=1, unknown=0)


@pytest.mark.parametrize(("stages", "flat", "unique", "drawn", "targets"), [
    (("summary",), 7892, 2520, 890, 820), (("summary", "questions"), 8012, 2540, 910, 840),
])
def test_partial_sums(stages: tuple[str, ...], flat: int, unique: int, drawn: int, targets: int) -> None:
    document = json.loads(ATIF.read_bytes())
    for step in document["steps"]:
        for result in step.get("observation", {}).get("results", []):
            result["subagent_trajectory_ref"] = [
                ref for ref in result["subagent_trajectory_ref"] if ref["trajectory_path"].endswith(
                    tuple(f"-{stage}.json" for stage in stages))]
    (one,) = imported([Trace(ATIF.name, json.dumps(document).encode(), trace(ATIF).beside)], Options())
    counts = Counts.of(one.file)
    assert (counts.flat, counts.unique, counts.drawn, counts.targets) == (flat, unique, drawn, targets)


def test_steps_8_to_10_draw_one_output_from_one_prompt() -> None:
    """Prompts of 850 ids, outputs of 40, 40 and 30: 110 drawn, 40 counted."""
    document = json.loads(ATIF.read_bytes())
    document["steps"] = [step for step in document["steps"] if step["step_id"] >= 8]
    (one,) = imported([Trace(ATIF.name, json.dumps(document).encode())], Options())
    assert [(note.prompt_len, note.length - note.prompt_len) for note in one.file.calls] == [(850, 40), (850, 40), (850, 30)]
    counts = Counts.of(one.file)
    assert (counts.drawn, counts.targets, counts.unique) == (110, 40, 890)


def atif(*steps: dict, name: str = "agent", session: str = "s", **fields: object) -> bytes:
    return json.dumps({"schema_version": "ATIF-v1.6", "session_id": session, "agent": {"name": name}, "steps": steps,
                       **fields}).encode()


def step(number: int, prompt: list[int], output: list[int], **fields: object) -> dict:
    metrics = {"prompt_token_ids": prompt, "completion_token_ids": output, "logprobs": [-0.5] * len(output)}
    return {"step_id": number, "source": "agent", "message": "m", "metrics": metrics, "model_name": "m1", **fields}


def refers(number: int, *paths: str) -> dict:
    refs = [{"session_id": path, "trajectory_path": path} for path in paths]
    results = [{"subagent_trajectory_ref": refs}]
    return {"step_id": number, "source": "system", "message": "s", "observation": {"results": results}}


def test_other_sub_agents_are_sub_agents_and_may_have_their_own() -> None:
    main = atif(step(1, [1, 2], [3]), refers(2, "sub/one.json"), step(3, [1, 2, 3, 4], [5]))
    files = {"sub/one.json": atif(step(1, [9, 8], [7]), refers(2, "two.json"), name="explorer", session="e1"),
             "two.json": atif(step(1, [9, 6], [5]), name="explorer", session="e2")}
    (one,) = imported([Trace("main.json", main, files.get)], Options())
    assert [(n.role_class, n.agent) for n in one.file.calls] == [
        ("main", "main"), ("sub-agent", "e1"), ("sub-agent", "e2"), ("main", "main")]
    assert (one.num_files, Counts.of(one.file).roots) == (3, 2)


def test_a_file_goes_on_in_the_one_it_names_or_in_the_next_beside_it() -> None:
    named = atif(step(1, [1, 2], [3]), continued_trajectory_ref="trajectory.cont-1.json")
    further = atif({"step_id": 1, "source": "user", "message": "copied", "is_copied_context": True},
                   step(2, [1, 2, 3], [3], is_copied_context=True), step(3, [1, 2, 3, 4], [5]))
    last = atif(step(1, [1, 2, 3, 4, 5], [6]))
    files = {"x.trajectory.cont-1.json": further, "x.trajectory.cont-2.json": last}
    for first in (named, atif(step(1, [1, 2], [3]))):
        (one,) = imported([Trace("x.trajectory.json", first, files.get)], Options(main_only=True))
        assert [(n.prompt_len, n.length) for n in one.file.calls] == [(2, 3), (4, 5), (5, 6)]
        assert one.num_files == 3


def test_a_trace_of_texts_is_spelled_as_bytes_if_asked() -> None:
    """As OpenHands writes them: a call is shown what stands before it."""
    document = atif({"step_id": 1, "source": "user", "message": "hi"},
                    {"step_id": 2, "source": "agent", "message": "ok", "observation": {"results": [{"content": "done"}]}},
                    {"step_id": 3, "source": "agent", "message": "bye", "tool_calls": [{"f": "finish"}]})
    (one,) = imported([Trace("t.json", document)], Options(as_bytes=True))
    assert [text_of(one.file, n) for n in range(2)] == [
        ("<257>hi<258>", "ok"), ("<257>hi<258>ok<259>done<258>", 'bye\n[{"f": "finish"}]')]
    assert (one.unit, Counts.of(one.file).flat) == ("byte", 6 + 12 + 21)


# ---------------------------------------------------------------- SWE-agent


def test_messages_shared_under_sliding_elision() -> None:
    lists = message_lists(unpacked(trace(MARSHMALLOW)))
    assert shared_messages(lists) == [0, 4, 6, 8, 10, 3, 5, 7, 9, 11, 13, 15, 17]
    assert [len(messages) for messages in lists] == list(range(4, 29, 2))


def test_bytes_of_the_recorded_lists() -> None:
    """221,447 bytes written out, 103,261 if what is shared is counted by whole messages: 2.14 times.

    By single ids it is less: an elided message begins as the whole one does (`{"role": "tool", "content": "`), which is
    233 bytes here. With an id for the role before each of the 208 messages it is that many more ids, 92 of them unique.
    """
    lists = message_lists(unpacked(trace(MARSHMALLOW)))
    sizes = [[len(text.encode()) for _, text in messages] for messages in lists]
    own = sum(sum(size[shared:]) for size, shared in zip(sizes, shared_messages(lists), strict=True))
    flat = sum(map(sum, sizes))
    assert (flat, own, round(flat / own, 2)) == (221447, 103261, 2.14)

    def counted(sequences: list[np.ndarray]) -> tuple[int, int]:
        empty = np.empty(0, np.int32)
        tree = build_tree(record_calls((ForeignCall("", ids, empty) for ids in sequences), "x"))
        return tree.num_flat_tokens, tree.num_tokens

    spelled = [spell(messages) for messages in lists]
    assert counted([ids[ids < 256] for ids in spelled]) == (221447, 103261 - 233)
    assert counted(spelled) == (221447 + 208, 103261 - 233 + 92)


def test_the_calls_behind_the_lists() -> None:
    """A list is written down after its step: it holds that step's answer, and the last one was shown to nobody."""
    one = read(MARSHMALLOW)
    lists = message_lists(unpacked(trace(MARSHMALLOW)))
    assert [note.prompt_len for note in one.file.calls] == [len(spell(lists[0][:2])) + 1, *(
        len(spell(messages)) + 1 for messages in lists[:-1])]
    assert one.file.header.outcome.num_calls == 13
    assert Counts.of(one.file) == Counts(calls=13, flat=210608, unique=93981, drawn=5531, targets=5531, roots=1, unknown=0)
    keeps = [note.keep_len for note in one.file.calls]
    lengths = [0, *(note.length for note in one.file.calls)]
    assert [keep == length for keep, length in zip(keeps, lengths, strict=False)] == [*[True] * 6, *[False] * 7]


def test_a_file_with_queries() -> None:
    """What newer files write down is what the call was shown."""
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}
    document = {"trajectory": [
        {"query": [system, user], "response": "a"},
        {"query": [system, user, {"role": "assistant", "content": "a", "tool_calls": None}, {"role": "tool", "content": "t"}],
         "response": "b", "tool_calls": [{"id": 1}]}]}
    (one,) = imported([Trace("q.traj", json.dumps(document).encode())], Options())
    assert one.file.calls[1].keep_len == one.file.calls[0].length
    assert text_of(one.file, 1)[1] == '{"role": "assistant", "content": "b", "tool_calls": [{"id": 1}]}'


# ---------------------------------------------------------------- Claude Code


def test_a_rewind_and_a_compaction_that_preserves_messages() -> None:
    one = read(REWIND)
    assert Counts.of(one.file) == Counts(calls=5, flat=343, unique=277, drawn=52, targets=52, roots=2, unknown=0)
    parents = one.file.parent.tolist()
    assert parents == [-1, 0, 0, -1]  # two children of the first answer; the compaction is a root of its own
    assert [note.segment for note in one.file.calls] == [0, 1, 2, 2, 3]
    assert {(note.role_class, note.agent) for note in one.file.calls} == {("main", "main")}
    assert one.file.calls[4].evidence.replays == one.file.calls[3].call
    assert text_of(one.file, 3) == (
        "<257>Start<258>Ready<257>Second attempt<258>Second answer<257>Keep going<258>", "Kept going")
    prompt, output = text_of(one.file, 4)
    assert prompt.startswith("<260>This session is being continued")
    assert prompt.endswith("asked for a plan.<258>Second answer<257>Keep going<258>Kept going<257>After compaction<258>")
    assert output == "Final answer"


def test_side_chains_are_sub_agents() -> None:
    one = read(SUB_AGENT)
    assert [(n.role_class, n.agent, n.known_by) for n in one.file.calls] == [("sub-agent", "subagent-fixture", "harness")]
    assert text_of(one.file, 0) == ("<257>Inspect the retry path.<258>", "The retry path uses bounded exponential backoff.")


def line(uuid: str, parent: str | None, kind: str, content: object, message: str | None = None, **fields: object) -> bytes:
    body = {"role": kind, "content": content} | ({"id": message} if message else {})
    return json.dumps({"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": body, **fields}).encode()


def test_a_message_of_several_lines_and_the_results_of_its_tools() -> None:
    """Two tools asked for in one message; their results hang on different lines, and both are shown."""
    use = [{"type": "tool_use", "id": f"t{n}", "name": "Task", "input": {"prompt": f"look {n}"}} for n in (1, 2)]
    result = [[{"type": "tool_result", "tool_use_id": f"t{n}", "content": f"seen {n}"}] for n in (1, 2)]
    main = b"\n".join([
        json.dumps({"type": "summary", "summary": "no message"}).encode(), line("u", None, "user", "go"),
        line("a1", "u", "assistant", [{"type": "text", "text": "hm"}], "m1"), line("a2", "a1", "assistant", [use[0]], "m1"),
        line("a3", "a2", "assistant", [use[1]], "m1"), line("r1", "a2", "user", result[0]), line("r2", "a3", "user", result[1]),
        line("b", "r2", "assistant", "done", "m2"), line("b", "u", "assistant", "a copy", "m2")])
    side = line("x", None, "user", "look 2", isSidechain=True, agentId="7") + b"\n" + line(
        "y", "x", "assistant", "found", isSidechain=True, agentId="7")
    (one,) = imported([Trace("s.jsonl", main), Trace("agent-7.jsonl", side)], Options())
    assert [n.role_class for n in one.file.calls] == ["main", "main", "sub-agent"]
    answer = "\n".join(["hm", *map(json.dumps, use)])
    assert text_of(one.file, 0) == ("<257>go<258>", answer)
    results = "".join(f"<259>{json.dumps(r[0])}" for r in result)
    assert text_of(one.file, 1) == (f"<257>go<258>{answer}{results}<258>", "done")
    assert one.file.calls[2].evidence.task_of == one.file.calls[0].call
    (alone,) = imported([Trace("s.jsonl", main), Trace("agent-7.jsonl", side)], Options(main_only=True))
    assert len(alone.file.calls) == 2


# ---------------------------------------------------------------- prefix hashes


def test_sessions_of_prefix_hashes() -> None:
    found = list(imported([trace(SESSIONS)], Options()))
    counts = [Counts.of(one.file) for one in found]
    assert (len(found), sum(one.facts["sub_agents"] for one in found)) == (17, 63)
    assert (sum(c.flat for c in counts), sum(c.unique for c in counts), sum(c.calls for c in counts)) == (5472857, 262720, 3775)
    assert round(5472857 / 262720, 2) == 20.83
    subs = [{n.agent for n in one.file.calls if n.role_class == "sub-agent"} for one in found]
    assert list(map(len, subs)) == [one.facts["sub_agents"] for one in found]
    assert {(c.drawn, c.targets, c.unknown) for c in counts} == {(0, 0, 0)}
    # The totals that the file gives for its first session: tokens in, tokens out.
    assert (found[0].name, found[0].facts["input_tokens"], found[0].facts["output_tokens"]) == ("trace_0291", 2254119, 19504)


def test_hash_trees_count_what_sets_of_prefixes_count() -> None:
    documents = unpacked(trace(SESSIONS)).data.splitlines()[:2]
    for document, one in zip(documents, imported([Trace("two", b"\n".join(documents))], Options()), strict=True):
        requests = [r for top in json.loads(document)["requests"] for r in top.get("requests", [top])]
        prefixes = {(n, hash(tuple(r["hash_ids"][:n]))) for r in requests for n in range(1, len(r["hash_ids"]) + 1)}
        assert len(one.file.ids) == len(prefixes)


def test_one_session_in_a_file_of_many_lines() -> None:
    path = DATA / "prefix_hashes/trace_0022.json"
    assert Counts.of(read(path).file) == Counts(7, 4244, 682, 0, 0, 1, 0)
    pretty = json.dumps(json.loads(path.read_bytes()), indent=1).encode()
    (again,) = imported([Trace("p.json", pretty)], Options())
    assert Counts.of(again.file).unique == 682


# ---------------------------------------------------------------- all


@pytest.mark.parametrize(("path", "name"), [
    (ATIF, "harbor"), (MARSHMALLOW, "swe-agent"), (REWIND, "claude-code"), (SUB_AGENT, "claude-code"),
    (SESSIONS, "prefix-hashes")])
def test_the_format_is_found_by_content(path: Path, name: str) -> None:
    assert detect(Trace("whatever.bin", unpacked(trace(path)).data)) == name


@pytest.mark.parametrize("seed", range(60))
def test_deltas_are_as_long_as_a_gateway_could_make_them(seed: int) -> None:
    """Whole prompts of random executions give back their records: the same prefix, and the same latest base."""
    script = random_calls(seed)
    prompts = [np.array(ids[:r.prompt_len], np.int32) for r, ids in zip(script.records, script.sequences, strict=True)]
    foreign = (ForeignCall("", prompt, r.output_ids) for prompt, r in zip(prompts, script.records, strict=True))
    calls = record_calls(foreign, f"x{seed}")
    for made, record in zip(calls, script.records, strict=True):
        assert (made.record.keep_len, made.record.base_call, made.record.digest) == (
            record.keep_len, record.base_call, record.digest)


def test_deltas_of_a_made_session() -> None:
    """Elision, stripped thinking, compaction, sub-agents, retries: each prompt is found to keep what it was made to keep."""
    log = CallLog()
    for record in make(Workload(turns=40, strip_thinking=30, elision_window=3, compactions=2, sub_agents=5, sub_agent_turns=3,
                                retries=7)).records:
        log.add(record)
    made = log.ordered()
    calls = record_calls((ForeignCall("", c.read(0, c.record.prompt_len), c.record.output_ids) for c in made), "x")
    assert [c.record.keep_len for c in calls] == [c.record.keep_len for c in made]
    assert [c.record.digest for c in calls] == [c.record.digest for c in made]


def test_deltas_of_long_prompts() -> None:
    """Prefixes that end in, before and behind the blocks at which they are looked up."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 9, 2000).astype(np.int32)
    other = np.full(300, 77, np.int32)
    empty = np.empty(0, np.int32)
    for keep in (0, 1, 255, 256, 257, 511, 512, 1024, 1999, 2000):
        prompts = [base, other, np.concatenate((base[:keep], other[:5], base[keep:])), base[:keep]]
        calls = record_calls((ForeignCall("", prompt, empty) for prompt in prompts), "x")
        shared = [c.record.keep_len for c in calls]
        assert shared[2] == (keep if keep else 5)
        assert shared[3] == keep
