"""An fp32 master kept as a bf16 weight and a 16-bit residual: docs/formats/split_master.md.

Exact and invertible over all 2^32 patterns, NaNs with their payloads included: `join(*split(x))` has
the bits of `x`. The weight is the master rounded to bf16, halves away from zero (half-up on the
magnitude); round-to-nearest-even could not be undone at ties.
"""

from __future__ import annotations

import torch


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 of any shape to (bf16 weight, int16 residual) of that shape, both new."""
    bits = master.contiguous().view(torch.int32).to(torch.int64)
    residual = _wrap16(bits)
    weight = _wrap16((bits - residual) >> 16)
    return weight.to(torch.int16).view(torch.bfloat16), residual.to(torch.int16)


def join(weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its int16 residual, new."""
    high = weight.contiguous().view(torch.int16).to(torch.int64) << 16
    bits = high + residual.to(torch.int64)
    return (((bits + 2**31) % 2**32) - 2**31).to(torch.int32).view(torch.float32)


def _wrap16(values: torch.Tensor) -> torch.Tensor:
    """Modulo 2^16 into [-2^15, 2^15)."""
    return ((values + 2**15) % 2**16) - 2**15
