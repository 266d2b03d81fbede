"""vLLM's token-in-token-out route in its own words: what is sent, and what comes back, checked before anything reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from gyre.rollout.engines.host import Call, Ended, Piece

#: What the server puts before the id of a request that comes in by this route; its abort wants the whole.
ID_PREFIX = "generate-tokens-"

_SEED_BITS = 63


class Candidate(msgspec.Struct):
    """One token with its log-probability."""

    token_id: int
    logprob: float


class Position(Candidate):
    """The sampled token of one position, and what else was asked for there."""

    top_logprobs: list[Candidate] = []


class Logprobs(msgspec.Struct):
    content: list[Position] | None = None


class VersionSpan(msgspec.Struct):
    """Output tokens [start, end) were sampled under `version`."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None

    def piece(self) -> Piece:
        """Its tokens and their log-probabilities. Raises ValueError if they do not belong together."""
        ids = self.token_ids or []
        content = (self.logprobs.content if self.logprobs else None) or []
        if [position.token_id for position in content] != ids:
            raise ValueError(f"{len(ids)} tokens {ids[:8]} with log-probabilities of {[p.token_id for p in content[:8]]}")
        return Piece(ids, [position.logprob for position in content])

    def logprob_of_first(self, token_id: int) -> float | None:
        """Of a token that was asked for, at the first position of this choice."""
        content = (self.logprobs.content if self.logprobs else None) or []
        found = [c.logprob for position in content[:1] for c in (position, *position.top_logprobs) if c.token_id == token_id]
        return found[0] if found else None


class CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: CachedTokens | None = None

    @property
    def num_reused(self) -> int:
        return (self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None) or 0


class Problem(msgspec.Struct):
    message: str = ""


class Chunk(msgspec.Struct):
    """One event of a stream, or the whole answer of a call that does not stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: Problem | None = None


read_chunk = msgspec.json.Decoder(Chunk).decode


def body_of(call: Call, salt: str, *, stream: bool = True, watch: int | None = None,
            transfer: Mapping[str, Any] | None = None) -> dict[str, Any]:  # fmt: skip
    """The request of a call. `watch`: a token whose log-probability is wanted everywhere.

    `ignore_eos`, because what ends a request is our affair: its stop tokens.
    """
    sampling: dict[str, Any] = {
        "max_tokens": call.max_tokens, "temperature": call.temperature, "logprobs": 0, "detokenize": False,
        "ignore_eos": True, "stop_token_ids": list(call.stop_token_ids),
        "seed": seed_at(call.seed, len(call.prompt_ids)),
    }  # fmt: skip
    if watch is not None:
        sampling |= {"logprobs": 1, "logprob_token_ids": [watch]}  # the server wants one number to be the other's length
    body: dict[str, Any] = {"request_id": call.call_id, "token_ids": call.prompt_ids, "sampling_params": sampling,
                            "cache_salt": salt}  # fmt: skip
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if transfer is not None:
        body["kv_transfer_params"] = dict(transfer)
    return body


def seed_at(seed: int, position: int) -> int:
    """The seed of a call that begins at `position`.

    The server's noise depends on its seed and on how many tokens the call has sampled. A call that goes on where another
    was ended must not see the same noise again.
    """
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def salt_of(era: int, salt: str) -> str:
    """A `cache_salt`: the server takes no slash, no at sign and no more than 128 characters."""
    return hashlib.blake2b(f"{era}/{salt}".encode(), digest_size=16).hexdigest()


def ended_of(reason: str, num_reused: int) -> Ended:
    """How a call ended, from the server's `finish_reason`."""
    if reason in ("stop", "length", "abort"):
        return Ended(reason, num_reused=num_reused)  # type: ignore[arg-type]
    return Ended("error", f"vLLM ended the call with {reason!r}", num_reused)
