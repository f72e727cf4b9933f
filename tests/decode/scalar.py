"""Formats decoded one number at a time, from their specifications, in Python's exact arithmetic.

Slow, and without any code of the package. A value is a float that is exact, or was rounded by
`rounded`; NaN stands for every NaN.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

# Of each dtype: bits of the mantissa without the leading one, exponents of the smallest normal
# number and of the largest.
FORMATS = {"BF16": (7, -126, 127), "F16": (10, -14, 15), "F32": (23, -126, 127)}


def rounded(value: float | Fraction, dtype: str) -> float:
    """To nearest, ties to even, with denormals and infinities."""
    if isinstance(value, float):
        if not math.isfinite(value) or value == 0:
            return value
        value = Fraction(value)
    if value == 0:
        return 0.0
    mantissa, lowest, highest = FORMATS[dtype]
    exponent = max(_exponent(abs(value)), lowest)
    step = Fraction(2) ** (exponent - mantissa)
    number = round(value / step) * step  # Python rounds a fraction to the nearest even.
    if abs(number) >= Fraction(2) ** (highest + 1):
        return math.copysign(math.inf, value)
    return math.copysign(float(number), value)


def _exponent(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def product(a: float, b: float, dtype: str) -> float:
    """The product, rounded once."""
    if math.isfinite(a) and math.isfinite(b) and a and b:
        return rounded(Fraction(a) * Fraction(b), dtype)
    return a * b


def quotient(a: float, b: float, dtype: str) -> float:
    """The quotient, rounded once."""
    if math.isfinite(a) and math.isfinite(b) and a and b:
        return rounded(Fraction(a) / Fraction(b), dtype)
    if b:
        return a / b
    is_negative = math.copysign(1.0, a) != math.copysign(1.0, b)
    return math.nan if not a or math.isnan(a) else -math.inf if is_negative else math.inf


def total(a: float, b: float, dtype: str) -> float:
    if math.isfinite(a) and math.isfinite(b) and a + b:
        return rounded(Fraction(a) + Fraction(b), dtype)
    return a + b


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code >> 3 else 1.0, code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * (2 + mantissa) * 2.0 ** (exponent - 2)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def stored_float(content: bytes, dtype: str) -> float:
    """The number in the bytes of an element."""
    if dtype in ("F8_E8M0", "U8"):
        return e8m0(content[0])
    if dtype == "BF16":
        return struct.unpack("<f", b"\0\0" + content)[0]
    return struct.unpack("<e" if dtype == "F16" else "<f", content)[0]
