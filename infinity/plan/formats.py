"""Bytes of a matrix at rest, by the name that a model's file gives to its format. Pure.

The sizes are those of the codecs: docs/formats/quantized.md.
"""

from __future__ import annotations

from infinity.codecs import Codec, Fp8Blocks, Int4Groups, Mxfp4Blocks, Nf4, Plain
from infinity.codecs import stored_nbytes as nbytes_of_parts
from infinity.errors import ConfigError

PLAIN = "bf16"
_CODECS: dict[str, Codec] = {
    PLAIN: Plain("BF16"),
    "fp8-128x128": Fp8Blocks(),
    "int4-g32": Int4Groups(),
    "mxfp4": Mxfp4Blocks(),
    "nf4": Nf4(),
}


def stored_nbytes(format_name: str, rows: int, columns: int) -> int:
    """Returns the bytes of a matrix of [rows, columns] with its scales. Raises ConfigError for an
    unknown format, and for a matrix that the format cannot store."""
    codec = _CODECS.get(format_name)
    if codec is None:
        raise ConfigError(
            f"stored.format: expected one of {', '.join(_CODECS)}; got {format_name!r}"
        )
    return nbytes_of_parts(codec, (rows, columns))
