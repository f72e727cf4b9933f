"""Finds the codec of every tensor of a checkpoint, from its configuration and its headers.

The headers decide which tensors are quantised, because every quantised weight has parts that a
plain one does not have. The configuration decides what the parts mean, and every scheme in it must
be one that a codec knows. What the two say must agree; no tensor of codes or scales is left over.

Sources: transformers 5.23 `integrations/finegrained_fp8.py`, `mxfp4.py`, `bitsandbytes.py`;
compressed-tensors `quantization/quant_args.py`, `compressors/`; docs/formats/quantized.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from typing_extensions import override

from infinity.bounded import (
    MalformedError,
    field,
    integer,
    list_of,
    parse_json,
    table_of,
    text_of,
)
from infinity.codecs.compressed import CompressedScheme
from infinity.codecs.floats import MX_BLOCK, FloatBlocks, mxfp4
from infinity.codecs.found import FoundTensors, Headers, LogicalTensor
from infinity.codecs.part import ITEM_NBYTES, Shape, StoredPart
from infinity.codecs.tables import STATE_SUFFIX, TableBlocks
from infinity.errors import ConfigError

QUANTISATION_KEYS = ("quantization_config", "compression_config")


def quantization_of(config: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """Returns the quantisation in a config.json, of the model or of a part of it; None without one.

    Raises ConfigError if there are several that differ, or if one is no table.
    """
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    found = [section[key] for section in sections for key in QUANTISATION_KEYS if section.get(key)]
    for value in found:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected a table of quantization, got {value!r}")
        if value != found[0]:
            raise ConfigError(f"{where}: its config.json has two different tables of quantization")
    return found[0] if found else None


def logical_tensors(
    config: Mapping[str, Any],
    headers: Headers,
    *,
    read: Callable[[str], bytes],
    where: str,
) -> dict[str, LogicalTensor]:
    """Returns every logical tensor of a checkpoint by its name, quantised and plain ones.

    config: config.json; without a quantisation in it every tensor is plain
    headers: every tensor of every file
    read: returns the bytes of a stored tensor; is called for small ones of bitsandbytes only
    where: the path, for messages

    Raises ConfigError for a format without a codec, for parameters that its codec does not have,
    and for parts that are missing, left over, or of another shape or dtype.
    """
    found = FoundTensors(headers, where)
    quantization = quantization_of(config, where)
    if quantization is not None:
        scheme_of(quantization, where).find(found, read)
    found.add_plain()
    return found.logical


# -- What each writer calls its tensors, and what they mean ----------------------------------------


KNOWN_METHODS = "fp8, compressed-tensors, mxfp4, bitsandbytes (nf4)"
_STATE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BITSANDBYTES_SUFFIXES = (
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".bitsandbytes__nf4",
    ".bitsandbytes__fp4",
    ".SCB",
)
_FP8_SUFFIXES = ("_scale_inv", ".weight_scale", ".qscale_weight")


class Scheme(Protocol):
    """One kind of quantised checkpoint."""

    def find(self, found: FoundTensors, read: Callable[[str], bytes]) -> None:
        """Adds every quantised tensor to `found`. Raises ConfigError as `logical_tensors`."""


def scheme_of(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Returns the scheme of a table. Raises ConfigError for one that no codec knows."""
    method = quantization.get("quant_method")
    if method is None and "config_groups" in quantization:
        method = "compressed-tensors"
    if method == "fp8":
        return Fp8Scheme(quantization, where)
    if method == "compressed-tensors":
        return CompressedScheme(quantization, where)
    if method == "mxfp4":
        return Mxfp4Scheme()
    if method == "bitsandbytes":
        return BitsandbytesScheme(quantization, where)
    raise ConfigError(
        f"{where}: its weights are quantized with quant_method={method!r}; codecs exist for "
        f"{KNOWN_METHODS}. Use a checkpoint in one of those, or the bfloat16 one of the model"
    )


class Fp8Scheme(Scheme):
    """DeepSeek's: `weight` F8_E4M3 and `weight_scale_inv`, or `.scale`; experts may be MXFP4."""

    def __init__(self, quantization: Mapping[str, Any], where: str) -> None:
        if quantization.get("fmt") not in (None, "e4m3"):
            raise ConfigError(f"{where}: expected FP8 of fmt='e4m3', got {quantization['fmt']!r}")
        block = quantization.get("weight_block_size")
        self._block = (0, 0) if block is None else _two_sizes(block, where)

    @override
    def find(self, found: FoundTensors, read: Callable[[str], bytes]) -> None:
        for name, (dtype, _) in found.headers.items():
            if dtype not in ("F8_E4M3", "I8"):
                continue
            scale = self._scale_of(found, name)
            if dtype == "I8":
                if scale is not None:
                    _add_packed_fp4(found, name, scale)
                continue
            if scale is None:
                raise found.error(
                    f"{name!r} is F8_E4M3, and its scales {name + '_scale_inv'!r} are missing; "
                    "copy the checkpoint again, or use one that is complete"
                )
            add_fp8(found, FloatBlocks(self._block, found.headers[scale][0]), name, scale)
        found.refuse_leftovers(_FP8_SUFFIXES, "FP8")

    @staticmethod
    def _scale_of(found: FoundTensors, name: str) -> str | None:
        stem = name.removesuffix(".weight")
        names = (f"{name}_scale_inv", f"{stem}.scale", f"{stem}.qscale_weight")
        return next((scale for scale in names if scale in found.headers), None)


def add_fp8(found: FoundTensors, codec: FloatBlocks, name: str, scale: str) -> None:
    """Adds an FP8 weight. Raises ConfigError for scales that do not fit it.

    A single scale per matrix may be stored without the dimensions of length 1.
    """
    shape, (dtype, scale_shape) = found.matrix(name), found.headers[scale]
    if dtype not in ("F32", "BF16", "F16", "F8_E8M0"):
        raise found.error(f"{scale!r} is {dtype}; expected scales of F32, BF16, F16 or F8_E8M0")
    codes, scales = found.parts(name, codec, shape)
    if codec.block == (0, 0) and [n for n in scale_shape if n > 1] == [
        n for n in scales.shape if n > 1
    ]:
        scales = StoredPart(scales.suffix, dtype, scale_shape)
    stem = name.removesuffix("weight")
    aside = (f"{stem}activation_scale", f"{stem}input_scale")
    found.add(name, codec, shape, (name, scale), parts=(codes, scales), aside=aside)


def _add_packed_fp4(found: FoundTensors, name: str, scale: str) -> None:
    """Adds an MXFP4 weight whose codes are stored as I8, and its scales as F8_E8M0."""
    shape = found.matrix(name)
    codec, logical = mxfp4(), (*shape[:-1], 2 * shape[-1])
    codes, scales = found.parts(name, codec, logical)
    parts = (
        StoredPart("", "I8", codes.shape),
        StoredPart("_scale_inv", "F8_E8M0", scales.shape),
    )
    found.add(name, codec, logical, (name, scale), parts=parts)


class Mxfp4Scheme(Scheme):
    """gpt-oss: `..._blocks` and `..._scales` U8 of the transposed weight."""

    @override
    def find(self, found: FoundTensors, read: Callable[[str], bytes]) -> None:
        for blocks in found.unused("_blocks"):
            name, shape = blocks.removesuffix("_blocks"), found.headers[blocks][1]
            if len(shape) < 3 or shape[-1] != MX_BLOCK // 2:
                raise found.error(
                    f"{blocks!r} has shape {shape}; MXFP4 needs "
                    f"(..., rows, blocks, {MX_BLOCK // 2})"
                )
            logical = (*shape[:-3], MX_BLOCK * shape[-2], shape[-3])
            found.add(name, mxfp4(True), logical, (blocks, f"{name}_scales"))
        found.refuse_leftovers(("_scales",), "MXFP4")


class BitsandbytesScheme(Scheme):
    """`weight` U8 with `weight.absmax` and so on; a JSON in a tensor says the rest."""

    def __init__(self, quantization: Mapping[str, Any], where: str) -> None:
        kind = quantization.get("bnb_4bit_quant_type", "fp4")  # The default of bitsandbytes.
        if not quantization.get("load_in_4bit", quantization.get("_load_in_4bit")):
            kind = "8 bits"
        if kind != "nf4":
            raise ConfigError(
                f"{where}: its weights are quantized by bitsandbytes as {kind!r}; a codec exists "
                "for 'nf4'. Use such a checkpoint, or the bfloat16 one of the model"
            )

    @override
    def find(self, found: FoundTensors, read: Callable[[str], bytes]) -> None:
        for state in found.unused(STATE_SUFFIX):
            name = state.removesuffix(STATE_SUFFIX)
            try:
                codec, shape = _parse_state(read(state))
            except MalformedError as error:
                raise found.error(f"{state!r} is malformed: {error}") from None
            codes, *others = codec.parts(shape)
            stored, packed = found.headers.get(name, ("", ()))
            as_stored = StoredPart("", stored, packed)
            if stored in ITEM_NBYTES and as_stored.nbytes == codes.nbytes:
                codes = as_stored  # bnb_4bit_quant_storage: the same bytes under another dtype.
            names = [f"{name}{part.suffix}" for part in (codes, *others)]
            found.add(name, codec, shape, names, parts=(codes, *others), aside=(state,))
        found.refuse_leftovers(_BITSANDBYTES_SUFFIXES, "NF4 of bitsandbytes")


def _two_sizes(block: Any, where: str) -> tuple[int, int]:
    try:
        sizes = [integer(size, "a size") for size in list_of(block, "it")]
    except MalformedError:
        sizes = []
    if len(sizes) != 2 or 0 in sizes:
        raise ConfigError(
            f"{where}: expected a weight_block_size of two positive numbers, got {block!r}"
        )
    return sizes[0], sizes[1]


def _parse_state(content: bytes) -> tuple[TableBlocks, Shape]:
    """Returns (codec, shape of the weight) of a quant_state. Raises MalformedError."""
    state = table_of(parse_json(content), "it")
    kind = text_of(field(state, "quant_type"), "quant_type", max_length=32)
    dtype = text_of(field(state, "dtype"), "dtype", max_length=32)
    if kind != "nf4" or dtype not in _STATE_DTYPES:
        raise MalformedError(f"expected quant_type nf4 of a float dtype, got {kind} of {dtype}")
    shape = tuple(integer(n, "a length") for n in list_of(field(state, "shape"), "shape"))
    block = _block(state, "blocksize")
    if "nested_blocksize" not in state:
        return TableBlocks(block, 0, 0.0, _STATE_DTYPES[dtype]), shape
    if state.get("nested_dtype", "float32") != "float32":
        raise MalformedError(f"expected nested_dtype float32, got {state['nested_dtype']!r}")
    offset = field(state, "nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise MalformedError(f"expected a number as nested_offset, got {offset!r}")
    nested = _block(state, "nested_blocksize")
    return TableBlocks(block, nested, float(offset), _STATE_DTYPES[dtype]), shape


def _block(state: dict[str, Any], key: str) -> int:
    size = integer(field(state, key), key)
    if size < 2 or size % 2:
        raise MalformedError(f"expected an even {key}, got {size}")
    return size
