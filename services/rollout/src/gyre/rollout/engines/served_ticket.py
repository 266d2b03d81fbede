"""Tickets of engines that are servers of their own: what such a server said of the KV it holds, and for what.

A server that is shown parameters of KV that was freed, used or belongs to other tokens may answer with wrong text and no
error. So nothing is shown to it that is not, by what is written here, exactly what the request needs; and what comes back
is compared with what the source predicted (`next_id`, `next_logprob`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServedTicket:
    """`digest`: of the tokens whose KV is held. `expires`: wall clock, when the destination must have asked for it.

    `next_id` and `next_logprob`: a token that the source sampled after these tokens, and its log-probability (T = 1).
    `parameters` are the server's own words. `holder` names the server, `held_id` what it holds.
    """

    layout: str
    weights_version: int
    digest: str
    expires: float
    holder: str
    held_id: str
    next_id: int
    next_logprob: float
    parameters: dict[str, Any]

    def to_bytes(self) -> bytes:
        """JSON text."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, ticket: bytes) -> ServedTicket | None:
        """None if these bytes are no ticket of this kind."""
        try:
            raw = json.loads(ticket) if len(ticket) <= MAX_BYTES else None
            parsed = cls(**raw)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            return None
        well_typed = (
            isinstance(parsed.weights_version, int) and isinstance(parsed.next_id, int)
            and isinstance(parsed.expires, float) and isinstance(parsed.next_logprob, float)
            and isinstance(parsed.parameters, dict)
            and all(isinstance(text, str) for text in (parsed.layout, parsed.digest, parsed.holder, parsed.held_id))
        )  # fmt: skip
        return parsed if well_typed else None

    def why_useless(self, layout: str, weights_version: int, prompt_ids: np.ndarray, now: float) -> str:
        """Why an engine cannot use it for `prompt_ids` (int32 [P]); empty if it can."""
        if self.layout != layout:
            return f"layout {self.layout!r}, ours is {layout!r}"
        if self.weights_version != weights_version:
            return f"weights version {self.weights_version}, ours is {weights_version}"
        if self.digest != tokens_digest(prompt_ids):
            return "it is for other tokens"
        return "" if now < self.expires else f"it ran out {now - self.expires:.1f} s ago"


def tokens_digest(ids: np.ndarray) -> str:
    """Of int32 ids [P], as hex."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype="<i4").tobytes(), digest_size=16).hexdigest()
