"""The checkpoints of bitsandbytes: a JSON beside each weight says how it is stored.

Source: transformers `integrations/bitsandbytes.py`; bitsandbytes `functional.py` (QuantState).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.bounded import MalformedError, field, integer, list_of, parse_json, table_of, text_of
from infinity.codecs.affine import AffineGroups
from infinity.codecs.found import FoundTensors, Scheme, no_codec
from infinity.codecs.part import Shape, StoredPart
from infinity.codecs.tables import STATE_SUFFIX, TableBlocks

_KINDS = ("nf4", "fp4")
_STATE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SCALES_OF_INT8 = ".SCB"
_SUFFIXES = (
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".bitsandbytes__nf4",
    ".bitsandbytes__fp4",
    _SCALES_OF_INT8,
)


def bitsandbytes_scheme(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Returns what finds `weight` U8 with `weight.absmax` and so on, of which a JSON in a tensor
    says the rest; or `weight` I8 with `SCB` beside it (LLM.int8). Raises ConfigError."""
    kind = quantization.get("bnb_4bit_quant_type", "fp4")  # The default of bitsandbytes.
    if quantization.get("load_in_8bit", quantization.get("_load_in_8bit")):
        kind = "8 bits"
    if kind not in (*_KINDS, "8 bits"):
        raise no_codec(where, f"bitsandbytes as {kind!r}", "'nf4', 'fp4' and 8 bits")
    form = "nf4" if quantization.get("bnb_4bit_use_double_quant") else "nf4-single"
    return Scheme(_find, [] if kind == "8 bits" else [("*", form)])


def _find(found: FoundTensors) -> None:
    for state in [name for name in found.headers if STATE_SUFFIX in name]:
        name = state.partition(STATE_SUFFIX)[0]
        try:
            codec, shape = _parse_state(found.read(state))
        except MalformedError as error:
            raise found.error(f"{state!r} is malformed: {error}") from None
        codes, *others = codec.parts(shape)
        stored, packed = found.headers.get(name, ("", ()))
        as_stored = StoredPart("", stored, packed)
        if as_stored.nbytes == codes.nbytes:
            codes = as_stored  # bnb_4bit_quant_storage: the same bytes under another dtype.
        names = [f"{name}{part.suffix}" for part in (codes, *others)]
        found.add(name, codec, shape, names, parts=(codes, *others), aside=(state,))
    for scales in found.unused(_SCALES_OF_INT8):
        module = scales.removesuffix(_SCALES_OF_INT8)
        _add_int8(found, f"{module}.weight", scales, f"{module}.weight_format")
    found.refuse_leftovers(_SUFFIXES, "bitsandbytes")


def _add_int8(found: FoundTensors, name: str, scales: str, form: str) -> None:
    if name not in found.headers:
        raise found.error(f"{name!r} is missing, to which {scales!r} belongs")
    if form in found.headers and any(found.read(form)):
        raise found.error(
            f"{form!r} says that {name!r} is in the order of a GPU's kernel; expected rows. "
            "Save the model again with bitsandbytes 0.45 or later"
        )
    shape = found.matrix(name)
    codec = AffineGroups(max(1, shape[-1]), "F32", 8, "LLM.int8")
    found.add(name, codec, shape, (name, scales), aside=(form,))


def _parse_state(content: bytes) -> tuple[TableBlocks, Shape]:
    """Returns (codec, shape of the weight) of a quant_state. Raises MalformedError."""
    state = table_of(parse_json(content), "it")
    kind = text_of(field(state, "quant_type"), "quant_type", max_length=32)
    dtype = text_of(field(state, "dtype"), "dtype", max_length=32)
    if kind not in _KINDS or dtype not in _STATE_DTYPES:
        raise MalformedError(
            f"expected quant_type nf4 or fp4 of a float dtype, got {kind} of {dtype}"
        )
    shape = tuple(integer(n, "a length") for n in list_of(field(state, "shape"), "shape"))
    block = _block(state, "blocksize")
    if "nested_blocksize" not in state:
        return TableBlocks(block, 0, 0.0, _STATE_DTYPES[dtype], kind), shape
    if state.get("nested_dtype", "float32") != "float32":
        raise MalformedError(f"expected nested_dtype float32, got {state['nested_dtype']!r}")
    offset = field(state, "nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise MalformedError(f"expected a number as nested_offset, got {offset!r}")
    nested = _block(state, "nested_blocksize")
    return TableBlocks(block, nested, float(offset), _STATE_DTYPES[dtype], kind), shape


def _block(state: dict[str, Any], key: str) -> int:
    size = integer(field(state, key), key)
    if size < 2 or size % 2:
        raise MalformedError(f"expected an even {key}, got {size}")
    return size
