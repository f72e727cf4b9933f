"""Numbers of safetensors' dtypes in Triton kernels: bytes to fp32, and fp32 rounded to bits.

Everything but the conversion between fp16 and fp32 is integer arithmetic, so no mode of the device
(flushing of denormals, contraction) and no choice of the compiler can change a bit.
"""

import triton
import triton.language as tl


@triton.jit
def byte_at(part, index, mask):
    """Bytes of a part (a pointer to uint8) as int32; 0 where `mask` is false."""
    return tl.load(part + index, mask=mask, other=0).to(tl.int32)


@triton.jit
def number_at(part, index, mask, form: tl.constexpr):
    """Numbers of a part at any address, as fp32. `form`: F32, BF16, F16 or F8_E8M0."""
    if form == "F8_E8M0":
        code = byte_at(part, index, mask)
        bits = tl.where(code == 0, 0x00400000, code << 23)
        bits = tl.where(code == 255, 0x7FC00000, bits)
    elif form == "F32":
        at = index * 4
        low = byte_at(part, at, mask) | (byte_at(part, at + 1, mask) << 8)
        high = byte_at(part, at + 2, mask) | (byte_at(part, at + 3, mask) << 8)
        bits = low | (high << 16)
    else:
        at = index * 2
        bits = byte_at(part, at, mask) | (byte_at(part, at + 1, mask) << 8)
    return widened(bits, form)


@triton.jit
def widened(bits, form: tl.constexpr):
    """The fp32 value of bits (int32). `form`: BF16, F16, and F32 for anything else."""
    if form == "BF16":
        value = (bits << 16).to(tl.float32, bitcast=True)
    elif form == "F16":
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def rounded(value, form: tl.constexpr):
    """The bits (int32) of an fp32 value, rounded to nearest, ties to even, to BF16, F16 or F32.

    Every NaN becomes the positive quiet one.
    """
    bits = value.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if form == "BF16":
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(is_nan, 0x7FC0, bits)
    elif form == "F16":
        bits = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(is_nan, 0x7E00, bits)
    else:
        bits = tl.where(is_nan, 0x7FC00000, bits)
    return bits


@triton.jit
def store_rounded(out, offset, value, mask, form: tl.constexpr):
    """Stores fp32 values as BF16, F16 (`out`: a pointer to int16) or F32 (int32)."""
    bits = rounded(value, form)
    if form == "F32":
        tl.store(out + offset, bits, mask=mask)
    else:
        tl.store(out + offset, bits.to(tl.int16), mask=mask)
