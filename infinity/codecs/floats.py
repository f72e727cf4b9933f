"""Codes that are floats of 8 or 4 bits, with a scale per block: docs/formats/quantized.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.codecs.codes import scales_of
from infinity.codecs.on_device import FusedCodec
from infinity.codecs.part import (
    Encoding,
    Shape,
    StoredPart,
    check_encode,
    even_rows,
    flat_bytes,
    matrix_of,
)
from infinity.codecs.rounding import exponents_of, fp32_to_e8m0
from infinity.errors import ConfigError
from infinity.fused.decode import CodeLayout

MX_BLOCK = 32
NVFP4_BLOCK = 16
_LARGEST = {"E4M3": 448.0, "E2M1": 6.0}
_SMALLEST_E4M3 = 2.0**-9
_LARGEST_EXPONENT = 2  # Of E2M1: 6 is 1.5 x 2^2.
# A magnitude of E2M1 has as many thresholds below it as its code; ties go to the even code.
_TIES_UP = (0.75, 1.75, 3.5)
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_POWERS = ("F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class FloatBlocks(FusedCodec):
    """Codes of the weight's shape, and one scale per block of rows and columns.

    block: rows and columns that share a scale; 0 is the full length, so (1, 0) has a scale per row
        and (0, 0) has one per matrix. The last block of each direction may be short. E2M1 has
        blocks of one row, and all of them are full.
    scale: the dtype of the scales: F32, BF16, F16, F8_E4M3, F8_E8M0, or U8 for the same
    element: E4M3, a byte each, or E2M1, two in a byte, the first one in its low half
    is_transposed: the stored matrix is the transpose of the weight (E2M1 of gpt-oss)
    global_scale: what an F32 scale of each matrix does: TIMES or OVER scales, "" without one
    product: the dtype of fp32(code) * fp32(scale), which is then rounded to that of the output

    With a global scale, which only E2M1 has, the scale is rounded to fp32 after that operation.
    Leading dimensions are matrices of their own.
    """

    block: tuple[int, int] = (128, 128)
    scale: str = "F32"
    element: str = "E4M3"
    is_transposed: bool = False
    global_scale: str = ""
    product: str = "F32"

    @property
    @override
    def format(self) -> str:
        if self.element == "E2M1":
            return "NVFP4" if self.global_scale else "MXFP4"
        if self.scale in _POWERS and self.block == (1, MX_BLOCK):
            return "MXFP8"
        return f"FP8 E4M3 in blocks of {self.block[0]}x{self.block[1]}"

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.product == "F16" else torch.bfloat16

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        matrix_of(self.format, shape)
        stored = self._stored(shape)
        grid = (*stored[:-2], *self._grid(stored))
        if self.element == "E4M3":
            return StoredPart("", "F8_E4M3", stored), StoredPart("_scale_inv", self.scale, grid)
        size = self.block[1]
        if stored[-1] % size:
            raise ConfigError(
                f"{self.format}: {stored} as stored does not have full blocks of {size}"
            )
        if self.is_transposed:
            codes = StoredPart("_blocks", "U8", (*grid, size // 2))
            return codes, StoredPart("_scales", self.scale, grid)
        codes = StoredPart("_packed", "U8", (*stored[:-1], stored[-1] // 2))
        scales = StoredPart("_scale", self.scale, grid)
        if not self.global_scale:
            return codes, scales
        return codes, scales, StoredPart("_global_scale", "F32", shape[:-2] or (1,))

    def _stored(self, shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-1, -2) if self.is_transposed else tensor

    def _block(self, stored: Shape) -> tuple[int, int]:
        return self.block[0] or max(stored[-2], 1), self.block[1] or max(stored[-1], 1)

    def _grid(self, stored: Shape) -> tuple[int, int]:
        rows, columns = self._block(stored)
        return -(-stored[-2] // rows), -(-stored[-1] // columns)

    @override
    def code_layout(self, shape: Shape) -> CodeLayout:
        stored = self._stored(shape)
        is_byte = self.element == "E4M3"
        return CodeLayout(
            stored, self.element, "F8_E8M0" if self.scale in _POWERS else self.scale,
            self._block(stored), self.product, packing="BYTES" if is_byte else "ROWS",
            bits=8 if is_byte else 4, is_transposed=self.is_transposed,
            global_scale=self.global_scale,
        )  # fmt: skip

    @property
    @override
    def trial_shapes(self) -> tuple[Shape, ...]:
        if self.element == "E2M1":
            return (self._stored((2, 35, 3 * self.block[1])),)
        rows, columns = (min(length, 128) for length in self.block)
        return (2, max(rows, 1), max(columns, 1)), (2, rows + 5, columns + 70)

    def encode(self, weight: torch.Tensor) -> Encoding:
        """As `Codec.encode`: the scale of a block is its largest magnitude / that of a code, or 1;
        of MXFP4 2^(floor(log2(largest magnitude)) - 2), as MX defines it. A global scale makes the
        largest scale of its matrix 448."""
        wide = self._turned(check_encode(self, weight))
        stored, block, grid = tuple(wide.shape), self._block(wide.shape), self._grid(wide.shape)
        padded = wide.new_zeros(*stored[:-2], grid[0] * block[0], grid[1] * block[1])
        padded[..., : stored[-2], : stored[-1]] = wide
        blocks = padded.view(*stored[:-2], grid[0], block[0], grid[1], block[1])
        largest, of_matrices = blocks.abs().amax(dim=(-3, -1)), []
        if self.global_scale:
            of_matrix = largest.amax(dim=(-2, -1)) / (_LARGEST["E2M1"] * _LARGEST["E4M3"])
            of_matrix = torch.where(of_matrix == 0, 1.0, of_matrix).clamp(min=2.0**-126)
            largest = largest / of_matrix[..., None, None]
            of_matrices = [
                flat_bytes(1.0 / of_matrix if self.global_scale == "OVER" else of_matrix)
            ]
        scales = self._scales_of(largest)
        layout, parts = self.code_layout(tuple(weight.shape)), [flat_bytes(scales), *of_matrices]
        named = dict(zip(layout.part_names[1:], parts, strict=True))
        wide, spread = wide.reshape(layout.matrices), scales_of(layout, named)
        if self.element == "E4M3":
            limit = _LARGEST["E4M3"]
            codes = (wide / spread).clamp(-limit, limit).to(torch.float8_e4m3fn)
        else:
            codes = _e2m1_codes(wide.double() / spread.double())
        return Encoding(self, (flat_bytes(codes), *parts), {})

    def _scales_of(self, largest: torch.Tensor) -> torch.Tensor:
        """Returns the scales, as stored, for the largest magnitudes of the blocks."""
        if self.element == "E2M1" and self.scale in _POWERS:
            return fp32_to_e8m0(exponents_of(largest) - _LARGEST_EXPONENT)
        exact = torch.where(largest == 0, 1.0, largest / _LARGEST[self.element])
        if self.scale == "F8_E4M3":
            return exact.clamp(_SMALLEST_E4M3, _LARGEST["E4M3"]).to(torch.float8_e4m3fn)
        exact = exact.clamp(min=2.0**-126)
        if self.scale == "F32":
            return exact
        if self.scale in ("BF16", "F16"):
            rounded = exact.to(torch.bfloat16 if self.scale == "BF16" else torch.float16)
            return rounded.clamp(min=torch.finfo(rounded.dtype).tiny)
        exponents = exponents_of(exact)
        exponents = exponents + (torch.ldexp(torch.ones_like(exact), exponents) < exact)
        return fp32_to_e8m0(exponents)

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        codes, scales, *of_matrices = self.parts(shape)
        if len(shape) > 2:
            return even_rows((codes, scales, *of_matrices), shape[0], start, stop)
        if self.is_transposed:
            return None  # A row of the weight is a column of the stored matrix.
        block = self._block(shape)[0]
        if start % block or (stop % block and stop != shape[0]):
            return None
        blocks = (start // block, -(-stop // block))
        of_codes = even_rows((codes,), shape[0], start, stop)
        of_scales = even_rows((scales,), scales.shape[0], *blocks)
        return (*of_codes, *of_scales, *((0, part.nbytes) for part in of_matrices))


def mxfp4(is_transposed: bool = False) -> FloatBlocks:
    """Returns MXFP4 as compressed-tensors stores it, or as gpt-oss does: transposed."""
    return FloatBlocks((1, MX_BLOCK), "U8", "E2M1", is_transposed)


def nvfp4(global_scale: str = "OVER", block: int = NVFP4_BLOCK) -> FloatBlocks:
    """Returns NVFP4 as compressed-tensors stores it (OVER), or as modelopt does (TIMES)."""
    product = "BF16" if global_scale == "OVER" else "F32"
    return FloatBlocks((1, block), "F8_E4M3", "E2M1", global_scale=global_scale, product=product)


def _e2m1_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the packed codes: to nearest, ties to even, at most 6."""
    magnitudes = numbers.abs()
    codes = torch.signbit(numbers).to(torch.uint8) << 3
    for tie in _TIES_UP:
        codes += magnitudes >= tie
    for tie in _TIES_DOWN:
        codes += magnitudes > tie
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
