"""What the policy reads: renderings extend each other token by token, and the warm start reads the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sessions
import torch
import warmstart
from gyre.policy.checkpoint import load_checkpoint
from gyre.policy.tokenizer import ChatTokenizer
from policy import END, POLICY, VOCABULARY, build_tokenizer
from tasks import INSTRUCTION

REPORT = "a 3 b . c 1 d 2 e . f 4"


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversation() -> list[list[dict[str, str]]]:
    """The messages of every call of one context, and of the first call after its compaction."""
    messages = [say("user", f"{INSTRUCTION}\n{REPORT}")]
    calls = [list(messages)]
    for command, observation in (("F a 3", "a . c"), ("F c 2", "c 1 d"), ("", "? ? a\ncompact")):
        messages += [say("assistant", command), say("user", observation)]
        calls.append(list(messages))
    return [*calls, [say("user", f"{INSTRUCTION}\n{REPORT}")]]


def test_each_prompt_extends_the_last_one_and_its_output() -> None:
    tokenizer = build_tokenizer()
    calls = conversation()
    for before, after in zip(calls[:3], calls[1:4], strict=True):
        output = tokenizer.encode(after[len(before)]["content"] + END)
        known = tokenizer.encode(tokenizer.render(before)) + output
        assert tokenizer.encode(tokenizer.render(after))[: len(known)] == known


def test_an_output_cut_off_before_its_end_is_still_extended() -> None:
    tokenizer = build_tokenizer()
    before = [say("user", "a 3")]
    after = [*before, say("assistant", "F a a a"), say("user", "?")]
    known = tokenizer.encode(tokenizer.render(before)) + tokenizer.encode("F a a a")
    prompt = tokenizer.encode(tokenizer.render(after))
    assert prompt[: len(known)] == known
    assert prompt[len(known)] == tokenizer.id_of(END)


def test_compaction_starts_a_new_root_with_the_summary_in_it() -> None:
    tokenizer = build_tokenizer()
    calls = conversation()
    full, fresh = (tokenizer.encode(tokenizer.render(call)) for call in calls[3:])
    assert fresh != full[: len(fresh)] or len(fresh) < len(full)
    summary = tokenizer.encode(REPORT)
    assert fresh[-2 - len(summary) : -2] == summary


def test_sampled_text_encodes_to_the_ids_it_came_from() -> None:
    tokenizer = build_tokenizer()
    ids = [tokenizer.id_of(word) for word in ("F", "a", "2", END)]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == "F a 2"
    assert tokenizer.encode(text) == ids[:-1]
    assert tokenizer.stop_ids == (tokenizer.id_of(END),)


def test_the_tokenizer_survives_its_files(tmp_path: Path) -> None:
    build_tokenizer().save(tmp_path)
    loaded, built = ChatTokenizer.load(tmp_path), build_tokenizer()
    for call in conversation():
        assert loaded.encode(loaded.render(call)) == built.encode(built.render(call))
    assert loaded.vocab_size == len(VOCABULARY) == POLICY.vocab_size


def test_random_sessions_are_in_the_tokens_of_the_rendered_chat() -> None:
    tokenizer = build_tokenizer()
    drawn = sessions.draw(np.random.default_rng(0), sessions.training_patterns(), 5)
    for row in drawn.ids_SW.tolist():
        text = tokenizer.decode(row)
        messages = []
        for turn in text.split(END)[:-1]:
            role, _, content = turn.strip().partition("|> ")
            messages.append(say(role.removeprefix("<|"), content))
        assert tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False)) == row
        assert messages[0]["content"].startswith(INSTRUCTION)
        assert [m["role"] for m in messages] == ["user", "assistant"] * 4
        assert messages[-2]["content"].endswith("compact")


def test_random_commands_do_not_depend_on_the_report() -> None:
    drawn = sessions.draw(np.random.default_rng(0), sessions.training_patterns(), 4000)
    kinds_S = drawn.ids_SW[:, np.flatnonzero(drawn.places_W == sessions.KIND)[0]]
    modules_S = drawn.ids_SW[:, np.flatnonzero(drawn.places_W == sessions.MODULE)[0]]
    report_SM = drawn.ids_SW[:, np.flatnonzero(drawn.places_W == sessions.REPORT)]
    named_S = np.isin(modules_S, sessions.MODULE_IDS)
    kinds_S, modules_S, report_SM = kinds_S[named_S], modules_S[named_S], report_SM[named_S]
    told_S = report_SM[np.arange(len(modules_S)), modules_S - sessions.MODULE_IDS[0]]
    failing_S = (told_S != sessions.STATE_IDS[0]) & np.isin(kinds_S, sessions.STATE_IDS)
    assert (kinds_S == told_S)[failing_S].mean() == pytest.approx(0.25, abs=0.03)


def test_a_warm_start_is_built_once_for_the_same_inputs(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = warmstart.Settings(num_updates=2, sessions_per_update=4)
    assert warmstart.build(tmp_path, warmstart.clinic(), settings)
    assert not warmstart.build(tmp_path, warmstart.clinic(), settings)
    first = load_checkpoint(tmp_path)[1]
    assert warmstart.build(tmp_path, warmstart.clinic(), warmstart.Settings(num_updates=3, sessions_per_update=4))
    assert warmstart.build(tmp_path, warmstart.clinic(), settings)
    again = load_checkpoint(tmp_path)[1]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert ChatTokenizer.load(tmp_path).vocab_size == POLICY.vocab_size
