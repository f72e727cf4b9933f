"""Blocks of a row that hold codes, scales and minima, as GGUF files have them.

Source of the layouts: ggml-common.h and ggml-quants.c of llama.cpp; docs/formats/quantized.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from infinity.codecs import native
from infinity.codecs.found import FoundTensors
from infinity.codecs.part import (
    Codec,
    Encoding,
    Shape,
    StoredPart,
    check_decode,
    even_rows,
    matrix_of,
)
from infinity.codecs.rounding import decode_by_values
from infinity.errors import ConfigError

Field = tuple[int, int, int]  # (first byte, bits of a code, run)

_IQ4_VALUES = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
    1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)  # fmt: skip
_ALL_BITS = 8


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where a block of `numel` codes, `nbytes` long, has what. Every `group` codes share a factor.

    low, high: fields of the low and the high bits of codes. A byte holds 8 / bits codes; the same
        bits of `run` bytes in a row are codes in a row. Codes of 8 bits are signed.
    scale, minimum: the bytes of the fp16 scale and minimum; -1 without a minimum
    factors: (packing, first byte) of the small factors of groups; ("", 0) without them
    zero: what is subtracted from a code
    is_minimum_added: the minimum is added, else subtracted
    values: numbers that the codes stand for
    """

    numel: int
    nbytes: int
    group: int
    low: Field
    scale: int
    high: Field = (0, 0, 1)
    minimum: int = -1
    factors: tuple[str, int] = ("", 0)
    zero: int = 0
    is_minimum_added: bool = False
    values: tuple[float, ...] = ()


# By the name of the type in ggml.
LAYOUTS = {
    "Q4_0": BlockLayout(32, 18, 32, (2, 4, 16), 0, zero=8),
    "Q4_1": BlockLayout(32, 20, 32, (4, 4, 16), 0, minimum=2, is_minimum_added=True),
    "Q5_0": BlockLayout(32, 22, 32, (6, 4, 16), 0, (2, 1, 1), zero=16),
    "Q5_1": BlockLayout(32, 24, 32, (8, 4, 16), 0, (4, 1, 1), 2, is_minimum_added=True),
    "Q8_0": BlockLayout(32, 34, 32, (2, 8, 32), 0, zero=128),
    "Q2_K": BlockLayout(256, 84, 16, (16, 2, 32), 80, minimum=82, factors=("NIBBLES", 0)),
    "Q3_K": BlockLayout(
        256, 110, 16, (32, 2, 32), 108, (0, 1, 32), factors=("SIX_SIGNED", 96), zero=4
    ),
    "Q4_K": BlockLayout(256, 144, 32, (16, 4, 32), 0, minimum=2, factors=("SIX_PAIRS", 4)),
    "Q5_K": BlockLayout(
        256, 176, 32, (48, 4, 32), 0, (16, 1, 32), minimum=2, factors=("SIX_PAIRS", 4)
    ),
    "Q6_K": BlockLayout(
        256, 210, 16, (0, 4, 64), 208, (128, 2, 32), factors=("BYTES", 192), zero=32
    ),
    "IQ4_NL": BlockLayout(32, 18, 32, (2, 4, 16), 0, values=_IQ4_VALUES),
    "IQ4_XS": BlockLayout(
        256, 136, 32, (8, 4, 16), 0, factors=("SIX_SPLIT", 2), values=_IQ4_VALUES
    ),
}


@dataclass(frozen=True, slots=True)
class GgmlBlocks(Codec):
    """Blocks of a type of ggml, by its name: one part of U8, out x (bytes of a row).

    The value is (code - zero or the value of the code) * (scale * factor) - minimum * factor, each
    operation rounded to fp32, then to the dtype of the output.
    """

    kind: str

    @property
    def layout(self) -> BlockLayout:
        """Where a block of this kind has what."""
        return LAYOUTS[self.kind]

    @property
    @override
    def format(self) -> str:
        return f"{self.kind} of GGUF"

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        matrix_of(self.format, shape)
        blocks, rest = divmod(shape[-1], self.layout.numel)
        if rest:
            raise ConfigError(
                f"{self.format}: the columns of {shape} are not full blocks of {self.layout.numel}"
            )
        return (StoredPart(f".{self.kind}", "U8", (*shape[:-1], blocks * self.layout.nbytes)),)

    @override
    def decode(self, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> None:
        check_decode(self, parts, shape, out)
        if not native.runs(parts, out):
            decode_by_values(self, parts, shape, out)
            return
        layout = self.layout
        native.decode_blocks(
            parts[0], shape, out, numel=layout.numel, nbytes=layout.nbytes, group=layout.group,
            low=layout.low, high=layout.high, places=(layout.scale, layout.minimum),
            factors=layout.factors[0], factors_at=layout.factors[1], zero=layout.zero,
            is_minimum_added=layout.is_minimum_added, values=layout.values,
        )  # fmt: skip

    @override
    def values(self, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        layout = self.layout
        blocks = parts[0].view(-1, layout.nbytes)
        codes = _field(blocks, layout.low, layout.numel)
        if layout.high[1]:
            codes = codes | (_field(blocks, layout.high, layout.numel) << layout.low[1])
        if layout.values:
            numbers = torch.tensor(layout.values, device=codes.device)[codes.int()]
        else:
            is_signed = layout.low[1] == _ALL_BITS
            numbers = ((codes ^ 0x80 if is_signed else codes).int() - layout.zero).float()
        factors, minima = _FACTORS[layout.factors[0]](blocks[:, layout.factors[1] :].int())
        steps = _half(blocks, layout.scale) * factors.float()
        grouped = numbers.view(blocks.shape[0], -1, layout.group) * steps[..., None]
        if layout.minimum >= 0:
            lowest = _half(blocks, layout.minimum) * minima.float()
            grouped = grouped - (-lowest if layout.is_minimum_added else lowest)[..., None]
        return grouped.view(shape)

    @override
    def encode(self, weight: torch.Tensor) -> Encoding:
        """Raises ConfigError: llama.cpp writes blocks."""
        raise ConfigError(
            f"{self.format} is read and not written here; write numbers (`infinity merge --to "
            "bf16`), of which llama.cpp makes a GGUF file"
        )

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        return even_rows(self.parts(shape), shape[0], start, stop)


@dataclass(frozen=True, slots=True)
class GgufScheme:
    """What `infinity convert` writes of a GGUF file: a tensor of blocks has its type as the last
    part of its name."""

    table: Mapping[str, Any]
    where: str

    def find(self, found: FoundTensors) -> None:
        """Raises as `FoundTensors.add`."""
        for kind, layout in LAYOUTS.items():
            for name in found.unused(f".{kind}"):
                *leading, width = found.matrix(name)
                shape = (*leading, width // layout.nbytes * layout.numel)
                found.add(name.removesuffix(f".{kind}"), GgmlBlocks(kind), shape, [name])
        found.refuse_leftovers((), "GGUF")


def _field(blocks: torch.Tensor, field: Field, numel: int) -> torch.Tensor:
    """Returns the codes of a field as uint8, blocks x `numel`."""
    at, bits, run = field
    stored = blocks[:, at : at + numel * bits // _ALL_BITS].reshape(blocks.shape[0], -1, 1, run)
    shifts = torch.arange(0, _ALL_BITS, bits, dtype=torch.uint8, device=blocks.device)
    return ((stored >> shifts.view(1, 1, -1, 1)) & ((1 << bits) - 1)).reshape(blocks.shape[0], -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the fp16 at a byte of each block as fp32, blocks x 1."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


# -- Small factors of groups. `stored`: bytes from the first of them on as int32, a row per block.
# Returned are those of scales and of minima, blocks x groups; without minima the same twice.

_Pair = tuple[torch.Tensor, torch.Tensor]


def _no_factors(stored: torch.Tensor) -> _Pair:
    ones = torch.ones_like(stored[:, :1])
    return ones, ones


def _bytes(stored: torch.Tensor) -> _Pair:
    signed = (stored[:, :16] ^ 0x80) - 0x80
    return signed, signed


def _nibbles(stored: torch.Tensor) -> _Pair:
    return stored[:, :16] & 15, stored[:, :16] >> 4


def _six_pairs(stored: torch.Tensor) -> _Pair:
    scales, minima, rest = stored[:, :4], stored[:, 4:8], stored[:, 8:12]
    return (
        torch.cat([scales & 63, (rest & 15) | ((scales >> 2) & 48)], dim=1),
        torch.cat([minima & 63, (rest >> 4) | ((minima >> 2) & 48)], dim=1),
    )


def _six_signed(stored: torch.Tensor) -> _Pair:
    low = torch.cat([stored[:, :8] & 15, stored[:, :8] >> 4], dim=1)
    high = torch.cat([(stored[:, 8:12] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = (low | (high << 4)) - 32
    return scales, scales


def _six_split(stored: torch.Tensor) -> _Pair:
    low = torch.stack([stored[:, 2:6] & 15, stored[:, 2:6] >> 4], dim=-1).flatten(1)
    word = stored[:, :1] | (stored[:, 1:2] << 8)
    high = torch.cat([(word >> (2 * group)) & 3 for group in range(8)], dim=1)
    scales = (low | (high << 4)) - 32
    return scales, scales


_FACTORS = {
    "": _no_factors,
    "BYTES": _bytes,
    "NIBBLES": _nibbles,
    "SIX_PAIRS": _six_pairs,
    "SIX_SIGNED": _six_signed,
    "SIX_SPLIT": _six_split,
}
