"""The checkpoints of compressed-tensors: groups of modules, each with a scheme for its weights.

Source: compressed-tensors `quantization/quant_args.py`, `quantization/quant_config.py` and
`compressors/quantized_compressors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinity.codecs.affine import AffineGroups
from infinity.codecs.floating import PER_ROW, PER_TENSOR, add_fp4, add_fp8
from infinity.codecs.found import FoundTensors
from infinity.errors import ConfigError

KNOWN_FORMATS = (
    "pack-quantized (4 bits, symmetric), float-quantized and naive-quantized (FP8, symmetric), "
    "mxfp8-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized"
)
_FP8_FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized")
_PACKED = ".weight_packed"
_LEFTOVERS = (
    _PACKED,
    ".weight_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
    ".weight_global_scale",
)


@dataclass(frozen=True, slots=True)
class _Group:
    """How the weights of some modules are stored. `size` is of INT4 groups, 0 for full rows."""

    kind: str  # "int4", "fp8", "mxfp4" or "nvfp4"
    size: int = 0
    block: tuple[int, int] = (0, 0)


class CompressedScheme:
    """`weight_packed` or F8_E4M3 `weight`, `weight_scale`, and for packed codes `weight_shape`."""

    def __init__(self, quantization: Mapping[str, Any], where: str) -> None:
        groups = quantization.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ConfigError(f"{where}: expected config_groups of compressed-tensors, got none")
        for key in ("sparsity_config", "transform_config"):
            table = quantization.get(key)
            if table and not (isinstance(table, dict) and table.get("format") == "dense"):
                raise ConfigError(f"{where}: no codec knows {key} of compressed-tensors: {table}")
        default = quantization.get("format")
        self._groups = [
            _parse_group(name, group, default, where)
            for name, group in groups.items()
            if not isinstance(group, dict) or group.get("weights") is not None
        ]

    def find(self, found: FoundTensors) -> None:
        """See `Scheme.find`."""
        for suffix in (".weight_zero_point", ".weight_g_idx"):
            for name in found.unused(suffix):
                raise found.error(
                    f"{name!r} is there: weights with zero points or act-order have no codec; use "
                    "a symmetric checkpoint without act-order"
                )
        for name in found.unused(_PACKED):
            stem = name.removesuffix("_packed")
            if found.headers[name][0] == "U8":
                self._add_fp4(found, stem)
            else:
                self._add_int4(found, stem)
        for name, (dtype, _) in found.headers.items():
            if dtype == "F8_E4M3" and not found.is_used(name):
                self._add_fp8(found, name)
        found.refuse_leftovers(_LEFTOVERS, "compressed-tensors")

    def _add_int4(self, found: FoundTensors, name: str) -> None:
        packed, scale = f"{name}_packed", f"{name}_scale"
        dtype, stored = _scale_of(found, name, ("BF16", "F16", "F32"))
        shape = found.matrix(packed)
        logical = (*shape[:-1], 8 * shape[-1])
        sizes = {group.size or logical[-1] for group in self._groups if group.kind == "int4"}
        per_row = stored[-1] if stored else 0
        size = logical[-1] // per_row if per_row else 0
        if size not in sizes or not size:
            expected = " or ".join(map(str, sorted(sizes))) or "no INT4 group"
            raise found.error(
                f"{scale!r} has shape {stored} for a weight of {logical}: groups of {size or '?'} "
                f"columns; config.json says {expected}. Do config.json and the files belong "
                "together?"
            )
        names, codec = (packed, scale), AffineGroups(size, dtype)
        found.add(name, codec, logical, names, aside=(f"{name}_shape",))

    def _add_fp4(self, found: FoundTensors, name: str) -> None:
        packed, scale = f"{name}_packed", f"{name}_scale"
        kinds = {"nvfp4": ("F8_E4M3",), "mxfp4": ("U8", "F8_E8M0")}
        known = [kind for kind in kinds if any(group.kind == kind for group in self._groups)]
        if not known:
            raise found.error(f"{packed!r} is U8, and config.json has no group of FP4")
        _scale_of(found, name, tuple(dtype for kind in known for dtype in kinds[kind]))
        add_fp4(found, packed, scale, f"{name}_global_scale", name=name, is_divided=True)

    def _add_fp8(self, found: FoundTensors, name: str) -> None:
        _scale_of(found, name, ("BF16", "F16", "F32", "U8", "F8_E8M0"))
        blocks = [group.block for group in self._groups if group.kind == "fp8"]
        add_fp8(found, name, f"{name}_scale", [*dict.fromkeys(blocks), *blocks[:1]])


def _scale_of(
    found: FoundTensors, name: str, dtypes: tuple[str, ...]
) -> tuple[str, tuple[int, ...]]:
    """Returns (dtype, shape) of the scales of a weight. Raises ConfigError."""
    scale = f"{name}_scale"
    if scale not in found.headers:
        raise found.error(
            f"{scale!r} is missing, without which {name!r} cannot be decoded; copy the checkpoint "
            "again, or use one that is complete"
        )
    dtype, shape = found.headers[scale]
    if dtype not in dtypes:
        raise found.error(f"{scale!r} is {dtype}; expected scales of {' or '.join(dtypes)}")
    return dtype, shape


def _parse_group(name: str, group: Any, default: Any, where: str) -> _Group:
    """Returns a group of config_groups. Raises ConfigError for one that no codec knows."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ConfigError(f"{where}: {name} of config_groups is no table with weights: {group!r}")
    form = group.get("format") or default
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    told = f"format={form!r}, {bits} bits, type={kind!r}, strategy={strategy!r}, group_size={size}"
    if not weights.get("symmetric", True):
        raise _unknown(where, name, f"{told}, asymmetric (with zero points)")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _unknown(where, name, f"{told}, actorder={weights['actorder']!r}")
    if (form, kind, bits) == ("pack-quantized", "int", 4):
        if strategy in ("group", None) and isinstance(size, int) and size > 0 and size % 8 == 0:
            return _Group("int4", size)
        if strategy == "channel":
            return _Group("int4")
    if form in _FP8_FORMATS and (kind, bits) == ("float", 8):
        block = _fp8_block(strategy, weights.get("block_structure"), size)
        if block is not None:
            return _Group("fp8", block=block)
    if (form, kind, bits, size) == ("mxfp4-pack-quantized", "float", 4, 32):
        return _Group("mxfp4")
    if (form, kind, bits, size) == ("nvfp4-pack-quantized", "float", 4, 16):
        return _Group("nvfp4")
    raise _unknown(where, name, told)


def _fp8_block(strategy: Any, structure: Any, size: Any) -> tuple[int, int] | None:
    """Returns the block of an FP8 strategy, None for one without a codec."""
    if strategy in ("tensor", None):
        return PER_TENSOR
    if strategy == "channel":
        return PER_ROW
    if strategy == "group" and isinstance(size, int) and size > 0:
        return 1, size
    if isinstance(structure, str) and re.fullmatch(r"\d+x\d+", structure):
        structure = [int(size) for size in structure.split("x")]
    is_pair = isinstance(structure, list) and len(structure) == 2
    if strategy == "block" and is_pair and all(isinstance(n, int) and n > 0 for n in structure):
        return structure[0], structure[1]
    return None


def _unknown(where: str, name: str, told: str) -> ConfigError:
    return ConfigError(
        f"{where}: {name} of compressed-tensors has {told}; codecs exist for {KNOWN_FORMATS}. Use "
        "such a checkpoint, or the bfloat16 one of the model"
    )
