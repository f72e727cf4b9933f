"""An fp32 master kept as a bf16 weight and a 16-bit residual: docs/formats/split_master.md.

Exact and invertible over all 2^32 patterns, NaNs with their payloads included: `join(*split(x))`
has the bits of `x`. The weight is the master rounded to bf16, halves away from zero (half-up on the
magnitude); round-to-nearest-even could not be undone at ties.
"""

from __future__ import annotations

import torch


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
