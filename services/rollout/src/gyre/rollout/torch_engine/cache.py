"""Which physical KV blocks hold what. Pure bookkeeping: the tensors belong to the runner.

A full block of computed tokens is *filed* under (the block before it, its exact ids); the first block of a chain is
filed under its root, (weights version, namespace). So a prefix is found again only by exact ids, under the weights it
was computed with, within its namespace, and hashes cannot collide because keys hold the ids themselves.
A filed block that nobody uses stays until its memory is wanted, longest unused first and tails before heads.
A namespace that keeps its blocks when the weights change (carry = "keep") has one root, (KEPT, namespace); then `versions`
say what was computed under which weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

KEPT = -2

Root = tuple[int, str]
Tip = Root | int  # what the next block of a chain is filed under: the root, or the serial of the block before
Key = tuple[Tip, bytes]


@dataclass(slots=True)
class Chain:
    """Blocks, one reference each, that hold KV of the first `num_computed` tokens of a sequence.

    The first `num_filed` blocks are filed, up to `tip`. Blocks behind the computed ones are room. `kv_version` is the oldest
    weights version that anything in them was computed under, -1 if nothing is.
    """

    tip: Tip
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_filed: int = 0
    kv_version: int = -1


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens with reference counts and a prefix index."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._serials = [0] * num_blocks  # names the content a block was filed with; never used again for another
        self._index: dict[Key, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._next_serial = 1
        self._allocations = [0] * num_blocks
        self.versions = np.full(num_blocks, -1, dtype=np.int64)
        """The oldest weights version that anything in a block was computed under."""

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that are filed and in nobody's use."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now, filed but unused ones included."""
        return len(self._free) + len(self._idle)

    def is_filed(self, block: int) -> bool:
        """Whether the block is full and can be found."""
        return self._keys[block] is not None

    def allocation(self, block: int) -> int:
        """Names what a full block holds: changes whenever the block is handed out anew."""
        return self._allocations[block]

    def match(self, root: Root, ids: np.ndarray) -> tuple[list[int], Tip]:
        """Takes a reference on the longest filed prefix of `ids` (int32 [T]); returns its blocks in order and its tip.

        At least one token is left over, because a sequence needs one computed position to sample from.
        """
        blocks: list[int] = []
        tip: Tip = root
        size = self.block_size
        for end in range(size, len(ids), size):
            block = self._index.get((tip, ids[end - size : end].tobytes()))
            if block is None:
                break
            self._idle.pop(block, None)
            self._refs[block] += 1
            blocks.append(block)
            tip = self._serials[block]
        return blocks, tip

    def allocate(self, version: int = -1) -> int | None:
        """An empty block with one reference, for what is computed under `version`; None if every block is in use."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._unfile(block)
        else:
            return None
        self._refs[block] = 1
        self._allocations[block] += 1
        self.versions[block] = version
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one more reference on each of these blocks, which must have one."""
        for block in blocks:
            self._refs[block] += 1

    def file(self, tip: Tip, blocks: Sequence[int], ids: np.ndarray) -> Tip:
        """Files further full blocks of a sequence after `tip`; `ids` are exactly their tokens. Returns the new tip.

        Where another sequence filed the same content first, the chain goes on from that twin and the block stays
        unfiled.
        """
        size = self.block_size
        for number, block in enumerate(blocks):
            key = (tip, ids[number * size : (number + 1) * size].tobytes())
            twin = self._index.setdefault(key, block)
            if twin == block:
                self._keys[block] = key
                self._serials[block] = self._next_serial
                self._next_serial += 1
            tip = self._serials[twin]
        return tip

    def release(self, blocks: list[int]) -> None:
        """Gives back one reference on each block of a sequence; tails become evictable before heads."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def forget(self, is_over: Callable[[Root], bool]) -> None:
        """Takes everything below the roots that are over out of the prefix index (the weights changed).

        Blocks in use stay with their sequences. One pass: a block is filed after the one before it.
        """
        alive: set[Tip] = set()
        for key, block in list(self._index.items()):
            tip = key[0]
            if tip in alive or (isinstance(tip, tuple) and not is_over(tip)):
                alive.add(self._serials[block])
                continue
            self._unfile(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def _unfile(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None
