"""Tensors of which every rank holds some rows: given out by the leader, brought together on it, summed over.

A tensor of R rows is cut along its first axis as `torch.chunk` does into one piece per rank, the last ones shorter or
empty; a tensor without axes counts as one row. All calls are collective.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def rows_of(num_rows: int, rank: int, num_ranks: int) -> slice:
    """The rows that a rank holds."""
    per_rank = -(-num_rows // num_ranks)
    return slice(min(rank * per_rank, num_rows), min((rank + 1) * per_rank, num_rows))


def gather(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The whole tensor on the leader, None elsewhere; on the device and in the dtype of `piece`."""
    padded = _padded(piece, shape)
    pieces = [torch.empty_like(padded) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(padded, pieces, dst=0)
    return None if pieces is None else torch.cat(pieces)[: shape[0]].reshape(shape)


def scatter(whole: torch.Tensor | None, piece: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Fill `piece` from the leader's whole tensor, whatever dtype and device that has."""
    padded = _padded(piece, shape)
    pieces = None
    if dist.get_rank() == 0:
        assert whole is not None
        pieces = [_padded(whole[rows_of(shape[0], r, dist.get_world_size())].to(piece), shape)
                  for r in range(dist.get_world_size())]
    dist.scatter(padded, pieces, src=0)
    piece.copy_(padded[: len(piece)])


def gather_everywhere(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor on every rank."""
    padded = _padded(piece, shape)
    whole = padded.new_empty(len(padded) * dist.get_world_size(), *shape[1:])
    dist.all_gather(list(whole.chunk(dist.get_world_size())), padded)
    return whole[: shape[0]]


def sum_rows(whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum over all ranks' whole tensors."""
    num_ranks, rows = dist.get_world_size(), rows_of(len(whole), dist.get_rank(), dist.get_world_size())
    per_rank = -(-len(whole) // num_ranks)
    pieces = [_padded(whole[rows_of(len(whole), rank, num_ranks)], tuple(whole.shape)) for rank in range(num_ranks)]
    summed = whole.new_empty(per_rank, *whole.shape[1:])
    dist.reduce_scatter(summed, pieces)
    return summed[: rows.stop - rows.start]


def _padded(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    per_rank = -(-shape[0] // dist.get_world_size())
    padded = piece.new_zeros(per_rank, *shape[1:])
    padded[: len(piece)] = piece
    return padded
