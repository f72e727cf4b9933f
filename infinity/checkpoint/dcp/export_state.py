"""Exports training state as a torch.distributed.checkpoint directory, slab by slab.

The directory has the names that the functions of PyTorch use:

    model.<name>                     weights in the compute dtype, tied ones under every name, and
                                     persistent buffers: `{"model": model.state_dict()}`
    master.<name>                    the fp32 value of each weight that is narrower
    optimizer.state.<name>.step, .exp_avg, .exp_avg_sq,
    optimizer.param_groups           `{"optimizer": get_optimizer_state_dict(model, AdamW(...))}`

`torch.distributed.checkpoint.save` names the items and makes the metadata. Its writer keeps every
tensor of a file until the file is complete (`tensor_dict` in `_write_files_from_queue`), so another
`StorageWriter` streams: a large tensor is cut along its first dimension, like a sharded one, and
memory holds one slab at a time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from infinity.checkpoint.durable import check_space, make_directory, new_directory
from infinity.checkpoint.reader import (
    CheckpointSource,
    StateInfo,
    StatePart,
    StateSource,
    engine_source,
    full_state,
)
from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, UnsupportedError, reporting
from infinity.optimizers.offloaded import OffloadedOptimizer
from infinity.private.torch import StorageInfo
from infinity.sizes import GIB, MIB

_SLAB_NBYTES = 64 * MIB
_FILE_NBYTES = 4 * GIB
# The most that torch.save and the metadata add to each slab.
_SLAB_OVERHEAD_NBYTES = 4096


def export_dcp(
    model: nn.Module, directory: str | os.PathLike[str], optimizer: OffloadedOptimizer | None = None
) -> Path:
    """Writes weights, masters and, with `optimizer`, moments and settings; returns the directory.

    `torch.distributed.checkpoint.load` reads the directory into an ordinary model and
    `torch.optim.AdamW` on any number of ranks; `dcp_to_torch_save` makes one file of it. Beside the
    host budget, memory holds one slab of 64 MiB, or one tensor whose rows are larger or which is
    not row-major. Gradients are left out. Call between steps, from the training thread.

    All ranks call it. The first rank writes the state of all ranks and its own buffers, and holds
    one rank's part of a state kind as well; only its arguments count. The other ranks serve it.

    Raises ConfigError if the directory is not empty, UnsupportedError for moments of eight bits,
    StorageError for too little space before anything is written, and for a write that fails. The
    directory gets its name when all of it is durable.
    """
    source = engine_source(model, optimizer, what="infinity.checkpoint.export_dcp")
    return _export(source, Path(directory), _aliases(model), _persistent_buffers(model))


def export_checkpoint_dcp(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    model: nn.Module | None = None,
) -> Path:
    """Writes the same directory as `export_dcp` from a checkpoint; returns the directory.

    `model` may be on meta: it gives the names of tied weights and of persistent buffers. Without
    `model` a tied weight gets its first name only, and every buffer is written. Raises as
    `export_dcp`, and CorruptionError for a damaged checkpoint.
    """
    source = CheckpointSource(checkpoint)  # Closed by _export.
    aliases = {} if model is None else _aliases(model)
    buffers = None if model is None else _persistent_buffers(model)
    return _export(source, Path(directory), aliases, buffers)


def _export(
    opened: AbstractContextManager[StateSource | None],
    directory: Path,
    aliases: dict[str, str],
    buffer_names: set[str] | None,
) -> Path:
    with opened as source:
        if source is None:  # The first rank writes.
            return directory
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            what = "is not empty" if directory.is_dir() else "is no directory"
            raise ConfigError(f"{directory} {what}; name a directory that is new or empty")
        make_directory(directory.parent)
        buffers = source.buffers()
        if buffer_names is not None:
            buffers = {name: value for name, value in buffers.items() if name in buffer_names}
        slabs = sum(1 + info.nbytes // _SLAB_NBYTES for info in source.infos)
        nbytes = sum(info.nbytes for info in source.infos) + slabs * _SLAB_OVERHEAD_NBYTES
        check_space(directory.parent, nbytes)
        with reporting("export", directory), new_directory(directory) as partial:
            _write(source, partial, aliases, buffers)
    return directory


def _write(
    source: StateSource, path: Path, aliases: dict[str, str], buffers: dict[str, torch.Tensor]
) -> None:
    doubles = {f"model.{alias}": f"model.{first}" for alias, first in aliases.items()}
    with in_one_process():
        dcp.save(
            _state_dict(source, aliases, buffers),
            storage_writer=_SlabWriter(path, source, doubles),
            planner=_SlabPlanner(source, doubles),
            no_dist=True,
        )


@contextmanager
def in_one_process() -> Iterator[None]:
    """Holds a save or a load without other ranks, and raises the error that stopped it itself.

    PyTorch warns that it is alone, and wraps every error, also a KeyboardInterrupt, in one that is
    no Exception.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def _place(info: StateInfo) -> str:
    """Returns the key of a tensor in the directory."""
    if info.kind in ("weight", "master"):
        return f"{'model' if info.kind == 'weight' else 'master'}.{info.name}"
    return f"optimizer.state.{info.name}.{info.kind}"


def _state_dict(
    source: StateSource, aliases: dict[str, str], buffers: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Returns the state dict that PyTorch would save; tensors of state are on meta."""
    model: dict[str, Any] = {}
    master: dict[str, Any] = {}
    moments: dict[str, dict[str, Any]] = {}
    for info in source.infos:
        tensor = torch.empty(info.shape, dtype=info.dtype, device="meta")
        if info.kind == "weight":
            model[info.name] = tensor
        elif info.kind == "master":
            master[info.name] = tensor
        else:
            moments.setdefault(info.name, {})[info.kind] = tensor
    for alias, first in aliases.items():
        model[alias] = model[first]
    answer: dict[str, Any] = {"model": model | buffers}
    if master:
        answer["master"] = master
    if source.optimizer is not None:
        answer["optimizer"] = _optimizer_dict(source.optimizer, moments)
    return answer


def _optimizer_dict(named: dict[str, Any], moments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`."""
    defaults = defaults_of_torch(named.get("name", "adamw"))
    groups = [{**defaults, **group} for group in named["groups"]]
    names = [name for group in groups for name in group["params"] if name in moments]
    steps = {name: float(named["steps"].get(name, 0)) for name in names}
    state = {
        name: {"step": torch.tensor(step, device="cpu"), **moments[name]}
        for name, step in steps.items()
    }
    return {"state": state, "param_groups": groups}


class _SlabPlanner(DefaultSavePlanner):
    """Plans a large tensor as shards along its first dimension, and a tied weight once."""

    def __init__(self, source: StateSource, doubles: dict[str, str]) -> None:
        super().__init__()
        self._infos = {_place(info): info for info in source.infos}
        self._doubles = doubles

    @override
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self._doubles]
        slabs = [slab for item in items for slab in self._slabs(item)]
        self.plan = dataclasses.replace(plan, items=slabs)
        return self.plan

    def _slabs(self, item: WriteItem) -> Iterator[WriteItem]:
        info = self._infos.get(item.index.fqn)
        rows = None if info is None else _rows_of_slab(info)
        if info is None or rows is None or rows >= info.shape[0]:
            yield item
            return
        assert item.tensor_data is not None
        for start in range(0, info.shape[0], rows):
            offsets = _offsets(info, start)
            sizes = torch.Size([min(rows, info.shape[0] - start), *info.shape[1:]])
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            index = MetadataIndex(item.index.fqn, offsets)
            yield WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class _SlabWriter(FileSystemWriter):
    """Writes each item when its slab has come from the source; a full file is followed by a new
    one. `doubles`: the further names of tied weights, which point to the items of the first."""

    def __init__(self, path: Path, source: StateSource, doubles: dict[str, str]) -> None:
        super().__init__(path)
        self._source = source
        self._doubles = doubles
        self._count = 0
        self._file: BinaryIO | None = None

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        streamed = {_place(info) for info in self._source.infos}
        items = {item.index: item for item in plan.items}
        written: Future[list[WriteResult]] = Future()
        try:
            results = [
                self._write(item, planner.resolve_data(item))
                for item in plan.items
                if item.index.fqn not in streamed
            ]
            for info, row, slab in _gather_slabs(self._source.parts()):
                item = items[MetadataIndex(_place(info), _offsets(info, row))]
                results.append(self._write(item, slab))
        finally:
            self._close()
        written.set_result(results)
        return written

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        of_name: dict[str, list[WriteResult]] = {}
        for result in results[0]:
            of_name.setdefault(result.index.fqn, []).append(result)
        for alias, first in self._doubles.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[first]
            for result in of_name[first]:
                index = dataclasses.replace(result.index, fqn=alias)
                results[0].append(dataclasses.replace(result, index=index))
        super().finish(metadata, results)

    def _write(self, item: WriteItem, value: Any) -> WriteResult:
        if self._file is None or self._file.tell() >= _FILE_NBYTES:
            self._close()
            self._file = (Path(self.path) / f"__0_{self._count}.distcp").open("wb")
            self._count += 1
        file, start = self._file, self._file.tell()
        if item.type == WriteItemType.BYTE_IO:
            file.write(value.getbuffer())
        else:
            _save(value, file)
        nbytes = file.tell() - start
        place = StorageInfo(os.path.basename(file.name), start, nbytes)
        return WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=place)

    def _close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            file.flush()
            os.fsync(file.fileno())
            # The file is not read soon; the page cache has better uses.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _offsets(info: StateInfo, row: int) -> torch.Size:
    """Returns the offsets of the slab that begins at `row` of a tensor."""
    return torch.Size([row, *[0] * (len(info.shape) - 1)]) if info.shape else torch.Size([])


def _rows_of_slab(info: StateInfo) -> int | None:
    """Returns the number of rows in one slab; None for a tensor without rows."""
    if not info.shape or not info.nbytes:
        return None
    return max(1, _SLAB_NBYTES // (info.nbytes // info.shape[0]))


def _gather_slabs(parts: Iterable[StatePart]) -> Iterator[tuple[StateInfo, int, torch.Tensor]]:
    """Joins parts to (tensor, first row, slab); every slab has its own memory."""
    slab, filled = torch.empty(0, device="cpu"), 0
    for part in parts:
        info = part.info
        numel = math.prod(info.shape)
        rows = _rows_of_slab(info)
        if rows is None:
            yield info, 0, part.values.clone().view(info.shape)
            continue
        row_numel = numel // info.shape[0]
        done = 0
        while done < part.values.numel():
            at = part.start + done
            if not filled:
                slab_numel = min(rows * row_numel, numel - at)
                slab = torch.empty(slab_numel, dtype=info.dtype, device="cpu")
            count = min(slab.numel() - filled, part.values.numel() - done)
            slab[filled : filled + count] = part.values[done : done + count]
            filled, done = filled + count, done + count
            if filled == slab.numel():
                first = (at + count - filled) // row_numel
                yield info, first, slab.view(-1, *info.shape[1:])
                filled = 0


def _save(tensor: torch.Tensor, file: BinaryIO) -> None:
    """Saves the elements of a tensor, where torch.save would write the full memory of a view."""
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.detach().clone()
    try:
        torch.save(tensor, file)
    except RuntimeError as error:  # The archive of torch hides the error of a write.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _aliases(model: nn.Module) -> dict[str, str]:
    """Maps the further names of tied weights to their first name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def _persistent_buffers(model: nn.Module) -> set[str]:
    return {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in module._buffers
        if leaf not in module._non_persistent_buffers_set
    }


# -- The state of torch.optim ----------------------------------------------------------------------


def optimizer_state_dict(model: nn.Module, optimizer: OffloadedOptimizer) -> dict[str, Any]:
    """Returns a state dict for `load_state_dict` of the torch optimizer with the same name.

    It has settings, step counts and moments. Every moment is a fresh fp32 tensor on the host, in
    shape and strides of its parameter; moments of eight bits are widened. For AdamW the moments
    need twice the fp32 size of the model, outside the host budget. Parameters are numbered as in
    the groups of the optimizer; the plain optimizer needs the same parameters in the same groups.

    All ranks call it. The first rank gets the full state dict, the others an empty dict, like the
    full state dicts of torch: a node has the memory for it once. Raises UnsupportedError for a
    model with tiles, whose parameters differ from those of the plain model, and InfinityError while
    parameters are in use.
    """
    tiled_params = engine_of(model).tiled_params
    if tiled_params:
        raise UnsupportedError(
            f"{next(iter(tiled_params))!r} stands as tiles, which a plain optimizer does not know; "
            "save a checkpoint, load it with schedule.tile as it is now, or train with "
            "schedule.tile = 0"
        )
    moments: dict[str, dict[str, torch.Tensor]] = {}
    with full_state(model, "infinity.checkpoint.optimizer_state_dict") as state:
        if state is None:
            return {}
        for unit in state.full_units:
            for state_kind in unit.moments.kinds:
                if not state.is_kept(unit, state_kind):
                    continue
                for spec in unit.trainable():
                    facts = spec.facts
                    empty = torch.empty_strided(facts.shape, facts.stride, device="cpu")
                    moments.setdefault(spec.name, {})[state_kind.value] = empty
                for part in state.parts(unit, state_kind):
                    full = moments[part.spec.name][state_kind.value].as_strided(
                        (part.spec.numel,), (1,)
                    )
                    values = part.wide(state_kind)
                    full[part.start : part.start + values.numel()] = values
        answer, named = optimizer.state_dict(), optimizer.named_state()
        names = [name for group in named["groups"] for name in group["params"]]
    steps, answer["state"] = answer["state"], {}
    for index, entry in steps.items():
        of_torch = moments.get(names[index], {})
        if optimizer.name != "sgd":
            of_torch["step"] = torch.tensor(float(entry["step"]), device="cpu")
        elif names[index] not in named["begun"]:
            of_torch = {}  # SGD of torch has no buffer before its first step with a momentum.
        if of_torch:
            answer["state"][index] = of_torch
    for group in answer["param_groups"]:
        for key, value in defaults_of_torch(optimizer.name).items():
            group.setdefault(key, value)
    return answer


def defaults_of_torch(name: str) -> dict[str, Any]:
    """Returns the default settings of a parameter group of the torch optimizer with this name."""
    cls: Any = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD
    }.get(name)  # fmt: skip
    if cls is None:
        return {}
    defaults: dict[str, Any] = cls([torch.empty(0, device="cpu")]).state_dict()["param_groups"][0]
    return defaults
