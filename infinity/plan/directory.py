"""A downloaded model as shapes: its config.json, and the headers of its safetensors files.

Bytes are those of the files. The tensors of the files get their places by the plan of an import, so
that what training refuses is refused here. Weights are read to compare a tied one that is stored
twice.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint.huggingface.import_weights import (
    ImportPlan,
    refuse_other_names,
    weight_source,
)
from infinity.checkpoint.huggingface.weight_tensors import (
    INDEX_NAME,
    WeightTensors,
    has_weights,
    read_config,
    read_index,
)
from infinity.codecs import Plain
from infinity.codecs.detect import method_of, quantization_of, scheme_of
from infinity.config.extras import require_release
from infinity.config.hub import model_name
from infinity.config.schema.train import Purpose
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import config_of_directory
from infinity.plan.files import refuse_no_model
from infinity.plan.frozen_base import (
    PLAIN,
    Matrices,
    PlannedPart,
    StoredModel,
    stored_bytes,
    stored_experts,
    stored_of_shape,
)
from infinity.plan.shapes import (
    ModelShape,
    PartKey,
    Place,
    Weight,
    model_on_meta,
    numel_of,
    places_of,
    shape_of_model,
)
from infinity.sizes import format_nbytes
from infinity.storage.protocol import FileRange

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory's shape, its stored bytes, its tokens, its files (none before they are
    downloaded), and the drives that hold them."""

    path: Path
    shape: ModelShape
    stored: StoredModel
    vocab_size: int
    files: tuple[Path, ...] = ()

    @property
    def num_drives(self) -> int:
        """The number of file systems that the files are on, symbolic links followed."""
        return len({os.stat(file).st_dev for file in self.files})


def read_directory(
    directory: Path, *, trusts_code: bool = False, ignore: Sequence[str] = (),
    purpose: Purpose = "generates text", num_labels: int = 0,
) -> ModelDirectory:  # fmt: skip
    """Reads config.json and headers, and finds the place of each tensor as training does. Without
    any file of weights, sizes are those of the format that config.json names. With `trusts_code`,
    code of the directory may run. `ignore` is that of `[model]`, `purpose` that of a run, and
    `num_labels` as in `model_on_meta`.

    Raises ConfigError for a directory without config.json, in a format without a codec, or with
    other weights than its class has; CorruptionError for a damaged header.
    """
    where = str(directory / "config.json")
    refuse_no_model(directory)
    table = read_config(directory)
    require_release("transformers", "infinity plan of a directory")
    hf_config = config_of_directory(directory, trusts_code=trusts_code)
    text = hf_config.get_text_config()
    vocab_size = getattr(text, "vocab_size", 0)
    name = f"{text.model_type} in {model_name(directory)}"
    model = model_on_meta(
        hf_config, where, trusts_code=trusts_code, purpose=purpose, num_labels=num_labels
    )
    shape = shape_of_model(model, name, where)
    if not has_weights(directory):
        stored = _not_downloaded(directory, table, shape, model)
        formats = f"{stored.formats}; by config.json, not downloaded"
        stored = replace(stored, formats=formats)
        return ModelDirectory(directory, shape, stored, vocab_size)
    quantization = quantization_of(table, str(directory))
    said = "not quantised" if quantization is None else method_of(quantization) or "quantised"
    source = weight_source(directory)
    stored = _stored(source.plan(model, ignore=ignore), shape, model, said)
    files = tuple(Path(file.path) for file in source.identities)
    return ModelDirectory(directory, shape, stored, vocab_size, files)


def _stored(plan: ImportPlan, shape: ModelShape, model: Any, format_name: str) -> StoredModel:
    """Returns the bytes of each part. A tensor of several targets is in the place of the first."""
    sources: defaultdict[PartKey, list[str]] = defaultdict(list)
    matrices: defaultdict[PartKey, Matrices] = defaultdict(tuple)
    places, tensors = places_of(model), plan.stored()
    for group in plan.groups:
        targets = (plan.view.targets[name] for name in group.targets if name in plan.view.targets)
        names = [name for target in targets for name in target.parameter_names]
        if not names:
            continue
        kind = type(model.get_submodule(names[0].rpartition(".")[0]))
        key, found = places[names[0]], tensors.get(names[0])
        is_apart = found and not key[1] and len(group.targets) == 1
        if is_apart and kind in (nn.Linear, nn.Embedding):  # The engine divides these.
            size = tuple(model.get_parameter(names[0]).shape)
            matrix = replace(_part(plan.source, group.source_names), tensor=found or ())
            matrices[key] += ((size, matrix),)
        else:
            sources[key] += group.source_names
    parts = {}
    for key in {**sources, **matrices}:
        block = shape.blocks[key[0]] if key[1] and isinstance(key[0], int) else None
        num_experts = block.num_experts if block is not None else 0
        parts[key] = _part(plan.source, sources[key], num_experts, matrices[key])
    unused = PlannedPart(plan.source.nbytes - sum(part.nbytes for part in parts.values()))
    stored = StoredModel({**parts, ("unused", False): unused}, format_name)
    return replace(stored, formats="; ".join([format_name, *_left_out(stored, shape)]))


def _part(
    source: WeightTensors, names: Iterable[str], num_experts: int = 0, matrices: Matrices = ()
) -> PlannedPart:
    """Returns the bytes of logical tensors, and where they are: by expert, of routed experts."""
    ranges: defaultdict[int, list[FileRange]] = defaultdict(list)
    stacks: list[FileRange] = []
    nbytes = sum(matrix.nbytes for _, matrix in matrices)
    is_encoded = any(matrix.is_encoded for _, matrix in matrices)
    for name in names:
        codec, own = source.stored(name)
        nbytes += sum(part.nbytes for part in own)
        is_encoded |= not isinstance(codec, Plain)
        found = _EXPERT.search(name)
        number = int(found[1]) if found is not None else 0
        if num_experts and found is None and source.shape(name)[:1] == (num_experts,):
            stacks += own
        else:
            ranges[number if number < num_experts else 0] += own
    if num_experts:
        return PlannedPart(nbytes, is_encoded, stored_experts(ranges, stacks, num_experts))
    return PlannedPart(nbytes, is_encoded, stored_bytes(ranges[0]), matrices)


def _left_out(stored: StoredModel, shape: ModelShape) -> Iterator[str]:
    tower, unused = stored.part("tower").nbytes, stored.part("unused").nbytes
    if tower:
        yield (
            f"{format_nbytes(tower)} beside the text model ({numel_of(shape.tower) / 1e9:.3g} B "
            "parameters) are frozen, and read with images alone"
        )
    if unused:
        yield f"{format_nbytes(unused)} of the files are not read"


# Where checkpoints have their layers, and other names that weights of experts have in them.
_LAYERS = ("model.layers", "model.language_model.layers", "language_model.model.layers")
_OUTSIDE = {
    "embedding": ("model.embed_tokens", "language_model.model.embed_tokens"),
    "head": ("lm_head", "language_model.lm_head"),
}
_OF_EXPERTS = {
    "gate_up_proj": ("gate_up_proj", "gate_proj", "w1"),
    "down_proj": ("down_proj", "w2"),
}


def _not_downloaded(
    directory: Path, table: Mapping[str, Any], shape: ModelShape, model: Any
) -> StoredModel:
    """Returns the bytes of each part in the format that config.json names for its modules.

    Raises ConfigError for a quantisation that no codec knows, or that only files can count, and for
    an index of another class.
    """
    where, index = str(directory / "config.json"), directory / INDEX_NAME
    names, size = read_index(index) if index.is_file() else ({}, 0)
    if names and not shape.scores:  # Of a run that was not told yet, the head may be another one.
        refuse_other_names(directory, model, names)
    quantization = quantization_of(table, where)
    if quantization is None:
        is_wide = "float32" in (table.get("dtype"), table.get("torch_dtype"))
        if size:  # Files may be wider than config.json says.
            is_wide = size > 3 * (shape.num_params + numel_of(shape.tower))
        return stored_of_shape(shape, plain="fp32" if is_wide else PLAIN)
    method = method_of(quantization)
    scheme = scheme_of({"expert_dtype": table.get("expert_dtype"), **quantization}, where)
    if not scheme.formats:
        raise ConfigError(
            f"{where}: the sizes of weights of {method} in this format are counted in its files; "
            "download them, and plan the directory"
        )
    by_module, places = scheme.by_module(), places_of(model)
    # bitsandbytes quantises modules, and experts are parameters of one since transformers 5.
    writer = str(table.get("transformers_version") or "4")
    has_modules = method != "bitsandbytes" or writer.startswith("4")
    layers = next(name.partition(f".{at}.")[0] for name, (at, _) in places.items() if at == 0)

    def format_of(weight: Weight, place: Place) -> str:
        name = weight.name.removesuffix(".weight")
        if place in _OUTSIDE and len(weight.shape) == 2:
            return by_module((name, *_OUTSIDE[place]))
        if not isinstance(place, int) or not weight.is_linear or weight.part == "router":
            return ""
        names = [name]
        if weight.part == "experts":
            if not has_modules and name == weight.name:
                return ""
            around, _, own = name.rpartition(".")
            for last in _OF_EXPERTS.get(own, (own,)):
                names += [f"{around}.{last}", f"{around}.0.{last}"]
                if method == "mlx":
                    names.append(f"{around.removesuffix('experts')}switch_mlp.{last}")
        return by_module(f"{at}.{place}.{name}" for at in {layers, *_LAYERS} for name in names)

    return stored_of_shape(shape, format_of)
