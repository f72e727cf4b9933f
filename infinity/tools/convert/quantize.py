"""Quantises the linear layers of a checkpoint, in the layout in which such models are published.

fp8   DeepSeek-V3's: E4M3 codes and F32 scales of 128x128 blocks, `weight` and `weight_scale_inv`
int4  Kimi-K2's: compressed-tensors, groups of 32, `weight_packed`, `weight_scale`, `weight_shape`
nf4   bitsandbytes' with nested scales, `weight` and `weight.absmax` and so on

Embeddings, the head, norms, biases and routers stay as they are, and so does a matrix whose shape
the format cannot store; config.json lists the modules. The source may be quantised: it is decoded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from infinity.checkpoint.huggingface.import_weights import WeightSource, weight_source
from infinity.checkpoint.huggingface.weight_tensors import read_config
from infinity.codecs import AffineGroups, FloatBlocks, Plain, TableBlocks
from infinity.codecs.detect import QUANTISATION_KEYS
from infinity.codecs.part import Codec
from infinity.config.paths import refuse_no_directory
from infinity.errors import ConfigError, listed
from infinity.fused.launches import FORMS
from infinity.modules.reading.configuration import is_router
from infinity.tools.convert.rewrite import (
    DirectoryPlan,
    PlannedTensor,
    as_codes,
    as_numbers,
    unchanged,
)

_log = logging.getLogger(__name__)

Format = Literal["fp8", "int4", "nf4"]

# Heads and embeddings stay, by the last part of their names; and routers.
_KEPT = re.compile(r"(^|\.)(lm_head|score|embed\w*|\w*embed(ding)?s?|wte|wpe)$")


# How a format is published: its codec by the dtype of the weight, its table in config.json, and the
# key there of the modules that stay.
FORMATS: Mapping[str, tuple[Callable[[torch.dtype], Codec], dict[str, Any], str]] = {
    "fp8": (
        lambda _: FloatBlocks(),
        {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "modules_to_not_convert",
    ),
    "int4": (
        lambda _: AffineGroups(),
        {
            "config_groups": {"group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                    "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
                    "symmetric": True, "type": "int",
                },
            }},
            "format": "pack-quantized", "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "compressed",
        },
        "ignore",
    ),
    "nf4": (
        lambda dtype: TableBlocks(stored=FORMS[dtype]),
        {
            "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False, "llm_int8_threshold": 6.0, "load_in_4bit": True,
            "load_in_8bit": False, "quant_method": "bitsandbytes",
        },
        "llm_int8_skip_modules",
    ),
}  # fmt: skip


def plan_quantize(directory: Path, to: Format) -> DirectoryPlan:
    """Plans every tensor of the result from headers. Reads no weight.

    Raises ConfigError for a directory without weights, for one without a matrix to quantise, and
    for packed experts, for which the formats have no published layout.
    """
    refuse_no_directory(directory)
    source, (codec_of, table, key_of_kept) = weight_source(directory), FORMATS[to]
    plan = DirectoryPlan.of(source, without_quantisation(read_config(directory)))
    kept, num_quantised, codecs = [], 0, set[type[Codec]]()
    for name in source.names():
        shard, module = source.file_of(name).name, name.removesuffix(".weight")
        dtype = _dtype_of_matrix(source, name)
        codec = None if dtype is None else codec_of(dtype)
        is_kept = bool(_KEPT.search(module)) or is_router(module)
        if codec is not None and not is_kept and _fits(codec, source.shape(name)):
            make = partial(source.read, name)
            plan.add(shard, name, as_codes(name, source.shape(name), codec, make))
            num_quantised += 1
            codecs.add(type(source.encoded(name).codec))
            continue
        if codec is not None:
            kept.append(module)
        plan.add(shard, name, plain(source, name))
    if not num_quantised:
        raise ConfigError(f"{directory} has no matrix that {to} can store")
    if codecs != {Plain}:
        _log.warning("%s is quantised: its weights are rounded a second time", directory)
    plan.config["quantization_config"] = {**table, key_of_kept: kept}
    return plan


def plain(source: WeightSource, name: str) -> PlannedTensor:
    """Returns a tensor as numbers: as it is stored, or decoded."""
    encoded = source.encoded(name)
    if isinstance(encoded.codec, Plain):
        return unchanged(source, name)
    return as_numbers(name, encoded.shape, encoded.dtype, partial(source.read, name))


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json, and the tables in it, without their quantisation."""
    return {
        key: without_quantisation(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in QUANTISATION_KEYS
    }


def _dtype_of_matrix(source: WeightSource, name: str) -> torch.dtype | None:
    """Returns the dtype of a tensor that is the weight of a linear layer, None of another. Raises
    ConfigError for packed experts."""
    shape, dtype = source.shape(name), source.stored_dtype(name)
    if not isinstance(dtype, torch.dtype) or dtype not in FORMS:
        return None
    if len(shape) == 3 and re.search(r"\.(experts|switch_mlp)\.", name):
        raise ConfigError(
            f"{source.path}: {listed([name])} packs experts in three dimensions {shape}; these "
            "formats are published with a matrix per expert. Give a directory that has those, if "
            "there is one"
        )
    return dtype if len(shape) == 2 and name.endswith(".weight") else None


def _fits(codec: Codec, shape: tuple[int, ...]) -> bool:
    try:
        codec.parts(shape)
    except ConfigError:
        return False
    return shape[0] > 1  # A gate of one row is no layer worth its scales.
