"""FP4 E2M1 codes with one power of two per 32 of them: docs/formats/quantized.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.codecs import native, on_device
from infinity.codecs.part import (
    Encoding,
    FusedCodec,
    Shape,
    StoredPart,
    check_decode,
    check_encode,
    even_rows,
    flat_bytes,
    matrix_of,
)
from infinity.codecs.rounding import e8m0_to_fp32, exponents_of, fp32_to_e8m0
from infinity.errors import ConfigError
from infinity.fused.decode import FourBits

BLOCK = 32
# By code: sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
_LARGEST_EXPONENT = 2  # Of E2M1: 6 is 1.5 x 2^2.
# A magnitude has as many thresholds below it as its code; ties go to the even code.
_TIES_UP = (0.75, 1.75, 3.5)
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)


@dataclass(frozen=True, slots=True)
class Mxfp4Blocks(FusedCodec):
    """Two codes per byte, lowest bits first, and one E8M0 scale per 32 codes of a row.

    is_transposed: the stored matrix is the transpose of the weight, in blocks of 16 bytes:
        `_blocks` and `_scales` of gpt-oss; else rows x (columns / 2) codes, `_packed` and `_scale`

    The value is e2m1(code) * 2^(scale - 127), exact in bfloat16 except that magnitudes from 2^128
    on are infinite; every value of a block with scale 255 is NaN.
    """

    is_transposed: bool = False

    @property
    @override
    def format(self) -> str:
        return "MXFP4"

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        matrix_of(self.format, shape)
        stored = self._stored(shape)
        if stored[-1] % BLOCK:
            raise ConfigError(f"{self.format}: {stored} as stored does not have full blocks of 32")
        blocks = (*stored[:-1], stored[-1] // BLOCK)
        if self.is_transposed:
            return StoredPart("_blocks", "U8", (*blocks, BLOCK // 2)), StoredPart(
                "_scales", "U8", blocks
            )
        codes = (*stored[:-1], stored[-1] // 2)
        return StoredPart("_packed", "U8", codes), StoredPart("_scale", "U8", blocks)

    def _stored(self, shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-1, -2) if self.is_transposed else tensor

    @override
    def decode(self, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> None:
        check_decode(self, parts, shape, out)
        if native.runs(parts, out):
            stored, turned = self._stored(shape), self._turned(out)
            native.decode_mxfp4(parts, stored, turned, block=BLOCK, values=E2M1_VALUES)
        else:
            on_device.decode(self, parts, shape, out)

    @property
    @override
    def trial_shapes(self) -> tuple[Shape, ...]:
        stored = (2, 35, 3 * BLOCK)
        return (self._stored(stored),)

    @override
    def form(self, shape: Shape) -> FourBits:
        return FourBits(BLOCK, "E2M1", "F8_E8M0", "F32", is_transposed=self.is_transposed)

    @override
    def values(self, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        codes = torch.stack([parts[0] & 15, parts[0] >> 4], dim=-1)
        table = torch.tensor(E2M1_VALUES, device=codes.device)
        numbers = table[codes.int()].view(-1, BLOCK) * e8m0_to_fp32(parts[1])[:, None]
        return self._turned(numbers.view(self._stored(shape)))

    def encode(self, weight: torch.Tensor) -> Encoding:
        """As `Codec.encode`: the scale is 2^(floor(log2(largest magnitude)) - 2), as MX defines it;
        codes are rounded to nearest, ties to even, and limited to 6."""
        wide = self._turned(check_encode(self, weight)).reshape(-1, BLOCK)
        exponents = exponents_of(wide.abs().amax(dim=1)) - _LARGEST_EXPONENT
        scales = fp32_to_e8m0(exponents)
        scaled = wide.double() / e8m0_to_fp32(scales).double()[:, None]
        magnitudes = scaled.abs()
        codes = torch.signbit(scaled).to(torch.uint8) << 3
        for tie in _TIES_UP:
            codes += magnitudes >= tie
        for tie in _TIES_DOWN:
            codes += magnitudes > tie
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return Encoding(self, (flat_bytes(packed), flat_bytes(scales)), {})

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        if self.is_transposed and len(shape) == 2:
            return None  # A row of the weight is a column of the stored matrix.
        return even_rows(self.parts(shape), shape[0], start, stop)
