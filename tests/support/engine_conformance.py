"""What every engine does, whichever backend it is: the checks, for whoever has an engine to check.

A `Lab` is one engine with weights loaded and admission open. A check may leave it paused, asleep or under other weights:
`Lab.ready` brings it back, so a server that takes a minute to start can go through all of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from gyre.policy.checkpoint import state_digest
from gyre.rollout.engines.base import (
    AdmissionClosed,
    Engine,
    EngineBusy,
    EventStream,
    Finish,
    GenerateRequest,
    InvalidRequest,
    TokenEvent,
    WeightsMismatch,
)

SLACK = 1e-3  # nats between two ways to compute the same in float32
Tokens = tuple[list[TokenEvent], Finish]


@dataclass
class Lab:
    """`weights(n)` is the n-th state dict. `longest`: prompt and output together. `positional`: equal (seed, position) draw
    equal noise in a replay too. `predicts`: what is sampled depends on the weights. `patience_s`: for one request.
    `another` makes a second engine that can read from this one."""

    engine: Engine
    weights: Callable[[int], Mapping[str, torch.Tensor]]
    vocab: int
    longest: int
    max_running: int
    max_waiting: int
    positional: bool = True
    predicts: bool = True
    patience_s: float = 20.0
    version: int = 0
    loaded: int = -1
    another: Callable[[], Engine] | None = None
    _names: Any = field(default_factory=itertools.count)

    async def load(self, number: int) -> None:
        """The n-th weights, under the next version."""
        state = self.weights(number)
        await self.engine.load_weights(self.version + 1, state_digest(state), state)
        self.version, self.loaded = self.version + 1, number
        probe = await self.engine.probe()
        assert probe.ok and probe.version == self.version, probe.detail
        self.engine.resume()

    async def ready(self) -> None:
        """Awake, admitting, nothing in flight, under weights 0."""
        await self.engine.wake()
        if self.loaded != 0:
            await self.load(0)
        assert (await self.engine.probe()).ok
        self.engine.resume()

    def prompt(self, length: int, start: int = 1) -> np.ndarray:
        """int32 [length]."""
        return ((np.arange(length) * 5 + start) % self.vocab).astype(np.int32)

    def ask(self, name: str = "", length: int = 10, max_tokens: int = 12, **fields: Any) -> GenerateRequest:
        """A request with a name of its own, sampled at temperature 1 unless told otherwise."""
        fields = {"seed": 11, "prompt_ids": self.prompt(length), **fields}
        return GenerateRequest(name or f"request-{next(self._names)}", max_tokens=max_tokens, **fields)

    async def run(self, request: GenerateRequest) -> Tokens:
        """All tokens and the end of one request."""
        return await self.rest(self.engine.submit(request))

    async def rest(self, stream: EventStream) -> Tokens:
        """What a stream still has. Nothing may come behind its terminal event."""
        tokens: list[TokenEvent] = []
        async with asyncio.timeout(self.patience_s):
            async for event in stream:
                if isinstance(event, Finish):
                    assert stream.finished
                    return tokens, event
                tokens.append(event)
        raise AssertionError("the stream ended without a Finish")

    async def some(self, stream: EventStream, num: int) -> list[TokenEvent]:
        """At least `num` tokens of a request that has more to say."""
        events: list[Any] = []
        async with asyncio.timeout(self.patience_s):
            while len(events) < num:
                events += await stream.take()
        assert not any(isinstance(event, Finish) for event in events)
        return events

    async def nothing_in_flight(self) -> None:
        """Ended requests leave nothing behind, maybe a moment later."""
        async with asyncio.timeout(self.patience_s):
            while (report := self.engine.load_report()).num_running + report.num_waiting:
                await asyncio.sleep(0.01)


Check = Callable[[Lab], Awaitable[None]]


def ids_of(tokens: list[TokenEvent]) -> list[int]:
    return [token.token_id for token in tokens]


async def a_request_yields_indexed_tokens_and_one_finish(lab: Lab) -> None:
    tokens, finish = await lab.run(lab.ask())
    assert finish.reason == "length"
    assert [t.index for t in tokens] == list(range(12))
    assert all(0 <= t.token_id < lab.vocab and t.logprob <= 0 for t in tokens)
    assert all(t.behaviour_logprob == t.logprob for t in tokens), "at temperature 1 the policy itself is sampled"
    assert {(t.weights_version, t.kv_version) for t in tokens} == {(lab.version, lab.version)}


async def greedy_tokens_were_certain(lab: Lab) -> None:
    tokens, _ = await lab.run(lab.ask(temperature=0.0))
    again, _ = await lab.run(lab.ask(temperature=0.0, seed=99))
    if lab.predicts:
        assert ids_of(tokens) == ids_of(again)
        assert {t.behaviour_logprob for t in tokens} == {0.0}
    assert all(t.logprob <= 0 for t in tokens)


async def a_stop_token_ends_the_stream_and_is_part_of_it(lab: Lab) -> None:
    tokens, _ = await lab.run(lab.ask())
    stop = tokens[4].token_id
    again, finish = await lab.run(lab.ask(stop_token_ids=(stop,)))
    assert finish.reason == "stop"
    assert ids_of(again) == ids_of(tokens)[: ids_of(tokens).index(stop) + 1]


async def the_same_seed_gives_the_same_tokens_in_whatever_company(lab: Lab) -> None:
    alone, _ = await lab.run(lab.ask())
    company = [lab.engine.submit(lab.ask(length=5 + 3 * i, seed=i)) for i in range(3)]
    among, _ = await lab.run(lab.ask())
    for stream in company:
        await lab.rest(stream)
    other, _ = await lab.run(lab.ask(seed=12))
    assert ids_of(among) == ids_of(alone) != ids_of(other)


async def a_replay_continues_with_the_same_tokens_and_indexes(lab: Lab) -> None:
    temperature = 1.0 if lab.positional else 0.0
    whole, _ = await lab.run(lab.ask(temperature=temperature))
    emitted = np.array(ids_of(whole)[:5], dtype=np.int32)
    again = np.concatenate((lab.prompt(10), emitted))
    tokens, finish = await lab.run(lab.ask(prompt_ids=again, max_tokens=7, num_emitted=5, temperature=temperature))
    assert [(t.index, t.token_id) for t in tokens] == [(t.index, t.token_id) for t in whole[5:]]
    assert finish.reason == "length"


async def a_ticket_that_is_none_is_ignored(lab: Lab) -> None:
    want, _ = await lab.run(lab.ask(temperature=0.0))
    for ticket in (b"nonsense", b"{}", b"\xff\x00"):
        got, finish = await lab.run(lab.ask(temperature=0.0, ticket=ticket))
        assert ids_of(got) == ids_of(want) or not lab.predicts
        assert finish.reason == "length" and len(got) == 12


async def an_aborted_request_keeps_what_it_emitted(lab: Lab) -> None:
    stream = lab.engine.submit(lab.ask("cut", max_tokens=lab.longest - 20))
    first = await lab.some(stream, 1)
    assert lab.engine.abort("cut") and not lab.engine.abort("cut")
    tokens, finish = await lab.rest(stream)
    assert finish.reason == "abort"
    assert [t.index for t in [*first, *tokens]] == list(range(len(first) + len(tokens)))
    assert len(first) + len(tokens) < lab.longest - 20
    assert not lab.engine.abort("cut") and not lab.engine.abort("never-was")
    await lab.nothing_in_flight()


async def a_paused_engine_refuses_new_requests_and_finishes_old_ones(lab: Lab) -> None:
    running = lab.engine.submit(lab.ask())
    lab.engine.pause()
    with pytest.raises(AdmissionClosed):
        lab.engine.submit(lab.ask())
    assert (await lab.rest(running))[1].reason == "length"
    lab.engine.resume()
    assert (await lab.run(lab.ask()))[1].reason == "length"


async def more_requests_than_slots_are_all_served(lab: Lab) -> None:
    before = lab.engine.load_report().num_tokens_sampled
    streams = [lab.engine.submit(lab.ask(length=4 + i, seed=i)) for i in range(lab.max_waiting)]
    results = [await lab.rest(streams.pop(0))]  # by now the rest has left the waiting queue
    streams += [lab.engine.submit(lab.ask(seed=i)) for i in range(lab.max_waiting)]
    results += [await lab.rest(stream) for stream in streams]
    assert all(len(tokens) == 12 and finish.reason == "length" for tokens, finish in results)
    assert lab.engine.load_report().num_tokens_sampled - before == 12 * len(results)


async def a_full_queue_refuses_with_its_size(lab: Lab) -> None:
    names = [f"full-{i}" for i in range(lab.max_waiting)]
    streams = [lab.engine.submit(lab.ask(name, max_tokens=lab.longest - 20)) for name in names]
    with pytest.raises(EngineBusy, match="queue full"):
        lab.engine.submit(lab.ask())
    for name, stream in zip(names, streams, strict=True):
        lab.engine.abort(name)
        assert (await lab.rest(stream))[1].reason == "abort"
    await lab.nothing_in_flight()
    assert (await lab.run(lab.ask()))[1].reason == "length"


async def requests_that_can_never_be_served_are_refused_by_name(lab: Lab) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        lab.engine.submit(lab.ask(max_tokens=lab.longest * 10))
    with pytest.raises(InvalidRequest, match="temperature"):
        lab.ask(temperature=-1.0)
    with pytest.raises(InvalidRequest, match="temperature"):
        lab.ask(temperature=1e-39)
    with pytest.raises(InvalidRequest, match="prompt_ids"):
        lab.ask(prompt_ids=np.zeros(0, dtype=np.int32))
    if lab.predicts:
        with pytest.raises(InvalidRequest, match="prompt_ids"):
            lab.engine.submit(lab.ask(prompt_ids=np.array([1, lab.vocab], dtype=np.int32)))
    stream = lab.engine.submit(lab.ask("twice", max_tokens=lab.longest - 20))
    with pytest.raises(InvalidRequest, match="in flight"):
        lab.engine.submit(lab.ask("twice"))
    lab.engine.abort("twice")
    await lab.rest(stream)


async def prefixes_are_shared_within_a_namespace_alone(lab: Lab) -> None:
    long = {"temperature": 0.0, "prompt_ids": lab.prompt(lab.longest - 40, 3)}
    before = lab.engine.load_report().num_tokens_reused
    fresh, first = await lab.run(lab.ask(namespace="one", **long))
    elsewhere, other = await lab.run(lab.ask(namespace="two", **long))
    assert first.num_reused == other.num_reused == 0
    assert lab.engine.load_report().num_tokens_reused == before
    again, _ = await lab.run(lab.ask(namespace="one", **long))
    assert lab.engine.load_report().num_tokens_reused > before or not lab.predicts
    if lab.predicts:
        assert ids_of(fresh) == ids_of(elsewhere) == ids_of(again)
        assert max(abs(a.logprob - b.logprob) for a, b in zip(fresh, again, strict=True)) < SLACK


async def new_weights_hit_no_old_prefix(lab: Lab) -> None:
    long = {"temperature": 0.0, "prompt_ids": lab.prompt(lab.longest - 40, 2), "namespace": "kept"}
    old, _ = await lab.run(lab.ask(**long))
    await lab.load(1)
    before = lab.engine.load_report().num_tokens_reused
    after, finish = await lab.run(lab.ask(**long))
    assert finish.num_reused == 0 and lab.engine.load_report().num_tokens_reused == before
    cold, _ = await lab.run(lab.ask(**{**long, "namespace": "cold"}))
    if lab.predicts:
        assert ids_of(after) == ids_of(cold)
        assert max(abs(a.logprob - b.logprob) for a, b in zip(after, cold, strict=True)) < SLACK
        assert [t.logprob for t in after] != [t.logprob for t in old]


async def a_weights_swap_labels_every_token_with_its_version(lab: Lab) -> None:
    stream = lab.engine.submit(lab.ask("long", length=8, max_tokens=lab.longest - 20))
    events: list[Any] = await lab.some(stream, 1)
    old = lab.version
    await lab.load(1)
    async with asyncio.timeout(lab.patience_s):
        while not any(isinstance(e, TokenEvent) and e.weights_version == lab.version for e in events):
            assert not stream.finished, "the request was over before the swap: give it more to say"
            events += await stream.take()
    lab.engine.abort("long")
    events += (await lab.rest(stream))[0]
    tokens = [e for e in events if isinstance(e, TokenEvent)]
    versions = [t.weights_version for t in tokens]
    assert versions == sorted(versions) and set(versions) <= {old, lab.version}
    assert [t.index for t in tokens] == list(range(len(tokens)))
    assert lab.engine.load_report().version == lab.version


async def weights_that_are_not_those_announced_change_nothing(lab: Lab) -> None:
    if not lab.predicts:
        return
    before, _ = await lab.run(lab.ask(temperature=0.0))
    with pytest.raises(WeightsMismatch):
        await lab.engine.load_weights(lab.version + 1, "0" * 64, lab.weights(1))
    after, _ = await lab.run(lab.ask(temperature=0.0))
    assert ids_of(after) == ids_of(before) and lab.engine.load_report().version == lab.version


async def sleep_ends_what_is_in_flight_and_wake_needs_a_probe(lab: Lab) -> None:
    before, _ = await lab.run(lab.ask())
    stream = lab.engine.submit(lab.ask(max_tokens=lab.longest - 20))
    await lab.engine.sleep()
    assert (await lab.rest(stream))[1].reason == "abort"
    assert lab.engine.load_report().asleep and not lab.engine.load_report().admitting
    with pytest.raises(AdmissionClosed):
        lab.engine.submit(lab.ask())
    assert not (await lab.engine.probe()).ok
    await lab.engine.wake()
    with pytest.raises(AdmissionClosed):
        lab.engine.resume()
    probe = await lab.engine.probe()
    assert probe.ok and probe.version == lab.version, probe.detail
    lab.engine.resume()
    after, _ = await lab.run(lab.ask())
    assert ids_of(after) == ids_of(before)


async def close_ends_every_stream(lab: Lab) -> None:
    streams = [lab.engine.submit(lab.ask(max_tokens=lab.longest - 20)) for _ in range(3)]
    await lab.engine.close()
    assert [(await lab.rest(stream))[1].reason for stream in streams] == ["abort"] * 3
    with pytest.raises(AdmissionClosed):
        lab.engine.submit(lab.ask())


async def admission_is_closed_until_weights_were_probed(lab: Lab) -> None:
    """Of an engine without weights."""
    with pytest.raises(AdmissionClosed):
        lab.engine.submit(lab.ask())
    with pytest.raises(AdmissionClosed):
        lab.engine.resume()
    assert not (await lab.engine.probe()).ok


CHECKS: tuple[Check, ...] = (
    a_request_yields_indexed_tokens_and_one_finish,
    greedy_tokens_were_certain,
    a_stop_token_ends_the_stream_and_is_part_of_it,
    the_same_seed_gives_the_same_tokens_in_whatever_company,
    a_replay_continues_with_the_same_tokens_and_indexes,
    a_ticket_that_is_none_is_ignored,
    an_aborted_request_keeps_what_it_emitted,
    a_paused_engine_refuses_new_requests_and_finishes_old_ones,
    more_requests_than_slots_are_all_served,
    a_full_queue_refuses_with_its_size,
    requests_that_can_never_be_served_are_refused_by_name,
    prefixes_are_shared_within_a_namespace_alone,
    new_weights_hit_no_old_prefix,
    a_weights_swap_labels_every_token_with_its_version,
    weights_that_are_not_those_announced_change_nothing,
    sleep_ends_what_is_in_flight_and_wake_needs_a_probe,
    close_ends_every_stream,  # the last one: nothing goes on after it
)


def name_of(check: Check) -> str:
    """For pytest's ids."""
    return check.__name__
