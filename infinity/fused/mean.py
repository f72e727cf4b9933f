"""Launches the Triton kernel of the mean: one launch, on the stream that is current."""

from __future__ import annotations

import contextlib

import torch

_PROGRAM_NUMEL = 1024
FORMS = {torch.float32: "F32", torch.bfloat16: "BF16"}
MOST_ROWS = 128


def mean_(out: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes the mean of the first elements of each row to `out`.

    out: fp32, (n,). rows: of a dtype of `FORMS`, (count, at least n), contiguous, at most
    `MOST_ROWS` rows, on one CUDA device (or on the CPU under Triton's interpreter)
    """
    from infinity.fused import mean_kernels

    numel, (count, stride) = out.numel(), rows.shape
    if not numel:
        return
    bits = rows.view(torch.int16 if rows.dtype is torch.bfloat16 else torch.int32)
    device = torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext()
    with device:
        mean_kernels.mean[(-(-numel // _PROGRAM_NUMEL),)](
            out, bits, numel, stride, 1.0 / count, count=count, form=FORMS[rows.dtype],
            program_numel=_PROGRAM_NUMEL, num_warps=4,
            enable_fp_fusion=False,  # Every operation is rounded.
        )  # fmt: skip
