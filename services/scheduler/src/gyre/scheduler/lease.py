"""Leadership: one subject, one writer. NATS refuses whatever a scheduler says after it lost the lease.

Every fact is published on the condition that the last message on the lease's subject is our own. A standby that has
seen the same lease message for its whole time to live takes over by writing the next one on the condition that nobody
else did. A leader that could not renew for that long stops by itself; it measures on its own monotonic clock.
"""

import logging
import time
import uuid
from collections.abc import Mapping

from gyre.contracts.errors import Fenced
from gyre.contracts.events import Fact, LeaseTaken
from gyre.contracts.subjects import message_id, subject_of
from gyre.runtime.blobs import BlobStore
from gyre.runtime.bus import Bus
from gyre.runtime.clock import Clock
from gyre.runtime.service import encode_fact
from gyre.scheduler.config import RENEW_EVERY_S

log = logging.getLogger(__name__)


class LostLease(Exception):
    """Somebody else leads, or nobody can tell; this process must stop acting."""


class Lease:
    """Taken once, renewed often; the only way a scheduler's fact reaches the bus."""

    def __init__(self, bus: Bus, blobs: BlobStore, clock: Clock, run: str, ttl_s: float,
                 renew_s: float = RENEW_EVERY_S) -> None:
        self._bus, self._blobs, self._clock, self._run, self._ttl_s, self._renew_s = bus, blobs, clock, run, ttl_s, renew_s
        self._holder = uuid.uuid4().hex[:12]
        self._term = 0
        self._sequence = 0
        self._renewed = 0.0
        self._subject = subject_of(LeaseTaken(self._holder, 0, ttl_s), run)

    @property
    def holder(self) -> str:
        return self._holder

    async def take(self) -> None:
        """Wait until nobody leads, then lead."""
        seen, since = -1, time.monotonic()
        while True:
            last = await self._bus.last_message(self._subject)
            sequence = int(last["sequence"]) if last else 0
            if sequence != seen:
                seen, since = sequence, time.monotonic()
            if sequence == 0 or time.monotonic() - since > self._ttl_s:
                try:
                    await self._write(sequence)
                    log.info("took the lease at sequence %d", self._sequence)
                    return
                except Fenced:
                    continue
            await self._clock.sleep(0.25)

    async def renew(self) -> None:
        """Say again that we lead. Raises LostLease."""
        if time.monotonic() - self._renewed > self._ttl_s:
            raise LostLease("could not renew in time")
        try:
            await self._write(self._sequence)
        except Fenced as error:
            raise LostLease(str(error)) from error

    async def _write(self, expected: int) -> None:
        started = time.monotonic()
        self._term += 1
        fact = LeaseTaken(self._holder, self._term, self._ttl_s)
        body = encode_fact(fact, run=self._run, source="scheduler", blobs=self._blobs)
        identity = message_id(fact, self._run)
        try:
            self._sequence = await self._bus.publish(self._subject, body, identity,
                                                     expected_last=(self._subject, expected))
        except Fenced:
            # "Refused" does not say "not stored": a try whose answer was lost may have won.
            last = await self._bus.last_message(self._subject)
            if last is None or last.get("Nats-Msg-Id") != identity:
                raise
            self._sequence = int(last["sequence"])
        self._renewed = started

    async def renew_if_due(self) -> None:
        """Renew once `renew_s` have passed since the last time. Raises LostLease."""
        if time.monotonic() - self._renewed >= self._renew_s:
            await self.renew()

    async def say(self, fact: Fact, trace: Mapping[str, str]) -> int:
        """Publish a fact under the lease; returns its sequence. Raises LostLease."""
        body = encode_fact(fact, run=self._run, source="scheduler", blobs=self._blobs, trace=trace)
        headers = {k: v for k, v in trace.items() if k == "traceparent"}
        subject, identity = subject_of(fact, self._run), message_id(fact, self._run)
        try:
            return await self._bus.publish(subject, body, identity, headers, expected_last=(self._subject, self._sequence))
        except Fenced as error:
            # As above: it may be stored although the answer was a refusal, and then it was said while we led.
            last = await self._bus.last_message(subject)
            if last is None or last.get("Nats-Msg-Id") != identity:
                raise LostLease(str(error)) from error
            return int(last["sequence"])
