"""Launches the Triton kernels that decode: one launch per tensor, on the stream that is current.

Tensors are those of `Codec.decode`: flat uint8 parts at any alignment and an output of any strides,
all on one CUDA device (or on the CPU under Triton's interpreter). Nothing waits for the device.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

_FORMS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_TILE = (32, 64)  # Rows and columns of a program. Both cover whole sectors of 32 bytes, so that an
# output may be transposed.


def can_run(shape: Sequence[int], out: torch.Tensor) -> bool:
    """Whether the kernels can decode this weight: at least a vector, dtype and strides of `out`."""
    leading = _leading(out)
    is_uniform = all(
        outer[1] == inner[1] * inner[0] for outer, inner in itertools.pairwise(leading)
    )
    programs = _programs(*_matrices(shape)) if shape else 0
    return out.dtype in _FORMS and is_uniform and 0 < programs < 1 << 31


def decode_fp8(
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    out: torch.Tensor,
    *,
    block: tuple[int, int],
    scale: str,
) -> None:
    """Decodes `Fp8Blocks`; `block` has no zeros."""
    from infinity.fused import decode_kernels as kernels

    codes, scales = parts
    rows, columns = _matrices(shape)[1:]
    _launch(
        kernels.decode_fp8, shape, out, codes, scales, _as_bits(out), rows, columns,
        *_strides(out), *block, scale_form=scale,
    )  # fmt: skip


def decode_four_bits(
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    out: torch.Tensor,
    *,
    group: int,
    values: str,
    scale: str,
    product: str,
    nested: tuple[int, float] = (0, 0.0),
) -> None:
    """Decodes `Int4Groups`, `Mxfp4Blocks` and `Nf4`: see the kernel.

    parts: codes, scales; for NF4 the table too; if its scales are nested, their scales and table
    nested: NF4's scales that share a scale, and the offset, an fp32 value; (0, 0.0) if not nested
    """
    from infinity.fused import decode_kernels as kernels

    nested_block, offset = nested
    codes, scales, table, nested_scales, nested_map = (*parts, *[parts[0]] * (5 - len(parts)))
    rows, columns = _matrices(shape)[1:]
    _launch(
        kernels.decode_four_bits, shape, out, codes, scales, table, nested_scales, nested_map,
        offset, _as_bits(out), rows, columns, *_strides(out), group=group,
        nested_block=max(1, nested_block), values=values,
        scale_form="NESTED" if nested_block else scale, product_form=product,
    )  # fmt: skip


def _launch(
    kernel: Any, shape: Sequence[int], out: torch.Tensor, *operands: object, **constants: object
) -> None:
    device = torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext()
    with device:
        kernel[(_programs(*_matrices(shape)),)](
            *operands,
            **constants,
            out_form=_FORMS[out.dtype],
            tile_rows=_TILE[0],
            tile_columns=_TILE[1],
            num_warps=4,
            enable_fp_fusion=False,  # A product and a sum are rounded each.
        )


def _matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns matrices, rows and columns; a vector is one row."""
    rows = shape[-2] if len(shape) > 1 else 1
    return math.prod(shape[:-2]), rows, shape[-1]


def _programs(matrices: int, rows: int, columns: int) -> int:
    return matrices * -(-rows // _TILE[0]) * -(-columns // _TILE[1])


def _as_bits(out: torch.Tensor) -> torch.Tensor:
    """Returns the output as integers of its size."""
    return out.view(torch.int32 if out.dtype is torch.float32 else torch.int16)


def _leading(out: torch.Tensor) -> list[tuple[int, int]]:
    """Returns (length, stride) of the dimensions that count matrices, without those of length 1."""
    pairs = zip(out.shape[:-2], out.stride()[:-2], strict=True)
    return [(length, stride) for length, stride in pairs if length != 1]


def _strides(out: torch.Tensor) -> tuple[int, int, int]:
    """Returns the strides of matrices, rows and columns in elements."""
    leading = _leading(out)
    row = out.stride(-2) if out.dim() > 1 else 0
    return leading[-1][1] if leading else 0, row, out.stride(-1)
