"""Numbers of safetensors' dtypes in Triton kernels: bytes to fp32, and fp32 rounded to bits.

Every conversion is exact or rounds to nearest, ties to even, so no mode of the device (flushing of
denormals, contraction) and no choice of the compiler can change a bit.
"""

import os

import triton
import triton.language as tl

_TWO_TO_120 = tl.constexpr(1.329227995784916e36)
_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def read_at(part, index, mask, nbytes: tl.constexpr):
    """Integers of 1, 2, 4 or 8 bytes of a part (a pointer to uint8) at any address, as int32, those
    of 8 bytes as int64; 0 where `mask` is false.

    Read as aligned words: the second of two words only where the integers lie across them. Memory
    is allocated in whole words.
    """
    if nbytes == 1:
        found = tl.load(part + index, mask=mask, other=0).to(tl.int32)
    else:
        wide: tl.constexpr = tl.int64 if nbytes == 8 else tl.int32
        kind: tl.constexpr = tl.int16 if nbytes == 2 else wide
        most: tl.constexpr = 63 if nbytes == 8 else 31
        address = part.to(tl.int64)
        shift = ((address & (nbytes - 1)) * 8).to(wide)
        words = (address & -nbytes).to(tl.pointer_type(kind)) + index
        low = tl.load(words, mask=mask, other=0).to(wide)
        is_across = index * 0 != shift  # Of the shape of `index`.
        high = tl.load(words + 1, mask=is_across & mask, other=0).to(wide)
        if nbytes == 2:
            found = ((low & 0xFFFF) >> shift) | ((high << (16 - shift)) & 0xFFFF)
        else:
            found = shifted(low, shift) | ((high << 1) << (most - shift))
    return found


@triton.jit
def shifted(word, shift):
    """A word shifted right by `shift`, zeros following."""
    kind: tl.constexpr = tl.uint64 if word.dtype == tl.int64 else tl.uint32
    return (word.to(kind, bitcast=True) >> shift.to(kind)).to(word.dtype, bitcast=True)


@triton.jit
def number_at(part, index, mask, form: tl.constexpr):
    """Numbers of a part at any address, as fp32. `form`: F32, BF16, F16, F8_E4M3 or F8_E8M0."""
    if form == "F8_E8M0":
        code = read_at(part, index, mask, 1)
        bits = tl.where(code == 0, 0x00400000, code << 23)
        number = tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif form == "F8_E4M3":
        number = e4m3_of(read_at(part, index, mask, 1))
    else:
        number = widened(read_at(part, index, mask, 4 if form == "F32" else 2), form)
    return number


@triton.jit
def e4m3_of(code):
    """The fp32 numbers of codes E4M3 (int32): their bits are those of fp32 numbers, also the
    denormal ones, times 2^-120."""
    magnitude = code & 0x7F
    number = (((code >> 7) << 31) | (magnitude << 20)).to(tl.float32, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), number * _TWO_TO_120)


@triton.jit
def widened(bits, form: tl.constexpr):
    """The fp32 value of bits (int32 or int16). `form`: BF16, F16, and F32 for anything else."""
    if form == "BF16":
        value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif form == "F16":
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def _nearest(value, form: tl.constexpr):
    """The bits of fp32 values, rounded to nearest, ties to even, to BF16, F16 (int16) or F32
    (int32). A NaN has any bits that a NaN may have."""
    if form == "F32":
        bits = value.to(tl.int32, bitcast=True)
    elif form == "F16":
        bits = value.to(tl.float16).to(tl.int16, bitcast=True)
    elif _IS_INTERPRETED:  # The interpreter's conversion cuts bits off.
        bits = value.to(tl.int32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def rounded(value, form: tl.constexpr):
    """As `_nearest`. Every NaN becomes the positive quiet one."""
    nan: tl.constexpr = 0x7FC0 if form == "BF16" else 0x7E00 if form == "F16" else 0x7FC00000
    bits = _nearest(value, form)
    return tl.where(value == value, bits, tl.full((), nan, bits.dtype))


@triton.jit
def rounded_product(value, factor, form: tl.constexpr):
    """As `rounded`, of the products of finite numbers with `factor`: only where that is not finite
    they are NaN, and else infinite there."""
    if _IS_INTERPRETED:  # A device has one NaN, which has all bits of an infinity and more.
        bits = rounded(value, form)
    else:
        keep: tl.constexpr = -64 if form == "BF16" else -512 if form == "F16" else -4194304
        bits = _nearest(value, form)
        is_finite = (factor.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
        bits = bits & tl.where(is_finite, -1, keep).to(bits.dtype)
    return bits


@triton.jit
def store_rounded(out, offset, value, mask, form: tl.constexpr):
    """Stores fp32 values as BF16, F16 (`out`: a pointer to int16) or F32 (int32)."""
    tl.store(out + offset, rounded(value, form), mask=mask)
