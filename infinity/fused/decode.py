"""Launches the Triton kernels that decode: one launch for many weights, on the current stream.

The weights of a launch have one format, shape, dtype and strides. Their parts are flat uint8
tensors at any alignment, all on one CUDA device (or on the CPU under Triton's interpreter), which
is the current one. Nothing waits for the device.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.fused.launches import FORMS

MOST_WEIGHTS = 65_535  # Of one launch: the length of the second axis of a grid.
_MOST_PARTS = 5
_MOST_ROWS = 1 << 30  # Rows and columns of blocks are counted in 32 bits, to the end of a tile.
# Rows and columns of a program: of one row, side by side in the output, and of any other matrix.
# Both of the last cover whole sectors of 32 bytes, so that an output may be transposed.
_LINE = (1, 4096)
_TILES = {"ROWS": (4, 1024), "COLUMNS": (32, 64), "STRIDED": (32, 64)}
_NARROW = 256  # Rows of codes that are taken one by one; HQQ stores a group in a row.
_CONVERTS_E4M3 = (8, 9)  # The least capability of a device.
_WORD = 8  # Codes that a thread reads as one.
ALIGNMENT = 16  # In bytes, of what a thread stores at once.
_MOST_WITHIN = (1 << 31) - 1  # From the first element of a tile to its last: numbers of 32 bits.


Field = tuple[int, int, int]  # (first byte, bits of a code, run)


@dataclass(frozen=True, slots=True)
class Record:
    """The layout of `numel` codes of a row, and of the numbers of their groups, in `nbytes` bytes.

    low, high: fields of the low and the high bits of codes. A byte holds 8 / bits codes; the same
        bits of `run` bytes in a row are codes in a row. Codes of 8 bits are signed.
    scale, minimum: the bytes of the scale and the minimum of the record; -1 without a minimum
    factors: (packing, first byte) of small factors, which make them those of each group
    """

    numel: int
    nbytes: int
    low: Field
    scale: int
    high: Field = (0, 0, 1)
    minimum: int = -1
    factors: tuple[str, int] = ("", 0)

    @property
    def facts(self) -> tuple[int | str, ...]:
        """All of it, one after the other: `_in_records` of `decode_kernels.py` takes it so."""
        of_codes = (self.numel, self.nbytes, *self.low, self.scale, *self.high)
        return (*of_codes, self.minimum, *self.factors)


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """The places and meaning of the codes of a weight, and of the numbers that belong to them.

    All decoders (native, Triton, torch operations) decode by it.

    shape: of the stored matrix, or matrices: that of the weight, whose last dimensions are swapped
        if `is_transposed`
    values: what codes stand for: E4M3, E2M1, INT (the code less a zero), IQ4 of ggml, or the TABLE
        of a part
    packing, bits: how codes are stored: `codecs/packing.py`; E4M3 are bytes
    scale: the dtype of the scales; F8_E8M0 also for U8
    block: rows and columns that share a scale, none of them 0; of PAIRS codes of the weight
    product: the dtype that value * scale is rounded to, before it is rounded to that of the output
    zeros: the zero of all codes, or the packing of zeros, one for each scale; a code less a zero of
        FLOATS is rounded as the product
    raised: is added to words of zeros
    has_order: an I32 per column of the weight names its group instead of its place
    nested_block: scales that share a scale of their own, 0 if they are not nested
    global_scale: what an fp32 number of each matrix does to its scales, TIMES or OVER; "" without
    minima: what a number for each scale does to the product, PLUS or MINUS; "" without
    record: of codes and numbers that lie together in one part
    times: the product is multiplied by it, and rounded again
    """

    shape: tuple[int, ...]
    values: str
    scale: str
    block: tuple[int, int]
    product: str = "F32"
    packing: str = "ROWS"
    bits: int = 4
    is_transposed: bool = False
    zeros: str | int = 0
    raised: int = 0
    has_order: bool = False
    nested_block: int = 0
    global_scale: str = ""
    minima: str = ""
    record: Record | None = None
    times: float = 1.0

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(matrices, rows, columns) as stored; codes in PAIRS are one row."""
        if self.packing == "PAIRS":
            return 1, 1, math.prod(self.shape)
        return math.prod(self.shape[:-2]), self.shape[-2], self.shape[-1]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the scales of a matrix."""
        _, rows, columns = self.matrices
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts that decoding needs, in their order."""
        if self.record:
            return ("codes",)
        others = {
            "zeros": isinstance(self.zeros, str),
            "order": self.has_order,
            "minima": bool(self.minima),
            "table": self.values == "TABLE",
            "nested": bool(self.nested_block),
            "nested_map": bool(self.nested_block),
            "global": bool(self.global_scale),
        }
        return ("codes", "scales", *(name for name, is_there in others.items() if is_there))

    @property
    def has_pairs(self) -> bool:
        """Whether two codes are in a byte and each run has a scale: 16 numbers to look up."""
        is_plain = self.packing == "PAIRS" or (self.packing == "ROWS" and self.shape[-1] % 8 == 0)
        return self.bits == 4 and is_plain and not self.has_order

    @property
    def has_words(self) -> bool:
        """Whether the Triton kernel reads the codes as words of eight; else it takes each alone."""
        has_numbers = self.values != "INT" or self.zeros == 1 << (self.bits - 1)
        has_one_product = not self.minima and self.times == 1
        return self.values == "E4M3" or (self.has_pairs and has_numbers and has_one_product)

    @property
    def has_blocks(self) -> bool:
        """Whether the Triton kernel finds scales by row and column; else groups are counted over
        all codes."""
        return self.values == "E4M3" or not self.has_words


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """The facts about a launch that do not change.

    programs: of one weight. numbers: arguments behind the addresses. constants: those that the
    kernel is compiled for, with the options of the compiler
    """

    programs: int
    numbers: tuple[int, ...]
    constants: Mapping[str, object]

    @property
    def variant(self) -> str:
        """The kernel's variant for one codec and dtype: the elements that lie side by side in an
        output (ROWS, COLUMNS or STRIDED), the tile, the codes that a thread reads as one, whether
        it stores 16 bytes, and the blocks that share a scale, 0 for all rows or columns."""
        names = ("order", "tile_rows", "tile_columns", "width", "block_rows", "block_columns")
        order, *numbers = (self.constants[name] for name in names)
        stored = " WIDE" if self.constants["is_wide"] else ""
        return "{} {}x{} BY {}{} IN {}x{}".format(order, *numbers[:3], stored, *numbers[3:])

    def run(self, parts: Sequence[torch.Tensor], places: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes a weight for each row of `places` (`place_of`).

        parts: the memory of each part of all weights; several may lie in one
        out: the memory of all outputs, of their dtype, at a multiple of 16 bytes if the launch is
            for outputs that are aligned
        """
        assert not self.constants["is_wide"] or out.data_ptr() % ALIGNMENT == 0
        from infinity.fused import decode_kernels

        operands = (*parts, *[parts[0]] * (_MOST_PARTS - len(parts)))
        bits = out.view(torch.int32 if out.dtype is torch.float32 else torch.int16)
        has_e4m3 = _has_e4m3(out.device)
        decode_kernels.decode[(self.programs, len(places))](
            *operands, places, bits, *self.numbers, **self.constants, has_e4m3=has_e4m3
        )


@functools.cache
def _has_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CONVERTS_E4M3


def place_of(target: int, offset: float, starts: Sequence[int]) -> tuple[int, ...]:
    """Returns the row of a weight in the table of a launch, int64.

    target: the first element of the output; starts: the first byte of each part; both from the
        beginning of the tensors that `DecodeLaunch.run` takes
    offset: NF4's fp32 number
    """
    bits = int(torch.tensor(offset, dtype=torch.float32, device="cpu").view(torch.int32))
    return target, bits, *starts, *[0] * (_MOST_PARTS - len(starts))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Matrices as they are stored, and the strides of their elements in the output."""

    matrices: int
    rows: int
    columns: int
    matrix_stride: int
    row_stride: int
    column_stride: int

    @property
    def order(self) -> str:
        """Which elements lie side by side in the output."""
        return (
            "ROWS" if self.column_stride == 1 else "COLUMNS" if self.row_stride == 1 else "STRIDED"
        )

    def as_line(self) -> _Layout:
        """The same elements as one row, if their order in the output is that of the codes."""
        numel, matrix = self.matrices * self.rows * self.columns, self.rows * self.columns
        is_dense = (
            self.column_stride == 1
            and (self.rows == 1 or self.row_stride == self.columns)
            and (self.matrices == 1 or self.matrix_stride == matrix)
        )
        return _Layout(1, 1, numel, 0, 0, 1) if is_dense else self


def _layout(shape: Sequence[int], stride: Sequence[int], is_transposed: bool) -> _Layout | None:
    """Returns None if no stride leads from matrix to matrix."""
    leading = [
        (length, step) for length, step in zip(shape[:-2], stride[:-2], strict=True) if length != 1
    ]
    if any(outer[1] != inner[1] * inner[0] for outer, inner in itertools.pairwise(leading)):
        return None
    matrices, matrix_stride = math.prod(shape[:-2]), leading[-1][1] if leading else 0
    rows, row_stride = (shape[-2], stride[-2]) if len(shape) > 1 else (1, 0)
    columns, column_stride = shape[-1], stride[-1]
    if is_transposed:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
    return _Layout(matrices, rows, columns, matrix_stride, row_stride, column_stride)


def launch_of(
    form: CodeLayout,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    *,
    is_aligned: bool,
) -> DecodeLaunch | None:
    """Returns the launch for weights of this shape, dtype and strides; None if no kernel decodes
    them: at least a vector, and one stride that leads from matrix to matrix; dense memory if codes
    are stored in other rows than the weight's. `is_aligned`: each output begins at a multiple of 16
    bytes."""
    if not shape or dtype not in FORMS:
        return None
    layout = _layout(shape, stride, form.is_transposed)
    if layout is not None and (layout.rows, layout.columns) != form.shape[-2:] and len(shape) > 1:
        (rows, columns), is_dense = form.shape, layout.as_line().rows == 1
        layout = _Layout(1, rows, columns, 0, columns, 1) if is_dense else None
    if layout is None:
        return None
    if not form.has_blocks and (layout.matrices == 1 or not form.global_scale):
        layout = layout.as_line()  # Its groups are counted over all codes.
    rows, columns = layout.rows, layout.columns
    is_narrow = not form.has_words and columns <= _NARROW
    tile = _TILES["STRIDED" if is_narrow else layout.order]
    if layout.matrices == rows == 1 and layout.order == "ROWS":
        tile = _LINE
    tiles = -(-rows // tile[0]), -(-columns // tile[1])
    within = (tile[0] - 1) * max(columns, layout.row_stride) + tile[1] * layout.column_stride
    is_counted_wide = form.has_blocks and max(rows, columns) > _MOST_ROWS
    programs = layout.matrices * tiles[0] * tiles[1]
    if is_counted_wide or within > _MOST_WITHIN or not 0 < programs < 1 << 31:
        return None
    strides = layout.matrix_stride, layout.row_stride, layout.column_stride
    grid = form.grid if form.has_blocks else (1, 1)
    return DecodeLaunch(
        programs,
        (rows, columns, *strides, *tiles, *grid),
        {
            **_constants_of(form, rows, columns),
            "out_form": FORMS[dtype],
            "order": layout.order,
            "is_wide": is_aligned
            and layout.order == "ROWS"
            and not any(step * dtype.itemsize % ALIGNMENT for step in strides[:2]),
            "tile_rows": tile[0],
            "tile_columns": tile[1],
            "num_warps": 4,
            "enable_fp_fusion": False,  # A product and a sum are rounded each.
        },
    )


def _constants_of(form: CodeLayout, rows: int, columns: int) -> dict[str, object]:
    """Returns what the kernel is compiled for, of the layout and of codes of this shape."""
    packed, blocks = not form.has_words, list(form.block)
    if form.has_words:  # A scale of all rows or columns needs no division.
        extents = (rows, columns) if form.has_blocks else (0, 0)
        blocks = [n if n < most else 0 for n, most in zip(blocks, extents, strict=True)]
    return {
        "values": "INT4" if form.values == "INT" and not packed else form.values,
        "scale_form": "NESTED" if form.nested_block else form.scale,
        "group": 0 if form.has_blocks else form.block[1],
        "nested_block": max(1, form.nested_block),
        "global_scale": form.global_scale,
        "block_rows": blocks[0],
        "block_columns": blocks[1],
        "product_form": form.product,
        "packing": form.packing if packed else "",
        "bits": form.bits,
        "zeros": form.zeros if isinstance(form.zeros, str) else "",
        "zero": form.zeros if isinstance(form.zeros, int) else 0,
        "raised": form.raised - (1 << 32) * (form.raised >> 31),
        "order_axis": (0 if form.is_transposed else 1) if form.has_order else -1,
        "minima": form.minima,
        "times": form.times,
        "record": form.record.facts if form.record else (),
        "width": 1 if packed else _width(columns, blocks[1] if form.has_blocks else form.block[1]),
    }


def _width(columns: int, run: int) -> int:
    """Returns how many codes a thread reads as one. `run`: those side by side with one scale."""
    return _WORD if columns % _WORD == 0 and run % _WORD == 0 else 1
