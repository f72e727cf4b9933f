"""A downloaded model as shapes: its config.json, and the headers of its safetensors files.

Bytes are those of the files. Weights are not read. Names are those of transformers' checkpoints:
blocks are numbered, routed experts are below a module called "experts".
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader, TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import (
    find_files,
    has_weights,
    read_config,
)
from infinity.codecs.detect import method_of, quantization_of, scheme_of
from infinity.codecs.grouped import GroupedScheme, MlxScheme
from infinity.config.extras import require_transformers
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import config_of_directory
from infinity.plan.files import refuse_no_model
from infinity.plan.frozen_base import (
    PartKey,
    Place,
    PlannedPart,
    StoredModel,
    stored_bytes,
    stored_experts,
    stored_of_shape,
)
from infinity.plan.shapes import (
    BlockShape,
    ModelShape,
    Part,
    PublishedFormat,
    numel_of,
    shape_of_config,
)
from infinity.sizes import format_nbytes
from infinity.storage.protocol import FileRange

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Towers beside the text model, and layers for multi-token prediction.
_UNREAD = re.compile(r"(?:^|\.)(?:vision|visual|audio|mm_projector|multi_modal|mtp|embed_vision)")
_MOST_OTHER = 0.01  # Some files have a buffer that the class makes itself.
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory's shape, its stored bytes, its files (none before they are downloaded), and the
    drives that hold them."""

    path: Path
    shape: ModelShape
    stored: StoredModel
    files: tuple[Path, ...]

    @property
    def num_drives(self) -> int:
        """The number of file systems that the files are on, symbolic links followed."""
        return len({os.stat(file).st_dev for file in self.files})


def read_directory(directory: Path, *, trusts_code: bool = False) -> ModelDirectory:
    """Reads config.json and headers. Without any file of weights, sizes are those of the format
    that config.json names. With `trusts_code`, code of the directory may run.

    Raises ConfigError for a directory without config.json, in a format without a codec, or with a
    block that no file has; CorruptionError for a damaged header.
    """
    where = str(directory / "config.json")
    refuse_no_model(directory)
    table = read_config(directory)
    require_transformers("infinity plan of a directory")
    hf_config = config_of_directory(directory, trusts_code=trusts_code)
    name = f"{hf_config.get_text_config().model_type} in {directory.name or directory}"
    shape = shape_of_config(hf_config, name, where, trusts_code=trusts_code)
    files = tuple(sorted(find_files(directory))) if has_weights(directory) else ()
    if not files:
        shape = replace(shape, stored=published_format(table, where))
        stored = stored_of_shape(shape)
        formats = f"{stored.formats}; by config.json, not downloaded"
        return ModelDirectory(directory, shape, replace(stored, formats=formats), ())
    quantization = quantization_of(table, str(directory))
    if quantization is not None:
        scheme_of(quantization, str(directory))  # Refuses formats without a codec.
    headers = _ModelHeaders(shape)
    for file in files:
        with SafetensorsReader(file) as reader:
            for info in reader.tensors.values():
                headers.add(info, str(file))
    said = "not quantised" if quantization is None else method_of(quantization) or "quantised"
    return ModelDirectory(directory, shape, headers.stored(directory, said), files)


@dataclass(slots=True)
class _PartHeaders:
    """The tensors of one part of the model, as headers are read."""

    nbytes: int = 0
    numel: int = 0
    is_encoded: bool = False
    ranges: defaultdict[int, list[FileRange]] = field(default_factory=lambda: defaultdict(list))
    stacks: list[FileRange] = field(default_factory=list)

    def add(self, info: TensorInfo, path: str, num_experts: int = 0) -> None:
        """Counts a tensor; `num_experts` of routed experts, else 0."""
        self.nbytes += info.nbytes
        self.numel += math.prod(info.shape)
        self.is_encoded |= info.unreadable is not None or info.dtype not in _PLAIN_DTYPES
        found = _EXPERT.search(info.name)
        part = FileRange(path, info.offset_nbytes, info.nbytes)
        if num_experts and found is None and info.shape[:1] == (num_experts,):
            self.stacks.append(part)
        else:
            number = int(found[1]) if found is not None else 0
            self.ranges[number if number < num_experts else 0].append(part)

    def stored(self, num_experts: int = 0) -> PlannedPart:
        """Returns the bytes, and where they are."""
        if num_experts:
            tensor = stored_experts(self.ranges, self.stacks, num_experts)
        else:
            tensor = stored_bytes(self.ranges[0])
        return PlannedPart(self.nbytes, self.is_encoded, tensor)


@dataclass(slots=True)
class _ModelHeaders:
    """The tensors by part, as headers are read."""

    shape: ModelShape
    parts: defaultdict[PartKey, _PartHeaders] = field(
        default_factory=lambda: defaultdict(_PartHeaders)
    )

    def add(self, info: TensorInfo, path: str) -> None:
        """Counts a tensor of a file."""
        found = _BLOCK.search(info.name)
        place: Place = int(found[1]) if found else _place_outside(info.name)
        of_experts = False
        if _UNREAD.search(info.name) or (found and int(found[1]) >= len(self.shape.blocks)):
            place = "unused"
        elif found:
            of_experts = "experts" in found[2].split(".")
        num_experts = self._num_experts(place) if of_experts else 0
        self.parts[place, of_experts].add(info, path, num_experts)

    def _num_experts(self, place: Place) -> int:
        return self.shape.blocks[place].num_experts if isinstance(place, int) else 0

    def stored(self, directory: Path, format_name: str) -> StoredModel:
        """Returns what training reads. Raises ConfigError if a block has no weights."""
        for layer, block in enumerate(self.shape.blocks):
            if not self.parts[layer, False].nbytes:
                raise ConfigError(
                    f"{directory}: config.json has {len(self.shape.blocks)} layers, and no file "
                    f"has weights of layer {layer}; download all files"
                )
            self._compare(directory, layer, block)
        unused_nbytes = self.parts["unused", False].nbytes
        unused = [f"{format_nbytes(unused_nbytes)} of the files are not read"] * bool(unused_nbytes)
        parts = {
            (place, of_experts): part.stored(self._num_experts(place) if of_experts else 0)
            for (place, of_experts), part in self.parts.items()
        }
        return StoredModel(parts, formats="; ".join([format_name, *unused]))

    def _compare(self, directory: Path, layer: int, block: BlockShape) -> None:
        """Raises ConfigError for a layer that has other sizes in the files than its class has."""
        parts = [self.parts[layer, of_experts] for of_experts in (True, False)]
        found, wanted = sum(part.numel for part in parts), numel_of(block.weights)
        if any(part.is_encoded for part in parts) or abs(found - wanted) <= wanted * _MOST_OTHER:
            return
        raise ConfigError(
            f"{directory}: layer {layer} has {found:,} parameters in the files, and {wanted:,} in "
            "the class of config.json in transformers; expected the config.json of these files"
        )


def _place_outside(name: str) -> Place:
    parts = name.split(".")
    if any(part in ("embed_tokens", "wte", "word_embeddings") for part in parts):
        return "embedding"
    if any(part in ("lm_head", "head", "output") for part in parts):
        return "head"
    return "norm" if "norm" in parts[-2] or "ln_f" in parts else "unused"


# A module of each part, as configurations name those that stay as they are.
_MODULES: dict[Part, str] = {
    "attention": "model.layers.7.self_attn.q_proj",
    "dense": "model.layers.7.mlp.gate_proj",
    "shared": "model.layers.7.mlp.shared_experts.gate_proj",
    "experts": "model.layers.7.mlp.experts.0.gate_proj",
}
_LEFT_OUT_KEYS = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")


def published_format(table: Mapping[str, Any], where: str) -> PublishedFormat | None:
    """Returns the format and the parts of a block that have it; None if nothing is quantised.

    Raises ConfigError for a quantisation that no codec knows.
    """
    quantization = quantization_of(table, where)
    if quantization is None:
        return None
    scheme = scheme_of(quantization, where)
    method = method_of(quantization)
    if method == "hqq" or quantization.get("load_in_8bit"):
        raise ConfigError(
            f"{where}: the sizes of weights of {method} in this format are counted in its files; "
            "download them, and plan the directory"
        )
    grouped = scheme.format if isinstance(scheme, GroupedScheme | MlxScheme) else ""
    name = grouped or _format_name(quantization)
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
    if "nvfp4" in f"{quantization.get('format')} {quantization.get('quant_algo')}".lower():
        return "nvfp4"
    groups = quantization.get("config_groups")
    weights = [
        group.get("weights")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    codes = [scheme for scheme in weights if scheme and scheme.get("type") == "int"]
    if not codes:
        return "fp8-128x128"
    return f"int{codes[0].get('num_bits')}-g{codes[0].get('group_size') or -1}"


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
