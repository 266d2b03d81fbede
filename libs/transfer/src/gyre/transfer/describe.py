"""Descriptors: what a region holds, which generation of it, and where a reader can reach it.

A descriptor is a capability: it carries the region's random token, and a reader without it is refused. It travels
over the control plane (a fact or an RPC answer) as plain values, see `to_wire`.
"""

from __future__ import annotations

import base64
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gyre.transfer.errors import LayoutMismatch

ALIGNMENT_BYTES = 64
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class Address:
    """A TCP endpoint of the owner as others reach it."""

    host: str
    port: int


@dataclass(frozen=True)
class BufferInfo:
    """One named buffer: numpy dtype string (`<f4`), shape, offset in the region's payload, blake2b-128 hex digest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    checksum: str = ""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class NixlTarget:
    """How NIXL reaches a region: the owner's agent, what a peer's agent has to load, where the region begins there."""

    agent: str
    metadata: bytes
    address: int

    def to_wire(self) -> list[str | int]:
        return [self.agent, base64.b64encode(self.metadata).decode("ascii"), self.address]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> NixlTarget:
        return cls(str(wire[0]), base64.b64decode(wire[1]), int(wire[2]))


@dataclass(frozen=True)
class RegionDescriptor:
    """A region at one generation.

    `path` is set when it lies in a shared-memory file, `address` when TCP serves it, `nixl` when NIXL does.
    """

    region: str
    owner: str
    generation: int
    token: str
    host: str
    path: str | None
    address: Address | None
    buffers: tuple[BufferInfo, ...]
    nixl: NixlTarget | None = None

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.buffers)

    def buffer(self, name: str) -> BufferInfo:
        """The buffer called `name`; raises `LayoutMismatch` naming what exists."""
        for info in self.buffers:
            if info.name == name:
                return info
        raise LayoutMismatch(f"region {self.region!r} has no buffer {name!r}; it has {[b.name for b in self.buffers]}")

    def digest(self) -> str:
        """One blake2b-128 hex digest over names, dtypes, shapes and checksums: equal contents, equal digest."""
        return combined_digest((b.name, b.dtype, b.shape, b.checksum) for b in self.buffers)

    def to_wire(self) -> dict[str, Any]:
        """Plain values (str, int, list, dict, None) for MessagePack or JSON."""
        return {
            "region": self.region,
            "owner": self.owner,
            "generation": self.generation,
            "token": self.token,
            "host": self.host,
            "path": self.path,
            "address": None if self.address is None else [self.address.host, self.address.port],
            "nixl": None if self.nixl is None else self.nixl.to_wire(),
            "buffers": [[b.name, b.dtype, list(b.shape), b.offset_bytes, b.checksum] for b in self.buffers],
        }

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> RegionDescriptor:
        """The inverse of `to_wire`; unknown keys are ignored, a missing key raises `KeyError`."""
        buffers = tuple(BufferInfo(n, d, tuple(s), o, c) for n, d, s, o, c in wire["buffers"])
        address = None if wire["address"] is None else Address(str(wire["address"][0]), int(wire["address"][1]))
        return cls(
            wire["region"], wire["owner"], int(wire["generation"]), wire["token"], wire["host"], wire["path"],
            address, buffers, NixlTarget.from_wire(wire["nixl"]) if wire.get("nixl") else None,
        )  # fmt: skip


def combined_digest(parts: Any) -> str:
    """blake2b-128 hex over `(name, dtype, shape, checksum)` tuples, in name order."""
    state = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for name, dtype, shape, checksum in sorted(parts):
        state.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{checksum}\n".encode())
    return state.hexdigest()


def checksum(array: np.ndarray) -> str:
    """blake2b-128 hex of the array's bytes (C order)."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(memoryview(flat), digest_size=CHECKSUM_BYTES).hexdigest()


def lay_out(arrays: dict[str, np.ndarray]) -> tuple[tuple[BufferInfo, ...], int]:
    """Offsets for `arrays` in one payload; returns the buffers in the given order and the payload's size in bytes."""
    infos: list[BufferInfo] = []
    offset = 0
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise LayoutMismatch(
                f"buffer {name!r} has dtype {array.dtype}: only plain numeric dtypes can be registered"
            )
        infos.append(BufferInfo(name, array.dtype.str, tuple(array.shape), offset))
        offset += -(-infos[-1].num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(infos), offset
