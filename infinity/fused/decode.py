"""Launches the Triton kernels that decode: one launch for many weights, on the current stream.

The weights of a launch have one format, shape, dtype and strides. Their parts are flat uint8
tensors at any alignment, all on one CUDA device (or on the CPU under Triton's interpreter), which
is the current one. Nothing waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

MOST_WEIGHTS = 65_535  # Of one launch: the length of the second axis of a grid.
_MOST_PARTS = 5
_MOST_ROWS = 1 << 30  # Rows and columns are counted in 32 bits, to the end of a tile.
_FORMS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# Rows and columns of a program. Both cover whole sectors of 32 bytes, so that an output may be
# transposed.
_TILE = (32, 64)
_MOST_WITHIN = (1 << 31) - 1  # From the first element of a tile to its last: numbers of 32 bits.


@dataclass(frozen=True, slots=True)
class EightBits:
    """Codes E4M3. `block`: rows and columns that share a scale, no zeros. `scale`: their dtype."""

    block: tuple[int, int]
    scale: str


@dataclass(frozen=True, slots=True)
class FourBits:
    """INT4, E2M1 and NF4: see the kernel. `nested_block`: NF4's scales that
    share a scale, 0 if they are not nested. `is_transposed`: stored matrices are transposes."""

    group: int
    values: str
    scale: str
    product: str
    nested_block: int = 0
    is_transposed: bool = False


CodeForm = EightBits | FourBits


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """The facts about a launch that do not change.

    kernel: its name. programs: of one weight. numbers: arguments behind the addresses. constants:
    those that the kernel is compiled for, with the options of the compiler
    """

    kernel: str
    num_parts: int
    programs: int
    numbers: tuple[int, ...]
    constants: Mapping[str, object]

    @property
    def variant(self) -> str:
        """What was compiled, of one codec and dtype: the kernel, the elements that lie side by side
        in an output (ROWS, COLUMNS or STRIDED), and whether a tile has one scale."""
        one_scale = " ONE SCALE" if self.constants.get("has_one_scale") else ""
        return f"{self.kernel} {self.constants['order']}{one_scale}"

    def run(self, parts: Sequence[torch.Tensor], places: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes a weight for each row of `places` (`place_of`).

        parts: the memory of each part of all weights; several may lie in one
        out: the memory of all outputs, of their dtype
        """
        from infinity.fused import decode_kernels

        operands = (*parts, *[parts[0]] * (self.num_parts - len(parts)))
        bits = out.view(torch.int32 if out.dtype is torch.float32 else torch.int16)
        kernel = getattr(decode_kernels, self.kernel)
        kernel[(self.programs, len(places))](
            *operands, places, bits, *self.numbers, **self.constants
        )


def place_of(target: int, offset: float, starts: Sequence[int]) -> tuple[int, ...]:
    """Returns the row of a weight in the table of a launch, int64.

    target: the first element of the output; starts: the first byte of each part; both from the
        beginning of the tensors that `DecodeLaunch.run` takes
    offset: NF4's fp32 number
    """
    bits = int(torch.tensor(offset, dtype=torch.float32).view(torch.int32))
    return target, bits, *starts, *[0] * (_MOST_PARTS - len(starts))


def launch_of(
    form: CodeForm | None, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DecodeLaunch | None:
    """Returns the launch for weights of this shape, dtype and strides; None if no kernel decodes
    them: at least a vector, and one stride that leads from matrix to matrix."""
    if form is None or not shape or dtype not in _FORMS:
        return None
    leading = [
        (length, step) for length, step in zip(shape[:-2], stride[:-2], strict=True) if length != 1
    ]
    if any(outer[1] != inner[1] * inner[0] for outer, inner in itertools.pairwise(leading)):
        return None
    matrices, matrix_stride = math.prod(shape[:-2]), leading[-1][1] if leading else 0
    rows, row_stride = (shape[-2], stride[-2]) if len(shape) > 1 else (1, 0)
    columns, column_stride = shape[-1], stride[-1]
    if isinstance(form, FourBits) and form.is_transposed:
        rows, columns, row_stride, column_stride = columns, rows, column_stride, row_stride
    programs = matrices * -(-rows // _TILE[0]) * -(-columns // _TILE[1])
    if max(rows, columns) > _MOST_ROWS or not 0 < programs < 1 << 31:
        return None
    within = _TILE[0] * max(columns, row_stride) + _TILE[1] * column_stride
    if isinstance(form, EightBits) and within > _MOST_WITHIN:
        return None
    is_by_groups = (
        isinstance(form, FourBits)
        and columns % form.group == 0
        and form.group.bit_count() == 1 < form.group
        and within <= _MOST_WITHIN
    )
    kernel, num_parts, extra, constants = _kernel_of(form, rows, columns, is_by_groups)
    order = "ROWS" if column_stride == 1 else "COLUMNS" if row_stride == 1 else "STRIDED"
    return DecodeLaunch(
        kernel,
        num_parts,
        programs,
        (rows, columns, matrix_stride, row_stride, column_stride, *extra),
        {
            **constants,
            "out_form": _FORMS[dtype],
            "order": order,
            "tile_rows": _TILE[0],
            "tile_columns": _TILE[1],
            "num_warps": 4,
            "enable_fp_fusion": False,  # A product and a sum are rounded each.
        },
    )


def _kernel_of(
    form: CodeForm, rows: int, columns: int, is_by_groups: bool
) -> tuple[str, int, tuple[int, ...], dict[str, object]]:
    """Returns name, number of parts, numbers of its own and constants of the kernel."""
    if isinstance(form, EightBits):
        block = min(form.block[0], rows), min(form.block[1], columns)
        has_one_scale = all(
            length % tile == 0 or length == extent
            for length, tile, extent in zip(block, _TILE, (rows, columns), strict=True)
        )
        return "decode_fp8", 2, block, {"scale_form": form.scale, "has_one_scale": has_one_scale}
    constants: dict[str, object] = {
        "group": form.group,
        "nested_block": max(1, form.nested_block),
        "values": form.values,
        "scale_form": "NESTED" if form.nested_block else form.scale,
        "product_form": form.product,
    }
    kernel = "decode_four_bits_by_groups" if is_by_groups else "decode_four_bits"
    return kernel, _MOST_PARTS, (), constants
