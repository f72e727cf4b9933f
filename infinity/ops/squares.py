"""Sums of squares of gradients, in blocks of SQUARES_NUMEL elements."""

from __future__ import annotations

import math

import torch

from infinity import _core
from infinity.config.cores import threads_here

SQUARES_NUMEL = _core.update.SQUARES_NUMEL


def sum_squares(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of each SQUARES_NUMEL elements, the last of fewer: fp64
    (ceil(numel / SQUARES_NUMEL),).

    values: fp32 (numel,), contiguous, on the host

    Each sum is a tree of its own in fp64, whose every level adds the second half of the terms to
    the first: its bits depend on nothing but its elements. Native, without the GIL, on as many
    threads as updates.
    """
    sums = torch.empty(math.ceil(values.numel() / SQUARES_NUMEL), dtype=torch.float64)
    _core.update.sum_squares(
        values.data_ptr(), values.numel(), sums.data_ptr(),
        num_threads=threads_here(torch.get_num_threads()),
    )  # fmt: skip
    return sums
