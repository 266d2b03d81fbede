"""NIXL's agent at its edge, inside one process: it copies real memory, or does as badly as the test asks for."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

from gyre.transfer.nixl import NixlBackend
from gyre.transfer.nixl_agent import NixlApi


class FakeNixlError(Exception):
    """What every call of a `FakeAgent` raises."""


@dataclass(eq=False)
class Handle:
    """One posted transfer. `state` is what the agent will say; `copy` what the network would do."""

    copies: list[tuple[int, int, int]]  # from, to, bytes
    peer: str
    state: str = "NEW"
    released: bool = False

    def land(self) -> None:
        for source, target, num_bytes in self.copies:
            ctypes.memmove(target, source, num_bytes)


class FakeFabric:
    """The agents of a test, by name, and how their transfers go.

    behaviour: of every transfer posted from now on: "done" (copied at once), "slow" (in flight until `finish`), "error"
    (an ERR state), "raises" (the status call raises), "refused" (posting raises). `late_copy` is when a slow one lands.
    """

    def __init__(self) -> None:
        self.agents: dict[str, FakeAgent] = {}
        self.behaviour = "done"
        self.posted: list[Handle] = []
        self.skip = 0  # so many transfers are done at once before `behaviour` applies
        self._names = itertools.count()

    def open(self, owner: str) -> NixlApi:
        name = f"{owner}-{next(self._names)}"
        self.agents[name] = FakeAgent(name, self)
        return NixlApi(self.agents[name], name, (FakeNixlError,))

    def backend(self, owner: str, landing_bytes: int = 4096) -> NixlBackend:
        return NixlBackend(owner, self.open, pause=lambda _: None, landing_bytes=landing_bytes)

    def finish(self, handle: Handle) -> None:
        """The network gets round to it, however late."""
        handle.land()
        handle.state = "DONE"


@dataclass(eq=False)
class FakeAgent:
    """As much of `nixl_agent` as is used, and as strict about releasing what is in flight as it must be."""

    name: str
    fabric: FakeFabric
    registered: dict[int, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        assert mem_type == "DRAM"
        self.registered.update({address: num_bytes for address, num_bytes, *_ in reg_list})
        return reg_list

    def deregister_memory(self, dereg_list: Any) -> None:
        for address, *_ in dereg_list:
            if self.registered.pop(address, None) is None:
                raise FakeNixlError("NIXL_ERR_NOT_FOUND")

    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool, backends: list[str]) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> object:
        if metadata.decode() not in self.fabric.agents:
            raise FakeNixlError("NIXL_ERR_MISMATCH")
        self.known.add(metadata.decode())
        return metadata

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        return descs

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str) -> Any:
        peer = self.fabric.agents.get(remote_agent)
        reachable = peer is not None and (remote_agent in self.known or peer is self)
        if operation != "READ" or not reachable or not all(peer.holds(a, n) for a, n, _ in remote_descs):
            raise FakeNixlError("NIXL_ERR_NOT_FOUND")
        assert all(self.holds(a, n) for a, n, _ in local_descs), "the target is not registered"
        return Handle([(r[0], here[0], r[1]) for r, here in zip(remote_descs, local_descs, strict=True)], remote_agent)

    def transfer(self, handle: Any) -> str:
        behaviour = "done" if self.fabric.skip else self.fabric.behaviour
        self.fabric.skip = max(self.fabric.skip - 1, 0)
        self.fabric.posted.append(handle)
        if behaviour == "refused":
            handle.state = "ERR"
            raise FakeNixlError("NIXL_ERR_REMOTE_DISCONNECT")
        handle.state = {"done": "DONE", "slow": "PROC", "error": "ERR", "raises": "PROC"}[behaviour]
        if behaviour == "done":
            handle.land()
        if behaviour == "raises":
            handle.state = "RAISES"
            return "PROC"
        return handle.state

    def check_xfer_state(self, handle: Any) -> str:
        assert not handle.released, "a released handle was used"
        if handle.state == "RAISES":
            raise FakeNixlError("NIXL_ERR_REMOTE_DISCONNECT")
        return handle.state

    def release_xfer_handle(self, handle: Any) -> None:
        assert handle.state != "PROC", "releasing an active transfer brings the process down"
        assert not handle.released, "a handle was released twice"
        handle.released = True

    def holds(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + size for start, size in self.registered.items())
