"""Plans and streams the weights of a Hugging Face directory into tiers, tensor by tensor.

    source = weight_source("path/to/checkpoint")  # reads and checks the headers of all files
    plan = source.plan(model)                     # checks every name, shape and conversion
    plan.load(engine.write_parameter)             # streams; nothing is written before this line

`write(name, tensor)` gets each parameter once, under its first name in `model.named_parameters()`,
in full or by tiles (`load`), as a fresh CPU tensor **in the dtype of the file**. The writer casts,
because the fp32 master needs the value of the file, not a value that was rounded to bf16. What is
quantised is decoded to the dtype of the parameter, as it is in place: placement changes no bit. The
writer may keep or change the tensor. Persistent buffers are written into the model. Memory holds
the source tensors of one target and the target (for example one expert stack), never the model.

Everything that a header shows is checked before the first write: the length of every file, tensors
missing from the file that the index names, missing and unexpected tensors, codes of quantised
weights, shapes, conversions, and equality of tied weights. A quantised checkpoint has the names and
often the shapes of a plain one, and codes that are read as numbers train without an error. So a
tensor that the model has no place for (a scale, a zero point) is refused as well. Errors:
CorruptionError for bytes that contradict each other, ConfigError if checkpoint and model do not
belong together, StorageError for a read that fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.huggingface.names import (
    ModelView,
    PlacedSource,
    SourcePlaces,
    TensorGroup,
    WeightTarget,
    import_groups,
    is_expected_extra,
    planned_targets,
)
from infinity.checkpoint.huggingface.safetensors_file import tensor_bytes
from infinity.checkpoint.huggingface.weight_tensors import WeightTensors, read_config
from infinity.codecs.detect import method_of, quantization_of
from infinity.errors import ConfigError, listed
from infinity.modules.reading.dtypes import names_kept_wide
from infinity.state.stored import StoredSlice, StoredTensor
from infinity.storage.shards import ShardIdentity

_log = logging.getLogger("infinity")
_WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

Write = Callable[[str, torch.Tensor], None]
TileRows = Callable[[str], list[tuple[str, int, int]]]


def weight_source(path: str | os.PathLike[str]) -> WeightSource:
    """Opens a directory in Hugging Face layout (one file or an index), or one safetensors file.

    Reads and checks all headers. Raises ConfigError for a path without weights, CorruptionError for
    a damaged header or index, StorageError for a read that fails.
    """
    return WeightSource(path)


class WeightSource(WeightTensors):
    """The tensors of a checkpoint, and plans of loading them into a model. Raises as
    `WeightTensors`."""

    def plan(
        self, model: nn.Module, *, strict: bool = True, ignore: Sequence[str] = ()
    ) -> ImportPlan:
        """Plans every write. Reads no tensor, except to compare tied weights that are stored twice,
        and biases of a class without them.

        With `strict`, ConfigError is raised for a parameter that the checkpoint lacks, unless it is
        a head that the class of the checkpoint does not have; and for a tensor that the model has
        no place for, unless transformers ignores it, it belongs to the head of another class, or a
        pattern in `ignore` matches it. Without `strict` both are only listed, in `missing` and
        `unexpected` of the plan. Codes of quantised weights always raise ConfigError.
        """
        view, names = ModelView(model), self.names()
        groups, unexpected = import_groups(view.model, names, view.targets)
        kept, missing, without_place = _match(self, view, groups)
        missing = [name for name in missing if not view.may_be_missing(name)]
        if strict:
            _refuse_missing(self.path, view.model, missing, names)
        unexpected = [
            name
            for name in (*unexpected, *without_place)
            if not is_expected_extra(view.model, name)
            and not view.computes(name)
            and not any(fnmatchcase(name, pattern) for pattern in ignore)
            and not self._adds_nothing(name)
        ]
        self.close()
        heads = [name for name in unexpected if _is_other_head(view.model, name, names)]
        if strict:
            _refuse_unexpected(self.path, view.model, [n for n in unexpected if n not in heads])
        return ImportPlan(
            source=self, view=view, groups=kept, missing=missing, unexpected=unexpected
        )

    def _adds_nothing(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, as AutoGPTQ writes for layers without one."""
        own = self._encoded.get(name)
        is_bias = own is not None and name.endswith(".bias") and len(own.shape) == 1
        return is_bias and not self.read(name).any()


# Ends of the names of codes, and what the weight has in their place.
_CODES = {".qweight": ".weight", "weight_packed": "weight", ".W_q": ".weight", "_blocks": ""}


def refuse_other_names(path: Path, model: nn.Module, names: Iterable[str]) -> None:
    """Raises ConfigError if the names of an index, whose files are not there, are others than the
    model has. A class with a conversion that makes several tensors is not asked."""
    view, stored = ModelView(model), [*names]
    for end, other in _CODES.items():
        stored = [f"{n.removesuffix(end)}{other}" if n.endswith(end) else n for n in stored]
    groups, _ = import_groups(view.model, stored, view.targets)
    if any(len(getattr(group.transform, "target_patterns", ())) > 1 for group in groups):
        return
    made = {view.targets[group.first_target].canonical for group in groups}
    every = dict.fromkeys(target.canonical for target in view.targets.values())
    missing = [name for name in every if name not in made and not view.may_be_missing(name)]
    _refuse_missing(path, view.model, missing, stored)


def _refuse_missing(
    path: Path, model: nn.Module, missing: Sequence[str], names: Sequence[str]
) -> None:
    if missing and not _is_new_head(model, missing, path):
        said = _of_mlx(path)
        if (others := _other_classes(model, path)) and not said:
            said = (
                f" It is of {listed(others)}, which may tie a tensor of this name to one of "
                "another; build that class, and give it to infinity.offload with `weights`"
            )
        raise ConfigError(
            f"{path} lacks {listed(missing)} of {type(model).__name__}; "
            f"it has {len(names)} tensors, e.g. {listed(names[:3])}. "
            f"Is it a checkpoint of this architecture and these sizes?{said}"
        )


def _of_mlx(path: Path) -> str:
    """Returns what else may be wrong with a checkpoint in MLX's format, "" of any other."""
    directory = path if path.is_dir() else path.parent
    table = quantization_of(read_config(directory), str(directory)) or {}
    said = (
        " MLX stores layers of some classes under other names and in other layouts; take the "
        "checkpoint that it was made of"
    )
    return said if method_of(table) == "mlx" else ""


def _match(
    source: WeightTensors, view: ModelView, groups: Sequence[TensorGroup]
) -> tuple[list[TensorGroup], list[str], list[str]]:
    """Finds the target of every tensor that the groups make.

    Returns the groups that make a target first; targets that no group makes, by canonical name; and
    tensors without a target. A target that was resized keeps its value. Raises ConfigError for
    another shape, and for codes of quantised weights.
    """
    facts = {name: (source.shape(name), source.dtype(name)) for name in source.names()}
    provider: dict[str, TensorGroup] = {}  # canonical name -> the group that makes it
    duplicates: list[tuple[TensorGroup, TensorGroup]] = []
    kept: list[TensorGroup] = []
    without_place: list[str] = []
    for group in groups:
        is_new = False
        made = planned_targets(group, facts, view)
        for name, (shape, _) in made.items():
            target = view.targets.get(name)
            if target is None:
                without_place.append(name)
                continue
            if len(made) == 1 and tuple(shape) != target.shape and target.is_resized_from(shape):
                provider.setdefault(target.canonical, group)
                _log.info("%r keeps its value, of shape %s", name, target.shape)
                continue
            _check_shape(source, group, name, shape, target)
            used = ((n, source.stored_dtype(n)) for n in group.source_names)
            refuse_codes(source.path, name, target.dtype, used)
            if target.canonical in provider:
                duplicates.append((provider[target.canonical], group))
            else:
                provider[target.canonical] = group
                is_new = True
        if is_new:
            kept.append(replace(group, targets={n: shape for n, (shape, _) in made.items()}))
    for first, second in duplicates:
        _check_tied(source, first, second)
    every = dict.fromkeys(target.canonical for target in view.targets.values())
    return kept, [name for name in every if name not in provider], without_place


def _check_shape(
    source: WeightTensors, group: TensorGroup, name: str, shape: Sequence[int], target: WeightTarget
) -> None:
    if tuple(shape) == target.shape:
        return
    files = dict.fromkeys(str(source.file_of(part)) for part in group.source_names)
    raise ConfigError(
        f"{', '.join(files)}: tensor {listed(group.source_names)} gives {name!r} the shape "
        f"{tuple(shape)}, the model expects {target.shape}; the checkpoint is of another size "
        "or architecture. A resized embedding or head needs its value before it is resized: "
        'weight.copy_(infinity.checkpoint.weight_source(directory).read("its name"))'
        f".{_of_mlx(source.path)}"
    )


def _check_tied(source: WeightTensors, first: TensorGroup, second: TensorGroup) -> None:
    """Raises ConfigError if two stored copies of a tied weight differ."""
    names = (first.source_names, second.source_names)
    assert len(names[0]) == len(names[1]) == 1, f"tied weights made by a conversion: {names}"
    one, other = (source.read(name[0]) for name in names)
    source.close()
    if one.dtype != other.dtype or tensor_bytes(one) != tensor_bytes(other):
        raise ConfigError(
            f"{source.path}: {names[0][0]!r} and {names[1][0]!r} are one tied weight of the "
            "model but differ in the checkpoint; set tie_word_embeddings to false in its "
            "config.json"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """A checked mapping from the tensors of a checkpoint to those of a model.

    `missing` parameters are not written; the model has no place for `unexpected` tensors.
    """

    source: WeightTensors
    view: ModelView
    groups: list[TensorGroup]
    missing: list[str]
    unexpected: list[str]

    @property
    def identities(self) -> list[ShardIdentity]:
        """The files, as they were when their headers were read."""
        return self.source.identities

    def stored(self) -> dict[str, StoredTensor]:
        """Returns the parameters that can be read in place, under their names for the writer.

        A parameter that needs more than stacking, concatenating or transposing what the files have
        is not among them.
        """
        found: dict[str, StoredTensor] = {}
        places = SourcePlaces(self.view)
        for group in self.groups:
            names = group.source_names
            placed = places.of(group, [self.source.shape(name) for name in names], group.targets)
            for name, sources in zip(group.targets, placed or (), strict=bool(placed)):
                target = self.view.targets.get(name)
                if target is None:
                    continue
                slices = tuple(self._slice(names[placed.index], placed) for placed in sources)
                for parameter_name in target.parameter_names:
                    found.setdefault(parameter_name, slices)
        return found

    def _slice(self, source: str, placed: PlacedSource) -> StoredSlice:
        codec, parts = self.source.stored(source)
        return StoredSlice(source, placed.box, placed.axes, self.source.shape(source), codec, parts)

    def load(
        self, write: Write, tile_rows: TileRows | None = None, in_place: Set[str] = frozenset()
    ) -> None:
        """Streams every tensor: parameters to `write`, buffers into the model.

        Parameters `in_place` are not read.

        `tile_rows(name)` returns (name, first row, end) of the tiles of a parameter. A tiled
        parameter that needs no conversion is read and written tile by tile. Raises
        CorruptionError, StorageError.
        """
        self._warn_of_differences()
        written: set[str] = set()
        wide = names_kept_wide(self.view.model)
        try:
            for group in self.groups:
                targets = [self.view.targets[n] for n in group.targets if n in self.view.targets]
                if all(t.parameter_names and set(t.parameter_names) <= in_place for t in targets):
                    continue  # Nothing that it makes has to be read now.
                if tile_rows is not None and self._load_by_tiles(group, write, tile_rows, written):
                    continue
                fetch = partial(self.source.read, dtype=targets[0].dtype)
                made = group.convert(fetch, self.view)
                while made:
                    name, tensor = made.popitem()
                    target = self.view.targets.get(name)
                    if target is None or target.canonical in written:
                        continue
                    written.add(target.canonical)
                    names = [n for n in target.parameter_names if n not in in_place]
                    for parameter_name in names[1:]:
                        write(parameter_name, tensor.clone())
                    for parameter_name in names[:1]:
                        write(parameter_name, tensor)
                    for module, buffer_name in target.buffers:
                        if wide is not None and wide.search(name):
                            module._buffers[buffer_name] = tensor.float()
                        else:
                            _set_buffer(module, buffer_name, tensor)
                    del tensor  # Frees the memory before the next read.
        finally:
            self.source.close()

    def _warn_of_differences(self) -> None:
        kind = type(self.view.model).__name__
        if self.missing:
            _log.warning(
                "%s of %s are not in %s: the values are new, or an adapter's",
                listed(self.missing), kind, self.source.path,
            )  # fmt: skip
        if self.unexpected:
            _log.warning(
                "%s in %s are not used by %s", listed(self.unexpected), self.source.path, kind
            )

    def _load_by_tiles(
        self, group: TensorGroup, write: Write, tile_rows: TileRows, written: set[str]
    ) -> bool:
        """Loads the group if it is one tiled parameter; returns whether it is."""
        target = self.view.targets.get(group.first_target)
        if group.transform is not None or target is None or len(target.parameter_names) != 1:
            return False
        tiles = tile_rows(target.parameter_names[0])
        if len(tiles) == 1:
            return False
        if target.canonical not in written:
            written.add(target.canonical)
            for tile, start, stop in tiles:
                name = group.source_names[0]
                write(tile, self.source.read_rows(name, start, stop, target.dtype))
        return True


def _set_buffer(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    buffer = module._buffers[name]
    assert buffer is not None
    if buffer.is_meta:
        module._buffers[name] = tensor.to(buffer.dtype)
    else:
        buffer.copy_(tensor)


def refuse_codes(
    path: object, target: str, wanted: torch.dtype, sources: Iterable[tuple[str, torch.dtype | str]]
) -> None:
    """Raises ConfigError if a float weight would be read from codes of a quantised one.

    Sources are (name, dtype). Allowed are the dtype of the model and the wide ones.
    """
    if not wanted.is_floating_point:
        return
    for name, dtype in sources:
        if dtype not in _WIDE and dtype is not wanted:
            raise ConfigError(
                f"{path}: {name!r} is {dtype}, and {target!r} of the model is {wanted}; codes of "
                "a quantized weight are not its numbers. Use the bfloat16 or float32 checkpoint "
                "of the model, or dequantize this one and save it"
            )


def _refuse_unexpected(path: object, model: nn.Module, names: Sequence[str]) -> None:
    """Raises ConfigError if `names`, tensors that the model has no place for, is not empty."""
    if names:
        raise ConfigError(
            f"{path} has tensors that {type(model).__name__} has no place for: {listed(names)}. "
            "Scales of a quantized checkpoint, or parts that the model lacks? Build the model that "
            "the checkpoint is of, or say which are to be left out: infinity.offload(..., "
            'weights=..., ignore=["pattern", ...]), in a file `model.ignore`'
        )


def _is_other_head(model: Any, name: str, source_names: Iterable[str]) -> bool:
    """Whether tensor `name` belongs to a head that the checkpoint has and the model does not have.

    Such a tensor lies outside the base model, in a module that the model does not have.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not any(source.startswith(f"{prefix}.") for source in source_names):
        return False
    return not name.startswith(f"{prefix}.") and not _has(model, name.rpartition(".")[0])


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _is_new_head(model: Any, missing: Sequence[str], directory: Path) -> bool:
    """Whether the missing names are those of a new head on the base model of the checkpoint, or of
    the pooler of a base model, which the checkpoints of some heads lack.

    Then config.json names another class, and no other tensor is missing. Raises ConfigError for a
    config.json that cannot be read.
    """
    prefix = getattr(model, "base_model_prefix", "")
    is_base = not prefix or not _has(model, prefix) or getattr(model, prefix) is model
    if any(name.startswith("pooler." if is_base else f"{prefix}.") != is_base for name in missing):
        return False
    return bool(_other_classes(model, directory))


def _other_classes(model: Any, path: Path) -> list[str]:
    """Returns the classes that config.json names, if that of the model is none of them."""
    classes = read_config(path if path.is_dir() else path.parent).get("architectures")
    return classes if isinstance(classes, list) and type(model).__name__ not in classes else []
