"""Exact fp32 arithmetic that torch has no function for, and an fp32 master in two halves.

A master is kept as a bf16 weight and a 16-bit residual: docs/formats/split_master.md. Exact and
invertible over all 2^32 patterns, NaNs with their payloads included: `join(*split(x))` has the bits
of `x`. The weight is the master rounded to bf16, halves away from zero (half-up on the magnitude);
round-to-nearest-even could not be undone at ties.
"""

from __future__ import annotations

import ctypes
import functools
from fractions import Fraction

import torch


def fma(a: torch.Tensor | float, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """A * b + c, rounded once to fp32. fp32 tensors, or numbers that are fp32 values; broadcasts.

    The product of two fp32 values is exact in fp64, the sum is not: rounding it to fp64 and then to
    fp32 would round twice. So the fp64 sum is rounded to odd, which leaves the one bit that the
    second rounding needs.

    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
    using rounding to odd", 2008, theorem 1.
    """
    wide = [torch.as_tensor(x, device=getattr(x, "device", "cpu")).double() for x in (a, b, c)]
    product = wide[0] * wide[1]
    total = product + wide[2]
    # The exact error of that sum: Knuth's TwoSum.
    back = total - product
    error = (product - (total - back)) + (wide[2] - back)
    bits = total.view(torch.int64)
    is_inexact_even = (error != 0) & torch.isfinite(total) & torch.isfinite(error) & (bits & 1 == 0)
    # Toward the error: magnitude up when the signs agree, else down.
    away = torch.where((error > 0) == (total > 0), 1, -1)
    odd = (bits + torch.where(is_inexact_even, away, 0)).view(torch.float64)
    return odd.to(torch.float32)


def sqrt(a: torch.Tensor) -> torch.Tensor:
    """The square root of an fp32 tensor, rounded once, as processors do it.

    torch's own fp32 root comes from a vector library and may be off by one place. The fp64 root is
    accurate enough: the root of an fp32 value is never closer to the middle of two of them.
    """
    return a.to(torch.float64).sqrt().to(torch.float32)


@functools.lru_cache(maxsize=64)  # The same settings for every chunk of a step.
def one_minus_product(a: float, b: float) -> float:
    """1 - a * b, rounded once to fp64, as compilers contract it."""
    return float(1 - Fraction(a) * Fraction(b))


def to_fp32(value: float) -> float:
    """The nearest fp32 value, infinity beyond its range."""
    return ctypes.c_float(value).value  # Without a tensor: a launch rounds eight numbers.


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 of any shape to (bf16 weight, int16 residual) of that shape, both new."""
    bits = master.contiguous().view(torch.int32)
    residual = (bits << 16) >> 16  # The low half, with its sign.
    weight = (bits - residual) >> 16  # Integers wrap around.
    return weight.to(torch.int16).view(torch.bfloat16), residual.to(torch.int16)


def join(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its int16 residual, new."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + residual).view(torch.float32)
