"""Launches the Triton kernel that adds experts' rows per token: one launch, on the stream that is
current."""

from __future__ import annotations

import contextlib

import torch

_PROGRAM_NUMEL = 1024
FORMS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


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
    from infinity.fused import token_sums_kernels

    if not out.numel():
        return
    bits = torch.int32 if out.dtype is torch.float32 else torch.int16
    device = torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext()
    with device:
        token_sums_kernels.add_rows[(len(out), -(-out.shape[1] // _PROGRAM_NUMEL))](
            out.view(bits), rows.view(bits), by_token, ends, out.shape[1],
            form=FORMS[out.dtype], is_last_first=is_last_first, program_numel=_PROGRAM_NUMEL,
            num_warps=4,
        )  # fmt: skip
