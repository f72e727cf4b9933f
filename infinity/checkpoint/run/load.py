"""Loads a checkpoint into an offloaded model: verified first, then streamed to its tiers.

State that is linked to the swap files of this run, or to swap files that the run has adopted, is
read, compared and restored where it is (`links.py`). All other state is streamed. If several ranks
wrote the checkpoint, a rank reads those ranges of their shards that it keeps itself.

Placement, budgets, chunk sizes, units, ZeRO stage, number of ranks and the cut of large layers may
differ from those of the run that saved. `opened.py` verifies names, shapes, dtypes, lengths and the
small state before anything changes. The SHA-256 of a tensor is known when its last byte is read,
the CRC32C of linked state page by page. If one of these is wrong, the model may be a mixture of two
states, and the error says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.run.contents import buffers_of
from infinity.checkpoint.run.directory import find_checkpoint
from infinity.checkpoint.run.layout import STREAMED, StateTensor, kept_tensors
from infinity.checkpoint.run.links import restore_linked
from infinity.checkpoint.run.opened import OpenCheckpoint, StoredReader
from infinity.checkpoint.run.program import believing, check_kinds, restore_random_state
from infinity.checkpoint.run.save import Stateful
from infinity.engine.engine import Engine
from infinity.engine.registry import engine_of
from infinity.engine.state_access import StateAccess
from infinity.errors import ConfigError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.optimizers.offloaded import OffloadedOptimizer
from infinity.state.units import StateKind, Unit
from infinity.streaming.gradients.sums import in_memory_order

_MIXTURE = "the model is a mixture of two states now: do not train on, load another checkpoint"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that was read: its path, its number of steps, the `extra` of its caller, and
    the number of ranks that wrote it."""

    path: Path
    step: int
    extra: dict[str, Any]
    num_ranks: int = 1


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    *,
    scheduler: Stateful | None = None,
) -> Loaded:
    """Restores what `save` wrote; the run then continues with the same bits.

    path: a checkpoint, or a directory of checkpoints, from which the newest is loaded
    model: offloaded, with the architecture and dtypes of the saved one; its placement may differ
    optimizer, scheduler: built with the arguments of the saved run; with None their state is not
        restored, and the run is no exact continuation

    All ranks call `load` with one path. If another number of ranks wrote the checkpoint, a rank
    that did not save gets `extra` and buffers of the first rank, and keeps its own generators.

    Call between steps, from the training thread. Raises ConfigError for a checkpoint of another
    model or optimizer, UnsupportedError for a newer format, CorruptionError for a damaged
    checkpoint, StorageError for a file that cannot be read. These errors come before anything
    changes, except for damaged bytes that are found while they are streamed; the CorruptionError
    then says that the model is a mixture.
    """
    # INV-15: what follows is bit-identical to the uninterrupted run.
    engine = engine_of(model)
    with engine.collective_section("infinity.checkpoint.load: what is there") as asked:
        found = OpenCheckpoint(find_checkpoint(Path(path)))
        program = found.program(engine.rank)
        _check_program(program, optimizer, scheduler, found.path)
        with engine.at_rest("infinity.checkpoint.load") as state:
            found.check_model(state, model, engine.rank)
        found.check_part(engine.rank, engine.num_ranks)
        asked.local = found.path.name.encode()
    if len(set(asked.of_all)) > 1:
        names = sorted({name.decode() for name in asked.of_all})
        raise ConfigError(f"{path}: expected one checkpoint for all ranks, they found {names}")
    engine.ranks.begin_change("infinity.checkpoint.load: state is about to change")
    with (
        engine.collective_section("infinity.checkpoint.load"),
        engine.at_rest("infinity.checkpoint.load") as state,
    ):
        is_checked = engine.num_ranks > 1  # `check_part` has compared all files.
        with StoredReader(is_checked=is_checked, consequence=_MIXTURE) as reader:
            _load_tensors(found, state, engine, reader)
        _load_buffers(found, model, engine.rank)
        state.weight_cache.finish_writes()
    engine.ranks.forget_gathered()
    if optimizer is not None:
        with believing(found.path, "the optimizer's state"):
            optimizer.restore_named_state(program["optimizer"])
    if scheduler is not None:
        with believing(found.path, "the scheduler's state"):
            scheduler.load_state_dict(program["scheduler"])
    if program["random"] is not None:
        with believing(found.path, "the state of the generators"):
            restore_random_state(program["random"])
    return Loaded(found.path, found.manifest.step, program["extra"], len(found.manifest.places))


def read_program(path: str | os.PathLike[str], rank: int = 0) -> Loaded:
    """Reads step and `extra` of one rank, which a program checks before it builds a model.

    Raises ConfigError where there is no checkpoint, otherwise as `OpenCheckpoint`.
    """
    found = OpenCheckpoint(find_checkpoint(Path(path)))
    extra = found.program(rank)["extra"]
    return Loaded(found.path, found.manifest.step, extra, len(found.manifest.places))


def _check_program(
    program: Mapping[str, Any],
    optimizer: OffloadedOptimizer | None,
    scheduler: Stateful | None,
    path: Path,
) -> None:
    for what, target in (("an optimizer", optimizer), ("a scheduler", scheduler)):
        if target is not None and program[what.split()[1]] is None:
            raise ConfigError(f"{path} was saved without {what}, so there is none to bring back")
    if optimizer is not None:
        with believing(path, "the optimizer's state"):
            saved, own = program["optimizer"], optimizer.named_state()
            optimizer.check_named_state(saved)
            check_kinds(saved["groups"], own["groups"], "groups")
            check_kinds(saved["steps"], dict.fromkeys(saved["steps"], 0), "steps")
    if scheduler is not None:
        with believing(path, "the scheduler's state"):
            check_kinds(program["scheduler"], scheduler.state_dict(), "scheduler")


class _ModelReader:
    """Reads tensors by their names in the model, and joins those that are stored in other tiles."""

    def __init__(self, checkpoint: OpenCheckpoint, reader: StoredReader) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        # The last one whose stored order of elements is not that in memory.
        self._full: tuple[StateTensor, torch.Tensor] | None = None

    def fill(self, tensor: StateTensor, start: int, target: torch.Tensor) -> None:
        """Fills `target` with elements in memory order; see `fill_state_kind`."""
        start += tensor.start
        _, stride = self._checkpoint.form_of(tensor.name)
        if tensor.is_scales or stride == tensor.facts.stride:
            self._read_into(tensor.name, start, target)
            return
        if self._full is None or self._full[0] is not tensor:
            self._full = tensor, in_memory_order(self.read(tensor.name), tensor.full)
        target.copy_(self._full[1][start : start + target.numel()])

    def read(self, name: str) -> torch.Tensor:
        """Returns a fresh tensor on the CPU, in its shape. Raises as `StoredReader.read_into`."""
        info, stride = self._checkpoint.form_of(name)
        values = torch.empty(math.prod(info.shape), dtype=info.dtype)
        self._read_into(name, 0, values)
        return values.as_strided(info.shape, stride)

    def _read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        for tensor, first, count in self._checkpoint.sources(name, start, target.numel()):
            self._reader.read_into(tensor, first, target[:count])
            target = target[count:]


def _load_tensors(
    checkpoint: OpenCheckpoint, state: StateAccess, engine: Engine, stored: StoredReader
) -> None:
    kept = kept_tensors(state)
    restored = restore_linked(checkpoint, state, kept, engine.rank)
    state.forget_gradients()
    reader = _ModelReader(checkpoint, stored)
    for unit, tensors in kept:
        for state_kind in STREAMED if tensors else ():
            if (unit, state_kind) not in restored:
                fill_state_kind(state, unit, state_kind, tensors, reader.fill)
        for spec in unit.trainable():
            if checkpoint.has(f"{spec.name}.gradient"):
                gradient = reader.read(f"{spec.name}.gradient")
                state.put_gradient(unit, spec, gradient, engine.device.torch_device)


def fill_state_kind(
    state: StateAccess,
    unit: Unit,
    state_kind: StateKind,
    tensors: Sequence[StateTensor],
    fill: Callable[[StateTensor, int, torch.Tensor], None],
) -> None:
    """Gives a state kind of a unit new values, part by part.

    `fill(tensor, start, target)` fills `target` with elements of one of the `tensors`, which count
    from the first one that this process keeps. Elements of no tensor become zeros.
    """
    if state.store.location(unit, state_kind) is None:
        return
    kept = [tensor for tensor in tensors if tensor.state_kind is state_kind]
    by_spec = {tensor.spec: tensor for tensor in kept if not tensor.is_scales}
    scales = {tensor.spec: tensor for tensor in kept if tensor.is_scales}
    for part in state.parts(unit, state_kind, keep=True):
        if part.scales is not None:
            fill(scales[part.spec], part.start // BLOCK_NUMEL, part.scales)
        tensor = by_spec.get(part.spec)
        if tensor is None:
            part.values.zero_()
        else:
            fill(tensor, part.start, part.values)


def _load_buffers(checkpoint: OpenCheckpoint, model: nn.Module, rank: int) -> None:
    saved = checkpoint.buffers(rank)
    if not saved:
        return
    with StoredReader(consequence=_MIXTURE) as reader, torch.no_grad():
        for name, buffer in buffers_of(model).items():
            buffer.copy_(reader.read_full(saved[name]))
