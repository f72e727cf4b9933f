"""Streams the weights of a Hugging Face directory into tiers, tensor by tensor.

Usage:

    source = weight_source("path/to/checkpoint")  # reads and checks the headers of all files
    plan = source.plan(model)                     # checks every name, shape and conversion
    plan.load(engine.write_parameter)             # streams; nothing is written before this line

or, in one call, `weight_source(path).load_into(model, engine.write_parameter)`.
`write(name, tensor)` gets each parameter once, under its first name in `model.named_parameters()`,
in full or by tiles (`load`), as a fresh CPU tensor **in the dtype of the file**. The writer casts,
because the fp32 master needs the value of the file, not a value that was rounded to bf16. The
writer may keep or change the tensor. Persistent buffers are written into the model. Memory holds
the source tensors of one target and the target (for example one expert stack), never the model.

The model may be on meta, or have handles or plain parameters: only names, shapes and dtypes are
used. A PEFT model has the names of the model that it wraps; adapters are not read from the file.

Everything that a header shows is checked before the first write: the length of every file, tensors
missing from the file that the index names, missing and unexpected tensors, codes of quantised
weights, shapes, conversions, and equality of tied weights. Errors: CorruptionError for bytes that
contradict each other, ConfigError if checkpoint and model do not belong together, StorageError for
a read that fails.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.bounded import MalformedError, field, plain_name, read_json, table_of
from infinity.checkpoint.huggingface.import_checks import (
    is_ignored,
    is_new_head,
    is_other_head,
    listed,
    read_config,
    refuse_codes,
    refuse_undeclared,
    refuse_unexpected,
)
from infinity.checkpoint.huggingface.names import (
    PlacedSource,
    SourcePlaces,
    TensorGroup,
    import_groups,
    is_expected_extra,
    is_expected_missing,
    planned_targets,
)
from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsReader,
    TensorInfo,
    dtype_name,
    tensor_bytes,
)
from infinity.codecs import Plain
from infinity.codecs.detect import logical_tensors
from infinity.codecs.found import Encoded
from infinity.engine.adapters import follows
from infinity.engine.dtypes import names_kept_wide
from infinity.errors import ConfigError, CorruptionError, StorageError, corrupt
from infinity.state.stored import Decoder, StoredPiece, StoredTensor
from infinity.storage.shards import ShardIdentity, ShardRange

_SINGLE_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"

_log = logging.getLogger("infinity")

Write = Callable[[str, torch.Tensor], None]
TileRows = Callable[[str], list[tuple[str, int, int]]]


def weight_source(path: str | os.PathLike[str]) -> WeightSource:
    """Opens a directory in Hugging Face layout (one file or an index), or one safetensors file.

    Reads and checks all headers. Raises ConfigError for a path without weights, CorruptionError for
    a damaged header or index, StorageError for a read that fails.
    """
    return WeightSource(path)


class WeightSource:
    """The logical tensors of a checkpoint, by their names. Holds headers, no tensor.

    A tensor that is stored as numbers has its name in the files. A quantised weight is one tensor
    with the name and the shape of the weight; its codes and scales are stored tensors
    (`infinity.codecs`). Not thread-safe; close it. Raises as `weight_source`, and ConfigError for a
    quantised checkpoint that no codec can decode.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._files: dict[str, Path] = {}  # tensor name -> the file that has it
        self._infos: dict[str, TensorInfo] = {}
        self._reader: SafetensorsReader | None = None
        self.identities: list[ShardIdentity] = []
        for file, listed_names in _find_files(self.path).items():
            with SafetensorsReader(file) as reader:
                for name in listed_names:
                    if name not in reader.tensors:
                        raise CorruptionError(
                            errno.ENOENT,
                            operation="read",
                            path=str(file),
                            detail=f"{_INDEX_NAME} says that tensor {name!r} is in this file, "
                            "but its header does not have it",
                        )
                self.identities.append(reader.identity())
                for name, info in reader.tensors.items():
                    if name in listed_names or name not in self._files:
                        self._files[name], self._infos[name] = file, info
        self._encoded = self._find_encoded()

    def _find_encoded(self) -> dict[str, Encoded]:
        directory = self.path if self.path.is_dir() else self.path.parent
        config = read_config(directory)
        refuse_undeclared(directory, config)
        headers = {
            name: (_stored_name(info), tuple(info.shape)) for name, info in self._infos.items()
        }
        return logical_tensors(config, headers, read=self._read_bytes, where=str(directory))

    def _read_bytes(self, name: str) -> bytes:
        return bytes(tensor_bytes(self._opened(name).read(name)))

    @property
    def nbytes(self) -> int:
        """The size of all tensors in the files."""
        return sum(info.nbytes for info in self._infos.values())

    def names(self) -> list[str]:
        """Returns the names of all logical tensors."""
        return list(self._encoded)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._encoded[name].shape

    def stored_dtype(self, name: str) -> torch.dtype | str:
        """Returns the dtype of a tensor; its name in the file if torch does not have the dtype."""
        encoded = self._encoded[name]
        if isinstance(encoded.codec, Plain):
            return self._infos[name].stored_dtype
        return encoded.dtype

    def file_of(self, name: str) -> Path:
        """Returns the file with the tensor, or with its codes."""
        return self._files[self._encoded[name].names[0]]

    def read(self, name: str) -> torch.Tensor:
        """Returns a fresh CPU tensor, in the dtype of the file or decoded.

        The file stays open until `close`. Raises CorruptionError, StorageError, UnsupportedError
        for a dtype that torch does not have.
        """
        encoded = self._encoded[name]
        if isinstance(encoded.codec, Plain):
            return self._opened(name).read(name)
        parts = [self._stored_bytes(part) for part in encoded.names]
        tensor = torch.empty(encoded.shape, dtype=encoded.dtype)
        encoded.codec.decode(parts, encoded.shape, tensor)
        return tensor

    def _stored_bytes(self, name: str) -> torch.Tensor:
        return self._opened(name).read(name).reshape(-1).view(torch.uint8)

    def encoded(self, name: str) -> Encoded:
        """Returns the codec of a tensor and the names of its stored tensors."""
        return self._encoded[name]

    def stored_info(self, stored_name: str) -> TensorInfo:
        """Returns the facts of a stored tensor, by its name in the files."""
        return self._infos[stored_name]

    def read_stored(self, stored_name: str) -> torch.Tensor:
        """Returns a stored tensor, by its name in the files, in the dtype of the file."""
        return self._opened(stored_name).read(stored_name)

    def stored(self, name: str) -> tuple[Decoder, tuple[ShardRange, ...]]:
        """Returns the codec of a tensor, and the ranges of files that it decodes."""
        encoded = self._encoded[name]
        ranges = []
        for part in encoded.names:
            info, path = self._infos[part], os.path.abspath(self._files[part])
            ranges.append(ShardRange(path, info.offset_nbytes, info.nbytes))
        return encoded.codec, tuple(ranges)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Returns rows [start, stop) of a tensor. Raises as `read`."""
        if not isinstance(self._encoded[name].codec, Plain):
            return self.read(name)[start:stop].clone()
        reader, info = self._opened(name), self._infos[name]
        rows = torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype)
        reader.read_into(name, start * math.prod(info.shape[1:]), rows)
        return rows

    def _opened(self, name: str) -> SafetensorsReader:
        file = str(self._files[name])
        if self._reader is None or self._reader.path != file:
            self.close()
            self._reader = SafetensorsReader(file)
        if self._reader.tensors.get(name) != self._infos[name]:
            raise CorruptionError(
                errno.ESTALE,
                operation="read",
                path=file,
                detail=f"the place of tensor {name!r} changed since the checkpoint was opened",
            )
        return self._reader

    def close(self) -> None:
        """Closes the file. Idempotent; a later `read` opens it again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def plan(
        self, model: nn.Module, *, strict: bool = True, ignore: Sequence[str] = ()
    ) -> ImportPlan:
        """Plans every write. Reads no tensor, except to compare tied weights that are stored twice.

        With `strict`, ConfigError is raised for a parameter that the checkpoint lacks, unless it is
        a head that the class of the checkpoint does not have; and for a tensor that the model has
        no place for, unless transformers ignores it, it belongs to the head of another class, or a
        pattern in `ignore` matches it. Without `strict` both are only listed, in `missing` and
        `unexpected` of the plan. Codes of quantised weights always raise ConfigError.
        """
        view = _ModelView(model)
        groups, unexpected = import_groups(view.model, self._encoded, view.targets)
        sources = {name: (each.shape, self._dtype(name)) for name, each in self._encoded.items()}
        provider: dict[str, TensorGroup] = {}  # canonical name -> the group that makes it
        duplicates: list[tuple[TensorGroup, TensorGroup]] = []
        kept: list[PlannedGroup] = []
        for group in groups:
            is_new = False
            made = planned_targets(group, sources, view.proxy())
            for name, (shape, _) in made.items():
                target = view.targets.get(name)
                if target is None:
                    unexpected.append(name)
                    continue
                self._check_shape(group, name, shape, target)
                used = ((n, self.stored_dtype(n)) for n in group.source_names)
                refuse_codes(self.path, name, target.dtype, used)
                if target.canonical in provider:
                    duplicates.append((provider[target.canonical], group))
                else:
                    provider[target.canonical] = group
                    is_new = True
            if is_new:
                kept.append(PlannedGroup(group, {n: shape for n, (shape, _) in made.items()}))
        for first, second in duplicates:
            self._check_tied(first, second)
        missing = [
            name
            for name in dict.fromkeys(target.canonical for target in view.targets.values())
            if name not in provider
        ]
        missing = [name for name in missing if not view.may_be_missing(name)]
        is_head = bool(missing) and is_new_head(view.model, missing, self.path)
        if missing and strict and not is_head:
            raise ConfigError(
                f"{self.path} lacks {listed(missing)} of {type(view.model).__name__}; "
                f"it has {len(self._encoded)} tensors, e.g. {listed(list(self._encoded)[:3])}. "
                "Is it a checkpoint of this architecture and these sizes?"
            )
        unexpected = [
            name
            for name in unexpected
            if not is_expected_extra(view.model, name)
            and not view.computes(name)
            and not is_ignored(name, ignore)
        ]
        heads = [name for name in unexpected if is_other_head(view.model, name, self._encoded)]
        if strict:
            refuse_unexpected(self.path, view.model, [n for n in unexpected if n not in heads])
        return ImportPlan(
            source=self, view=view, groups=kept, missing=missing, unexpected=unexpected
        )

    def load_into(
        self, model: nn.Module, write: Write, *, strict: bool = True, ignore: Sequence[str] = ()
    ) -> ImportPlan:
        """Runs `plan` and `load`; returns the plan. Raises as these."""
        plan = self.plan(model, strict=strict, ignore=ignore)
        plan.load(write)
        return plan

    def _dtype(self, name: str) -> torch.dtype:
        encoded = self._encoded[name]
        is_plain = isinstance(encoded.codec, Plain)
        return self._infos[name].dtype if is_plain else encoded.dtype

    def _check_shape(
        self, group: TensorGroup, name: str, shape: Sequence[int], target: _Target
    ) -> None:
        if tuple(shape) == target.shape:
            return
        files = dict.fromkeys(str(self.file_of(source)) for source in group.source_names)
        raise ConfigError(
            f"{', '.join(files)}: tensor {listed(group.source_names)} gives {name!r} the shape "
            f"{tuple(shape)}, the model expects {target.shape}; the checkpoint is of another size "
            "or architecture"
        )

    def _check_tied(self, first: TensorGroup, second: TensorGroup) -> None:
        """Raises ConfigError if two stored copies of a tied weight differ."""
        names = (first.source_names, second.source_names)
        assert len(names[0]) == len(names[1]) == 1, f"tied weights made by a conversion: {names}"
        one, other = (self.read(name[0]) for name in names)
        self.close()
        if one.dtype != other.dtype or tensor_bytes(one) != tensor_bytes(other):
            raise ConfigError(
                f"{self.path}: {names[0][0]!r} and {names[1][0]!r} are one tied weight of the "
                "model but differ in the checkpoint; set tie_word_embeddings to false in its "
                "config.json"
            )


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group, and the shapes of the targets that it makes, by name."""

    group: TensorGroup
    targets: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """A checked mapping from the tensors of a checkpoint to those of a model.

    `missing` parameters are not written; the model has no place for `unexpected` tensors.
    """

    source: WeightSource
    view: _ModelView
    groups: list[PlannedGroup]
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
        places = SourcePlaces(self.view.proxy())
        for planned in self.groups:
            names = planned.group.source_names
            shapes = [self.source.shape(name) for name in names]
            placed = places.of(planned.group, shapes, planned.targets)
            for name, sources in zip(planned.targets, placed or (), strict=bool(placed)):
                target = self.view.targets.get(name)
                if target is None:
                    continue
                pieces = tuple(self._piece(names[each.index], each) for each in sources)
                for parameter_name in target.parameter_names:
                    found.setdefault(parameter_name, pieces)
        return found

    def _piece(self, source: str, placed: PlacedSource) -> StoredPiece:
        codec, parts = self.source.stored(source)
        shape = self.source.shape(source)
        return StoredPiece(source, placed.box, placed.axes, shape, codec, parts)

    def load(
        self,
        write: Write,
        tile_rows: TileRows | None = None,
        in_place: Set[str] = frozenset(),
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
            for planned in self.groups:
                group = planned.group
                if self._is_read_in_place(planned, in_place):
                    continue
                if tile_rows is not None and self._load_by_tiles(group, write, tile_rows, written):
                    continue
                made = group.convert(self.source.read, self.view.proxy())
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

    def _is_read_in_place(self, planned: PlannedGroup, in_place: Set[str]) -> bool:
        """Whether nothing that the group makes has to be read now."""
        targets = [self.view.targets[n] for n in planned.targets if n in self.view.targets]
        return all(
            target.parameter_names and set(target.parameter_names) <= in_place for target in targets
        )

    def _warn_of_differences(self) -> None:
        kind = type(self.view.model).__name__
        if self.missing:
            _log.warning(
                "%s of %s are not in %s and are newly initialised",
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
                write(tile, self.source.read_rows(group.source_names[0], start, stop))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """One parameter or persistent buffer of the model.

    `canonical` is its first name in the view, which all aliases of a tied weight share.
    `parameter_names` are its names for the writer: one, or several if PEFT keeps a trainable copy
    of a module beside the frozen one. Exactly one of the two last fields is filled.
    """

    canonical: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter_names: tuple[str, ...] = ()
    buffers: tuple[tuple[nn.Module, str], ...] = ()


class _ModelView:
    """A model under the names of its checkpoint, without the wrapping of PEFT."""

    def __init__(self, model: Any) -> None:
        self.model: nn.Module = model.get_base_model() if _is_peft(model) else model
        self.targets: dict[str, _Target] = {}
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters: dict[str, list[nn.Parameter]] = {}
        buffers: dict[str, list[tuple[nn.Module, str]]] = {}
        self._computed: dict[str, list[str]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for leaf, parameter in module._parameters.items():
                name = _without_peft(self.model, prefix + leaf)
                if parameter is not None and name is not None:
                    parameters.setdefault(name, []).append(parameter)
            for leaf, buffer in module._buffers.items():
                name = _without_peft(self.model, prefix + leaf)
                is_saved = leaf not in module._non_persistent_buffers_set
                if not is_saved and name is not None:
                    self._computed.setdefault(leaf, []).append(name)
                if buffer is not None and is_saved and name is not None:
                    buffers.setdefault(name, []).append((module, leaf))
        first_name: dict[int, str] = {}
        for name, copies in parameters.items():
            same = [copies[0], *(copy for copy in copies[1:] if follows(copy, copies[0]))]
            self.targets[name] = _Target(
                canonical=first_name.setdefault(id(same[0]), name),
                shape=tuple(same[0].shape),
                dtype=same[0].dtype,
                parameter_names=tuple(dict.fromkeys(name_of[id(one)] for one in same)),
            )
        for name, places in buffers.items():
            module, leaf = places[0]
            buffer = module._buffers[leaf]
            assert buffer is not None
            self.targets[name] = _Target(
                canonical=first_name.setdefault(id(buffer), name),
                shape=tuple(buffer.shape),
                dtype=buffer.dtype,
                buffers=tuple(places),
            )

    def may_be_missing(self, name: str) -> bool:
        """Whether a checkpoint is complete without `name`.

        The model computes its buffers itself, and transformers lists some weights by pattern.
        """
        return bool(self.targets[name].buffers) or is_expected_missing(self.model, name)

    def computes(self, name: str) -> bool:
        """Whether `name` is a buffer that the model computes itself; older versions saved some."""
        leaf = name.rpartition(".")[2]
        return any(
            own == name or own.endswith(f".{name}") or name.endswith(f".{own}")
            for own in self._computed.get(leaf, ())
        )

    def proxy(self) -> Any:
        """Returns what conversions need of a model: configuration and shapes of parameters."""
        return _Proxy(getattr(self.model, "config", None), self.targets)


@dataclass(frozen=True, slots=True)
class _Proxy:
    config: Any
    targets: Mapping[str, _Target]

    def get_parameter(self, name: str) -> torch.Tensor:
        if name not in self.targets:
            raise AttributeError(f"the model has no parameter {name!r}")
        return torch.empty(self.targets[name].shape, device="meta")


def _set_buffer(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    buffer = module._buffers[name]
    assert buffer is not None
    if buffer.is_meta:
        module._buffers[name] = tensor.to(buffer.dtype)
    else:
        buffer.copy_(tensor)


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _without_peft(model: nn.Module, name: str) -> str | None:
    """Returns the name that a parameter had before PEFT wrapped its module; None for adapters.

    A tuner layer keeps the wrapped module as `base_layer` and names its own parts in
    `adapter_layer_names`; a module to save keeps `original_module` and copies by adapter name, and
    trainable tokens are a tuner layer called `token_adapter` in one of those.
    """
    kept: list[str] = []
    parts = name.split(".")
    module: Any = model
    while parts:
        part = parts.pop(0)
        child = getattr(module, part, None)
        if hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer"):
            if part != "base_layer":
                return None
        elif hasattr(module, "original_module"):
            if part == "modules_to_save":
                child = child[parts.pop(0)]  # type: ignore[index]
            elif part not in ("original_module", "token_adapter"):
                return None
        else:
            kept.append(part)
        module = child
    return ".".join(kept)


def _stored_name(info: TensorInfo) -> str:
    """Returns the dtype as the header has it."""
    return dtype_name(info.dtype) if info.unreadable is None else info.unreadable[0]


def _find_files(path: Path) -> dict[Path, list[str]]:
    """Returns the files of a checkpoint, each with the tensors that the index expects in it."""
    if path.is_file():
        return {path: []}
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; expected a local Hugging Face checkpoint")
    index = path / _INDEX_NAME
    single = path / _SINGLE_NAME
    if single.is_file():
        return {single: []}
    if not index.is_file():
        have = sorted(entry.name for entry in path.iterdir())
        raise ConfigError(
            f"{path} has neither {_SINGLE_NAME} nor {_INDEX_NAME}; it has {listed(have)}. "
            "Weights in other formats must be saved as safetensors first "
            "(model.save_pretrained)"
        )
    files: dict[Path, list[str]] = {}
    for name, file_name in _read_weight_map(index).items():
        files.setdefault(path / file_name, []).append(name)
    for file, names in files.items():
        if not file.is_file():
            raise CorruptionError(
                errno.ENOENT,
                operation="open",
                path=str(file),
                detail=f"{_INDEX_NAME} places {len(names)} tensors in it ({listed(names)}), "
                "but there is no such file; the checkpoint is incomplete",
            )
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        table = table_of(read_json(index), "it")
        weight_map = table_of(field(table, "weight_map"), "weight_map")
        for name, file_name in weight_map.items():
            plain_name(file_name, f"the file of tensor {name!r}")
    except OSError as error:
        raise StorageError(error.errno or 0, operation="read", path=str(index)) from None
    except MalformedError as error:
        raise corrupt(str(index), f"no weight_map can be read: {error}") from None
    return weight_map
