"""Sums of squares of gradients, in blocks of SQUARES_NUMEL elements, and the tree over the blocks.

The tree is in csrc/update/squares.h: its bits do not depend on which ranks sum which blocks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch

from infinity import _core
from infinity.config.machine import threads_here

SQUARES_NUMEL = _core.update.SQUARES_NUMEL
_PIECE_NUMEL = 2048 * SQUARES_NUMEL  # 48 MiB of device memory while it is summed.


def sum_squares(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of each SQUARES_NUMEL elements, the last of fewer: fp64
    (ceil(numel / SQUARES_NUMEL),), where the values are.

    values: fp32 (numel,), contiguous, on the host or on a device

    Each sum is a tree of its own in fp64, whose every level adds the second half of the terms to
    the first: its bits depend on nothing but its elements. On the host native, without the GIL, on
    as many threads as updates.
    """
    if values.device.type != "cpu":
        return sum_squares_by_torch(values)
    sums = torch.empty(math.ceil(values.numel() / SQUARES_NUMEL), dtype=torch.float64)
    _core.update.sum_squares(
        values.data_ptr(), values.numel(), sums.data_ptr(),
        num_threads=threads_here(torch.get_num_threads()),
    )  # fmt: skip
    return sums


def sum_squares_by_torch(values: torch.Tensor) -> torch.Tensor:
    """As `sum_squares`, by operations of torch, of which each rounds as the host does."""
    count = math.ceil(values.numel() / SQUARES_NUMEL)
    sums = torch.empty(count, dtype=torch.float64, device=values.device)
    for start in range(0, values.numel(), _PIECE_NUMEL):
        terms = values[start : start + _PIECE_NUMEL].double()
        padding = -terms.numel() % SQUARES_NUMEL
        level = torch.nn.functional.pad(terms, (0, padding)).square().view(-1, SQUARES_NUMEL)
        while level.shape[1] > 1:
            low, high = level.chunk(2, dim=1)
            level = low + high
        first = start // SQUARES_NUMEL
        sums[first : first + len(level)] = level[:, 0]
    return sums


def roots_of(sums: torch.Tensor, first: int) -> numpy.ndarray[Any, numpy.dtype[numpy.float64]]:
    """Returns the roots of the tree over blocks for a run of blocks, of which `first` is the number
    of the first one: fp64. Their number is `num_roots`.

    sums: fp64 (blocks,), contiguous, on the host
    """
    return numpy.array(_core.update.roots_of(sums.data_ptr(), sums.numel(), first), numpy.float64)


num_roots = _core.update.num_roots
tree_sum = _core.update.tree_sum
