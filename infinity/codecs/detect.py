"""Finds the codec of every tensor of a checkpoint, from its configuration and its headers.

The headers decide which tensors are quantised, because every quantised weight has parts that a
plain one does not have. The configuration decides what the parts mean, and every scheme in it must
be one that a codec knows. What the two say must agree; no tensor of codes or scales is left over.

docs/formats/quantized.md has the formats.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from infinity.codecs.bitsandbytes import bitsandbytes_scheme
from infinity.codecs.compressed import compressed_scheme
from infinity.codecs.floating import (
    MXFP8,
    PER_COLUMN,
    PER_ROW,
    ROUTED,
    FloatScheme,
    find_mxfp4,
    fp8_scheme,
    modelopt_scheme,
    quark_scheme,
)
from infinity.codecs.found import FoundTensors, Headers, LogicalTensor, Scheme
from infinity.codecs.grouped import find_gguf, find_hqq, grouped_scheme, mlx_scheme
from infinity.errors import ConfigError

_OF_MLX = "quantization"
QUANTISATION_KEYS = ("quantization_config", "compression_config", _OF_MLX)
_WIDE = ("BF16", "F16", "F32", "F64")
_log = logging.getLogger("infinity")
# Scales of activations and of a cache of keys and values, which training does not quantise.
_ACTIVATION_SUFFIXES = (
    ".input_scale", ".activation_scale", ".output_scale", ".input_global_scale", ".qscale_act",
    ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_output_scale", ".input_zero_point",
)  # fmt: skip


def quantization_of(config: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """Returns the quantisation in a config.json, of the model or of a part of it; None without one.

    Raises ConfigError if there are several that differ, or if one is no table.
    """
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    keys = [key for key in QUANTISATION_KEYS if key != _OF_MLX]
    found = [section[key] for section in sections for key in keys if section.get(key)]
    if not found and config.get(_OF_MLX):
        found = [config[_OF_MLX]]
    for value in found:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected a table of quantization, got {value!r}")
        if value != found[0]:
            raise ConfigError(f"{where}: its config.json has two different tables of quantization")
    return found[0] if found else None


def _of_modelopt(table: dict[str, Any]) -> dict[str, Any]:
    quantization = table.get("quantization")
    if not isinstance(quantization, dict) or not quantization.get("quant_algo"):
        return {}  # Only a cache of keys and values is quantised.
    return {"quant_method": "modelopt", **quantization}


def _of_autoawq(table: dict[str, Any]) -> dict[str, Any]:
    sizes = {"bits": table.get("w_bit"), "group_size": table.get("q_group_size")}
    return {"quant_method": "awq", **sizes, **table}


# Files that declare a quantisation of which config.json may say nothing, and the same as a table of
# `quantization_config`.
DECLARING_FILES: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "hf_quant_config.json": _of_modelopt,
    "quantize_config.json": lambda table: {"quant_method": "gptq", **table},
    "quant_config.json": _of_autoawq,
}


def logical_tensors(
    config: Mapping[str, Any], headers: Headers, *, read: Callable[[str], bytes], where: str
) -> dict[str, LogicalTensor]:
    """Returns every logical tensor of a checkpoint by its name, quantised and plain ones.

    config: config.json; without a quantisation in it every tensor is plain
    headers: every tensor of every file
    read: returns the bytes of a stored tensor; is called for small ones of bitsandbytes only
    where: the path, for messages

    Raises ConfigError for a format without a codec, for parameters that its codec does not have,
    and for parts that are missing, left over, or of another shape or dtype.
    """
    found = FoundTensors(headers, where, read)
    quantization = quantization_of(config, where)
    if quantization is not None:
        scheme_of(quantization, where, headers).find(found)
        if found.put_aside(_ACTIVATION_SUFFIXES):
            _say_ignored(where)
    else:
        _refuse_untold_codes(found)
    found.add_plain()
    return found.logical


def _refuse_untold_codes(found: FoundTensors) -> None:
    """Raises ConfigError for codes of MLX, of which nothing says how many bits they have."""
    for name, (dtype, _) in found.headers.items():
        if dtype == "U32" and name.removesuffix("weight") + "scales" in found.headers:
            raise found.error(
                f"{name!r} is U32, as MLX stores codes, and config.json has no 'quantization' that "
                "says their bits; take the config.json of the same checkpoint"
            )


_SCHEMES: Mapping[str, Callable[[Mapping[str, Any], str], Scheme]] = {
    "fp8": fp8_scheme,
    "mxfp8": lambda *_: Scheme(FloatScheme((MXFP8,)), [("*", "fp8-1x32-u8")]),
    # Its packed experts are transposed: a scale per column.
    "fbgemm_fp8": lambda *_: Scheme(FloatScheme((PER_ROW, PER_COLUMN)), [("*", "fp8-1x0")]),
    "modelopt": modelopt_scheme,
    "modelopt_fp4": modelopt_scheme,
    "quark": quark_scheme,
    "mxfp4": lambda *_: Scheme(find_mxfp4, [(ROUTED, "mxfp4")]),
    "compressed-tensors": compressed_scheme,
    "gptq": grouped_scheme,
    "awq": grouped_scheme,
    "auto-round": grouped_scheme,
    "bitsandbytes": bitsandbytes_scheme,
    "gguf": lambda *_: Scheme(find_gguf),
    "mlx": mlx_scheme,
    "metal": mlx_scheme,
    "hqq": lambda *_: Scheme(find_hqq),
}
# Lists of modules that are numbers; and such modules outside of blocks, where no list says so.
_LEFT_OUT = (
    "ignore", "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers",
    "exclude_modules", "exclude",
)  # fmt: skip
_OUTSIDE: Mapping[str, Sequence[str]] = {"mlx": (), "compressed-tensors": ("re:.*embed_tokens",)}


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(one, kind) for one in value)


# Of a table of quantisation what each key has to be, if it is there and not null. "*" is any key.
KINDS: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    ("a table", lambda value: isinstance(value, dict), """
        quantized_layers layer_quant_config layer_quant_config.* global_quant_config export
        config_groups config_groups.* config_groups.*.weights sparsity_config transform_config
        dynamic dynamic.* extra_config extra_config.*"""),
    ("a table or a list of tables", lambda v: isinstance(v, dict) or _is_list_of(dict)(v), """
        algo_config global_quant_config.weight layer_quant_config.*.weight"""),
    ("a table or a text", lambda value: isinstance(value, dict | str), "quantized_layers.*"),
    ("a list of texts", _is_list_of(str), f"{' '.join(_LEFT_OUT)} config_groups.*.targets"),
    ("a text", lambda value: isinstance(value, str), """
        quant_method quant_algo quantized_layers.*.quant_algo checkpoint_format packing_format
        format config_groups.*.format global_quant_config.weight.dtype
        layer_quant_config.*.weight.dtype"""),
    ("an integer", lambda value: type(value) is int and abs(value) < 2**31, """
        bits group_size *.bits *.group_size dynamic.*.bits dynamic.*.group_size
        extra_config.*.bits extra_config.*.group_size config_groups.*.weights.num_bits
        config_groups.*.weights.group_size global_quant_config.weight.group_size
        layer_quant_config.*.weight.group_size"""),
)  # fmt: skip


def _check_kinds(quantization: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for a value of another kind than every writer gives."""
    for expected, is_kind, paths in KINDS:
        for path in paths.split():
            for key, value in _values_at(quantization, *path.split(".")):
                if value is not None and not is_kind(value):
                    raise ConfigError(
                        f"{where}: expected {expected} as {key} of its quantization, got "
                        f"{reprlib.repr(value)}"
                    )


def _values_at(table: Any, key: str, *rest: str) -> Iterator[tuple[str, Any]]:
    """Yields values with their keys. Entries of a list are asked in turn."""
    if isinstance(table, list):
        found = [(str(at), _values_at(entry, key, *rest)) for at, entry in enumerate(table)]
    else:
        entries = table if isinstance(table, dict) else {}
        names = entries if key == "*" else {key} & entries.keys()
        if not rest:
            yield from ((name, entries[name]) for name in names)
            return
        found = [(name, _values_at(entries[name], *rest)) for name in names]
    for name, inner in found:
        yield from ((f"{name}.{key}", value) for key, value in inner)


def scheme_of(
    quantization: Mapping[str, Any], where: str, headers: Headers | None = None
) -> Scheme:
    """Returns the scheme of a table. Raises ConfigError for one that no codec knows, with the first
    of the tensors that is not stored as numbers."""
    method = method_of(quantization)
    try:
        if str(method) not in _SCHEMES:
            remedy = "Use a checkpoint in one of those, or the bfloat16 one of the model"
            if method == "torchao":
                remedy = "infinity convert DIR -o OUT makes a bfloat16 model of it"
            raise ConfigError(
                f"{where}: its weights are quantized with quant_method={method!r}; codecs exist "
                f"for {', '.join(_SCHEMES)}. {remedy}, of which `infinity quantize` makes a "
                "smaller one"
            )
        _check_kinds(quantization, where)
        scheme = _SCHEMES[str(method)](quantization, where)
    except ConfigError as error:
        for name, (dtype, _) in (headers or {}).items():
            if dtype not in _WIDE:
                raise ConfigError(f"{error}. The first such tensor is {name!r} ({dtype})") from None
        raise
    left_out = list(_OUTSIDE.get(str(method), ("embed_tokens", "lm_head")))
    left_out += [pattern for key in _LEFT_OUT for pattern in quantization.get(key) or ()]
    numbers = [(pattern, "") for pattern in left_out] if scheme.formats else []
    return replace(scheme, formats=[*numbers, *scheme.formats])


def method_of(quantization: Mapping[str, Any]) -> str | None:
    """Returns the `quant_method` of a table, which some writers leave out."""
    method = quantization.get("quant_method")
    if method is None and "config_groups" in quantization:
        return "compressed-tensors"
    if method is None and "bits" in quantization and "group_size" in quantization:
        return "mlx"
    return method


@lru_cache(maxsize=64)
def _say_ignored(where: str) -> None:
    _log.info("%s: scales of activations and caches are ignored; weights are decoded", where)
