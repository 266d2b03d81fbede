"""What every engine does when a request is to move, by what its `capabilities.migration` says. More of `engine_conformance`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from engine_conformance import Check, Lab, ids_of
from gyre.policy.checkpoint import state_digest
from gyre.rollout.engines.base import Engine, GenerateRequest, TokenEvent
from gyre.rollout.engines.moving import ExportOf, Frozen, Mover, MoveRefused, Reservation, TicketUnknown, tokens_digest

LEASE_S = 30.0
Indexed = list[tuple[int, int]]


@dataclass
class Started:
    """A request that has said a few tokens, and all that it says (index, id) if nobody interferes."""

    request: GenerateRequest
    whole: Indexed
    stream: Any
    tokens: list[TokenEvent]

    async def moved(self, lab: Lab) -> None:
        """Takes what was still said before the move, which must be the stream's end."""
        more, finish = await lab.rest(self.stream)
        assert finish.reason == "moved"
        self.tokens += more

    def known(self) -> np.ndarray:
        """int32 [T]: prompt and output."""
        return np.concatenate((self.request.prompt_ids, np.array(ids_of(self.tokens), np.int32)))

    def rest(self, ticket: bytes) -> GenerateRequest:
        """What is to be asked elsewhere."""
        num = len(self.tokens)
        return replace(self.request, prompt_ids=self.known(), max_tokens=self.request.max_tokens - num, num_emitted=num,
                       ticket=ticket)  # fmt: skip


def indexed(tokens: list[TokenEvent]) -> Indexed:
    return [(t.index, t.token_id) for t in tokens]


async def start(lab: Lab) -> Started:
    """Greedy. The undisturbed run is in another namespace: what is reused later is the move's."""
    request = lab.ask(max_tokens=lab.longest - 60, temperature=0.0, namespace="moved")
    whole, _ = await lab.run(replace(request, namespace="whole"))
    stream = lab.engine.submit(request)
    return Started(request, indexed(whole), stream, await lab.some(stream, 3))


async def goes_on(lab: Lab, begun: Started, engine: Engine, ticket: bytes) -> int:
    """The rest is exactly what it would have been. Returns how many tokens were reused."""
    tokens, finish = await lab.rest(engine.submit(begun.rest(ticket)))
    assert finish.reason == "length"
    assert indexed(begun.tokens + tokens) == begun.whole
    return finish.num_reused


def mover_of(engine: Engine) -> Mover:
    assert engine.mover is not None, "an engine of kind staged has a mover, no other has"
    return engine.mover


async def capabilities_say_how_requests_move(lab: Lab) -> None:
    can = lab.engine.capabilities
    assert (lab.engine.mover is not None) == (can.migration == "staged")
    assert bool(can.layout) == (can.migration != "replay")


async def without_tickets_an_export_is_refused_and_the_request_goes_on(lab: Lab) -> None:
    if lab.engine.capabilities.migration == "ticket":
        return
    begun = await start(lab)
    with pytest.raises(MoveRefused):
        await lab.engine.export_ticket(begun.request.request_id)
    await lab.engine.release_ticket(b"never-was")
    tokens, finish = await lab.rest(begun.stream)
    assert finish.reason == "length" and indexed(begun.tokens + tokens) == begun.whole


async def a_ticket_takes_a_request_on_exactly_and_once(lab: Lab) -> None:
    if lab.engine.capabilities.migration != "ticket":
        return
    begun = await start(lab)
    ticket = await lab.engine.export_ticket(begun.request.request_id)
    await begun.moved(lab)
    with pytest.raises(MoveRefused):
        await lab.engine.export_ticket(begun.request.request_id)
    await goes_on(lab, begun, lab.engine, ticket)
    await goes_on(lab, begun, lab.engine, ticket)  # used: computed again
    await lab.engine.release_ticket(ticket)
    assert lab.engine.load_report().num_held == 0


async def a_released_ticket_is_of_no_use_and_harmless(lab: Lab) -> None:
    if lab.engine.capabilities.migration != "ticket":
        return
    begun = await start(lab)
    await lab.engine.release_ticket(b"never-was")
    ticket = await lab.engine.export_ticket(begun.request.request_id)
    await begun.moved(lab)
    assert lab.engine.load_report().num_held == 1
    for _ in range(2):
        await lab.engine.release_ticket(ticket)
        assert lab.engine.load_report().num_held == 0
    await goes_on(lab, begun, lab.engine, ticket)


async def frozen_here(lab: Lab, begun: Started, ticket: str) -> Frozen:
    """Exports in one stage, and checks what is said of it."""
    mover, engine = mover_of(lab.engine), lab.engine
    offer = await mover.open_export(ticket, ExportOf(begun.request.request_id), LEASE_S)
    assert (offer.ticket, offer.layout, offer.weights_version, offer.namespace) == (
        ticket, engine.capabilities.layout, lab.version, "moved")  # fmt: skip
    stage = await mover.read_stage(ticket, 0)
    frozen = await mover.freeze(ticket, len(stage.rows))
    await begun.moved(lab)
    check_frozen(begun, frozen)
    return frozen


def check_frozen(begun: Started, frozen: Frozen) -> None:
    assert frozen.num_known == len(begun.known()) and frozen.digest == tokens_digest(begun.known())
    assert frozen.num_known - frozen.num_computed == len(frozen.known_ids) <= 1


async def a_frozen_request_thaws_at_its_source_with_nothing_computed_again(lab: Lab) -> None:
    if lab.engine.capabilities.migration != "staged":
        return
    begun = await start(lab)
    frozen = await frozen_here(lab, begun, "thaw")
    assert lab.engine.load_report().num_held == 1
    assert await goes_on(lab, begun, lab.engine, b"thaw") == frozen.num_computed
    await mover_of(lab.engine).release("thaw")
    assert lab.engine.load_report().num_held == 0
    await goes_on(lab, begun, lab.engine, b"thaw")  # used: of no use, and harmless


async def an_export_that_is_released_leaves_the_request_alone(lab: Lab) -> None:
    if lab.engine.capabilities.migration != "staged":
        return
    begun, mover = await start(lab), mover_of(lab.engine)
    await mover.open_export("dropped", ExportOf(begun.request.request_id), LEASE_S)
    assert lab.engine.load_report().num_held == 1
    assert await mover.release("dropped") and not await mover.release("dropped")
    assert lab.engine.load_report().num_held == 0
    tokens, finish = await lab.rest(begun.stream)
    assert finish.reason == "length" and indexed(begun.tokens + tokens) == begun.whole


async def a_ticket_that_was_never_given_is_unknown(lab: Lab) -> None:
    if lab.engine.capabilities.migration != "staged":
        return
    begun, mover = await start(lab), mover_of(lab.engine)
    frozen = await frozen_here(lab, begun, "known")
    assert await mover.release("known")
    for ticket in ("known", "never-was"):
        with pytest.raises(TicketUnknown):
            await mover.read_stage(ticket, 0)
        with pytest.raises(TicketUnknown):
            await mover.freeze(ticket, 0)
        with pytest.raises(TicketUnknown):
            await mover.pull(ticket, "", frozen.tail, 1.0)
        with pytest.raises(TicketUnknown):
            await mover.commit(ticket, frozen)
        assert not await mover.release(ticket)
    with pytest.raises(MoveRefused):
        await mover.open_export("nothing", ExportOf("never-was"), LEASE_S)
    assert lab.engine.load_report().num_held == 0


async def twin_of(lab: Lab) -> Engine:
    """A second engine under the same version of the same weights."""
    assert lab.another is not None
    twin, state = lab.another(), lab.weights(lab.loaded)
    await twin.load_weights(lab.version, state_digest(state), state)
    assert (await twin.probe()).ok
    twin.resume()
    return twin


async def carry_over(lab: Lab, begun: Started, twin: Engine, ticket: str) -> Frozen:
    """A whole move, up to the commit."""
    source, there = mover_of(lab.engine), mover_of(twin)
    offer = await source.open_export(ticket, ExportOf(begun.request.request_id), LEASE_S)
    await there.reserve(Reservation(ticket, 1, offer.layout, lab.version, offer.namespace, offer.max_tokens, LEASE_S))
    stage = await source.read_stage(ticket, 0)
    await there.pull(ticket, offer.region, stage, LEASE_S)
    frozen = await source.freeze(ticket, stage.first_block + len(stage.rows))
    await begun.moved(lab)
    check_frozen(begun, frozen)
    await there.pull(ticket, offer.region, frozen.tail, LEASE_S)
    await there.commit(ticket, frozen)
    return frozen


async def a_request_goes_on_in_another_engine_with_nothing_computed_again(lab: Lab) -> None:
    if lab.engine.capabilities.migration != "staged" or lab.another is None:
        return
    begun, twin = await start(lab), await twin_of(lab)
    try:
        assert twin.capabilities == lab.engine.capabilities
        frozen = await carry_over(lab, begun, twin, "over")
        twin.pause()  # what was promised room is taken even then
        assert await goes_on(lab, begun, twin, b"over") == frozen.num_computed
        assert await mover_of(lab.engine).release("over")
        await mover_of(twin).release("over")
        assert lab.engine.load_report().num_held == twin.load_report().num_held == 0
    finally:
        await twin.close()


async def a_reservation_that_does_not_fit_is_refused(lab: Lab) -> None:
    if lab.engine.capabilities.migration != "staged":
        return
    mover = mover_of(lab.engine)
    good = Reservation("room", 1, lab.engine.capabilities.layout, lab.version, "moved", 40, LEASE_S)
    for wrong in (replace(good, layout="other"), replace(good, weights_version=lab.version + 1),
                  replace(good, num_tokens=10_000_000)):  # fmt: skip
        with pytest.raises(MoveRefused):
            await mover.reserve(wrong)
    assert lab.engine.load_report().num_held == 0
    for _ in range(2):
        await mover.reserve(good)
    assert lab.engine.load_report().num_held == 1
    assert await mover.release("room") and lab.engine.load_report().num_held == 0


TICKET_CHECKS: tuple[Check, ...] = (
    capabilities_say_how_requests_move,
    a_ticket_takes_a_request_on_exactly_and_once,
    a_released_ticket_is_of_no_use_and_harmless,
)
STAGED_CHECKS: tuple[Check, ...] = (
    a_frozen_request_thaws_at_its_source_with_nothing_computed_again,
    an_export_that_is_released_leaves_the_request_alone,
    a_ticket_that_was_never_given_is_unknown,
    a_request_goes_on_in_another_engine_with_nothing_computed_again,
    a_reservation_that_does_not_fit_is_refused,
)
MOVE_CHECKS: tuple[Check, ...] = (
    without_tickets_an_export_is_refused_and_the_request_goes_on,
    *TICKET_CHECKS,
    *STAGED_CHECKS,
)
