"""`DisaggregatedParams` as a ticket, that is as bytes: JSON, because what comes from a peer is never unpickled."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from gyre.rollout.engines.moving import MoveRefused

# what is carried, of the fields that exist; logits and multimodal handles are not ours
CARRIED = (
    "first_gen_tokens", "first_gen_log_probs", "ctx_request_id", "opaque_state", "draft_tokens", "disagg_request_id",
    "ctx_dp_rank", "ctx_info_endpoint", "schedule_style",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ticket:
    """`tokens`: digest of the prompt that was prefilled. `first`: the token sampled there, which follows it.

    `params`: fields of `DisaggregatedParams`, logprobs as [[token, logprob, rank], ...] or as plain numbers.
    """

    layout: str
    salt: str
    tokens: str
    first: int
    params: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        wire = {"layout": self.layout, "salt": self.salt, "tokens": self.tokens, "first": self.first,
                "params": {name: _plain(value) for name, value in self.params.items()}}  # fmt: skip
        return json.dumps(wire).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Ticket:
        """Raises MoveRefused for what is no ticket."""
        try:
            wire = json.loads(raw)
            params = {str(name): _rich(value) for name, value in wire["params"].items()}
            return cls(str(wire["layout"]), str(wire["salt"]), str(wire["tokens"]), int(wire["first"]), params)
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise MoveRefused(f"not a ticket of TensorRT-LLM: {type(error).__name__}: {error}") from error

    def fits(self, layout: str, salt: str, prompt_ids: Sequence[int]) -> str:
        """Why this engine cannot use it for these tokens; '' if it can."""
        if self.layout != layout:
            return f"the ticket is for {self.layout}, this engine is {layout}"
        if self.salt != salt:
            return f"the ticket is for weights and namespace {self.salt!r}, not {salt!r}"
        if not prompt_ids or prompt_ids[-1] != self.first or tokens_digest(prompt_ids[:-1]) != self.tokens:
            return "the ticket is for other tokens"
        return ""


def tokens_digest(ids: Sequence[int]) -> str:
    """Of a prompt, in order."""
    return hashlib.blake2b(np.asarray(ids, dtype="<i4").tobytes(), digest_size=16).hexdigest()


def params_of(given: Any) -> dict[str, Any]:
    """The fields that are carried, of those that are set."""
    found = {name: getattr(given, name, None) for name in CARRIED}
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Enum):
        return {"number": value.value}
    if isinstance(value, Mapping):  # one position: token -> Logprob
        return {"top": [[int(token), float(entry.logprob), entry.rank] for token, entry in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _rich(value: Any) -> Any:
    """`top` stays an object of rows: only the engine's own classes can be built from it (`with_logprobs`)."""
    if isinstance(value, dict):
        if "bytes" in value:
            return base64.b64decode(value["bytes"], validate=True)
        return value.get("number", value)
    return [_rich(each) for each in value] if isinstance(value, list) else value


def with_logprobs(value: Any, make: Any) -> Any:
    """`first_gen_log_probs` as the engine wants them; `make(logprob=, rank=)` builds its entry."""
    if isinstance(value, dict) and "top" in value:
        return {int(token): make(logprob=float(logprob), rank=rank) for token, logprob, rank in value["top"]}
    return [with_logprobs(each, make) for each in value] if isinstance(value, list) else value
