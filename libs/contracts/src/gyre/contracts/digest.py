"""The digest of a token sequence, chained over fixed blocks, so that extending a context costs only its new blocks.

With blocks b_1..b_n of BLOCK ids (little-endian int32) and a tail t shorter than a block:
state_0 = zeros, state_i = H(state_{i-1} + b_i), digest = H(state_n + "tail" + t + length), H = blake2b of 16 bytes.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

BLOCK = 256
_SIZE = 16


def _hash(*parts: bytes) -> bytes:
    h = hashlib.blake2b(digest_size=_SIZE)
    for part in parts:
        h.update(part)
    return h.digest()


def _bytes(ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


@dataclass(frozen=True, slots=True)
class TokenChain:
    """The digest's running state after `length` ids: `state` over whole blocks, `tail` of the open block."""

    state: bytes = bytes(_SIZE)
    tail: bytes = b""
    length: int = 0

    def extend(self, ids: np.ndarray) -> "TokenChain":
        """The chain after appending `ids` (int32, shape [T])."""
        data = self.tail + _bytes(ids)
        width = BLOCK * 4
        whole = len(data) // width * width
        state = self.state
        for start in range(0, whole, width):
            state = _hash(state, data[start:start + width])
        return TokenChain(state, data[whole:], self.length + len(ids))

    def hexdigest(self) -> str:
        """Digest of everything appended so far: 32 hex digits."""
        return _hash(self.state, b"tail", self.tail, self.length.to_bytes(8, "little")).hex()


def token_digest(ids: np.ndarray) -> str:
    """Digest of one sequence of ids (int32, shape [T]): 32 hex digits."""
    return TokenChain().extend(ids).hexdigest()


def bytes_digest(data: bytes) -> str:
    """blake2b-128 of raw bytes: 32 hex digits."""
    return _hash(data).hex()
