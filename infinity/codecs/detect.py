"""Finds the codec of every tensor of a checkpoint, from its configuration and its headers.

The headers decide which tensors are quantised, because every quantised weight has parts that a
plain one does not have. The configuration decides what the parts mean, and every scheme in it must
be one that a codec knows. What the two say must agree; no tensor of codes or scales is left over.

Sources: transformers 5.23 `integrations/finegrained_fp8.py`, `mxfp4.py`, `bitsandbytes.py`;
compressed-tensors `quantization/quant_args.py`, `compressors/`; docs/formats/quantized.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from infinity.codecs.found import FoundTensors, Headers, LogicalTensor
from infinity.codecs.schemes import scheme_of
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
