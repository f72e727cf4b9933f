"""Bytes of a matrix at rest, by the format in which a checkpoint stores it. Pure.

Sources: the checkpoints' own layouts. FP8 of DeepSeek-V3: E4M3 codes and an fp32 scale for each
block of 128 x 128. INT4 of compressed-tensors: eight codes in 32 bits and a bf16 scale for each
group of 32. MXFP4: OCP Microscaling Formats 1.0 (2023), a scale of 8 bits for each block of 32. NF4
of bitsandbytes: Dettmers et al., "QLoRA" (2023), section 3: a code of 8 bits for the scale of each
block of 64, and an fp32 scale for each 256 of these codes.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity.errors import ConfigError

PLAIN = "bf16"
_BLOCK = 128


def _fp8(rows: int, columns: int) -> int:
    return rows * columns + 4 * -(-rows // _BLOCK) * -(-columns // _BLOCK)


def _int4(rows: int, columns: int) -> int:
    return rows * (-(-columns // 8) * 4 + 2 * -(-columns // 32))


def _mxfp4(rows: int, columns: int) -> int:
    return rows * -(-columns // 32) * 17


def _nf4(rows: int, columns: int) -> int:
    blocks = -(-rows * columns // 64)
    return -(-rows * columns // 2) + blocks + 4 * -(-blocks // 256)


_SIZES: dict[str, Callable[[int, int], int]] = {
    PLAIN: lambda rows, columns: 2 * rows * columns,
    "fp8-128x128": _fp8,
    "int4-g32": _int4,
    "mxfp4": _mxfp4,
    "nf4": _nf4,
}


def stored_nbytes(format_name: str, rows: int, columns: int) -> int:
    """Returns the bytes of a matrix of [rows, columns] with its scales. Raises ConfigError for an
    unknown format."""
    if format_name not in _SIZES:
        raise ConfigError(
            f"stored.format: expected one of {', '.join(_SIZES)}; got {format_name!r}"
        )
    return _SIZES[format_name](rows, columns)
