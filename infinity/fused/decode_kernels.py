"""The Triton kernel that decodes stored weights.

One launch decodes many weights of one shape. One program decodes a tile of one matrix. Each product
and sum is rounded for itself, for which the launch forbids contraction. docs/formats/quantized.md
has the arithmetic.

`places` has a row of seven int64 numbers for each weight: the offset in elements of `out`, the bits
of NF4's fp32 offset, and what is added to the addresses of the five parts.

Nothing is compiled apart for the values of numbers and the alignment of addresses, so that a trial
compiles what every later launch runs.

Note [Words of codes]
  A device writes a decoded weight faster than its cores compute an address for each element. So a
  thread reads eight codes as one word, at any address (`read_at`), one scale for all of them, and
  stores their results as 16 bytes where the output allows it. A tile has one address of 64 bits;
  its elements are counted from there in 32. Where a row does not consist of whole words of one
  scale each, and in other packings (`_code_at`, `_in_records`), a thread takes one code at a time
  (`width`).
"""

import triton
import triton.language as tl

from infinity.fused.number_kernels import (
    e4m3_of,
    number_at,
    read_at,
    rounded,
    rounded_product,
    shifted,
    widened,
)

_PLACE_WIDTH = tl.constexpr(7)
_FIRST_PART = tl.constexpr(2)
_TWO_TO_126 = tl.constexpr(8.507059173023462e37)

_ARGUMENTS = (
    "codes", "scales", "table", "nested", "nested_map", "places", "out", "rows", "columns",
    "matrix_stride", "row_stride", "column_stride", "tiles_down", "tiles_across", "grid_rows",
    "grid_columns",
)  # fmt: skip


@triton.jit
def _place(places, column: tl.constexpr):
    """A number of this program's weight."""
    return tl.load(places + tl.program_id(1).to(tl.int64) * _PLACE_WIDTH + column)


@triton.jit
def _part(address, places, number: tl.constexpr):
    """The address of a part of this program's weight."""
    return address + _place(places, _FIRST_PART + number)


@triton.jit
def _over(index, length: tl.constexpr):
    """int32 numbers, none of them negative, divided by a constant."""
    return (index.to(tl.uint32, bitcast=True) // length).to(tl.int32, bitcast=True)


@triton.jit
def _codes(codes, before, within, mask, width: tl.constexpr, values: tl.constexpr):
    """The codes (rows, words, width) of a tile. `before`: elements before it; `within`: in it."""
    digit = tl.arange(0, width)[None, None, :]
    if values == "E4M3":
        word = read_at(codes + before, within // width, mask, width)
        code = (word[:, :, None] >> (8 * digit)).to(tl.int32) & 0xFF
    elif width == 1:
        at = within + (before & 1).to(tl.int32)
        half = (at & 1) ^ 1 if values == "TABLE" else at & 1
        byte = read_at(codes + (before >> 1), at >> 1, mask, 1)
        code = ((byte >> (4 * half)) & 15)[:, :, None]
    else:
        word = read_at(codes + (before >> 1), within >> 3, mask, 4)
        if values == "TABLE":  # The first code is in the high half of a byte.
            digit = digit ^ 1
        code = (word[:, :, None] >> (4 * digit)) & 15
    return code


@triton.jit
def _numbers(code, table, places, values: tl.constexpr, has_e4m3: tl.constexpr):
    """The fp32 numbers of codes (int32). `has_e4m3`: the device converts them itself."""
    if values == "TABLE":
        which = tl.arange(0, 16)
        entries = number_at(_part(table, places, 2), which, which < 16, "F32")
        flat = tl.gather(entries, code.reshape(code.numel), 0)
        number = flat.reshape(code.shape)
    elif values == "INT4":
        # 2^23 + code, without a conversion.
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    elif values == "E2M1":  # Its bits are those of fp32 numbers, also the denormal, times 2^-126.
        number = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
        number = number * _TWO_TO_126
    elif has_e4m3:
        number = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        number = e4m3_of(code)
    return number


@triton.jit
def _nbytes(form: tl.constexpr):
    """The bytes of a number."""
    return 1 if form == "F8_E8M0" or form == "F8_E4M3" else 4 if form == "F32" else 2


@triton.jit
def _scales_of_groups(
    scales, nested, nested_map, places, before, within, mask,
    group: tl.constexpr, nested_block: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The fp32 scales of groups of codes, counted over the weight. `form` NESTED is NF4's double
    quantisation."""
    first = before // group
    which = _over(within + (before - first * group).to(tl.int32), group)
    if form == "NESTED":
        code = read_at(scales + first, which, mask, 1)
        number = number_at(_part(nested_map, places, 4), code, mask, "F32")
        first_nested = first // nested_block
        which = _over(which + (first - first_nested * nested_block).to(tl.int32), nested_block)
        nested = _part(nested, places, 3) + 4 * first_nested
        offset = _place(places, 1).to(tl.int32).to(tl.float32, bitcast=True)
        scale = number * number_at(nested, which, mask, "F32") + offset
    else:
        scale = number_at(scales + _nbytes(form) * first, which, mask, form)
    return scale


@triton.jit
def _scales_of_blocks(
    scales, matrix, row, column, mask, grid_rows, grid_columns,
    block_rows: tl.constexpr, block_columns: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """The fp32 scales of blocks of rows and columns, 0 for all of them."""
    down = _over(row, block_rows) if block_rows else row * 0
    across = _over(column, block_columns) if block_columns else column * 0
    before = matrix * grid_rows * grid_columns
    return number_at(scales + _nbytes(form) * before, down * grid_columns + across, mask, form)[
        :, :, None
    ]


@triton.jit
def _value_of_words(
    codes, scales, table, nested, nested_map, places, matrix, first_row, first_column, row, column,
    mask, rows, columns, grid_rows, grid_columns, values: tl.constexpr, scale_form: tl.constexpr,
    group: tl.constexpr, nested_block: tl.constexpr, global_scale: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, width: tl.constexpr,
    has_e4m3: tl.constexpr,
):  # fmt: skip
    """The values and scales (fp32) of codes that lie in words. Rows and columns are counted from
    the first ones of the tile."""
    before = (matrix * rows + first_row) * columns + first_column
    within = row * columns.to(tl.int32) + column
    code = _codes(_part(codes, places, 0), before, within, mask, width, values)
    number = _numbers(code, table, places, values, has_e4m3)
    scales = _part(scales, places, 1)
    if group:
        scale = _scales_of_groups(
            scales, nested, nested_map, places, before, within, mask, group, nested_block,
            scale_form,
        )  # fmt: skip
        if global_scale != "":  # The kernel has no table then.
            factor = number_at(_part(table, places, 2), matrix, matrix >= 0, "F32")
            scale = scale * factor if global_scale == "TIMES" else tl.div_rn(scale, factor)
        scale = scale[:, :, None]
    else:
        scale = _scales_of_blocks(
            scales, matrix, first_row.to(tl.int32) + row, first_column.to(tl.int32) + column, mask,
            grid_rows, grid_columns, block_rows, block_columns, scale_form,
        )  # fmt: skip
    return number * scale, scale


@triton.jit
def _value_of_packed(
    codes, scales, third, fourth, fifth, places, matrix, row, column, mask, rows, columns,
    grid_rows, grid_columns, values: tl.constexpr, scale_form: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, product_form: tl.constexpr,
    packing: tl.constexpr, bits: tl.constexpr, zeros: tl.constexpr, zero: tl.constexpr,
    raised: tl.constexpr, order_axis: tl.constexpr, minima: tl.constexpr, times: tl.constexpr,
    record: tl.constexpr,
):  # fmt: skip
    """The values (fp32) of codes of any packing. Rows and columns are int64.

    zeros: their packing; "" if all are `zero`. raised: is added to words of zeros
    order_axis: the axis, 0 or 1, whose elements name their groups; -1 for none
    minima: what a number of each group does to the product, PLUS or MINUS; "" without
    times: what the product is multiplied by after it was rounded
    record: the fields of `Record` one after the other; () without

    The parts after codes and scales are zeros, order and minima, if they are there.
    """
    line = matrix * rows + row
    if packing == "FIELDS":
        code, scale, minimum = _in_records(
            _part(codes, places, 0), line, column, columns, mask, block_columns, bits, record
        )
    else:
        code = _code_at(
            _part(codes, places, 0), line, column, rows, columns, mask, 0, packing, bits
        )
        down, across = row // block_rows, column // block_columns
        if order_axis >= 0:
            order = _part(fourth if zeros != "" else third, places, 3 if zeros != "" else 2)
            if order_axis == 0:
                down = read_at(order, row, mask, 4).to(tl.int64)
                down = tl.minimum(tl.maximum(down, 0), grid_rows - 1)
            else:
                across = read_at(order, column, mask, 4).to(tl.int64)
                across = tl.minimum(tl.maximum(across, 0), grid_columns - 1)
        group = (matrix * grid_rows + down) * grid_columns + across
        scale = number_at(_part(scales, places, 1), group, mask, scale_form)
    if values == "IQ4":
        number = _iq4_of(code)
    elif zeros == "FLOATS":
        of_groups = number_at(_part(third, places, 2), group, mask, scale_form)
        number = _as_product(code.to(tl.float32) - of_groups, product_form)
    elif zeros != "":
        stored = _part(third, places, 2)
        of_groups = _code_at(
            stored, down, across, grid_rows, grid_columns, mask, raised, zeros, bits
        )
        number = (code - of_groups).to(tl.float32)
    else:
        number = (code - zero).to(tl.float32)
    value = _as_product(number * scale, product_form)
    if times != 1.0:
        value = _as_product(value * times, product_form)
    if minima != "":
        if packing != "FIELDS":
            minimum = number_at(_part(third, places, 2), group, mask, scale_form)
        value = value + minimum if minima == "PLUS" else value - minimum
        value = _as_product(value, product_form)
    return value


@triton.jit
def _store(
    here, bits, row, column, mask, row_stride, column_stride,
    order: tl.constexpr, width: tl.constexpr, is_wide: tl.constexpr,
):  # fmt: skip
    """Stores a tile. `here`: the address of its first element."""
    if is_wide:  # The compiler does not know it.
        step: tl.constexpr = 4 if bits.dtype == tl.int32 else 8
        here = tl.multiple_of((here.to(tl.int64) & -16).to(here.dtype), 16)
        row_stride = row_stride // step * step
    down, across = row[:, :, None], column[:, :, None] + tl.arange(0, width)[None, None, :]
    if order != "COLUMNS":
        down = down * row_stride.to(tl.int32)
    if order != "ROWS":
        across = across * column_stride.to(tl.int32)
    tl.store(here + (down + across), bits, mask=tl.broadcast_to(mask[:, :, None], bits.shape))


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def decode(
    codes, scales, table, nested, nested_map, places, out,
    rows: tl.int64, columns: tl.int64,
    matrix_stride: tl.int64, row_stride: tl.int64, column_stride: tl.int64,
    tiles_down: tl.int32, tiles_across: tl.int32, grid_rows: tl.int32, grid_columns: tl.int32,
    values: tl.constexpr, scale_form: tl.constexpr, group: tl.constexpr,
    nested_block: tl.constexpr, global_scale: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr, product_form: tl.constexpr, packing: tl.constexpr,
    bits: tl.constexpr, zeros: tl.constexpr, zero: tl.constexpr, raised: tl.constexpr,
    order_axis: tl.constexpr, minima: tl.constexpr, times: tl.constexpr, record: tl.constexpr,
    out_form: tl.constexpr,
    order: tl.constexpr, width: tl.constexpr, is_wide: tl.constexpr, tile_rows: tl.constexpr,
    tile_columns: tl.constexpr, has_e4m3: tl.constexpr,
):  # fmt: skip
    """Number of the code * its scale.

    values: E4M3; INT4 (code - 8), E2M1, or TABLE for the 16 numbers of the part `table`, whose
        codes begin in the high half of a byte
    group: codes that share a scale, counted over the weight; 0 for blocks of rows and columns
    global_scale: what the fp32 number of the matrix, in the place of `table`, does to its scales:
        TIMES or OVER; "" without one
    product_form: the dtype that the product is rounded to before it is rounded to that of `out`
    packing: "" for the packings of words; others, and `bits` to `record`, are those of
        `_value_of_packed`
    order: which stride is 1, that from column to column (ROWS), from row to row (COLUMNS), or none
    width: codes that a thread reads as one
    is_wide: every row of the output begins at a multiple of 16 bytes
    """
    tile = tl.program_id(0)
    matrix, first_row = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if tile_rows > 1:
        tile_row = tile // tiles_across
        tile = tile - tile_row * tiles_across
        matrix = (tile_row // tiles_down).to(tl.int64)
        first_row = (tile_row % tiles_down).to(tl.int64) * tile_rows
    first_column = tile.to(tl.int64) * tile_columns
    row = tl.arange(0, tile_rows)[:, None]
    column = (width * tl.arange(0, tile_columns // width))[None, :]
    left_columns = tl.minimum(columns - first_column, tile_columns).to(tl.int32)
    mask = (row < tl.minimum(rows - first_row, tile_rows).to(tl.int32)) & (column < left_columns)
    if packing != "":
        value = _value_of_packed(
            codes, scales, table, nested, nested_map, places, matrix, first_row + row,
            first_column + column, mask, rows, columns, grid_rows, grid_columns, values, scale_form,
            block_rows, block_columns, product_form, packing, bits, zeros, zero, raised, order_axis,
            minima, times, record,
        )  # fmt: skip
        found = rounded(value[:, :, None], out_form)
    else:
        value, scale = _value_of_words(
            codes, scales, table, nested, nested_map, places, matrix, first_row, first_column, row,
            column, mask, rows, columns, grid_rows, grid_columns, values, scale_form, group,
            nested_block, global_scale, block_rows, block_columns, width, has_e4m3,
        )  # fmt: skip
        if product_form != out_form:
            value = _as_product(value, product_form)
        if values == "INT4" or values == "E2M1":
            found = rounded_product(value, scale, out_form)
        else:
            found = rounded(value, out_form)
    target = _place(places, 0) + matrix * matrix_stride
    target += first_row * row_stride + first_column * column_stride
    _store(out + target, found, row, column, mask, row_stride, column_stride, order, width, is_wide)


# -- Codes of other packings, one at a time, and the numbers of their groups -----------------------


# The numbers of IQ4_NL by code, as signed bytes, eight in a word.
_IQ4_LOW = tl.constexpr(-0x0915_2230_4052_677F)
_IQ4_HIGH = tl.constexpr(0x7159_4535_2619_0D01)


@triton.jit
def _code_at(
    part, line, column, lines, columns, mask, raised,
    packing: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """Codes (int32) of a packed matrix of `lines` x `columns`. `raised` is added to its words."""
    if packing == "BYTES":
        code = read_at(part, line * columns + column, mask, 1) ^ 0x80
    elif packing == "PLANES":
        at, plane_numel = line * columns + column, lines * columns * bits // 8
        plane = at // plane_numel
        byte = read_at(part, at - plane * plane_numel, mask, 1)
        code = (byte >> (8 - bits - bits * plane).to(tl.int32)) & ((1 << bits) - 1)
    else:
        if packing == "COLUMNS":
            bit, step = line * bits, columns
            word = (bit >> 5) * columns + column
        else:
            if packing == "AWQ" or packing == "SIGNED_AWQ":
                column = (column & -8) | ((column & 7) >> 1) | ((column & 1) << 2)
            bit, step = column * bits, 1
            word = line * ((columns * bits + 31) >> 5) + (bit >> 5)
        shift = (bit & 31).to(tl.int32)
        code = shifted(read_at(part, word, mask, 4) + raised, shift)
        if 32 % bits != 0:
            is_across = shift + bits > 32
            high = read_at(part, word + step, mask & is_across, 4) + raised
            code = code | tl.where(is_across, (high << 1) << (31 - shift), 0)
        code = code & ((1 << bits) - 1)
        if packing == "SIGNED_AWQ":
            code = code ^ 8
    return code


@triton.jit
def _field(part, first, place, mask, at: tl.constexpr, bits: tl.constexpr, run: tl.constexpr):
    """The codes of a field of records that begin at the bytes `first`. `place`: in the record."""
    turn = place // run
    byte = at + turn // (8 // bits) * run + place % run
    shift = turn % (8 // bits) * bits
    return (read_at(part, first + byte, mask, 1) >> shift) & ((1 << bits) - 1)


@triton.jit
def _factors(part, first, group, mask, packing: tl.constexpr):
    """The small factors of groups in records, of scales and of minima (int32), which begin at the
    bytes `first`."""
    scale = group * 0 + 1
    minimum = scale
    if packing == "BYTES":
        scale = (read_at(part, first + group, mask, 1) ^ 0x80) - 0x80
    elif packing == "NIBBLES":
        byte = read_at(part, first + group, mask, 1)
        scale = byte & 15
        minimum = byte >> 4
    elif packing == "SIX_PAIRS":
        is_low = group < 4
        which = group & 3
        of_scale = read_at(part, first + which, mask, 1)
        of_minimum = read_at(part, first + 4 + which, mask, 1)
        rest = read_at(part, first + 8 + which, mask, 1)
        scale = tl.where(is_low, of_scale & 63, (rest & 15) | ((of_scale >> 2) & 48))
        minimum = tl.where(is_low, of_minimum & 63, (rest >> 4) | ((of_minimum >> 2) & 48))
    elif packing == "SIX_SIGNED":
        low = read_at(part, first + (group & 7), mask, 1) >> (group >> 3) * 4
        high = read_at(part, first + 8 + (group & 3), mask, 1) >> (group >> 2) * 2
        scale = ((low & 15) | ((high & 3) << 4)) - 32
    elif packing == "SIX_SPLIT":
        low = read_at(part, first + 2 + (group >> 1), mask, 1) >> (group & 1) * 4
        high = read_at(part, first + (group >> 2), mask, 1) >> (group & 3) * 2
        scale = ((low & 15) | ((high & 3) << 4)) - 32
    return scale, minimum


@triton.jit
def _in_records(
    part, line, column, columns, mask, group: tl.constexpr, bits: tl.constexpr,
    record: tl.constexpr,
):  # fmt: skip
    """Codes (int32), scales and minima (fp32) of records, `record`: the fields of `Record`, in
    their order, those that are tuples one by one."""
    numel: tl.constexpr = record[0]
    nbytes: tl.constexpr = record[1]
    scale_at: tl.constexpr = record[5]
    minimum_at: tl.constexpr = record[9]
    place = (column % numel).to(tl.int32)
    first = (line * (columns // numel) + column // numel) * nbytes
    code = _field(part, first, place, mask, record[2], record[3], record[4])
    if record[7]:
        high = _field(part, first, place, mask, record[6], record[7], record[8])
        code = code | (high << record[3])
    if bits == 8:
        code = code ^ 0x80
    scale_factor, minimum_factor = _factors(
        part, first + record[11], place // group, mask, record[10]
    )
    scale = number_at(part, (first + scale_at) >> 1, mask, "F16") * scale_factor.to(tl.float32)
    minimum = scale
    if minimum_at >= 0:
        minimum = number_at(part, (first + minimum_at) >> 1, mask, "F16")
        minimum = minimum * minimum_factor.to(tl.float32)
    return code, scale, minimum


@triton.jit
def _iq4_of(code):
    """The fp32 numbers of codes of IQ4_NL (int32)."""
    word = tl.where(code < 8, _IQ4_LOW, _IQ4_HIGH)
    byte = (word >> ((code & 7) * 8).to(tl.int64)).to(tl.int32) & 0xFF
    return ((byte ^ 0x80) - 0x80).to(tl.float32)


@triton.jit
def _as_product(value, form: tl.constexpr):
    """fp32 values, rounded to the dtype of products."""
    return value if form == "F32" else widened(rounded(value, form), form)
