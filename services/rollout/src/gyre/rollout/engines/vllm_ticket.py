"""What a vLLM server said of the KV it holds, as a ticket: JSON, because what comes from a peer is never unpickled.

A server that is shown parameters of KV that was freed, used or belongs to other tokens answers 200 and wrong text
(vllm #52234). So none is shown to it that is not, by what is written here, exactly what the request needs; and what comes
back is compared with what the source predicted (`next_id`, `next_logprob`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from gyre.contracts.digest import token_digest

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VllmTicket:
    """`digest`: of the tokens whose KV is held. `expires`: wall clock, when the destination must have asked for it.

    `salt` names the weights version and the cache namespace. `next_id` and `next_logprob`: a token that the source sampled
    after these tokens, and its log-probability (T = 1). `parameters` are the server's own words: `holder` is its name for
    itself, `held_id` for what it holds.
    """

    layout: str
    salt: str
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
    def parse(cls, ticket: bytes) -> VllmTicket | None:
        """None if these bytes are no ticket of this kind."""
        try:
            raw = json.loads(ticket) if len(ticket) <= MAX_BYTES else None
            parsed = cls(**raw)  # type: ignore[arg-type]
        except (ValueError, TypeError):
            return None
        well_typed = (
            isinstance(parsed.next_id, int) and isinstance(parsed.parameters, dict)
            and all(isinstance(text, str) for text in
                    (parsed.layout, parsed.salt, parsed.digest, parsed.holder, parsed.held_id))
            and all(isinstance(number, float) and math.isfinite(number) for number in (parsed.expires, parsed.next_logprob))
        )  # fmt: skip
        return parsed if well_typed else None

    def why_useless(self, layout: str, salt: str, prompt_ids: Sequence[int], now: float) -> str:
        """Why a server cannot use it for `prompt_ids`; '' if it can."""
        if self.layout != layout:
            return f"the ticket is for {self.layout}, this engine is {layout}"
        if self.salt != salt:
            return f"the ticket is for weights and namespace {self.salt!r}, not {salt!r}"
        if self.digest != tokens_digest(prompt_ids):
            return "the ticket is for other tokens"
        return "" if now < self.expires else f"the ticket ran out {now - self.expires:.1f} s ago"


def tokens_digest(ids: Sequence[int]) -> str:
    """Of a prompt, in order."""
    return token_digest(np.asarray(ids, dtype=np.int32))
