"""Signed 4-bit codes with one scale per group of columns: docs/formats/quantized.md."""

from __future__ import annotations

import math
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
    typed,
)
from infinity.errors import ConfigError
from infinity.fused.decode import FourBits

_CODES_PER_WORD = 8
_ZERO = 8  # The code of 0: codes are 0 to 15, values -8 to 7.
_VALUES = tuple(float(code - _ZERO) for code in range(16))
_SCALE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class AffineGroups(FusedCodec):
    """Eight codes per I32, lowest bits first, and scales of rows x (columns / group).

    group: columns that share a scale
    scale: the dtype of the scales, BF16, F16 or F32

    The value is (code - 8) * scale, rounded to the dtype of the scales, then to that of the output.
    """

    group: int = 32
    scale: str = "BF16"

    @property
    @override
    def format(self) -> str:
        return f"INT4 in groups of {self.group}"

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        _, _, columns = matrix_of(self.format, shape)
        if columns % self.group or columns % _CODES_PER_WORD:
            raise ConfigError(f"{self.format}: the columns of {shape} are not full groups")
        return (
            StoredPart("_packed", "I32", (*shape[:-1], columns // _CODES_PER_WORD)),
            StoredPart("_scale", self.scale, (*shape[:-1], columns // self.group)),
        )

    @override
    def decode(self, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> None:
        check_decode(self, parts, shape, out)
        if native.runs(parts, out):
            codes, scales = parts
            native.decode_four_bits(
                codes, scales, shape, out, group=self.group, scale=self.scale, values=_VALUES,
                product=self.scale,
            )  # fmt: skip
        else:
            on_device.decode(self, parts, shape, out)

    @property
    @override
    def trial_shapes(self) -> tuple[Shape, ...]:
        return ((2, 35, 3 * math.lcm(self.group, _CODES_PER_WORD)),)

    @override
    def form(self, shape: Shape) -> FourBits:
        return FourBits(self.group, "INT4", self.scale, self.scale)

    @override
    def values(self, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        packed = parts[0]  # Words are little-endian, so bytes hold codes lowest first too.
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(*shape[:-1], -1, self.group)
        scales = typed(parts[1], _SCALE_DTYPES[self.scale]).view(*shape[:-1], -1, 1)
        return ((codes.to(torch.int8) - _ZERO).to(scales.dtype) * scales).view(shape)

    def encode(self, weight: torch.Tensor) -> Encoding:
        """As `Codec.encode`: the scale of a group is its largest magnitude / 7.5, or 1.

        `aside` has `_shape`, the weight's shape.
        """
        wide, shape = check_encode(self, weight), tuple(weight.shape)
        groups = wide.reshape(*shape[:-1], -1, self.group)
        largest = groups.abs().amax(dim=-1, keepdim=True)
        scales = torch.where(largest == 0, 1.0, largest / 7.5).to(_SCALE_DTYPES[self.scale])
        tiny = torch.finfo(scales.dtype).tiny
        scales = scales.clamp(min=tiny)
        codes = (groups / scales.float()).round().clamp(-8, 7).to(torch.int8) + _ZERO
        pairs = codes.to(torch.uint8).reshape(-1, 2)
        packed = pairs[:, 0] | (pairs[:, 1] << 4)
        aside = {"_shape": torch.tensor(shape, dtype=torch.int32)}
        return Encoding(self, (packed, flat_bytes(scales)), aside)

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        return even_rows(self.parts(shape), shape[0], start, stop)
