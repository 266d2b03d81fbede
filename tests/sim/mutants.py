"""Faults put into the protocol on purpose, each a class in the place of the right one: the simulation has to find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gyre.contracts import events as e
from gyre.contracts.subjects import message_id
from gyre.rollout.core import RolloutCore
from gyre.rollout.core import State as RolloutState
from gyre.scheduler.schedules import Choice, Elastic, View
from gyre.trainer.claims import ClaimTable
from gyre.trainer.core import CheckpointWritten, TrainerCore, TrainerState
from sim.bus import RUN, Message
from sim.engines import SimEngine
from sim.kernel import Refused, Task
from sim.reward import SimEvaluator
from sim.scheduler import SimLease, SimScheduler
from sim.service import Row, SimService
from sim.simulation import Parts, Simulation
from sim.trainer import Offer, SimCore


class _NoCondition(SimLease):
    def say(self, fact: e.Fact) -> Task:
        return (yield from self._bus.publish(self._process, fact, id_=f"{message_id(fact, RUN)} {self.holder}"))


class IgnoresTheLease(SimScheduler):
    """Says its facts unconditionally, under ids of its own."""

    def make_lease(self) -> SimLease:
        return _NoCondition(self.world, self.bus, self.process)


class ForgetsItsOutbox(SimService):
    """What was not sent before a crash is never said."""

    def _start(self) -> None:
        self.disk.unsent.clear()
        super()._start()


class AcknowledgesTooEarly(SimService):
    """Notes a message as applied before what follows from it is durable."""

    def _step(self, item: Any, journal: list[tuple[Any, float]], applied: list[Message], rows: list[Row]) -> list[Any]:
        if item.message is not None:
            self.disk.applied[item.message.stream] = item.message.sequence
        return super()._step(item, journal, applied, rows)


class CountsGroupsTwice(TrainerCore):
    """Takes a group that it knows."""

    def _group_completed(self, state: TrainerState, fact: e.GroupCompleted) -> list[Any]:
        state.membership.known.discard(fact.group)
        return super()._group_completed(state, fact)


class TakesOldEpochs(TrainerCore):
    """Believes every assignment, whatever its epoch."""

    def step(self, state: TrainerState, event: object, now: float) -> tuple[TrainerState, list[Any]]:
        if isinstance(event, e.CellRoleAssigned) and event.cell == self._cell:
            state.cell.epoch = event.epoch - 1
        return super().step(state, event, now)


class RestartsNothing(RolloutCore):
    """Forgets after a restart what was outstanding."""

    def resume(self, state: RolloutState, now: float) -> list[Any]:
        return super().resume(state, now)[-1:]


class TakesCallsTwice(RolloutCore):
    """Counts a call that it has already."""

    def _call_finished(self, state: RolloutState, event: Any, now: float) -> list[Any]:
        execution = state.executions.get(event.record.execution)
        if execution is not None and execution.takes_calls and event.record.index < execution.num_calls:
            state.executions[execution.id] = replace(execution, num_calls=execution.num_calls + 1)
            return []
        return super()._call_finished(state, event, now)


class TellsTheWrongVersion(SimEngine):
    """Takes new weights at their word before it has them."""

    def _load(self, published: e.WeightsPublished) -> Task:
        if self.weights is not None:
            self.weights = replace(self.weights, version=published.version)
        return super()._load(published)


class AnswersAsleep(SimEngine):
    """Answers what it was at although it has given its devices back."""

    def generate(self) -> Task:
        if not self.is_awake or not self.admits or self.weights is None:
            raise Refused("does not admit")
        weights = self.weights
        yield self.world.pick(0.05, 1.0)
        self.devices.check(self.process, "samples tokens")
        return weights.version, weights.checksum


class PublishesTooEarly(SimCore):
    """Says that a version is durable before it is."""

    def _publish_weights(self) -> Task:
        weights = self.weights
        yield from self.service.submit(CheckpointWritten(weights.version, weights.checksum, "early", "", 0))
        self.world.point(self.process, "before the checkpoint")
        yield self.world.pick(0.1, 1.0)
        self.checkpoints.write(weights, b"")


class AddsWhatWasRevoked(SimCore):
    """Adds a buffer although its worker was revoked while it was read."""

    def _add_offers(self, table: ClaimTable) -> Task:
        for offer in table.offers:
            yield from self._read(Offer(offer.worker, offer.cell, offer.transfer))
            table.revoke(offer.worker)
            read = self.satellites[offer.cell].exported
            if read is not None:
                self._sum.add(read.total, read.micro_steps)
        return True


class AcknowledgesBeforeItSays(SimEvaluator):
    """Takes work off the queue before its result is stored."""

    def _run(self) -> Task:
        while True:
            found = yield from self.bus.take_work(self.process)
            if found is None:
                yield 0.5
                continue
            self.bus.ack_work(self.process, found[0])
            self.world.point(self.process, "before evaluating")
            result = yield from self._evaluate(found[0].fact)
            yield from self.bus.publish(self.process, result, id_=f"run/execution.result/{result.execution}")


@dataclass(frozen=True, slots=True)
class NoGate(Elastic):
    """Lets cells go that are still needed."""

    def next_to_train(self, view: View) -> Choice:
        cell = view.next_in_order
        return Choice() if cell is None or view.steps_left_in_burst <= 0 else Choice(cell.cell)


def no_gate(simulation: Simulation) -> None:
    for scheduler in simulation.schedulers:
        scheduler._schedule = NoGate()


def with_trainer_core(kind: type[TrainerCore]) -> Callable[[Simulation], None]:
    """Put another core into every trainer."""
    def mutate(simulation: Simulation) -> None:
        for worker in (simulation.core, *simulation.satellites):
            service = worker.service
            service.core = kind(worker.devices.cell, service.core._rules)
    return mutate


def with_rollout_core(kind: type[RolloutCore]) -> Callable[[Simulation], None]:
    """Put another core into the rollout service."""
    def mutate(simulation: Simulation) -> None:
        simulation.rollout.service.core = kind(16, len(simulation.engines))
    return mutate


def every_service(kind: type[SimService]) -> Callable[[Simulation], None]:
    """Have every service run by another loop."""
    def mutate(simulation: Simulation) -> None:
        for service in simulation.services:
            service.__class__ = kind
            service.process.start = service._start
    return mutate


# name -> (what is wrong, the settings it can show in)
MUTANTS: dict[str, Parts] = {
    "the scheduler ignores the lease": Parts(scheduler=IgnoresTheLease),
    "the outbox is lost in a crash": Parts(mutate=(every_service(ForgetsItsOutbox),)),
    "messages are acknowledged before the commit": Parts(mutate=(every_service(AcknowledgesTooEarly),)),
    "membership counts a group twice": Parts(mutate=(with_trainer_core(CountsGroupsTwice),)),
    "a cell accepts an older epoch": Parts(mutate=(with_trainer_core(TakesOldEpochs),)),
    "a restart forgets what is outstanding": Parts(mutate=(with_rollout_core(RestartsNothing),)),
    "a call is counted twice": Parts(mutate=(with_rollout_core(TakesCallsTwice),)),
    "an engine tells the wrong version": Parts(engine=TellsTheWrongVersion),
    "an engine answers without its devices": Parts(engine=AnswersAsleep),
    "weights are published before they are durable": Parts(core=PublishesTooEarly),
    "a revoked worker's gradients are added": Parts(core=AddsWhatWasRevoked),
    "an evaluator acknowledges before it says": Parts(evaluator=AcknowledgesBeforeItSays),
    "cells leave that are needed": Parts(mutate=(no_gate,)),
}
