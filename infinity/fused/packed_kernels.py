"""Codes of any packing and the numbers of their groups, for the kernel that decodes: the layouts of
`codecs/packing.py` and the records of GGUF, by the description in `fused/decode.py`.

A thread takes one code at a time. Neighbours find their words in the cache of their core.
"""

import triton
import triton.language as tl

from infinity.fused.number_kernels import number_at, read_at, rounded, shifted, widened

# The numbers of IQ4_NL by code, as signed bytes, eight in a word.
_IQ4_LOW = tl.constexpr(-0x0915_2230_4052_677F)
_IQ4_HIGH = tl.constexpr(0x7159_4535_2619_0D01)


@triton.jit
def code_at(
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
def in_records(
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
def iq4_of(code):
    """The fp32 numbers of codes of IQ4_NL (int32)."""
    word = tl.where(code < 8, _IQ4_LOW, _IQ4_HIGH)
    byte = (word >> ((code & 7) * 8).to(tl.int64)).to(tl.int32) & 0xFF
    return ((byte ^ 0x80) - 0x80).to(tl.float32)


@triton.jit
def as_product(value, form: tl.constexpr):
    """fp32 values, rounded to the dtype of products."""
    return value if form == "F32" else widened(rounded(value, form), form)
