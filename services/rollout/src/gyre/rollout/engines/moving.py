"""How a request, or the cached prefix of an execution that waits on a tool, moves from one engine to another.

A *ticket* names KV that an engine holds for whoever shows the ticket. There are two kinds of engines that can move it:

    staged   blocks are copied while the source goes on decoding, then a short tail is frozen and copied:
             source  open_export -> read_stage ... -> freeze ----------------------------> release
             destination  reserve -> pull ... ------------------> pull (tail) -> commit -> submit(ticket)
    ticket   the engine ends the request and names what it holds, in words only its own kind understands:
             source  freeze ------------------------------------------------------------> release
             destination                                              submit(ticket)

A cached prefix of the second kind has no request that would show its ticket: `freeze` names the namespace, and the
destination is asked for one token behind the prefix, which nobody is told of.

After `freeze` the request's stream ends with `Finish("moved")` behind its last token, and the source holds its KV under
the ticket. After `commit` so does the destination. Whoever is then given the request again together with the ticket (the
destination; the source, if the destination failed) goes on without computing anything again. Every ticket has a lease;
a request that comes with one that has run out, was used, or does not fit is computed from its tokens, as any request.
So no failure of a move is more than a replay. An engine that is paused still takes a request whose ticket it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from gyre.contracts.digest import token_digest
from gyre.contracts.errors import EngineError

Migration = Literal["staged", "ticket", "replay"]


class MoveRefused(EngineError):
    """This move cannot be (no room, another layout or weights version, nothing left to move). Nothing has changed."""


class TicketUnknown(MoveRefused):
    """The ticket was never given, was used or released, or its lease has run out."""


def tokens_digest(ids: np.ndarray) -> bytes:
    """16 bytes that name a sequence of token ids (int32 [T]), as `Frozen.digest` holds them."""
    return bytes.fromhex(token_digest(ids))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beyond tokens in, tokens out.

    `layout` names everything two engines must have in common to read each other's blocks: model shape, dtype, block size
    and how a block is laid out; empty if none can be read.
    """

    migration: Migration = "replay"
    layout: str = ""
    sleeps: bool = True  # sleep frees memory; else it only stops


@dataclass(frozen=True, slots=True)
class ExportOf:
    """What is to be exported: the request in flight called `request_id`, or the newest prefix cached for `namespace`."""

    request_id: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a destination must know before it reserves. `region`: a transfer descriptor as JSON text.

    `num_tokens` are known now; `max_tokens` may they become. `weights_version` must be equal on both sides.
    `block_bytes`: size of one block, 0 if that is not said.
    """

    ticket: str
    layout: str
    weights_version: int
    namespace: str
    num_tokens: int
    max_tokens: int
    region: str
    block_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Blocks [first_block, first_block + R) of a sequence; they do not change any more.

    `rows` int64 [R]: where they lie in the source's region. `checksums`: one for each row, as `gyre.transfer` makes them.
    `token_ids` int32: the tokens of these blocks; in a tail the last block may be partly filled.
    `kv_versions` int64 [R]: the weights version that each block was computed under.
    """

    first_block: int
    rows: np.ndarray
    checksums: tuple[bytes, ...]
    token_ids: np.ndarray
    kv_versions: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """What is left to copy once the source has stopped, and how the destination verifies the whole.

    `num_known` tokens are known, KV of the first `num_computed` is in the blocks. `known_ids` int32: the known tokens
    behind those of all stages, of which no KV exists (at most one after a decode). `digest`: `tokens_digest` of all known
    tokens. An engine of kind `ticket` fills `opaque` alone: what `submit` is to be given elsewhere.
    """

    tail: Stage
    num_known: int
    num_computed: int
    known_ids: np.ndarray
    digest: bytes
    opaque: bytes = b""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for a move, on the destination. `epoch` is that of the source cell; an older one is refused."""

    ticket: str
    epoch: int
    layout: str
    weights_version: int
    namespace: str
    num_tokens: int  # room to hold; pulling a stage beyond it takes more, or is refused
    lease_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A cached prefix that is held under a ticket. `ids` int32 [T]: what an engine elsewhere must be asked to continue so
    that it takes the KV over. The last one may be of the export's own making: what is cached before it counts."""

    ids: np.ndarray
    ticket: bytes


class Mover(Protocol):
    """The moving half of an engine of kind `staged`. Called from the engine's event loop.

    All but `release` raise `MoveRefused`; those that name a ticket raise `TicketUnknown` for one that is not held.
    Nothing is cancelled halfway: a caller that went away, or whose deadline passed, sends `release`, which may come while a
    `pull` runs. Blocks that a read may still write to stay taken until it has ended.
    """

    async def open_export(self, ticket: str, what: ExportOf, lease_s: float) -> Offer:
        """Pin what is computed and offer it. The request goes on decoding. Idempotent for an equal ticket."""
        ...

    async def read_stage(self, ticket: str, first_block: int) -> Stage:
        """Full blocks from `first_block` on, as many as there is room to offer (none: there are no more). Renews the lease."""
        ...

    async def freeze(self, ticket: str, first_block: int) -> Frozen:
        """Stop the request at a token boundary, end its stream with `Finish("moved")`, and give what is left from
        `first_block` on. Idempotent. Of a cached prefix: what is left, nothing stops."""
        ...

    async def reserve(self, reservation: Reservation) -> None:
        """Take blocks for what will come. Idempotent for an equal reservation."""
        ...

    async def pull(self, ticket: str, region: str, stage: Stage, timeout_s: float) -> None:
        """Read a stage's blocks from the source, one-sided, and verify them. Idempotent for a stage that is there."""
        ...

    async def commit(self, ticket: str, frozen: Frozen) -> None:
        """Verify tokens, number of blocks and versions; from here on the ticket can be submitted, and its prefix is found
        by its tokens. Idempotent."""
        ...

    async def release(self, ticket: str) -> bool:
        """Drop what is held under the ticket, on either side; False if nothing is."""
        ...
