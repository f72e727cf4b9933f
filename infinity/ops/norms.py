"""Parts of the norms of gradients: sums of squares in blocks, and the 2-norm of bf16 numbers.

Sums of squares are those of blocks of SQUARES_NUMEL elements; the tree over the blocks is in
csrc/update/squares.h: its bits do not depend on which ranks sum which blocks.

The norm of bf16 numbers has the bits that torch's has for the same numbers in fp32. torch measures
a tensor on the host by one sum for each lane of a vector, in the order of memory
(ATen/native/cpu/ReduceOpsKernel.cpp, `norm_kernel_tensor_iterator_impl`). How many lanes there are,
and whether a product is rounded before it is added, is its build's and the processor's choice; a
trial at the first call finds it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy
import torch

from infinity import _core
from infinity.config.machine import threads_here
from infinity.ops.optimizers import instruction_sets

SQUARES_NUMEL = _core.update.SQUARES_NUMEL
_PIECE_NUMEL = 2048 * SQUARES_NUMEL  # 48 MiB of device memory while it is summed.
# The square of a bf16 number is exact in fp32 and not rounded, unless it is too small: there, and
# not in every sum, the roundings differ.
_TRIALS = [(numel, scale) for numel in (100, 1000, 65537) for scale in (1.0, 1e-3)]
_TRIALS += [(numel, 1e-20) for numel in range(2, 200)]


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
    sums = torch.empty(math.ceil(values.numel() / SQUARES_NUMEL), dtype=torch.float64, device="cpu")
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


def norm_of_bf16(values: torch.Tensor) -> torch.Tensor:
    """Returns `torch.linalg.vector_norm(values.float())`, an fp32 scalar, without the fp32 array.

    values: bf16 (numel,), contiguous, on the host. Native, on the calling thread, without the GIL.
    `has_norm_of_bf16` holds.
    """
    variant = _variant()
    assert variant is not None
    if values.numel() == 1:  # The root of a tiny square is not the number; torch takes no square.
        return values.abs().float().reshape(())
    return _norm(values, *variant)


def has_norm_of_bf16() -> bool:
    """Whether the native kernel has torch's bits here."""
    return _variant() is not None


def _norm(values: torch.Tensor, simd: str, variant: int) -> torch.Tensor:
    norm = _core.update.norm_of_bf16(
        values.data_ptr(), values.numel(), simd=simd, variant=variant
    )  # fmt: skip
    return torch.tensor(norm, dtype=torch.float32, device="cpu")


@cache
def _variant() -> tuple[str, int] | None:
    """Returns the instruction set and the rounding that give torch's bits; None if none do."""
    trials = list(_trials())
    wanted = [torch.linalg.vector_norm(values.float()) for values in trials]
    for simd in instruction_sets():
        for variant in range(_core.update.NUM_NORMS):
            found = [_norm(values, simd, variant) for values in trials]
            if all(map(torch.equal, found, wanted)):
                return simd, variant
    return None


def _trials() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)  # The global one is the user's.
    for numel, scale in _TRIALS:
        values = torch.randn(numel, generator=generator, device="cpu") * scale
        yield values.to(torch.bfloat16)
