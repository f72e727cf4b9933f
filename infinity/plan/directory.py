"""A downloaded model as shapes: its config.json, and the headers of its safetensors files.

Bytes are those of the files. Weights are not read. Names are those of transformers' checkpoints:
blocks are numbered, routed experts are below a module called "experts".
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from infinity.bounded import MalformedError, read_json, table_of
from infinity.checkpoint.huggingface.import_checks import with_declared
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader, TensorInfo
from infinity.codecs.detect import method_of, quantization_of, scheme_of
from infinity.errors import ConfigError
from infinity.plan.frozen_base import (
    PlannedPart,
    StoredBlock,
    StoredModel,
    stored_bytes,
    stored_experts,
    stored_of_shape,
)
from infinity.plan.shapes import LatentAttention, ModelShape, Moe, Part, PublishedFormat
from infinity.plan.shipped import shapes_remedy
from infinity.sizes import format_nbytes
from infinity.storage.shards import ShardRange

_INDEX = "model.safetensors.index.json"
_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_OTHER_TOWERS = re.compile(r"(?:^|\.)(?:vision|visual|audio|mm_projector|multi_modal)")
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory's shape, its stored bytes, its files (none before they are downloaded), and the
    drives that hold them."""

    path: Path
    shape: ModelShape
    stored: StoredModel
    files: tuple[Path, ...]
    max_positions: int | None = None  # The longest sequence, if config.json says.

    @property
    def is_quantised(self) -> bool:
        """Whether some weights are codes, which cannot be trained."""
        return any(
            block.experts.is_encoded or block.rest.is_encoded for block in self.stored.blocks
        )

    @property
    def num_drives(self) -> int:
        """The number of file systems that the files are on, symbolic links followed."""
        return len({os.stat(file).st_dev for file in self.files})


def read_directory(directory: Path) -> ModelDirectory:
    """Reads config.json and headers. Without any file of weights, sizes are those of the format
    that config.json names.

    Raises ConfigError for a directory without config.json, in a format without a codec, or with a
    block that no file has; CorruptionError for a damaged header.
    """
    where = str(directory / "config.json")
    table = _table(directory / "config.json")
    shape = shape_of_config(table, where)
    files = _files(directory)
    if not files:
        shape = shape.model_copy(update={"stored": published_format(table, where)})
        stored = stored_of_shape(shape)
        formats = f"{stored.formats}; by config.json, not downloaded"
        return ModelDirectory(
            directory, shape, replace(stored, formats=formats), (), _max_positions(table)
        )
    quantization = quantization_of(with_declared(directory, table), str(directory))
    if quantization is not None:
        scheme_of(quantization, str(directory))  # Refuses formats without a codec.
    headers = _ModelHeaders(shape)
    for file in files:
        with SafetensorsReader(file) as reader:
            for info in reader.tensors.values():
                headers.add(info, str(file))
    said = "not quantised" if quantization is None else method_of(quantization) or "quantised"
    stored = headers.stored(directory, said)
    return ModelDirectory(directory, shape, stored, files, _max_positions(table))


def shape_of_config(table: dict[str, Any], where: str) -> ModelShape:
    """Returns the shape that a config.json of transformers describes. Raises ConfigError with the
    missing key."""
    text = table.get("text_config") or table
    try:
        return ModelShape(
            name=f"{text.get('model_type', 'model')} in {Path(where).parent.name or where}",
            source=where,
            layers=_first(text, "num_hidden_layers", "n_layer"),
            hidden=_first(text, "hidden_size", "n_embd"),
            ffn=text.get("intermediate_size") or 4 * _first(text, "hidden_size", "n_embd"),
            heads=_first(text, "num_attention_heads", "n_head"),
            kv_heads=text.get("num_key_value_heads"),
            head_dim=None if text.get("kv_lora_rank") else text.get("head_dim"),
            vocab=_first(text, "vocab_size"),
            tied=bool(text.get("tie_word_embeddings", table.get("tie_word_embeddings", False))),
            latent_attention=_latent(text),
            moe=_moe(text),
        )
    except KeyError as error:
        raise ConfigError(f"{where}: expected the key {error}; it is missing") from None
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"{where} describes no model that can be planned: {error}") from None


def _table(file: Path) -> dict[str, Any]:
    try:
        return table_of(read_json(file), file.name)
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; expected the directory of a downloaded model"
            + shapes_remedy(str(file.parent))
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


def _first(text: dict[str, Any], *keys: str) -> Any:
    """Returns the value of the first key that is there. Raises KeyError with the first key."""
    for key in keys:
        if text.get(key) is not None:
            return text[key]
    raise KeyError(keys[0])


def _max_positions(table: dict[str, Any]) -> int | None:
    text = table.get("text_config") or table
    for key in ("max_position_embeddings", "n_positions"):
        if isinstance(text.get(key), int):
            return int(text[key])
    return None


def _latent(text: dict[str, Any]) -> LatentAttention | None:
    if not text.get("kv_lora_rank"):
        return None
    return LatentAttention(
        q_rank=_first(text, "q_lora_rank"),
        kv_rank=text["kv_lora_rank"],
        nope_head_dim=_first(text, "qk_nope_head_dim"),
        rope_head_dim=_first(text, "qk_rope_head_dim"),
        v_head_dim=_first(text, "v_head_dim"),
    )


def _moe(text: dict[str, Any]) -> Moe | None:
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    experts = next((text[key] for key in keys if text.get(key)), None)
    if experts is None:
        return None
    ffn = _first(text, "moe_intermediate_size", "intermediate_size")
    shared = text.get("n_shared_experts") or 0
    if text.get("shared_expert_intermediate_size"):
        shared = -(-text["shared_expert_intermediate_size"] // ffn)
    return Moe(
        experts=experts,
        experts_per_token=_first(text, "num_experts_per_tok", "experts_per_token"),
        expert_ffn=ffn,
        shared_experts=shared,
        dense_layers=text.get("first_k_dense_replace") or 0,
    )


def _files(directory: Path) -> tuple[Path, ...]:
    """Returns the files of weights; none if none of them is there."""
    index = directory / _INDEX
    if index.exists():
        try:
            names = set(table_of(_table(index).get("weight_map"), "weight_map").values())
        except MalformedError as error:
            raise ConfigError(f"{index}: {error}") from None
        missing = sorted(str(name) for name in names if not (directory / str(name)).exists())
        if len(missing) == len(names):
            return ()
        if missing:
            raise ConfigError(
                f"{directory} lacks {len(missing)} of the {len(names)} files that {_INDEX} names, "
                f"such as {missing[0]}; download them"
            )
        return tuple(sorted(directory / str(name) for name in names))
    return tuple(sorted(directory.glob("*.safetensors")))


@dataclass(slots=True)
class _PartHeaders:
    """The tensors of one part of the model, as headers are read."""

    nbytes: int = 0
    is_encoded: bool = False
    ranges: defaultdict[int, list[ShardRange]] = field(default_factory=lambda: defaultdict(list))
    stacks: list[ShardRange] = field(default_factory=list)

    def add(self, info: TensorInfo, path: str, num_experts: int | None) -> None:
        """Counts a tensor; `num_experts` of routed experts, else None."""
        self.nbytes += info.nbytes
        self.is_encoded |= info.unreadable is not None or info.dtype not in _PLAIN_DTYPES
        found = _EXPERT.search(info.name)
        part = ShardRange(path, info.offset_nbytes, info.nbytes)
        if num_experts and found is None and info.shape[:1] == (num_experts,):
            self.stacks.append(part)
        else:
            number = int(found[1]) if found is not None else 0
            self.ranges[number if number < (num_experts or 0) else 0].append(part)

    def stored(self, num_experts: int | None = None) -> PlannedPart:
        """Returns the bytes, and where they are."""
        if num_experts:
            tensor = stored_experts(self.ranges, self.stacks, num_experts)
        else:
            tensor = stored_bytes(self.ranges[0])
        return PlannedPart(self.nbytes, self.is_encoded, tensor)


@dataclass(slots=True)
class _ModelHeaders:
    """The tensors by block and part, as headers are read."""

    shape: ModelShape
    blocks: defaultdict[tuple[int, bool], _PartHeaders] = field(
        default_factory=lambda: defaultdict(_PartHeaders)
    )
    outside: defaultdict[str, _PartHeaders] = field(
        default_factory=lambda: defaultdict(_PartHeaders)
    )

    @property
    def num_experts(self) -> int | None:
        """The number of routed experts of a block."""
        return None if self.shape.moe is None else self.shape.moe.experts

    def add(self, info: TensorInfo, path: str) -> None:
        """Counts a tensor of a file."""
        found = _BLOCK.search(info.name)
        if _OTHER_TOWERS.search(info.name) or (found and int(found[1]) >= self.shape.layers):
            self.outside["unused"].add(info, path, None)
        elif found:
            is_experts = "experts" in found[2].split(".")
            part = self.blocks[int(found[1]), is_experts]
            part.add(info, path, self.num_experts if is_experts else None)
        else:
            self.outside[_part_outside(info.name)].add(info, path, None)

    def stored(self, directory: Path, format_name: str) -> StoredModel:
        """Returns what training reads. Raises ConfigError if a block has no weights."""
        layers = range(self.shape.layers)
        for layer in layers:
            if not self.blocks[layer, False].nbytes:
                raise ConfigError(
                    f"{directory}: config.json has {len(layers)} layers, and no file has weights "
                    f"of layer {layer}; download all files"
                )
        unused_nbytes = self.outside["unused"].nbytes
        unused = [f"{format_nbytes(unused_nbytes)} of the files are not read"] * bool(unused_nbytes)
        return StoredModel(
            blocks=tuple(
                StoredBlock(
                    experts=self.blocks[layer, True].stored(self.num_experts),
                    rest=self.blocks[layer, False].stored(),
                )
                for layer in layers
            ),
            embedding=self.outside["embedding"].stored(),
            norm=self.outside["norm"].stored(),
            head=self.outside["head"].stored(),
            formats="; ".join([format_name, *unused]),
            unused_nbytes=unused_nbytes,
        )


def _part_outside(name: str) -> str:
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
    if method in ("gptq", "awq"):
        return "int4-g128"
    if "nvfp4" in f"{quantization.get('format')} {quantization.get('quant_algo')}".lower():
        return "nvfp4"
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
