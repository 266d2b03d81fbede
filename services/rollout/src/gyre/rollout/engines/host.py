"""What an engine that runs elsewhere must do for us: the seam below `hosted.HostedEngine`.

A host is somebody else's engine in its own words (TensorRT-LLM in this process, SGLang behind HTTP). It answers one call
at a time with pieces and then exactly one `Ended`; what is queued, restarted, labelled or refused is decided above it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from gyre.contracts.errors import EngineError
from gyre.rollout.engines.moving import Capabilities


class HostError(EngineError):
    """The host did not do what it was asked. What it did instead is unknown: whoever asked must not go on as if it had."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request to the host. `call_id` is 32 hex digits: hosts that match ids by prefix need all of one length.

    `salt` names the cache namespace, weights version included, so that a missed flush costs memory and nothing else.
    `ticket` is what `Host.export` gave elsewhere for the tokens of `prompt_ids` (all but the last, if the source sampled
    that while it exported).
    """

    call_id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int
    salt: str
    ticket: bytes = b""


class Piece(NamedTuple):
    """Newly sampled tokens with their log-probabilities under the untempered policy; both of one length."""

    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended. `abort`: it was told to, its tokens are kept. `no_ticket`: nothing was sampled, because the KV the
    ticket names did not arrive; the call may be sent again without it."""

    reason: Literal["stop", "length", "abort", "error", "no_ticket"]
    detail: str = ""
    num_reused: int = 0


class Exported(NamedTuple):
    """One more sampled token (None if the destination samples it), and the ticket for everything before it."""

    token_id: int | None
    logprob: float
    ticket: bytes


class Host(Protocol):
    """Somebody else's engine. All methods run on one event loop and may raise `HostError`; `generate` ends instead."""

    capabilities: Capabilities
    failed: asyncio.Event
    """Set when the host is gone for good."""

    async def start(self) -> None:
        """Brings it up, with whatever weights. Takes the devices. Called once."""
        ...

    def generate(self, call: Call) -> AsyncIterator[Piece | Ended]:
        """Pieces in order, then one `Ended`. Token counts never differ from logprob counts."""
        ...

    async def abort(self, call_id: str) -> None:
        """Asks for the end of one call, whose stream then ends. Unknown ids are ignored."""
        ...

    async def hold(self) -> None:
        """Ends every call with `abort` and starts none until `go_on`. Returns once nothing is in flight."""
        ...

    async def go_on(self) -> None:
        """Takes calls again."""
        ...

    async def update(self, version: int, directory: Path) -> str:
        """Loads a Hugging Face checkpoint while nothing is in flight. Returns a fingerprint of the live weights, or ''."""
        ...

    async def fingerprint(self) -> str:
        """As `update` returned it, of the weights as they are now; '' if the host cannot say."""
        ...

    async def reset_cache(self) -> None:
        """Forgets every cached prefix, on all tiers. Nothing is in flight."""
        ...

    async def release(self) -> int:
        """Gives memory back; nothing is in flight and the cache was reset. Returns the freed bytes, 0 if it cannot say."""
        ...

    async def restore(self) -> bool:
        """Takes memory again. Returns whether the weights are still those before `release`."""
        ...

    async def export(self, call: Call) -> Exported:
        """Prefills `call`, samples one token, and holds the KV. Raises MoveRefused where that cannot be."""
        ...

    async def drop(self, ticket: bytes) -> None:
        """Lets go of what is held for a ticket of this host; unknown ones are ignored."""
        ...

    async def close(self) -> None:
        """Ends it."""
        ...
