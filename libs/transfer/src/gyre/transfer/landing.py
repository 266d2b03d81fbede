"""Where NIXL reads land, and what keeps memory safe from a read that nobody waits for any more.

A posted transfer cannot be called back: after a deadline the network may still write into its target. So reads never
land in a caller's arrays but in buffers of this pool, are copied out when they are done, and a buffer whose transfer
was given up stays in quarantine until its handle says that it has ended. Only then is the handle released (releasing
an active one has crashed processes) and the buffer used again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gyre.transfer.errors import BackendUnavailable
from gyre.transfer.nixl_agent import MEMORY, NixlApi

log = logging.getLogger(__name__)

LANDING_BYTES = 16 << 20
MAX_QUARANTINED = 8
CLOSE_POLLS = 100
CLOSE_PAUSE_S = 0.01


@dataclass(frozen=True, eq=False)
class Landing:
    """One registered buffer of `LANDING_BYTES`."""

    memory: mmap.mmap
    registration: Any

    @property
    def bytes(self) -> np.ndarray:
        return np.frombuffer(self.memory, np.uint8)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


class LandingPool:
    """Not thread-safe: its owner calls under its own lock."""

    def __init__(self, api: NixlApi, num_bytes: int = LANDING_BYTES) -> None:
        self._api = api
        self.num_bytes = num_bytes
        self._idle: list[Landing] = []
        self._quarantined: list[tuple[Landing, Any]] = []

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def take(self) -> Landing:
        """A free buffer; raises `BackendUnavailable` when too many are held by reads that never ended."""
        self.sweep()
        if self._idle:
            return self._idle.pop()
        if len(self._quarantined) >= MAX_QUARANTINED:
            raise BackendUnavailable(
                f"nixl: {len(self._quarantined)} reads that were given up have not ended; no more memory is put at risk"
            )
        memory = mmap.mmap(-1, self.num_bytes)
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        try:
            return Landing(memory, self._api.agent.register_memory([(address, self.num_bytes, 0, "")], MEMORY))
        except self._api.errors as error:
            raise BackendUnavailable(f"nixl cannot register {self.num_bytes} bytes to read into: {error!r}") from error

    def give_back(self, landing: Landing) -> None:
        self._idle.append(landing)

    def quarantine(self, landing: Landing, handle: Any) -> None:
        """The transfer into `landing` was given up and may still write."""
        self._quarantined.append((landing, handle))
        log.warning("nixl: a read was given up while in flight; its buffer is set aside until the transfer has ended")

    def discard(self, landing: Landing, handle: Any) -> None:
        """The transfer failed: its memory is not used again, so that nothing late can land in another read."""
        try:
            self._api.agent.release_xfer_handle(handle)
            self._api.agent.deregister_memory(landing.registration)
        except self._api.errors as error:
            log.warning("nixl: a failed transfer could not be released and is kept: %r", error)
            keep_forever(handle, landing)

    def sweep(self) -> None:
        """Take back the buffers whose transfers have ended meanwhile."""
        still: list[tuple[Landing, Any]] = []
        for landing, handle in self._quarantined:
            state = self._state(handle)
            if state == "PROC":
                still.append((landing, handle))
            elif state == "DONE":
                self._api.agent.release_xfer_handle(handle)
                self.give_back(landing)
            else:
                self.discard(landing, handle)
        self._quarantined = still

    def close(self, pause: Callable[[float], None]) -> bool:
        """Free what can be freed; False if a transfer is still in flight: then the agent must outlive us too."""
        for _ in range(CLOSE_POLLS):
            self.sweep()
            if not self._quarantined:
                break
            pause(CLOSE_PAUSE_S)
        for landing, handle in self._quarantined:
            keep_forever(landing, handle)
        for landing in self._idle:
            deregister(self._api, landing.registration)
        self._idle.clear()
        return not self._quarantined

    def _state(self, handle: Any) -> str:
        try:
            return self._api.agent.check_xfer_state(handle)
        except self._api.errors:
            return "ERR"


def deregister(api: NixlApi, registration: Any) -> None:
    """Best effort: memory that stays registered is lost to nobody but this process."""
    try:
        api.agent.deregister_memory(registration)
    except api.errors as error:
        log.warning("nixl: memory could not be deregistered: %r", error)


def keep_forever(*things: object) -> None:
    """Never finalise `things`, not even at interpreter exit: their finaliser would release an active transfer."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
