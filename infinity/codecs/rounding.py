"""Roundings and scales that several formats share, in torch operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from infinity.codecs.part import Codec, Shape, typed

# Elements that the references decode at a time: their tensors take about 16 bytes for each.
STEP_NUMEL = 1 << 24
_STEP_ROWS = 128  # A multiple of the rows that usually share a scale.

_BITS_OF_2_TO_MINUS_127 = 0x0040_0000
_BITS_OF_NAN = 0x7FC0_0000
_E8M0_NAN = 255
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def decode_by_values(
    codec: Codec, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor
) -> None:
    """Fills `out` by `codec.values`, about STEP_NUMEL elements at a time if the format allows."""
    step = max(1, STEP_NUMEL // max(1, math.prod(shape[1:])))
    step = step // _STEP_ROWS * _STEP_ROWS or step
    if not shape or shape[0] <= step or codec.rows(shape, 0, step) is None:
        store(codec.values(parts, shape), out)
        return
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        ranges = codec.rows(shape, start, stop)
        assert ranges is not None, (codec, shape, start, stop)
        cut = [part[begin:end] for part, (begin, end) in zip(parts, ranges, strict=True)]
        store(codec.values(cut, (stop - start, *shape[1:])), out[start:stop])


def store(values: torch.Tensor, out: torch.Tensor) -> None:
    """Rounds `values` to the dtype of `out`: to nearest, ties to even, NaN to one NaN.

    torch's own conversions differ in the bits of a NaN from one instruction set to the next.
    """
    is_nan = torch.isnan(values).to(out.device)
    out.copy_(values)
    out.masked_fill_(is_nan, float("nan"))


def e8m0_to_fp32(codes: torch.Tensor) -> torch.Tensor:
    """Returns 2^(code - 127) of uint8 codes; 255 is NaN.

    Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.4.1.
    """
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, _BITS_OF_2_TO_MINUS_127, bits)
    return torch.where(codes == _E8M0_NAN, _BITS_OF_NAN, bits).view(torch.float32)


def scales_to_fp32(part: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns the numbers of a part of scales as fp32, flat. U8 are powers of two, as F8_E8M0."""
    if dtype in ("F8_E8M0", "U8"):
        return e8m0_to_fp32(part)
    return typed(part, FLOAT_DTYPES.get(dtype, torch.float8_e4m3fn)).float()


def exponents_of(numbers: torch.Tensor) -> torch.Tensor:
    """Returns floor(log2(number)) of positive fp32 numbers as int32; -150 for zero."""
    _, exponents = torch.frexp(numbers)
    return torch.where(numbers == 0, -150, exponents - 1)


def fp32_to_e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Returns uint8 codes of 2^exponent, limited to those that are numbers."""
    return (exponents + 127).clamp(0, _E8M0_NAN - 1).to(torch.uint8)
