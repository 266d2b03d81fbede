"""Prompts are exact: what was sampled is reused as ids, only new messages are tokenised, and digests say the same."""

from pathlib import Path

import numpy as np
from gyre.contracts.digest import token_digest
from gyre.rollout.gateway.messages import Message
from hypothesis import given
from hypothesis import strategies as st
from rollout_fakes import TEMPLATE, ask, chatml_tokenizer, make_bench, sequences

SHELL = ({"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}},)


async def test_each_turn_continues_the_exact_ids_of_the_one_before(tmp_path: Path) -> None:
    # "usok": the text would be tokenised "us" "ok"; the engine says it byte by byte, and these ids must stay.
    bench = make_bench(tmp_path)
    spelled = [bench.tokenizer.id_of(c) for c in "usok"]
    bench.engine.script = lambda attempt: [*spelled, bench.tokenizer.eos_id]
    assert bench.tokenizer.encode("usok") != spelled

    messages = [Message("system", "be brief"), Message("user", "hello")]
    for turn in range(4):
        answer = await ask(bench, messages)
        messages += [answer.message, Message("user", f"turn {turn}")]

    built = list(sequences(bench).values())
    for number in range(1, 4):
        record = bench.records[number].record
        assert record.base_call == bench.records[number - 1].record.call
        assert record.keep_len == len(built[number - 1])
        increment = bench.tokenizer.decode(record.prompt_delta)
        assert increment == f"\n<|im_start|>user\nturn {number - 1}<|im_end|>\n<|im_start|>assistant\n"
    assert (built[3][:len(built[2])] == built[2]).all()


async def test_a_whole_conversation_reads_as_the_template_would_write_it(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two", "three")
    messages = [Message("user", "hi")]
    for _ in range(3):
        messages += [(await ask(bench, messages)).message, Message("user", "go on")]
    plain = [{"role": m.role, "content": m.content} for m in messages[:-1]]
    text = bench.tokenizer.render(plain, add_generation_prompt=False)
    assert bench.tokenizer.decode(list(sequences(bench).values())[-1]) + "\n" == text


STRICT = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}""" + TEMPLATE


async def test_a_template_that_refuses_a_late_system_message_gets_it_as_the_users(tmp_path: Path) -> None:
    """Claude Code puts reminders among the messages under the role of the system."""
    late = [Message("system", "be brief"), Message("user", "hello"), Message("system", "remember")]
    for name, template, role in (("strict", STRICT, "user"), ("lenient", TEMPLATE, "system")):
        (tmp_path / name).mkdir()
        bench = make_bench(tmp_path / name, "one", tokenizer=chatml_tokenizer(template))
        answer = await ask(bench, late)
        await ask(bench, [*late, answer.message, Message("system", "again"), Message("user", "go on")])
        first, second = (bench.tokenizer.decode(c.record.prompt_delta) for c in bench.records)
        assert first.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello"), template
        assert f"<|im_start|>{role}\nremember<|im_end|>" in first
        assert second.startswith(f"\n<|im_start|>{role}\nagain<|im_end|>\n<|im_start|>user\ngo on")


async def test_an_output_cut_by_length_is_closed_by_the_increment(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "a long answer")
    answer = await ask(bench, [Message("user", "hi")], max_tokens=5)
    assert answer.stop_reason == "length"
    assert answer.message.content == "a lon"
    await ask(bench, [Message("user", "hi"), answer.message, Message("user", "more")])
    assert bench.tokenizer.decode(bench.records[1].record.prompt_delta).startswith("<|im_end|>\n<|im_start|>user")


async def test_compaction_starts_a_new_root_and_shares_only_what_is_equal(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "first", "second", "a summary", "third")
    system = Message("system", "s")
    history = [system, Message("user", "do it")]
    history += [(await ask(bench, history)).message, Message("user", "next")]
    summary = await ask(bench, [*history, Message("user", "summarise")])
    assert bench.records[1].record.base_call == bench.records[0].record.call
    await ask(bench, [system, Message("user", f"so far: {summary.message.content}")])
    record = bench.records[2].record
    built = sequences(bench)
    base = built[record.base_call]
    prompt = built[record.call][:record.prompt_len]
    assert (base[:record.keep_len] == prompt[:record.keep_len]).all()
    assert base[record.keep_len] != prompt[record.keep_len]
    assert bench.tokenizer.decode(prompt[:record.keep_len]) == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n"


async def test_a_changed_history_forks_at_the_exact_token(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "abcdef", "x", "y")
    answer = await ask(bench, [Message("user", "hi")])
    await ask(bench, [Message("user", "hi"), answer.message, Message("user", "1")])
    await ask(bench, [Message("user", "hi"), Message("assistant", "abcXef"), Message("user", "1")])
    record = bench.records[2].record
    shared = sequences(bench)[record.base_call][:record.keep_len]
    assert bench.tokenizer.decode(shared).endswith("<|im_start|>assistant\nabc")


async def test_other_tools_are_another_root(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "ok")
    answer = await ask(bench, [Message("user", "hi")], SHELL)
    await ask(bench, [Message("user", "hi"), answer.message, Message("user", "1")])
    record = bench.records[1].record
    assert bench.tokenizer.decode(sequences(bench)[record.call][:record.prompt_len]).startswith("<|im_start|>user\nhi")


async def test_sub_agents_that_interleave_keep_their_own_lines(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "1", "2", "3", "4", "5", "6")
    lines = [[Message("user", "main")], [Message("user", "sub")]]
    for turn in range(3):
        for line in lines:
            line += [(await ask(bench, line)).message, Message("user", f"again {turn}")]
    bases = [c.record.base_call for c in bench.records]
    calls = [c.record.call for c in bench.records]
    assert bases[2:] == calls[:4]
    sequences(bench)


async def test_a_gateway_that_comes_back_goes_on_with_the_same_contexts(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    first = await ask(bench, [Message("user", "hi")])
    bench.archive.close()
    again = make_bench(tmp_path, "two")
    session = again.open()
    assert session.num_recorded == 1
    again.records.extend(bench.records)
    await ask(again, [Message("user", "hi"), first.message, Message("user", "on")])
    first_ids, _ = sequences(again).values()
    assert again.records[1].record.keep_len == len(first_ids)
    assert again.records[1].record.index == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.text("ab", max_size=3)), min_size=1, max_size=8))
def test_the_tree_finds_the_longest_common_prefix_there_is(steps: list[tuple[int, str]]) -> None:
    from gyre.rollout.gateway.context import TokenTree, common_prefix

    tree = TokenTree()
    known: dict[str, np.ndarray] = {}
    for number, (pick, text) in enumerate(steps):
        delta = np.asarray([ord(c) for c in text], np.int32)
        source = list(known.values())[pick % len(known)] if known and pick else delta[:0]
        prompt = np.concatenate((source[:len(source) - (pick % 2)], delta)).astype(np.int32)
        place = tree.locate(prompt)
        longest = max((common_prefix(ids, prompt) for ids in known.values()), default=0)
        assert place.keep_len == longest
        assert (place.base is None) == (longest == 0)
        if place.base is not None:
            assert (known[place.base.call][:longest] == prompt[:longest]).all()
        output = np.asarray([ord("a") + number % 2], np.int32)
        node = tree.add(str(number), place, prompt, output, tree.extended(place, prompt, output))
        known[str(number)] = np.concatenate((prompt, output))
        for call, ids in known.items():
            if call == node.call:
                assert (node.ids() == ids).all()
                assert node.chain.hexdigest() == token_digest(ids)
