"""Numbers of 2 to 8 bits with a scale and a zero per group: docs/formats/quantized.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import override

from infinity.codecs.codes import as_int32
from infinity.codecs.on_device import FusedCodec
from infinity.codecs.packing import WORD_BITS, Packing, packed, packed_shape
from infinity.codecs.part import (
    Encoding,
    Shape,
    StoredPart,
    check_encode,
    even_rows,
    flat_bytes,
    matrix_of,
)
from infinity.codecs.rounding import FLOAT_DTYPES
from infinity.errors import ConfigError
from infinity.fused.decode import CodeLayout

Layout = Literal["ROWS", "BYTES", "GPTQ", "AWQ"]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Names and packings of a layout. `is_transposed`: stored matrices are in x out, with groups of
    rows; else out x in, with groups of columns."""

    codes: tuple[str, Packing]
    scales: str
    zeros: tuple[str, Packing]
    order: str
    is_transposed: bool = False


_LAYOUTS: dict[Layout, _Parts] = {
    "ROWS": _Parts(("_packed", "ROWS"), "_scale", ("_zero_point", "COLUMNS"), "_g_idx"),
    "BYTES": _Parts(("", "BYTES"), "_scale", ("_zero_point", "BYTES"), "_g_idx"),
    "GPTQ": _Parts(("/qweight", "COLUMNS"), "/scales", ("/qzeros", "ROWS"), "/g_idx", True),
    "AWQ": _Parts(("/qweight", "AWQ"), "/scales", ("/qzeros", "AWQ"), "/g_idx", True),
}


@dataclass(frozen=True, slots=True)
class AffineGroups(FusedCodec):
    """Codes in 32-bit words or bytes, and a scale and perhaps a zero per group of input columns.

    group: columns that share a scale; the last group of GPTQ and AWQ may be short
    scale: the dtype of the scales, BF16, F16 or F32
    bits: of a code
    layout: ROWS and BYTES of compressed-tensors, out x in; GPTQ and AWQ, in x out
    has_zeros: a zero per group is stored; else it is 2^(bits - 1)
    is_raised: stored zeros are less by one, in words (the first convention of GPTQ)
    has_order: an I32 per column names its group, instead of its place ("act-order")

    The value is (code - zero) * scale, rounded to the dtype of the scales, then to that of the
    output.
    """

    group: int = 32
    scale: str = "BF16"
    bits: int = 4
    layout: Layout = "ROWS"
    has_zeros: bool = False
    is_raised: bool = False
    has_order: bool = False

    @property
    @override
    def format(self) -> str:
        writer = {"ROWS": "", "BYTES": ""}.get(self.layout, f" of {self.layout}")
        return f"INT{self.bits}{writer} in groups of {self.group}"

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.scale == "F16" else torch.bfloat16

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        _, rows, columns = matrix_of(self.format, shape)
        names, lead = _LAYOUTS[self.layout], shape[:-2]
        if lead and (self.has_zeros or self.has_order or names.is_transposed):
            raise ConfigError(f"{self.format} stores single matrices, got a weight of {shape}")
        if columns % self.group and not (names.is_transposed or self.has_order):
            raise ConfigError(f"{self.format}: the columns of {shape} are not full groups")
        stored, groups = self._stored(shape), self._groups(columns)
        of_codes = packed_shape(names.codes[1], self.bits, *stored[-2:])
        words = rows if self.layout == "AWQ" else math.gcd(rows, columns)
        if names.is_transposed and words * self.bits % WORD_BITS:
            raise ConfigError(f"{self.format}: {shape} does not fill words of 32 bits")
        grid = (groups, stored[-1]) if names.is_transposed else (rows, groups)
        dtype = "I8" if names.codes[1] == "BYTES" else "I32"
        parts = [
            StoredPart(names.codes[0], dtype, (*lead, *of_codes)),
            StoredPart(names.scales, self.scale, (*lead, *grid)),
        ]
        if self.has_zeros:
            of_zeros = packed_shape(names.zeros[1], self.bits, *grid)
            parts.append(StoredPart(names.zeros[0], dtype, of_zeros))
        if self.has_order:
            parts.append(StoredPart(names.order, "I32", (columns,)))
        return tuple(parts)

    def _stored(self, shape: Shape) -> Shape:
        is_transposed = _LAYOUTS[self.layout].is_transposed
        return (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape

    def _groups(self, columns: int) -> int:
        return -(-columns // self.group)

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _raise(self) -> int:
        """What is added to words of zeros: one in each of their fields."""
        return sum(1 << shift for shift in range(0, WORD_BITS, self.bits)) * self.is_raised

    @override
    def code_layout(self, shape: Shape) -> CodeLayout:
        names = _LAYOUTS[self.layout]
        block = (self.group, 1) if names.is_transposed else (1, self.group)
        return CodeLayout(
            self._stored(shape), "INT", self.scale, block, product=self.scale,
            packing=names.codes[1], bits=self.bits, is_transposed=names.is_transposed,
            zeros=names.zeros[1] if self.has_zeros else "",
            raised=self._raise, has_order=self.has_order,
        )  # fmt: skip

    @property
    @override
    def trial_shapes(self) -> tuple[Shape, ...]:
        return ((2, 35, 3 * math.lcm(self.group, 8)),)

    def encode(self, weight: torch.Tensor) -> Encoding:
        """As `Codec.encode`: the scale of a group is its largest magnitude / (2^(bits - 1) - 0.5),
        or 1; with zeros it is the range of the group and 0 / (2^bits - 1). With an order the first
        group has the columns of the largest magnitudes.

        `aside` has `_shape` of ROWS, the weight's shape.
        """
        wide, shape = check_encode(self, weight), tuple(weight.shape)
        names, count = _LAYOUTS[self.layout], self._groups(shape[-1])
        order = (
            wide.abs().amax(dim=0).argsort(descending=True, stable=True) if self.has_order else None
        )
        ordered = wide if order is None else wide[:, order]
        padded = torch.nn.functional.pad(ordered, (0, count * self.group - shape[-1]))
        groups = padded.reshape(math.prod(shape[:-1]), count, self.group)
        scales, zeros = self._scales_of(groups)
        numbers = (groups / scales.float()[..., None]).round_().add_(zeros[..., None])
        codes = numbers.clamp_(0, (1 << self.bits) - 1).to(torch.uint8)
        del numbers
        codes = codes.flatten(1)[:, : shape[-1]]
        if order is not None:
            codes = codes[:, order.argsort()]
        if names.is_transposed:
            codes, scales, zeros = codes.t(), scales.t(), zeros.t()
        parts = [packed(codes.contiguous(), names.codes[1], self.bits), flat_bytes(scales)]
        if self.has_zeros:
            stored = packed(zeros.to(torch.uint8).contiguous(), names.zeros[1], self.bits)
            if self.is_raised:
                stored = flat_bytes(stored.view(torch.int32) - as_int32(self._raise))
            parts.append(stored)
        if order is not None:
            parts.append(flat_bytes((order.argsort() // self.group).int()))
        has_shape = self.layout == "ROWS"
        aside = {"_shape": torch.tensor(shape, dtype=torch.int32)} if has_shape else {}
        return Encoding(self, tuple(parts), aside)

    def _scales_of(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (scales as stored, zeros in fp32) of groups in the last dimension."""
        dtype, most = FLOAT_DTYPES[self.scale], (1 << self.bits) - 1
        if not self.has_zeros:
            largest = groups.abs().amax(dim=-1)
            exact = torch.where(largest == 0, 1.0, largest / (most / 2))
            scales = exact.to(dtype).clamp(min=torch.finfo(dtype).tiny)
            return scales, torch.full_like(largest, float(self._middle))
        low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
        exact = torch.where(high == low, 1.0, (high - low) / most)
        scales = exact.to(dtype).clamp(min=torch.finfo(dtype).tiny)
        return scales, (-low / scales.float()).round().clamp(self.is_raised, most)

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        if _LAYOUTS[self.layout].is_transposed:
            return None  # A row of the weight is a column of the stored matrix.
        codes, scales, *others = self.parts(shape)
        ranges = list(even_rows((codes, scales), shape[0], start, stop))
        if self.has_zeros and self.layout == "BYTES":
            ranges += even_rows(others[:1], shape[0], start, stop)
        elif self.has_zeros:
            step = WORD_BITS // math.gcd(WORD_BITS, self.bits)  # Rows that fill words of zeros.
            if start % step or (stop % step and stop != shape[0]):
                return None
            words = (start * self.bits // WORD_BITS, -(-stop * self.bits // WORD_BITS))
            ranges += even_rows(others[:1], others[0].shape[0], *words)
        if self.has_order:
            ranges.append((0, others[-1].nbytes))
        return tuple(ranges)
