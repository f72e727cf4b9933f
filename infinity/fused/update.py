"""Launches the Triton kernel of the update: one launch per span, on the stream that is current."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

_PROGRAM_NUMEL = 1024
_NUM_COEFFICIENTS = 8


def update_span_(
    rule: str,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    gradient: torch.Tensor,
    states: Sequence[torch.Tensor],
    coefficients: Sequence[float],
    *,
    grad_scale: float,
) -> None:
    """One step in place. The arrays of a `StateSpan` without 8-bit states, on one CUDA device (or
    on the CPU under Triton's interpreter). `coefficients` and `grad_scale` are fp32 values. Nothing
    waits for the device."""
    from infinity.fused import update_kernels

    numel = weight.numel()
    if not numel:
        return
    unused = weight if residual is None else residual
    first, second = (*states, *[gradient] * (2 - len(states)))
    # AdamW's moments have their coefficients where Adam's have them: behind one that is not used.
    numbers = [0.0, *coefficients] if rule == "adamw" else list(coefficients)
    numbers += [0.0] * (_NUM_COEFFICIENTS - len(numbers))
    device = torch.cuda.device(weight.device) if weight.is_cuda else contextlib.nullcontext()
    with device:
        update_kernels.update[(-(-numel // _PROGRAM_NUMEL),)](
            _as_bits(weight), unused, _as_bits(gradient), first, second, numel, grad_scale,
            *numbers, rule=rule, num_states=len(states), is_split=residual is not None,
            is_gradient_bf16=gradient.dtype is torch.bfloat16, program_numel=_PROGRAM_NUMEL,
            num_warps=4,
            enable_fp_fusion=False,  # But for `tl.fma`, every operation is rounded.
        )  # fmt: skip


def _as_bits(array: torch.Tensor) -> torch.Tensor:
    """Returns a bf16 array as int16, another one as it is."""
    return array.view(torch.int16) if array.dtype is torch.bfloat16 else array
