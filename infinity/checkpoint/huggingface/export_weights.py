"""Exports the weights of a model as a Hugging Face checkpoint, tensor by tensor.

The plan needs shapes only. It gives every tensor its name, its shard and its offset. Then each
tensor is read from its tier and written to its place. If transformers has another layout on disk
(per-expert matrices instead of a packed one), one group of tensors is converted at a time.

The files get their final names when all of them are complete and synced. The old index, or the only
weight file, loses its name first, and the new one gets it last, so a crash in between leaves a
directory that does not load instead of one that loads a mixture.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.durable import (
    check_space,
    make_directory,
    replace_files,
    sync_directory,
    sync_file,
)
from infinity.checkpoint.huggingface.names import TensorGroup, export_groups, planned_targets
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsWriter, TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import INDEX_NAME, OF_DIFFUSERS, SINGLE_NAME
from infinity.checkpoint.reader import CheckpointSource, Kind, StateInfo
from infinity.engine.registry import find_engine
from infinity.errors import ConfigError, reporting
from infinity.modules.tiling.layers import Tiled
from infinity.modules.tiling.split import modules_of, parameters_of
from infinity.sizes import GIB
from infinity.storage.lock_file import locked

_SHARD_PATTERN = re.compile(rf"({OF_DIFFUSERS})?model(-\d{{5}}-of-\d{{5}})?\.safetensors")

Read = Callable[[str], torch.Tensor]


def export_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_nbytes: int = 2 * GIB,
    tokenizer: Any = None,
    read: Read | None = None,
    master: bool = False,
) -> list[Path]:
    """Writes a directory for `AutoModel...from_pretrained(directory)`, or for that of a class of
    diffusers; returns the weight files.

    The directory gets the weights (tied weights once), persistent buffers, config.json and
    generation_config.json if the model has them, and the files of the tokenizer if one is given.

    master: write fp32 masters, which the weights are rounded from, instead of the compute dtype
    max_shard_nbytes: the most bytes of tensors in one file; a larger tensor gets its own file
    read: `read(name)` returns a parameter on the CPU, with `master` in fp32; by default it reads
        from the engine of the model, or from the model itself if it has no engine

    Replaces the files of an earlier export, and leaves other files of the directory as they are.
    One rank is enough; ranks that export to one directory take turns. Raises ConfigError for a PEFT
    model, for a bad `max_shard_nbytes` and where another program is exporting; StorageError for too
    little space before anything is written, and for a write that fails.
    """
    directory, read = Path(directory), read or _reader(model, master=master)
    engine = find_engine(model)
    with contextlib.nullcontext() if engine is None else engine.alone():  # Files are of one step.
        plan = plan_export(model, max_shard_nbytes=max_shard_nbytes, master=master)
        make_directory(directory)
        waits = engine is not None and engine.num_ranks > 1
        busy = "another export is being written there"
        with locked(directory, busy, is_needed=False, waits=waits):
            _write(model, directory, plan, tokenizer, read, master=master)
    return [directory / shard for shard in plan.shards]


def _write(
    model: nn.Module, directory: Path, plan: ExportPlan, tokenizer: Any, read: Read, *, master: bool
) -> None:
    check_space(directory, plan.nbytes)
    fetch, tiles_of = _fetcher(model, read), _tiles_of(model)
    writers: dict[str, SafetensorsWriter] = {}
    texts = directory / ".texts.partial"
    try:
        for group in plan.groups:
            tiles = tiles_of(group)
            made = {} if tiles else group.convert(fetch, model)
            for name in [group.first_target] if tiles else list(made):
                shard = plan.shard_of[name]
                if shard not in writers:
                    writers[shard] = SafetensorsWriter(
                        directory / shard, plan.shards[shard], metadata={"format": "pt"}
                    )
                start = 0
                for tile in tiles:
                    part = read(tile).contiguous()
                    writers[shard].write_part(name, start, part)
                    start += part.numel()
                if not tiles:
                    writers[shard].write(name, made.pop(name))
                if writers[shard].is_complete:
                    writers[shard].finish()
        with reporting("export", directory):
            shutil.rmtree(texts, ignore_errors=True)
            texts.mkdir()
            _write_texts(model, texts, tokenizer, master=master)
            if len(plan.shards) > 1:
                _write_index(directory / plan.partial_index_name, plan)
            _commit(directory, texts, plan, writers)
    finally:
        shutil.rmtree(texts, ignore_errors=True)
        with contextlib.suppress(OSError):
            (directory / plan.partial_index_name).unlink()
        for writer in writers.values():
            writer.close()


def export_checkpoint_safetensors(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    master: bool = False,
    max_shard_nbytes: int = 2 * GIB,
    tokenizer: Any = None,
) -> list[Path]:
    """Runs `export_safetensors` on the weights of a checkpoint; returns the weight files.

    checkpoint: a checkpoint, or a directory of checkpoints, from which the newest is exported
    model: of the same architecture; it may be on meta, because only names and shapes are used

    Memory holds one tensor, or the group of tensors that transformers converts together. Raises
    ConfigError for a checkpoint of another model before anything is written, CorruptionError for
    bytes that their checksum does not match, otherwise as `export_safetensors`.
    """
    with CheckpointSource(checkpoint) as source:
        infos = {(info.name, info.kind): info for info in source.infos}
        _check_model(infos, model, source.path)

        def read(name: str) -> torch.Tensor:
            kind: Kind = "master" if master and (name, "master") in infos else "weight"
            value = source.tensor(infos[name, kind])
            return value.float() if master and value.is_floating_point() else value

        with torch.no_grad():
            buffers = source.buffers()
            for name, buffer in model.named_buffers():
                if name in buffers and not buffer.is_meta:
                    buffer.copy_(buffers[name])
        return export_safetensors(
            model,
            directory,
            max_shard_nbytes=max_shard_nbytes,
            tokenizer=tokenizer,
            read=read,
            master=master,
        )


def _check_model(infos: dict[tuple[str, Kind], StateInfo], model: nn.Module, path: Path) -> None:
    for name, parameter in model.named_parameters():
        info, shape = infos.get((name, "weight")), tuple(parameter.shape)
        if info is None or info.shape != shape:
            came = "it is not there" if info is None else f"it has the shape {info.shape} there"
            raise ConfigError(
                f"{path} is a checkpoint of another model: expected {name!r} of the shape {shape}, "
                f"{came}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """Every tensor of an export, with its shard. `shards` have the order of the model."""

    groups: list[TensorGroup]
    shards: dict[str, list[TensorInfo]]
    shard_of: dict[str, str]
    num_parameters: int
    prefix: str  # Of the names of the files.

    @property
    def partial_index_name(self) -> str:
        """The name of the index until all files are complete."""
        return f".{self.prefix}{INDEX_NAME}.partial"

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, without headers."""
        return sum(info.nbytes for infos in self.shards.values() for info in infos)


def plan_export(model: nn.Module, *, max_shard_nbytes: int, master: bool = False) -> ExportPlan:
    """Plans the files of `export_safetensors` from shapes and dtypes. Raises ConfigError."""
    if max_shard_nbytes <= 0:
        raise ConfigError(f"max_shard_nbytes={max_shard_nbytes} must be positive")
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "a PEFT model has no full checkpoint; merge the adapter first "
            "(merge_and_unload), or save it with save_pretrained"
        )
    saved = {
        name: (
            tuple(tensor.shape),
            torch.float32
            if master and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            else tensor.dtype,
        )
        for name, tensor in _saved_tensors(model)
    }
    groups = export_groups(model, saved)
    infos = [
        TensorInfo(name=name, shape=shape, dtype=dtype)
        for group in groups
        for name, (shape, dtype) in planned_targets(group, saved, model).items()
    ]
    prefix = OF_DIFFUSERS if hasattr(model, "save_config") else ""
    shards = _assign_shards(infos, max_shard_nbytes, prefix)
    return ExportPlan(
        prefix=prefix,
        groups=groups,
        shards=shards,
        shard_of={info.name: shard for shard, infos in shards.items() for info in infos},
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns every tensor of an export once, under the name that a load expects."""
    # A tied weight keeps the name that is not declared as tied to another one.
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    chosen: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for path, module in modules_of(model):
        prefix = f"{path}." if path else ""
        buffers = {
            leaf: buffer
            for leaf, buffer in module._buffers.items()
            if leaf not in module._non_persistent_buffers_set
        }
        for leaf, tensor in {**parameters_of(module), **buffers}.items():
            name = prefix + leaf
            if tensor is None or name in ignored:
                continue
            earlier = chosen.get(id(tensor))
            if earlier is None or (earlier in tied and name not in tied):
                if earlier is not None:
                    del tensors[earlier]
                chosen[id(tensor)] = name
                tensors[name] = tensor
    return iter(tensors.items())


def _assign_shards(
    infos: list[TensorInfo], max_shard_nbytes: int, prefix: str
) -> dict[str, list[TensorInfo]]:
    """Fills shards in order: sizes 3, 3, 5 at a maximum of 6 become [3, 3], [5]."""
    filled: list[list[TensorInfo]] = [[]]
    shard_nbytes = 0
    for info in infos:
        if filled[-1] and shard_nbytes + info.nbytes > max_shard_nbytes:
            filled.append([])
            shard_nbytes = 0
        filled[-1].append(info)
        shard_nbytes += info.nbytes
    if len(filled) == 1:
        return {f"{prefix}{SINGLE_NAME}": filled[0]}
    count = len(filled)
    return {
        f"{prefix}model-{index:05d}-of-{count:05d}.safetensors": shard
        for index, shard in enumerate(filled, start=1)
    }


def _reader(model: nn.Module, *, master: bool) -> Read:
    """Returns the reader of parameters: from the engine, or from a model without an engine."""
    engine, prefix = find_engine(model), _prefix_of(model)

    def read(name: str) -> torch.Tensor:
        if engine is not None:
            return engine.read_parameter(prefix + name, master=master)
        value = model.get_parameter(name).detach().cpu()
        return value.float() if master and value.is_floating_point() else value

    return read


def _prefix_of(model: nn.Module) -> str:
    """Returns what names of the engine have before those of the model, which may be a part of the
    one that was offloaded."""
    engine = find_engine(model)
    modules = () if engine is None else engine.model.named_modules()
    place = next((name for name, module in modules if module is model), "")
    return f"{place}." if place else ""


def _tiles_of(model: nn.Module) -> Callable[[TensorGroup], list[str]]:
    """Returns a function that lists the tiles of the tensor of a group; empty for a plain one."""
    prefix = _prefix_of(model)

    def tiles_of(group: TensorGroup) -> list[str]:
        path, _, leaf = group.sources[0][1].rpartition(".")
        module = model.get_submodule(path)
        if group.transform is not None or not isinstance(module, Tiled) or leaf in module._buffers:
            return []
        handles = module.tiled_params[leaf].handles
        return [handle.name_in_model.removeprefix(prefix) for handle in handles]

    return tiles_of


def _fetcher(model: nn.Module, read: Read) -> Read:
    """Returns a function that reads a parameter under any alias, or a buffer of the model."""
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    for _, module in modules_of(model):
        if isinstance(module, Tiled):
            first_name |= {id(tiled.tensor): tiled.name for tiled in module.tiled_params.values()}

    def fetch(name: str) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        buffer = module._buffers.get(leaf)
        if buffer is not None:
            return buffer.detach().cpu()
        return read(first_name[id(parameters_of(module)[leaf])])

    return fetch


def _write_texts(model: Any, directory: Path, tokenizer: Any, *, master: bool) -> None:
    """Writes config.json, generation_config.json and the tokenizer with transformers or
    diffusers."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)  # The configuration of the model must not change.
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        if master:
            dtype = torch.float32
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.save_pretrained(directory)
    elif hasattr(model, "save_config"):
        model.save_config(directory)
    if hasattr(model, "can_generate") and model.can_generate():
        model.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _write_index(path: Path, plan: ExportPlan) -> None:
    content = {
        "metadata": {"total_parameters": plan.num_parameters, "total_size": plan.nbytes},
        "weight_map": dict(sorted(plan.shard_of.items())),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync_file(path)


def _commit(
    directory: Path, texts: Path, plan: ExportPlan, writers: Mapping[str, SafetensorsWriter]
) -> None:
    """Renames the synced partial files in an order in which a crash cannot mix two exports. If the
    texts cannot be replaced, the earlier export is whole again. Raises OSError."""
    index, is_single = directory / f"{plan.prefix}{INDEX_NAME}", len(plan.shards) == 1
    shards = [name for name in os.listdir(directory) if _SHARD_PATTERN.fullmatch(name)]
    gone = [name for name in shards if is_single or name not in plan.shards]
    replace_files(texts, directory, last="config.json", gone=[index.name, *gone])
    for writer in writers.values():
        writer.commit()
    if not is_single:
        os.replace(directory / plan.partial_index_name, index)
    sync_directory(directory)
