"""The native decoders: tensors in, addresses to `infinity._core.decode`.

Their bits are the same on every instruction set; `INFINITY_SIMD` picks one by hand, for tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import astuple

import torch

from infinity import _core
from infinity.codecs.part import OUT_DTYPES, matrix_of
from infinity.config.machine import chosen_simd, threads_here
from infinity.fused.decode import CodeLayout
from infinity.fused.launches import FORMS


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


def decode(
    layout: CodeLayout,
    parts: Mapping[str, torch.Tensor],
    out: torch.Tensor,
    values: Sequence[float],
) -> None:
    """Decodes codes to the stored matrices of a weight, in rows and columns as they are stored.

    parts: by the names of `layout.part_names`; scales that were nested are fp32
    values: the numbers of the 16 codes of four bits; of integers those without a zero
    """
    shape = layout.shape
    if layout.packing == "PAIRS" and out.is_contiguous():
        shape, out = (1, out.numel()), out.view(1, -1)
    elif len(shape) == 1:
        shape, out = (1, *shape), out[None]
    _core.decode.codes(
        parts["codes"].data_ptr(),
        parts.get("scales", parts["codes"]).data_ptr(),
        "F32" if layout.nested_block else layout.scale,
        matrix_of(layout.values, shape),
        _output(out),
        is_float=layout.values == "E4M3",
        bits=layout.bits,
        packing=layout.packing,
        block=layout.block,
        values=values,
        product=layout.product,
        zeros=_zeros(layout, parts),
        order=(_address(parts.get("order")), layout.is_transposed),
        global_scales=(_address(parts.get("global")), layout.global_scale == "OVER"),
        minima=(_address(parts.get("minima")), layout.minima == "PLUS"),
        record=astuple(layout.record) if layout.record else None,
        times=layout.times,
        num_threads=threads_here(torch.get_num_threads()),
        simd=chosen_simd(_core.update.instruction_sets),
    )


def _zeros(layout: CodeLayout, parts: Mapping[str, torch.Tensor]) -> tuple[int, str, int, int]:
    """Returns (address, or 0 for none; packing; what is added to words; the zero of all codes)."""
    if isinstance(layout.zeros, int):
        return 0, "ROWS", 0, layout.zeros
    return parts["zeros"].data_ptr(), layout.zeros, layout.raised, 0


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _output(out: torch.Tensor) -> tuple[int, str, tuple[int, int, int]]:
    """Returns (address, format, strides of matrices, rows and columns in elements)."""
    leading = _leading(out)
    strides = (leading[-1][1] if leading else 0, out.stride(-2), out.stride(-1))
    return out.data_ptr(), FORMS[out.dtype], strides
