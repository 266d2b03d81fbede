"""Evaluators: they take work from the queue, say one result and only then acknowledge. `gyre.reward.core` decides."""

from __future__ import annotations

import itertools

from gyre.contracts.events import EvaluationRequested
from gyre.reward.core import Again, Attempt, Budget, Failed, Graded, NothingGradable, Result, Score, conclude, refuse_delivery
from sim.bus import RUN, Bus
from sim.kernel import Broken, Process, Task, World

IDLE_S = 0.5


class SimEvaluator:
    """One evaluator process; it remembers nothing."""

    def __init__(self, world: World, bus: Bus, process: Process) -> None:
        self.world, self.bus, self.process = world, bus, process
        self._budget = Budget()
        process.start = lambda: world.spawn(process, self._run())

    def _run(self) -> Task:
        while True:
            found = yield from self.bus.take_work(self.process)
            if found is None:
                yield IDLE_S
                continue
            message, num_delivered, _ = found
            request = message.fact
            result = refuse_delivery(request, self.process.name, num_delivered, self._budget)
            if result is None:
                result = yield from self._evaluate(request)
            self.world.point(self.process, "before saying a result")
            yield from self.bus.publish(self.process, result, id_=f"{RUN}/execution.result/{request.execution}")
            self.world.point(self.process, "before acknowledging work")
            self.bus.ack_work(self.process, message)

    def _evaluate(self, request: EvaluationRequested) -> Task:
        if request.snapshot.path not in self.world.blobs:
            raise Broken(f"{request.snapshot.path} is to be evaluated and was never preserved")
        for number in itertools.count(1):
            yield self.world.pick(0.05, 0.8)
            said: Result | Again = conclude(request, self.process.name, self._attempt(), number, self._budget)
            if not isinstance(said, Again):
                return said
            yield said.delay_s
        raise AssertionError("unreachable")

    def _attempt(self) -> Attempt:
        kind = self.world.dice.random()
        if kind < 0.08:
            return Failed("the grader fell over", final=kind < 0.02)
        if kind < 0.11:
            return NothingGradable()
        return Graded(Score(float(self.world.dice.random() < 0.5), 1, 1))
