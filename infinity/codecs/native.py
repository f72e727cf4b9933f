"""The native decoders: tensors in, addresses to `infinity._core.decode`.

Their bits are the same on every instruction set; `INFINITY_SIMD` picks one by hand, for tests.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from infinity import _core
from infinity.codecs.packing import Packing
from infinity.codecs.part import OUT_DTYPES, Shape
from infinity.config.machine import threads_here
from infinity.errors import UnsupportedError

SIMD_VARIABLE = "INFINITY_SIMD"

_FLOAT_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


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
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: Shape,
    out: torch.Tensor,
    *,
    block: tuple[int, int],
    scale: str,
) -> None:
    """Decodes codes E4M3, of which `block` (no zeros) rows and columns share a scale."""
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


def decode_four_bits(
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: Shape,
    out: torch.Tensor,
    *,
    group: int,
    scale: str,
    values: Sequence[float],
    product: str = "F32",
    is_high_first: bool = False,
    global_scales: torch.Tensor | None = None,
    is_divided: bool = False,
    zeros: torch.Tensor | None = None,
) -> None:
    """Decodes codes of 16 `values`, of which `group` share a scale; `product` is the dtype that
    value * scale is rounded to first. Scales are multiplied by the fp32 global scale of their
    matrix, or divided by it. With `zeros`, packed by columns, values are code - zero."""
    _core.decode.four_bits(
        codes.data_ptr(),
        scales.data_ptr(),
        scale,
        _matrices(shape),
        _output(out),
        group=group,
        values=values,
        is_high_first=is_high_first,
        product_format=product,
        global_scales=_address(global_scales),
        is_divided=is_divided,
        zeros=_address(zeros),
        num_threads=threads_here(torch.get_num_threads()),
        simd=_simd(),
    )


def decode_affine(
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: Shape,
    out: torch.Tensor,
    *,
    scale: str,
    bits: int,
    group: int,
    are_groups_down: bool,
    packing: Packing,
    zeros: torch.Tensor | None,
    zeros_packing: Packing,
    raised: int,
    order: torch.Tensor | None,
) -> None:
    """Decodes `AffineGroups`, in the shape of the stored matrix, of whose rows (`are_groups_down`)
    or columns `group` share a scale. `raised` is added to words of zeros."""
    _core.decode.affine(
        codes.data_ptr(),
        scales.data_ptr(),
        scale,
        _matrices(shape),
        _output(out),
        bits=bits,
        group=group,
        are_groups_down=are_groups_down,
        packing=packing,
        zeros=(_address(zeros), zeros_packing, raised),
        order=_address(order),
        num_threads=threads_here(torch.get_num_threads()),
        simd=_simd(),
    )


def decode_blocks(codes: torch.Tensor, shape: Shape, out: torch.Tensor, **layout: Any) -> None:
    """Decodes `GgmlBlocks`; `layout` has the names of the native function."""
    _core.decode.blocks(
        codes.data_ptr(),
        _matrices(shape),
        _output(out),
        num_threads=threads_here(torch.get_num_threads()),
        simd=_simd(),
        **layout,
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
