"""The evaluator's shell: take work, evaluate, publish, and only then acknowledge.

Who waits for whom: `run_until` holds one batch of requests at a time; `_keep_alive` tells NATS that they are worked on;
a request is acknowledged after its result is stored. An evaluator that dies acknowledges nothing, so its batch is
delivered to another. Results carry a message id made of the execution alone: whoever says a second one is not heard.
"""

import asyncio
import logging
import time

from gyre.contracts.codec import decode_envelope, fact_of
from gyre.contracts.errors import BusError, ContractError
from gyre.contracts.events import DeadLettered, EvaluationRequested, ExecutionScored, Fact
from gyre.contracts.subjects import EVAL, filter_of, message_id, subject_of
from gyre.reward.core import Budget, refuse_delivery
from gyre.reward.evaluation import Evaluation
from gyre.runtime import telemetry
from gyre.runtime.blobs import BlobStore
from gyre.runtime.bus import ACK_WAIT_S, Bus, Received
from gyre.runtime.clock import Clock
from gyre.runtime.service import encode_fact

log = logging.getLogger(__name__)
BATCH = 4
CANCEL_AGAIN_S = 1.0
MAX_DEAD_BODY_BYTES = 256 * 1024


def durable_of(run: str) -> str:
    """The consumer that all evaluators of a run share."""
    return f"{run}-reward"


def result_id(run: str, execution: str) -> str:
    """One id for every result of an execution, scored or not: JetStream keeps the first."""
    return f"{run}/execution.result/{execution}"


class Evaluator:
    """Works through the requests of one run."""

    def __init__(self, bus: Bus, blobs: BlobStore, evaluation: Evaluation, budget: Budget, clock: Clock, run: str,
                 name: str) -> None:
        self._bus = bus
        self._blobs = blobs
        self._evaluation = evaluation
        self._budget = budget
        self._clock = clock
        self._run = run
        self._name = name
        self.num_scored = 0
        self.num_unscorable = 0
        self.busy_s = 0.0

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set; what is held then is given back at once.

        Raises:
            BusError: the connection was closed for good.
        """
        work = asyncio.create_task(self._work())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            await work
            raise BusError("nats: connection closed")
        while not work.done():  # a wait that ends in the moment it is cancelled swallows the cancellation
            work.cancel()
            await asyncio.wait((work,), timeout=CANCEL_AGAIN_S)

    async def _work(self) -> None:
        filters = [filter_of(self._run, EvaluationRequested)]
        async for batch in self._bus.share(EVAL, durable_of(self._run), filters, batch=BATCH):
            held = {r.sequence: r for r in batch}
            keeper = asyncio.create_task(self._keep_alive(held))
            try:
                for received in batch:
                    await self._handle(received)
                    await received.ack()
                    del held[received.sequence]
            finally:
                keeper.cancel()
                for received in held.values():
                    await received.give_back()

    async def _keep_alive(self, held: dict[int, Received]) -> None:
        while True:
            await self._clock.sleep(ACK_WAIT_S / 3)
            for received in list(held.values()):
                await received.in_progress()

    async def _handle(self, received: Received) -> None:
        """Publish what has to be said about one message."""
        try:
            envelope = decode_envelope(received.data)
            request = fact_of(envelope, self._blobs.get(envelope.ref) if envelope.ref else None)
            if not isinstance(request, EvaluationRequested):
                raise ContractError(f"{envelope.type} is no work for an evaluator")
        except ContractError as error:
            await self._dead_letter(received, f"{type(error).__name__}: {error}")
            return
        with telemetry.span("gyre.reward.evaluate", envelope.trace, gyre__execution__id=request.execution,
                            gyre__evaluator=self._name) as span:
            started = time.perf_counter()
            result = refuse_delivery(request, self._name, received.num_delivered, self._budget)
            result = result or await self._evaluation.evaluate(request)
            self.busy_s += time.perf_counter() - started
            span.set_attribute("gyre.attempts", result.attempts)
            await self._publish(result, result_id(self._run, request.execution))
        self.num_scored += isinstance(result, ExecutionScored)
        self.num_unscorable += not isinstance(result, ExecutionScored)

    async def _dead_letter(self, received: Received, reason: str) -> None:
        log.error("%s %d: to the dead letters: %s", received.stream, received.sequence, reason)
        fact = DeadLettered(received.stream, received.subject, received.sequence, durable_of(self._run), reason,
                            received.data[:MAX_DEAD_BODY_BYTES])
        await self._publish(fact, message_id(fact, self._run))

    async def _publish(self, fact: Fact, id_: str) -> None:
        trace = telemetry.inject()
        body = encode_fact(fact, run=self._run, source=self._name, blobs=self._blobs, trace=trace)
        await self._bus.publish(subject_of(fact, self._run), body, id_, trace)
