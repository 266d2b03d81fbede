"""The memory of keys and values, block-major: one block is one contiguous row, so that it moves as one.

Axes: M blocks, L layers, T packed tokens, K key/value heads, D head size.
"""

from __future__ import annotations

import json
from typing import Protocol

import numpy as np
import torch
from gyre.policy.model import ModelShape
from gyre.transfer import RegionDescriptor

REGION = "kv"
LAYOUT_VERSION = 1  # of a block: [layers, block_size, 2, K, D]
_NUMPY = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "uint16", torch.float16: "float16"}


def layout_of(shape: ModelShape, dtype: torch.dtype, block_size: int, is_deterministic: bool) -> str:
    """What two engines must have in common to read each other's blocks, weights aside (their version is compared).

    Blocks of the ordinary mode are of no use to one that promises equal bits.
    """
    sizes = f"v{shape.vocab_size}-l{shape.num_layers}-k{shape.num_kv_heads}-d{shape.head_dim}"
    mode = ":deterministic" if is_deterministic else ""
    return f"gyre-torch-{LAYOUT_VERSION}:{sizes}:{str(dtype).removeprefix('torch.')}:b{block_size}{mode}"


class RegisteredRows(Protocol):
    """`gyre.transfer.Region` over rows."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """`rows`: the registered memory."""
        ...

    def populate(self) -> None:
        """Gives the memory its pages. Blocking."""
        ...


class RowTransfer(Protocol):
    """What of `gyre.transfer.Transfer` a pool of blocks needs."""

    def register_rows(self, name: str, num_rows: int, row_shape: tuple[int, ...], dtype: str) -> RegisteredRows: ...

    def describe_rows(self, name: str) -> RegionDescriptor: ...

    def release(self, name: str) -> None: ...

    async def read_rows(
        self, descriptor: RegionDescriptor, rows: np.ndarray, checksums: tuple[bytes, ...], into: np.ndarray,
        into_rows: np.ndarray, *, timeout_s: float,
    ) -> None: ...


class PagedKV:
    """Keys and values of all layers in one tensor [num_blocks, layers, block_size, 2, K, D].

    A token's keys and values of one layer lie together, so that storing them is one copy and a block of one layer is one
    piece to gather. With `transfer` and on a CPU the memory is a region of it, which others read one-sided; elsewhere it
    is plain memory.
    """

    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        transfer: RowTransfer | None = None,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        self.num_layers = shape.num_layers
        self.row_shape = (shape.num_layers, block_size, 2, shape.num_kv_heads, shape.head_dim)
        self.row_dtype = _NUMPY[dtype]
        self._transfer = transfer if device.type == "cpu" else None
        self.rows: np.ndarray | None = None  # the registered memory
        self.registered: RegisteredRows | None = None
        if self._transfer is None:
            # zeros, not empty: a masked key has weight 0, and 0 * NaN would spoil the row
            self.pool = torch.zeros((num_blocks, *self.row_shape), dtype=dtype, device=device)
        else:
            self.registered = self._transfer.register_rows(REGION, num_blocks, self.row_shape, self.row_dtype)
            self.rows = self.registered.arrays["rows"]
            self.pool = torch.from_numpy(self.rows).view(dtype)
        self._places = self.pool.view(num_blocks * self.num_layers * block_size, 2, *self.row_shape[-2:])
        self._layer_blocks = self.pool.view(num_blocks * self.num_layers, *self.row_shape[1:])
        self._vectors = self.pool.view(-1, shape.head_dim)
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in (self.pool, self._scratch))

    @property
    def region(self) -> str:
        """The descriptor of the registered memory, as JSON; empty if there is none."""
        if self._transfer is None:
            return ""
        return json.dumps(self._transfer.describe_rows(REGION).to_wire())

    def close(self) -> None:
        """Stops serving the memory; it is freed with the last view of it."""
        if self._transfer is not None:
            self._transfer.release(REGION)

    def places(self, blocks_T: np.ndarray, offsets_T: np.ndarray) -> np.ndarray:
        """Where tokens go in layer 0 (`write` adds the layer), int64 [T]."""
        return blocks_T * (self.num_layers * self.block_size) + offsets_T

    def write(self, layer: int, places_T: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Stores the keys and values of T tokens of a layer."""
        self._places.index_copy_(0, places_T + layer * self.block_size, torch.stack((k_TKD, v_TKD), dim=1))

    def copy(self, block: int, to: int) -> None:
        """What one block holds, into another."""
        self.pool[to].copy_(self.pool[block])

    @property
    def num_vectors(self) -> int:
        """Rows of what `vectors` returns."""
        layers, size, _, num_kv_heads, _ = self.row_shape
        return len(self._vectors) - ((layers - 1) * size * 2 + 1) * num_kv_heads

    def vectors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer in place, [num_vectors, D] each, of which `vector_columns` says what belongs to whom."""
        num_kv_heads = self.row_shape[3]
        keys, count = layer * self.block_size * 2 * num_kv_heads, self.num_vectors
        values = keys + num_kv_heads
        return self._vectors[keys : keys + count], self._vectors[values : values + count]

    def vector_columns(self, table_RM: np.ndarray, num_tokens: int) -> np.ndarray:
        """Rows in `vectors` of the first key/value head (the others follow) of each row's first tokens, [R, num_tokens]."""
        layers, size, _, num_kv_heads, _ = self.row_shape
        kind = np.int32 if len(self._vectors) < 2**31 else np.int64
        blocks_RM = table_RM[:, : -(-num_tokens // size)].astype(kind) * kind(layers * size * 2 * num_kv_heads)
        columns = blocks_RM[:, :, None] + np.arange(size, dtype=kind) * kind(2 * num_kv_heads)
        return columns.reshape(len(table_RM), -1)[:, :num_tokens]

    def gather(self, layer: int, blocks_M: torch.Tensor) -> torch.Tensor:
        """Blocks M of a layer as one tensor [M, block_size, 2, K, D], in memory that the next call reuses.

        `blocks_M` are block * layers. Fresh memory for every call costs more than the copy itself on a CPU (page faults).
        """
        source = self._layer_blocks
        size = blocks_M.shape[0] * source[0].numel()
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=source.dtype, device=source.device)
        out = self._scratch[:size].view(blocks_M.shape[0], *source.shape[1:])
        return torch.index_select(source, 0, blocks_M + layer, out=out)
