"""The two Triton kernels that decode stored weights: eight bits, and four bits, per code.

One launch decodes many weights of one shape. One program decodes a tile of one matrix, reading
codes and scales as bytes where they lie. A value is one product in fp32; a nested scale of NF4 is a
product and a sum, rounded after each, for which the launch forbids contraction.
docs/formats/quantized.md has the arithmetic.

`places` has a row of seven int64 numbers for each weight: the offset in elements of `out`, the bits
of NF4's fp32 offset, and what is added to the addresses of the five parts.

Nothing is compiled apart for the values of numbers and the alignment of addresses, so that a trial
compiles what every later launch runs. `order` says which stride is 1.
"""

import triton
import triton.language as tl

from infinity.fused.number_kernels import byte_at, number_at, rounded, store_rounded, widened

_PLACE_WIDTH = tl.constexpr(7)
_FIRST_PART = tl.constexpr(2)

_LAYOUT = ("places", "out", "rows", "columns", "matrix_stride", "row_stride", "column_stride")
_FP8 = ("codes", "scales", *_LAYOUT, "block_rows", "block_columns")
_FOUR_BITS = ("codes", "scales", "table", "nested", "nested_map", *_LAYOUT)


@triton.jit
def _place(places, column: tl.constexpr):
    """A number of this program's weight."""
    return tl.load(places + tl.program_id(1).to(tl.int64) * _PLACE_WIDTH + column)


@triton.jit
def _part(address, places, number: tl.constexpr):
    """The address of a part of this program's weight."""
    return address + _place(places, _FIRST_PART + number)


@triton.jit
def _tile(rows, columns, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """This program's matrix, rows (tile_rows, 1), columns (1, tile_columns), and what is inside."""
    tiles_down = (rows + tile_rows - 1) // tile_rows
    tiles_across = (columns + tile_columns - 1) // tile_columns
    tile = tl.program_id(0)
    across = tile % tiles_across
    down = (tile // tiles_across) % tiles_down
    matrix = (tile // tiles_across // tiles_down).to(tl.int64)
    row = (down * tile_rows + tl.arange(0, tile_rows))[:, None]
    column = (across * tile_columns + tl.arange(0, tile_columns))[None, :]
    return matrix, row, column, (row < rows) & (column < columns)


@triton.jit
def _target(
    places, matrix, row, column, matrix_stride, row_stride, column_stride, order: tl.constexpr
):
    """The offsets of a tile's elements in the output."""
    down, across = row.to(tl.int64), column.to(tl.int64)
    if order != "COLUMNS":
        down = down * row_stride
    if order != "ROWS":
        across = across * column_stride
    return _place(places, 0) + matrix * matrix_stride + down + across


@triton.jit(do_not_specialize=_FP8, do_not_specialize_on_alignment=_FP8)
def decode_fp8(
    codes,
    scales,
    places,
    out,
    rows: tl.int32,
    columns: tl.int32,
    matrix_stride: tl.int64,
    row_stride: tl.int64,
    column_stride: tl.int64,
    block_rows: tl.int32,
    block_columns: tl.int32,
    scale_form: tl.constexpr,
    out_form: tl.constexpr,
    order: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """`Fp8Blocks`: fp32(code) * fp32(scale)."""
    matrix, row, column, mask = _tile(rows, columns, tile_rows, tile_columns)
    codes, scales = _part(codes, places, 0), _part(scales, places, 1)
    code = byte_at(codes, (matrix * rows + row) * columns + column, mask)
    magnitude = code & 0x7F
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, (magnitude << 20) + (120 << 23))
    number = bits.to(tl.float32, bitcast=True)
    # Below 8 the exponent is zero: multiples of 2^-9.
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, number)
    number = (number.to(tl.int32, bitcast=True) | ((code >> 7) << 31)).to(tl.float32, bitcast=True)
    grid_rows = (rows + block_rows - 1) // block_rows
    grid_columns = (columns + block_columns - 1) // block_columns
    block = (matrix * grid_rows + row // block_rows) * grid_columns + column // block_columns
    value = number * number_at(scales, block, mask, scale_form)
    target = _target(places, matrix, row, column, matrix_stride, row_stride, column_stride, order)
    store_rounded(out, target, value, mask, out_form)


@triton.jit
def _scale(places, scales, nested, nested_map, group, mask, form: tl.constexpr, nested_block):
    """The fp32 scales of groups; `form` NESTED is NF4's double quantisation."""
    if form == "NESTED":
        nested, nested_map = _part(nested, places, 3), _part(nested_map, places, 4)
        offset = _place(places, 1).to(tl.int32).to(tl.float32, bitcast=True)
        number = number_at(nested_map, byte_at(scales, group, mask), mask, "F32")
        scale = number * number_at(nested, group // nested_block, mask, "F32") + offset
    else:
        scale = number_at(scales, group, mask, form)
    return scale


@triton.jit(do_not_specialize=_FOUR_BITS, do_not_specialize_on_alignment=_FOUR_BITS)
def decode_four_bits(
    codes,
    scales,
    table,
    nested,
    nested_map,
    places,
    out,
    rows: tl.int32,
    columns: tl.int32,
    matrix_stride: tl.int64,
    row_stride: tl.int64,
    column_stride: tl.int64,
    group: tl.constexpr,
    nested_block: tl.constexpr,
    values: tl.constexpr,
    scale_form: tl.constexpr,
    product_form: tl.constexpr,
    out_form: tl.constexpr,
    order: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """`Int4Groups`, `Mxfp4Blocks` and `Nf4`: number of the code * scale of its group.

    values: INT4 (code - 8), E2M1, or TABLE for the 16 numbers of the part `table`, whose codes
        begin in the high half of a byte
    product_form: the dtype that the product is rounded to before it is rounded to that of `out`
    """
    matrix, row, column, mask = _tile(rows, columns, tile_rows, tile_columns)
    codes, scales = _part(codes, places, 0), _part(scales, places, 1)
    element = (matrix * rows + row) * columns + column
    pair = byte_at(codes, element >> 1, mask)
    is_odd = (element & 1) != 0
    if values == "TABLE":
        code = tl.where(is_odd, pair & 15, pair >> 4)
        number = number_at(_part(table, places, 2), code, mask, "F32")
    else:
        code = tl.where(is_odd, pair >> 4, pair & 15)
        if values == "INT4":
            number = (code - 8).to(tl.float32)
        else:
            magnitude = code & 7
            bits = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
            bits = tl.where(magnitude == 0, 0, tl.where(magnitude == 1, 0x3F000000, bits))
            number = (bits | ((code >> 3) << 31)).to(tl.float32, bitcast=True)
    which = element // group
    scale = _scale(places, scales, nested, nested_map, which, mask, scale_form, nested_block)
    value = widened(rounded(number * scale, product_form), product_form)
    target = _target(places, matrix, row, column, matrix_stride, row_stride, column_stride, order)
    store_rounded(out, target, value, mask, out_form)
