"""Norms of gradients that rest in shards: the bits do not depend on the number of ranks.

Squares are summed in fp64, first within blocks of STATE_GRANULE elements that no partition cuts,
then over the blocks in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy
import torch

from infinity.state.partition import ShardSlice
from infinity.state.units import STATE_GRANULE, TensorSpec

_SUMMED_NUMEL = 256 * STATE_GRANULE  # At a time: fp64 copies are made of them.


def norms_of(
    specs: Iterable[TensorSpec],
    slices: Mapping[TensorSpec, Sequence[ShardSlice]],
    sums_by_rank: Sequence[bytes],
) -> dict[TensorSpec, torch.Tensor]:
    """Returns the 2-norm of each tensor's gradient: fp32 scalars on the host.

    `slices`: the parts of each tensor in the order of its elements. `sums_by_rank`: for each rank,
    the `block_sums` of its slices, in the order of `specs`, as fp64 bytes.
    """
    sums = [
        torch.from_numpy(numpy.frombuffer(content, dtype=numpy.float64).copy())
        for content in sums_by_rank
    ]
    places = [0] * len(sums)
    norms = {}
    for spec in specs:
        parts = []
        for part in slices[spec]:
            count = num_blocks(part.stop - part.start, first_block(part))
            place = places[part.rank]
            parts.append(sums[part.rank][place : place + count])
            places[part.rank] = place + count
        total = torch.cat(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
        norms[spec] = total.sqrt().float()
    return norms


def first_block(part: ShardSlice) -> int:
    """Returns the number of elements before the first multiple of a granule in the unit's state."""
    start = part.full.state_offset + part.start
    return min(-start % STATE_GRANULE, part.stop - part.start)


def num_blocks(numel: int, first: int) -> int:
    """Returns the number of sums that `block_sums` returns."""
    return (first > 0) + math.ceil((numel - first) / STATE_GRANULE)


def block_sums(values: torch.Tensor, first: int) -> torch.Tensor:
    """Returns sums of squares, fp64, of `values[:first]` and then of each STATE_GRANULE elements.

    Each sum is a tree of its own, so that its bits do not depend on what else is summed.
    """
    sums = [_tree_sums(values[:first])] if first else []
    sums += [_tree_sums(part) for part in values[first:].split(_SUMMED_NUMEL) if part.numel()]
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.float64)


def _tree_sums(values: torch.Tensor) -> torch.Tensor:
    count = math.ceil(values.numel() / STATE_GRANULE)
    squares = torch.zeros(count * STATE_GRANULE, dtype=torch.float64)
    squares[: values.numel()] = values
    level = squares.square_().view(count, STATE_GRANULE)
    while level.shape[1] > 1:
        half = level.shape[1] // 2
        level = level[:, :half] + level[:, half:]
    return level[:, 0]
