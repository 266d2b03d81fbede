"""The micro-step: an immutable pack of admitted tree rows of one group, handed to a training cell.

Layout: the union of the admitted paths of each execution, each tree in depth-first order, trees one after another.
Arrays have one entry per token (T) unless said otherwise.
"""

from dataclasses import dataclass

import numpy as np
from gyre.contracts.codec import pack, unpack
from gyre.contracts.digest import bytes_digest
from gyre.contracts.errors import BrokenBody


@dataclass(frozen=True, slots=True, eq=False)
class MicroStep:
    """Tokens, tree structure and targets.

    ids          int32 [T]    token ids
    parent       int32 [T]    index of the path predecessor, -1 at a root
    position     int32 [T]    depth: number of ancestors
    exit         int32 [T]    end of the token's subtree: q sees k iff k <= q < exit[k]
    tree         int32 [T]    index into `executions`
    target       int32 [K]    tokens that are trained, ascending; token i is scored by the hidden state of parent[i]
    path         int32 [K]    number of the admitted path that owns the target, unique inside the micro-step
    logprob      float32 [K]  behaviour log-prob of the target
    version      int32 [K]    weights version it was sampled under
    weight       float32 [K]  1 / |owned targets of its execution|
    advantage    float32 [E]  one scalar per execution
    executions   E ids        in the order of `tree`
    """

    micro_step: str
    group: str
    executions: tuple[str, ...]
    advantage: np.ndarray
    ids: np.ndarray
    parent: np.ndarray
    position: np.ndarray
    exit: np.ndarray
    tree: np.ndarray
    target: np.ndarray
    path: np.ndarray
    logprob: np.ndarray
    version: np.ndarray
    weight: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        return len(self.target)

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs: the sum of depth + 1."""
        return int(self.position.sum(dtype=np.int64)) + len(self.ids)

    def to_bytes(self) -> bytes:
        return pack(self)


def micro_step_from_bytes(data: bytes, digest: str) -> MicroStep:
    """Read a micro-step and verify it. Raises BrokenBody if the bytes are not those of `digest`."""
    if bytes_digest(data) != digest:
        raise BrokenBody(f"micro-step: bytes have digest {bytes_digest(data)}, expected {digest}")
    return unpack(data, MicroStep)
