"""A real vLLM (its CPU build) behind the engine contract: `make test-engines`.

Two servers, as two cells would have them, float32. The policy's heads are smaller than any the CPU kernels know, so what is
served is `gyre.policy.heads` of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from engine_conformance import CHECKS, Check, Lab, admission_is_closed_until_weights_were_probed, ids_of, name_of
from engine_move_conformance import TICKET_CHECKS
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import GenerateRequest, TokenEvent
from gyre.rollout.engines.moving import MoveRefused
from gyre.rollout.engines.server_process import ServerPlace
from gyre.rollout.engines.vllm_server import vllm_engine
from gyre.rollout.engines.vllm_ticket import VllmTicket
from gyre.runtime.config import EngineConfig, EngineServerConfig
from served_engines import Caller, Cells

torch.set_num_threads(1)
if "GYRE_VLLM_PYTHON" not in os.environ:
    pytest.skip("make test-engines installs vLLM and runs this", allow_module_level=True)
pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]
POLICY = PolicyConfig("qwen3", 512, 64, 96, 4, 4, 2, 16, tie_word_embeddings=True, qk_norm=True, max_position=2048)
LONGEST, SLOTS, PROMPTS, ANSWER, BLOCK = 2048, 24, 20, 200, 32
CALLS, LONG_ANSWER = 8, 800  # a small model has said much by the time that it hears an abort: many layers, many tokens


def weights(number: int) -> Mapping[str, torch.Tensor]:
    return Decoder.create(POLICY, number).state_dict()


def make_lab(home: Path) -> Lab:
    server = EngineServerConfig(start_timeout_s=900.0)  # its interpreter: $GYRE_VLLM_PYTHON
    config = EngineConfig(backend="vllm", kv_tokens=65536, max_running=SLOTS, max_waiting=SLOTS, server=server)
    place = ServerPlace("127.0.0.1", home / "server.log", home)
    engine = vllm_engine(POLICY, "float32", LONGEST, config, place, home)
    return Lab(engine, weights, POLICY.vocab_size, LONGEST, SLOTS, SLOTS, positional=False, patience_s=180.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def labs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Lab, Lab]]:
    home = tmp_path_factory.mktemp("vllm")
    pair = make_lab(home / "a"), make_lab(home / "b")
    for lab in pair:
        await admission_is_closed_until_weights_were_probed(lab)
    try:
        await asyncio.gather(*(lab.ready() for lab in pair))
        yield pair
    finally:
        await asyncio.gather(*(lab.engine.close() for lab in pair))
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or ())]
    assert not left, f"processes of a server that was closed: {left}"


async def both_ready(labs: tuple[Lab, Lab]) -> tuple[Lab, Lab]:
    """Under equal versions of equal weights."""
    a, b = labs
    while a.version != b.version or a.loaded != 0 or b.loaded != 0:
        behind = a if a.version < b.version else b
        await behind.load(0)
    await asyncio.gather(a.ready(), b.ready())
    return a, b


def question(lab: Lab, number: int, **fields: object) -> GenerateRequest:
    prompt = ((np.arange(70 + number) * (5 + number) + number) % POLICY.vocab_size).astype(np.int32)
    fields = {"max_tokens": LONG_ANSWER, "temperature": 0.0, **fields}
    return lab.ask(f"q{number}-{fields.get('namespace', '')}", prompt_ids=prompt, **fields)


def continued(request: GenerateRequest, tokens: list[TokenEvent], ticket: bytes) -> GenerateRequest:
    ids = np.array(ids_of(tokens), dtype=np.int32)
    return replace(request, prompt_ids=np.concatenate((request.prompt_ids, ids)), max_tokens=request.max_tokens - len(ids),
                   num_emitted=len(ids), ticket=ticket)  # fmt: skip


async def moved(a: Lab, b: Lab, request: GenerateRequest, after: int) -> tuple[list[TokenEvent], int]:
    """A request that begins on `a` and ends on `b`; the second number: tokens whose KV came along."""
    stream = a.engine.submit(request)
    tokens = await a.some(stream, after)
    ticket = await a.engine.export_ticket(request.request_id)
    rest, finish = await a.rest(stream)
    assert finish.reason == "moved"
    tokens += rest
    last, finish = await b.run(continued(request, tokens, ticket))
    assert finish.reason == "length", finish.detail
    return tokens + last, finish.num_reused


async def test_live_requests_move_between_servers_with_identical_tokens(labs: tuple[Lab, Lab]) -> None:
    a, b = await both_ready(labs)
    want = await asyncio.gather(*(a.run(question(a, i, namespace="stays")) for i in range(PROMPTS)))
    got = await asyncio.gather(*(moved(a, b, question(a, i, namespace="moves"), 5 + i) for i in range(PROMPTS)))
    gaps = []
    for (tokens, _), (expected, _) in zip(got, want, strict=True):
        assert ids_of(tokens) == ids_of(expected)
        assert [t.index for t in tokens] == list(range(LONG_ANSWER))
        gaps += [abs(x.logprob - y.logprob) for x, y in zip(tokens, expected, strict=True)]
    reused = [num for _, num in got]
    print(f"\n{PROMPTS} live requests moved: KV of {sum(reused)} tokens came along, at least {min(reused)} for each; "
          f"log-probabilities differ by at most {max(gaps):.1e}")  # fmt: skip
    assert min(reused) >= 64
    assert max(gaps) < 1e-4


async def test_a_ticket_is_of_use_for_its_own_tokens_in_time_and_once(labs: tuple[Lab, Lab]) -> None:
    a, b = await both_ready(labs)
    request = question(a, 3, namespace="wrong")
    want, _ = await a.run(replace(request, namespace="right"))
    stream = a.engine.submit(request)
    tokens = await a.some(stream, 4)
    ticket = await a.engine.export_ticket(request.request_id)
    tokens += (await a.rest(stream))[0]
    parsed = VllmTicket.parse(ticket)
    assert parsed is not None
    other = question(b, 9, namespace="other", ticket=ticket)
    assert ids_of((await b.run(other))[0]) == ids_of((await a.run(replace(other, ticket=b"")))[0])
    untrue = replace(parsed, next_logprob=parsed.next_logprob - 1.0).to_bytes()
    for wrong in (untrue, replace(parsed, expires=0.0).to_bytes(), ticket, ticket):
        rest, _ = await b.run(continued(request, tokens, wrong))
        assert ids_of(tokens) + ids_of(rest) == ids_of(want)
    back, _ = await a.run(continued(request, tokens, ticket))
    assert ids_of(tokens) + ids_of(back) == ids_of(want)


async def test_held_kv_delays_no_sleep_and_no_new_weights(labs: tuple[Lab, Lab]) -> None:
    a, _ = await both_ready(labs)
    request = question(a, 5, namespace="held")
    stream = a.engine.submit(request)
    await a.some(stream, 4)
    ticket = await a.engine.export_ticket(request.request_id)
    await a.rest(stream)
    with pytest.raises(MoveRefused):
        await a.engine.export_ticket(request.request_id)
    async with asyncio.timeout(50.0):  # a lease is 60 s
        await a.load(1)
    await a.engine.release_ticket(ticket)


@pytest_asyncio.fixture(loop_scope="module")
async def cells(labs: tuple[Lab, Lab], tmp_path: Path) -> AsyncIterator[Cells]:
    """The servers as cells 0 and 1 of a run."""
    opened = await Cells.open(tmp_path, labs)
    yield opened
    await opened.close()


async def answers(cells: Cells, callers: list[Caller]) -> list[list[int]]:
    """What is said to calls that nothing disturbs."""
    await asyncio.gather(*(caller.start(cells.router) for caller in callers))
    return [caller.output.ids for caller in callers]


async def test_a_cell_that_leaves_rollout_is_emptied_and_no_call_notices(cells: Cells) -> None:
    prompts = [question(cells.cells[0].lab, i).prompt_ids for i in range(CALLS)]
    want = await answers(cells, [Caller(f"stays-{i}", prompt, LONG_ANSWER) for i, prompt in enumerate(prompts)])
    callers = [Caller(f"moves-{i}", prompt, LONG_ANSWER, streams=i % 2 == 0) for i, prompt in enumerate(prompts)]
    cells.router.set_admitting(1, False)
    for caller in callers:
        caller.start(cells.router)
    await asyncio.gather(*(caller.until(5) for caller in callers))
    assert cells.router.num_live(0) == CALLS
    cells.router.set_admitting(1, True)
    num_moved, num_replayed = await cells.leaves(0)
    await asyncio.gather(*(caller.task for caller in callers))
    came = [(attempt, reused) for attempt, _, reused in cells.cells[1].client.tries if attempt.num_emitted]
    counts = cells.router.counts
    print(f"\n{num_moved} live calls moved with KV of {sum(r for _, r in came)} tokens, {num_replayed} were replayed "
          f"{dict(counts.replayed)}; computed again: {counts.num_tokens_recomputed} tokens")  # fmt: skip
    for caller, expected in zip(callers, want, strict=True):
        assert caller.output.ids == expected and caller.output.finish == "length"
        assert caller.heard == (expected if caller.streams else [])
    assert (num_moved, num_replayed, len(came)) == (CALLS, 0, CALLS)
    for attempt, reused in came:
        assert attempt.ticket and 5 <= attempt.num_emitted < LONG_ANSWER
        assert reused > len(attempt.prompt) - BLOCK, "no block was computed again but the last, which was not full"
    assert cells.cells[0].lab.engine.load_report().asleep and cells.cells[0].lab.engine.load_report().num_held == 0


async def test_an_execution_that_waits_on_a_tool_finds_its_context_where_it_asks_next(cells: Cells) -> None:
    lab = cells.cells[0].lab
    cells.router.set_admitting(1, False)
    first = Caller("waits", question(lab, 11).prompt_ids, ANSWER)
    await first.start(cells.router)
    cells.router.set_admitting(1, True)
    assert await cells.leaves(0) == (0, 0)
    assert len(first.heard) == len(first.output.ids) == ANSWER, "nobody hears the token that brought it over"
    context = np.concatenate((first.prompt, np.array(first.output.ids, np.int32)))
    again = Caller("waits", np.concatenate((context, lab.prompt(40))), ANSWER)
    await again.start(cells.router)
    (_, came, fetched), (_, finish, reused) = cells.cells[1].client.tries
    counts = cells.router.counts
    print(f"\na prefix of {len(context)} tokens moved with KV of {fetched}; the next call reused {reused}")
    assert (counts.num_prefixes_moved, came, finish, again.output.cell) == (1, "length", "length", 1)
    assert fetched > len(context) - BLOCK and reused > len(context) - BLOCK
    (want,) = await answers(cells, [Caller("other", again.prompt, ANSWER)])
    assert again.output.ids == want


@pytest.mark.parametrize("check", TICKET_CHECKS, ids=name_of)
async def test_it_moves_requests_as_engines_of_its_kind_do(labs: tuple[Lab, Lab], check: Check) -> None:
    await labs[0].ready()
    await check(labs[0])


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
async def test_conformance(labs: tuple[Lab, Lab], check: Check) -> None:
    lab = labs[0]
    await lab.ready()
    await check(lab)
