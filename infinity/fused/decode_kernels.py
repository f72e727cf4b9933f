"""The Triton kernels that decode stored weights: eight bits, and four bits, per code.

One launch decodes many weights of one shape. One program decodes a tile of one matrix, reading
codes and scales as bytes where they lie. A value is one product in fp32; a nested scale of NF4 is a
product and a sum, rounded after each, for which the launch forbids contraction.
docs/formats/quantized.md has the arithmetic.

`places` has a row of seven int64 numbers for each weight: the offset in elements of `out`, the bits
of NF4's fp32 offset, and what is added to the addresses of the five parts.

Nothing is compiled apart for the values of numbers and the alignment of addresses, so that a trial
compiles what every later launch runs. `order` says which stride is 1.

Note [Few instructions]
  A device writes a decoded weight faster than its cores compute 64-bit addresses for each element.
  So a tile has one address of 64 bits, its elements are counted from there in 32, one scale is read
  for all elements of a tile or a group, and two results of 16 bits are stored as one word where
  they lie at an even place.
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
def _first(rows, columns, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """This program's matrix, and the first row and the first column of its tile."""
    tiles_down = (rows + tile_rows - 1) // tile_rows
    tiles_across = (columns + tile_columns - 1) // tile_columns
    tile = tl.program_id(0)
    matrix = (tile // tiles_across // tiles_down).to(tl.int64)
    down = (tile // tiles_across) % tiles_down
    return matrix, down * tile_rows, (tile % tiles_across) * tile_columns


@triton.jit
def _within(row, column, row_stride, column_stride, order: tl.constexpr):
    """The offsets of a tile's elements from its first one, int32."""
    down, across = row, column
    if order != "COLUMNS":
        down = down * row_stride.to(tl.int32)
    if order != "ROWS":
        across = across * column_stride.to(tl.int32)
    return down + across


@triton.jit
def _tile(rows, columns, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """This program's matrix, rows (tile_rows, 1), columns (1, tile_columns), and what is inside."""
    matrix, first_row, first_column = _first(rows, columns, tile_rows, tile_columns)
    row = (first_row + tl.arange(0, tile_rows))[:, None]
    column = (first_column + tl.arange(0, tile_columns))[None, :]
    return matrix, row, column, (row < rows) & (column < columns)


@triton.jit
def _target(
    places, matrix, row, column, matrix_stride, row_stride, column_stride, order: tl.constexpr
):
    """The offsets of elements in the output, int64."""
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
    has_one_scale: tl.constexpr,
    out_form: tl.constexpr,
    order: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Codes E4M3: fp32(code) * fp32(scale). `has_one_scale`: no tile crosses a block's border."""
    matrix, first_row, first_column = _first(rows, columns, tile_rows, tile_columns)
    row = tl.arange(0, tile_rows)[:, None]
    column = tl.arange(0, tile_columns)[None, :]
    mask = (row < rows - first_row) & (column < columns - first_column)
    codes, scales = _part(codes, places, 0), _part(scales, places, 1)
    codes += (matrix * rows + first_row) * columns + first_column
    code = byte_at(codes, row * columns + column, mask)
    magnitude = code & 0x7F
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, (magnitude << 20) + (120 << 23))
    number = bits.to(tl.float32, bitcast=True)
    # Below 8 the exponent is zero: multiples of 2^-9.
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, number)
    number = (number.to(tl.int32, bitcast=True) | ((code >> 7) << 31)).to(tl.float32, bitcast=True)
    grid_rows = (rows + block_rows - 1) // block_rows
    grid_columns = (columns + block_columns - 1) // block_columns
    if has_one_scale:
        block = (matrix * grid_rows + first_row // block_rows) * grid_columns
        scale = number_at(
            scales, block + first_column // block_columns, first_row < rows, scale_form
        )
    else:
        block = (matrix * grid_rows + (first_row + row) // block_rows) * grid_columns
        block += (first_column + column) // block_columns
        scale = number_at(scales, block, mask, scale_form)
    target = _target(
        places, matrix, first_row, first_column, matrix_stride, row_stride, column_stride, order
    )
    within = _within(row, column, row_stride, column_stride, order)
    store_rounded(out + target, within, number * scale, mask, out_form)


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


@triton.jit
def _number(code, values: tl.constexpr, table, mask):
    """The fp32 number of a code (int32)."""
    if values == "TABLE":
        number = number_at(table, code, mask, "F32")
    elif values == "INT4":
        # 2^23 + code, without a conversion.
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    else:
        magnitude = code & 7
        bits = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
        bits = tl.where(magnitude == 0, 0, tl.where(magnitude == 1, 0x3F000000, bits))
        number = (bits | ((code >> 3) << 31)).to(tl.float32, bitcast=True)
    return number


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
    """INT4, E2M1 and NF4: number of the code * scale of its group.

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
        table = _part(table, places, 2)
        code = tl.where(is_odd, pair & 15, pair >> 4)
    else:
        code = tl.where(is_odd, pair >> 4, pair & 15)
    number = _number(code, values, table, mask)
    which = element // group
    scale = _scale(places, scales, nested, nested_map, which, mask, scale_form, nested_block)
    value = widened(rounded(number * scale, product_form), product_form)
    target = _target(places, matrix, row, column, matrix_stride, row_stride, column_stride, order)
    store_rounded(out, target, value, mask, out_form)


@triton.jit
def _rounded_twice(value, product_form: tl.constexpr, out_form: tl.constexpr):
    """The bits of a product, in `out_form`."""
    if product_form != out_form:
        value = widened(rounded(value, product_form), product_form)
    return rounded(value, out_form)


@triton.jit
def _store_pairs(
    here,
    even,
    odd,
    row,
    pair,
    mask,
    row_stride,
    column_stride,
    out_form: tl.constexpr,
    order: tl.constexpr,
):
    """Stores the bits of even and odd columns. `here`: the address of the first element."""
    within = _within(row, 2 * pair, row_stride, column_stride, order)
    step = column_stride.to(tl.int32)
    if out_form == "F32":
        tl.store(here + within, even, mask=mask)
        tl.store(here + within + step, odd, mask=mask)
    else:
        is_word = ((here.to(tl.int64) | (2 * row_stride)) & 3) == 0
        if order == "ROWS" and is_word:
            words = here.to(tl.pointer_type(tl.int32))
            half_stride = (row_stride >> 1).to(tl.int32)
            tl.store(words + row * half_stride + pair, (even & 0xFFFF) | (odd << 16), mask=mask)
        else:
            tl.store(here + within, even.to(tl.int16), mask=mask)
            tl.store(here + within + step, odd.to(tl.int16), mask=mask)


@triton.jit(do_not_specialize=_FOUR_BITS, do_not_specialize_on_alignment=_FOUR_BITS)
def decode_four_bits_by_groups(
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
    """As `decode_four_bits`, of matrices whose rows have whole groups; a group is a power of two.

    A program reads a byte for two elements, and a scale for a run of them: a group's, or the part
    of it in the tile.
    """
    run: tl.constexpr = group if group < tile_columns else tile_columns  # noqa: FURB136
    matrix, first_row, first_column = _first(rows, columns, tile_rows, tile_columns)
    row = tl.arange(0, tile_rows)[:, None, None]
    which = tl.arange(0, tile_columns // run)[None, :, None]
    pair = which * (run // 2) + tl.arange(0, run // 2)[None, None, :]
    is_row = row < rows - first_row
    mask = is_row & (2 * pair < columns - first_column)
    before = matrix * rows + first_row
    codes, scales = _part(codes, places, 0), _part(scales, places, 1)
    codes += (before * columns + first_column) >> 1
    byte = byte_at(codes, row * (columns >> 1) + pair, mask)
    groups = columns // group
    index = before * groups + first_column // group + (row * groups + which * run // group)
    scale = _scale(
        places, scales, nested, nested_map, index,
        is_row & (which * run < columns - first_column), scale_form, nested_block,
    )  # fmt: skip
    if values == "TABLE":
        table = _part(table, places, 2)
        even, odd = byte >> 4, byte & 15
    else:
        even, odd = byte & 15, byte >> 4
    even = _rounded_twice(_number(even, values, table, mask) * scale, product_form, out_form)
    odd = _rounded_twice(_number(odd, values, table, mask) * scale, product_form, out_form)
    target = _target(
        places, matrix, first_row, first_column, matrix_stride, row_stride, column_stride, order
    )
    _store_pairs(
        out + target, even, odd, row, pair, mask, row_stride, column_stride, out_form, order
    )
