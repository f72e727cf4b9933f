"""Launches the Triton kernels of updates and sums: one launch each, on the stream that is current.

Arrays are on one CUDA device, or on the CPU under Triton's interpreter. Nothing waits for the
device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

FORMS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MEAN_DTYPES = (torch.float32, torch.bfloat16)
MOST_ROWS = 128
_PROGRAM_NUMEL = 1024
_NUM_COEFFICIENTS = 8


def made_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a CUDA device the current one, as a launch needs it."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _as_bits(array: torch.Tensor) -> torch.Tensor:
    """Returns numbers of 16 bits as int16, others as int32."""
    return array.view(torch.int32 if array.dtype is torch.float32 else torch.int16)


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
    """One step in place, of the arrays of a `StateSpan` without 8-bit states. `coefficients` and
    `grad_scale` are fp32 values."""
    from infinity.fused import update_kernels

    numel = weight.numel()
    if not numel:
        return
    unused = weight if residual is None else residual
    first, second = (*states, *[gradient] * (2 - len(states)))
    numbers = [*coefficients, *[0.0] * (_NUM_COEFFICIENTS - len(coefficients))]
    arrays = [
        array.view(torch.int16) if array.dtype is torch.bfloat16 else array
        for array in (weight, unused, gradient, first, second)
    ]
    with made_current(weight.device):
        update_kernels.update[(-(-numel // _PROGRAM_NUMEL),)](
            *arrays, numel, grad_scale, *numbers, rule=rule, num_states=len(states),
            is_split=residual is not None, is_gradient_bf16=gradient.dtype is torch.bfloat16,
            program_numel=_PROGRAM_NUMEL, num_warps=4,
            enable_fp_fusion=False,  # But for `tl.fma`, every operation is rounded.
        )  # fmt: skip


def mean_(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes the mean of the first elements of each row to `out`.

    out: fp32, (n,). rows: of one of `MEAN_DTYPES`, (count, at least n), contiguous, at most
    `MOST_ROWS` rows
    """
    from infinity.fused import sum_kernels

    numel, (count, stride) = out.numel(), rows.shape
    if not numel:
        return
    with made_current(out.device):
        sum_kernels.mean[(-(-numel // _PROGRAM_NUMEL),)](
            out, _as_bits(rows), numel, stride, 1.0 / count, count=count, form=FORMS[rows.dtype],
            program_numel=_PROGRAM_NUMEL, num_warps=4,
            enable_fp_fusion=False,  # Every operation is rounded.
        )  # fmt: skip


def add_rows_(
    out: torch.Tensor,
    rows: torch.Tensor,
    by_token: torch.Tensor,
    ends: torch.Tensor,
    *,
    is_last_first: bool,
) -> None:
    """Adds to each row of `out` the rows of its token, in the order of `by_token`, or from the last
    one on, and rounds at each addition.

    out: [tokens, width], rows: [any, width], contiguous, of one dtype of `FORMS`. by_token: numbers
    of rows. ends: [tokens + 1], int64, where the rows of each token begin in `by_token`.
    """
    from infinity.fused import sum_kernels

    if not out.numel():
        return
    with made_current(out.device):
        sum_kernels.add_rows[(len(out), -(-out.shape[1] // _PROGRAM_NUMEL))](
            _as_bits(out), _as_bits(rows), by_token, ends, out.shape[1], form=FORMS[out.dtype],
            is_last_first=is_last_first, program_numel=_PROGRAM_NUMEL, num_warps=4,
        )  # fmt: skip
