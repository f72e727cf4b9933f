"""Weights that are stored as codes and scales: decoded by native kernels, by a Triton kernel, or in
torch operations. All of them decode by one description, `CodeLayout`; docs/formats/quantized.md has
the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from infinity.codecs import native
from infinity.codecs.packing import WORD_BITS, unpacked
from infinity.codecs.part import flat_bytes, typed
from infinity.codecs.records import IQ4_VALUES, without_record
from infinity.codecs.rounding import FLOAT_DTYPES, scales_to_fp32, store
from infinity.fused.decode import CodeLayout

# By code of E2M1: sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
_VALUES = {"E2M1": E2M1_VALUES, "IQ4": IQ4_VALUES}


def decode_natively(
    layout: CodeLayout, parts: Sequence[torch.Tensor], out: torch.Tensor, offset: float
) -> None:
    """Fills `out` by the native kernels. `offset`: is added to scales that were nested."""
    product = FLOAT_DTYPES[layout.product]
    if layout.values == "E4M3" and product not in (torch.float32, out.dtype):
        # The kernel of FP8 rounds once.
        rounded = torch.empty(out.shape, dtype=product, device="cpu")
        decode_natively(layout, parts, rounded, offset)
        store(rounded, out)
        return
    named = dict(zip(layout.part_names, parts, strict=True))
    values: Sequence[float] = _VALUES.get(layout.values, ())
    if layout.values == "INT" and layout.has_pairs and isinstance(layout.zeros, int):
        values = [float(code - layout.zeros) for code in range(16)]
    if "table" in named:
        values = typed(named["table"], torch.float32).tolist()
    if layout.nested_block:
        named["scales"] = flat_bytes(_numbers_of_scales(layout, named, offset))
    target = out.transpose(-1, -2) if layout.is_transposed else out
    if tuple(target.shape) == layout.shape:
        native.decode(layout, named, target, values)
        return
    target = target.reshape(layout.shape)  # A copy where no view has those rows and columns.
    native.decode(layout, named, target, values)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))


def values_of(layout: CodeLayout, parts: Sequence[torch.Tensor], offset: float) -> torch.Tensor:
    """Returns the weight before its last rounding: the reference of all decoders."""
    matrices, rows, columns = layout.matrices
    if layout.record:
        layout, parts = without_record(layout, layout.record, parts[0])
    named = dict(zip(layout.part_names, parts, strict=True))
    if layout.values == "E4M3":
        numbers = typed(named["codes"], torch.float8_e4m3fn).float()
    else:
        codes = unpacked(named["codes"], layout.packing, layout.bits, matrices * rows, columns)
        if layout.values == "INT":
            numbers = codes.to(torch.int16) - _zeros(layout, named)
            if layout.zeros == "FLOATS":
                numbers = numbers.to(FLOAT_DTYPES[layout.product])
            numbers = numbers.float()
        else:
            table = torch.tensor(_VALUES.get(layout.values, ()), device=codes.device)
            if "table" in named:
                table = typed(named["table"], torch.float32)
            numbers = table[codes.int()]
    product = numbers.view(layout.matrices) * scales_of(layout, named, offset)
    value = product.to(FLOAT_DTYPES[layout.product])
    if layout.times != 1:
        value = value * layout.times
    if layout.minima:
        minima = scales_to_fp32(named["minima"], layout.scale).view(matrices, *layout.grid)
        minima = _spread(layout, named, minima).to(value.dtype)
        value = value + minima if layout.minima == "PLUS" else value - minima
    value = value.view(layout.shape)
    return value.transpose(-1, -2) if layout.is_transposed else value


def scales_of(
    layout: CodeLayout, named: Mapping[str, torch.Tensor], offset: float = 0.0
) -> torch.Tensor:
    """Returns the fp32 scales of codes, or such that broadcast to them: (matrices, rows, columns).

    named: parts by the names of `layout.part_names`
    """
    matrices, _, _ = layout.matrices
    scales = _numbers_of_scales(layout, named, offset).view(matrices, *layout.grid)
    if layout.global_scale:
        of_matrices = typed(named["global"], torch.float32).view(-1, 1, 1)
        is_over = layout.global_scale == "OVER"
        scales = scales / of_matrices if is_over else scales * of_matrices
    return _spread(layout, named, scales)


def _numbers_of_scales(
    layout: CodeLayout, named: Mapping[str, torch.Tensor], offset: float
) -> torch.Tensor:
    """Returns the scales as fp32 in the order in which they are stored."""
    if not layout.nested_block:
        return scales_to_fp32(named["scales"], layout.scale)
    codes, nested = named["scales"], typed(named["nested"], torch.float32)
    spread = nested.repeat_interleave(layout.nested_block)[: codes.numel()]
    return typed(named["nested_map"], torch.float32)[codes.int()] * spread + offset


def _zeros(layout: CodeLayout, named: Mapping[str, torch.Tensor]) -> torch.Tensor | int:
    if isinstance(layout.zeros, int):
        return layout.zeros
    stored = named["zeros"]
    if layout.zeros == "FLOATS":
        floats = scales_to_fp32(stored, layout.scale).view(1, *layout.grid)
        return _spread(layout, named, floats)[0]
    if layout.raised:
        stored = flat_bytes(typed(stored, torch.int32) + as_int32(layout.raised))
    zeros = unpacked(stored, layout.zeros, layout.bits, *layout.grid)
    return _spread(layout, named, zeros[None].to(torch.int16))[0]


def _spread(
    layout: CodeLayout, named: Mapping[str, torch.Tensor], grid: torch.Tensor
) -> torch.Tensor:
    """Repeats the numbers of blocks, (matrices, rows, columns), over their blocks. One that is that
    of all rows or columns is not repeated."""
    _, *lengths = layout.matrices
    for dim, (length, block) in enumerate(zip(lengths, layout.block, strict=True), 1):
        if layout.has_order and dim == (1 if layout.is_transposed else 2):
            order = typed(named["order"], torch.int32).clamp(0, grid.shape[dim] - 1)
            grid = grid.index_select(dim, order)
        elif block > 1 and grid.shape[dim] > 1:
            grid = grid.repeat_interleave(block, dim).narrow(dim, 0, length)
    return grid


def as_int32(word: int) -> int:
    """Returns the signed number of 32 bits."""
    return word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word
