"""The native decoders: tensors in, addresses to `infinity._core.decode`.

Their bits are the same on every instruction set; `INFINITY_SIMD` picks one by hand, for tests.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence

import torch

from infinity import _core
from infinity.codecs.part import OUT_DTYPES, Shape, typed
from infinity.config.cores import threads_here
from infinity.errors import UnsupportedError

SIMD_VARIABLE = "INFINITY_SIMD"

_FLOAT_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_INT4_VALUES = [float(code - 8) for code in range(16)]


def instruction_sets() -> list[str]:
    """The instruction sets of this processor and build, the widest first. The first is used."""
    return list(_core.update.instruction_sets())


def runs(parts: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Whether the native kernels decode these tensors."""
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in (*parts, out))
    return is_on_cpu and out.dtype in OUT_DTYPES and _is_uniform(out)


def _leading(out: torch.Tensor) -> list[tuple[int, int]]:
    """Returns (length, stride) of the dimensions that count matrices, without those of length 1."""
    pairs = zip(out.shape[:-2], out.stride()[:-2], strict=True)
    return [(length, stride) for length, stride in pairs if length != 1]


def _is_uniform(out: torch.Tensor) -> bool:
    """Whether one stride leads from matrix to matrix."""
    leading = _leading(out)
    return all(outer[1] == inner[1] * inner[0] for outer, inner in itertools.pairwise(leading))


def decode_fp8(
    parts: Sequence[torch.Tensor],
    shape: Shape,
    out: torch.Tensor,
    *,
    block: tuple[int, int],
    scale: str,
) -> None:
    """Decodes `Fp8Blocks`; `block` has no zeros."""
    codes, scales = parts
    _core.decode.fp8(
        codes.data_ptr(),
        scales.data_ptr(),
        scale,
        _matrices(shape),
        _output(out),
        block=block,
        num_threads=threads_here(torch.get_num_threads()),
        simd=_simd(),
    )


def decode_int4(
    parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor, *, group: int, scale: str
) -> None:
    """Decodes `Int4Groups`."""
    codes, scales = parts
    _decode_four_bits(codes, scales, scale, shape, out, group, _INT4_VALUES, False, scale)


def decode_mxfp4(
    parts: Sequence[torch.Tensor],
    shape: Shape,
    out: torch.Tensor,
    *,
    block: int,
    values: Sequence[float],
) -> None:
    """Decodes `Mxfp4Blocks`; `shape` and `out` are those of the stored matrices."""
    codes, scales = parts
    _decode_four_bits(codes, scales, "F8_E8M0", shape, out, block, values, False, "F32")


def decode_nf4(
    parts: Sequence[torch.Tensor],
    scales: torch.Tensor,
    shape: Shape,
    out: torch.Tensor,
    *,
    block: int,
    stored: str,
) -> None:
    """Decodes `Nf4`, with the fp32 scale of every block."""
    values = typed(parts[2], torch.float32).tolist()
    if out.is_contiguous():
        shape, out = (1, out.numel()), out.view(1, -1)
    elif len(shape) == 1:
        shape, out = (1, *shape), out[None]
    _decode_four_bits(parts[0], scales, "F32", shape, out, block, values, True, stored)


def _decode_four_bits(
    codes: torch.Tensor,
    scales: torch.Tensor,
    scale_format: str,
    shape: Shape,
    out: torch.Tensor,
    group: int,
    values: Sequence[float],
    is_high_first: bool,
    product_format: str,
) -> None:
    _core.decode.four_bits(
        codes.data_ptr(),
        scales.data_ptr(),
        scale_format,
        _matrices(shape),
        _output(out),
        group=group,
        values=values,
        is_high_first=is_high_first,
        product_format=product_format,
        num_threads=threads_here(torch.get_num_threads()),
        simd=_simd(),
    )


def _matrices(shape: Shape) -> tuple[int, int, int]:
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def _output(out: torch.Tensor) -> tuple[int, str, tuple[int, int, int]]:
    """Returns (address, format, strides of matrices, rows and columns in elements)."""
    leading = _leading(out)
    strides = (leading[-1][1] if leading else 0, out.stride(-2), out.stride(-1))
    return out.data_ptr(), _FLOAT_NAMES[out.dtype], strides


def _simd() -> str:
    """Returns the instruction set that the environment asks for, "" for the widest."""
    simd = os.environ.get(SIMD_VARIABLE, "")
    known = instruction_sets()
    if simd and simd not in known:
        raise UnsupportedError(
            f"expected {SIMD_VARIABLE} to be one of {', '.join(known)} on this machine, got "
            f"{simd!r}; unset it to use the widest"
        )
    return simd
