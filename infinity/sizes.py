"""Sizes in words: bytes, "8GiB" <-> 8589934592, numbers of things and times; and alignment.

KiB, MiB, GiB, TiB are powers of 1024; kB, MB, GB, TB are powers of 1000. A bare K, M, G or T is
refused: fio, DeepSpeed and pydantic read it three different ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from typing import Any, TypeVar

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

# Direct I/O works in logical blocks; 4 KiB is a multiple of every block size in use.
PAGE_NBYTES = 4 * KIB
HUGE_PAGE_NBYTES = 2 * MIB

_UNITS = {
    "B": 1,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_EXACT_UNITS = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB")
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


class ByteRange:
    """`nbytes` at `offset_nbytes`: a base of dataclasses with these fields."""

    __slots__ = ()
    offset_nbytes: int
    nbytes: int

    @property
    def end_nbytes(self) -> int:
        """The offset behind the range."""
        return self.offset_nbytes + self.nbytes


_Range = TypeVar("_Range", bound=ByteRange)


def joined(ranges: Iterable[_Range], file_of: Callable[[_Range], object]) -> tuple[_Range, ...]:
    """Returns the same bytes: ranges that follow each other in a file are one."""
    found: list[_Range] = []
    for part in ranges:
        last: Any = found[-1] if found else None
        if last and (file_of(last), last.end_nbytes) == (file_of(part), part.offset_nbytes):
            found[-1] = replace(last, nbytes=last.nbytes + part.nbytes)
        else:
            found.append(part)
    return tuple(found)


def parse_nbytes(text: str | int) -> int:
    """Bytes of "512MiB", "1.5 GB" or a plain integer. Raises ValueError with the fix."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size cannot be negative, got {text}")
        return text
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"expected a size with a unit such as '8GiB' or '500MB', got {text!r}")
    number, unit = match.groups()
    if unit not in _UNITS:
        hint = ""
        if unit.upper() in ("K", "M", "G", "T"):
            u = unit.upper()
            hint = f"; write {u}iB (powers of 1024) or {u}B (powers of 1000)"
        raise ValueError(f"unknown size unit {unit!r} in {text!r}{hint}")
    return int(Decimal(number) * _UNITS[unit])


def counted(number: int, nouns: str) -> str:
    """Returns a number with its noun, of which `nouns` is the plural."""
    head, joint, rest = nouns.partition(" with ")
    return f"{number:,} {head.removesuffix('s') if number == 1 else head}{joint}{rest}"


def format_nbytes(nbytes: int | float) -> str:
    """Human form with binary units: 536870912 -> '512.0 MiB'."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def write_size(nbytes: int) -> str:
    """The shortest exact form: 4194304 -> "4MiB", 10**9 -> "1GB", 4097 -> "4097B"."""
    for unit in _EXACT_UNITS:
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return f"{nbytes}B"


def clock_of(seconds: float) -> str:
    """Returns a time as 0:07, 1:02:03 or 2d 03:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def align_up(value: int, alignment: int) -> int:
    """Returns the smallest multiple of `alignment` that is >= value: 5, 4 -> 8."""
    return -(-value // alignment) * alignment


def align_down(value: int, alignment: int) -> int:
    """Returns the largest multiple of `alignment` that is <= value: 5, 4 -> 4."""
    return value // alignment * alignment
