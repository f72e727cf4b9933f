"""FP8 E4M3 codes with one scale per block of rows and columns: docs/formats/quantized.md."""

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
    typed,
)
from infinity.codecs.rounding import (
    exponents_of,
    fp32_to_e8m0,
    scales_to_fp32,
)
from infinity.fused.decode import EightBits

_LARGEST = 448.0  # Of E4M3.


@dataclass(frozen=True, slots=True)
class Fp8Blocks(FusedCodec):
    """Codes F8_E4M3 of the weight's shape, and one scale per block of rows and columns.

    block: rows and columns that share a scale; 0 is the full length, so (1, 0) has a scale per row
        and (0, 0) has one per matrix. The last block of each direction may be short.
    scale: the dtype of the scales: F32, BF16, F16 or F8_E8M0

    The value is fp32(code) * fp32(scale), rounded to fp32, then to the dtype of the output. Leading
    dimensions are matrices of their own.
    """

    block: tuple[int, int] = (128, 128)
    scale: str = "F32"

    @property
    @override
    def format(self) -> str:
        return f"FP8 E4M3 in blocks of {self.block[0]}x{self.block[1]}"

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        matrix_of(self.format, shape)
        grid = (*shape[:-2], *self.grid(shape))
        return StoredPart("", "F8_E4M3", shape), StoredPart("_scale_inv", self.scale, grid)

    def grid(self, shape: Shape) -> tuple[int, int]:
        """Returns the blocks along rows and along columns."""
        rows, columns = self._block(shape)
        return -(-shape[-2] // rows), -(-shape[-1] // columns)

    def _block(self, shape: Shape) -> tuple[int, int]:
        return self.block[0] or max(shape[-2], 1), self.block[1] or max(shape[-1], 1)

    @override
    def decode(self, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> None:
        check_decode(self, parts, shape, out)
        if native.runs(parts, out):
            native.decode_fp8(parts, shape, out, block=self._block(shape), scale=self.scale)
        else:
            on_device.decode(self, parts, shape, out)

    @property
    @override
    def trial_shapes(self) -> tuple[Shape, ...]:
        rows, columns = (min(length, 128) for length in self.block)
        return (2, max(rows, 1), max(columns, 1)), (2, rows + 5, columns + 70)

    @override
    def form(self, shape: Shape) -> EightBits:
        return EightBits(self._block(shape), self.scale)

    @override
    def values(self, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        codes = typed(parts[0], torch.float8_e4m3fn).view(shape).float()
        scales = scales_to_fp32(parts[1], self.scale)
        return codes * self._spread(scales, shape)

    def _spread(self, scales: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Repeats every scale over its block: (..., rows, columns)."""
        grid = scales.view(*shape[:-2], *self.grid(shape))
        rows, columns = self._block(shape)
        row_of = torch.arange(shape[-2], device=scales.device) // rows
        column_of = torch.arange(shape[-1], device=scales.device) // columns
        return grid.index_select(-2, row_of).index_select(-1, column_of)

    def encode(self, weight: torch.Tensor) -> Encoding:
        """As `Codec.encode`: the scale of a block is its largest magnitude / 448, or 1."""
        wide, shape = check_encode(self, weight), tuple(weight.shape)
        (rows, columns), grid = self._block(shape), self.grid(shape)
        padded = wide.new_zeros(*shape[:-2], grid[0] * rows, grid[1] * columns)
        padded[..., : shape[-2], : shape[-1]] = wide
        blocks = padded.view(*shape[:-2], grid[0], rows, grid[1], columns)
        largest = blocks.abs().amax(dim=(-3, -1))
        scales, stored = self._scales(largest)
        codes = wide / self._spread(scales.reshape(-1), shape)
        codes = codes.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        return Encoding(self, (flat_bytes(codes), flat_bytes(stored)), {})

    def _scales(self, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (scales as fp32, as stored) for the largest magnitudes of the blocks."""
        exact = torch.where(largest == 0, 1.0, largest / _LARGEST)
        exact = exact.clamp(min=2.0**-126)
        if self.scale == "F32":
            return exact, exact
        if self.scale in ("BF16", "F16"):
            rounded = exact.to(torch.bfloat16 if self.scale == "BF16" else torch.float16)
            rounded = rounded.clamp(min=torch.finfo(rounded.dtype).tiny)
            return rounded.float(), rounded
        exponents = exponents_of(exact)
        exponents = exponents + (torch.ldexp(torch.ones_like(exact), exponents) < exact)
        codes = fp32_to_e8m0(exponents)
        return scales_to_fp32(codes.reshape(-1), self.scale).view(codes.shape), codes

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        codes, scales = self.parts(shape)
        if len(shape) > 2:
            return even_rows((codes, scales), shape[0], start, stop)
        block = self._block(shape)[0]
        if start % block or (stop % block and stop != shape[0]):
            return None
        blocks = (start // block, -(-stop // block))
        of_codes = even_rows((codes,), shape[0], start, stop)
        return (*of_codes, *even_rows((scales,), scales.shape[0], *blocks))
