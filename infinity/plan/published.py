"""The format of a checkpoint's weights by its config.json alone, before they are downloaded. Pure.

What a table leaves out of quantisation is found by the names that transformers gives the modules of
a block. Sizes are those of the nearest format of `formats.py`: groups of 128 have fewer scales.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from infinity.codecs.detect import quantization_of
from infinity.codecs.schemes import scheme_of
from infinity.plan.shapes import Part, PublishedFormat

# A module of each part, as configurations name those that stay as they are.
_MODULES: dict[Part, str] = {
    "attention": "model.layers.7.self_attn.q_proj",
    "dense": "model.layers.7.mlp.gate_proj",
    "shared": "model.layers.7.mlp.shared_experts.gate_proj",
    "experts": "model.layers.7.mlp.experts.0.gate_proj",
}
_LEFT_OUT_KEYS = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")
_BITS_OF_INT4 = 4


def published_format(table: Mapping[str, Any], where: str) -> PublishedFormat | None:
    """Returns the format and the parts of a block that have it; None if nothing is quantised.

    Raises ConfigError for a quantisation that no codec knows.
    """
    quantization = quantization_of(table, where)
    if quantization is None:
        return None
    scheme_of(quantization, where)
    name = _format_name(quantization)
    if name == "mxfp4":
        return PublishedFormat(format=name, parts=("experts",))
    patterns = [str(pattern) for key in _LEFT_OUT_KEYS for pattern in quantization.get(key) or ()]
    parts = tuple(
        part
        for part, module in _MODULES.items()
        if not any(_matches(pattern, module) for pattern in patterns)
    )
    return PublishedFormat(format=name, parts=parts) if parts else None


def _format_name(quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return "mxfp4"
    if method == "bitsandbytes":
        return "nf4"
    groups = quantization.get("config_groups")
    weights = [
        group.get("weights")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    has_int4 = any(scheme.get("num_bits") == _BITS_OF_INT4 for scheme in weights if scheme)
    return "int4-g32" if has_int4 else "fp8-128x128"


def _matches(pattern: str, module: str) -> bool:
    """Whether a name, a part of one, a glob or "re:" and an expression means the module."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module) is not None
        except re.error:
            return False
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(module, f"{pattern}*")
    return f".{pattern}." in f".{module}."
