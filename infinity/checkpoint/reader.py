"""Streams training state to exporters, from a running engine or from a checkpoint.

Every tensor comes once, as consecutive flat parts in row-major order. Memory holds one part.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import nn

from infinity.checkpoint.run.contents import buffers_of, in_row_major, row_major_stride
from infinity.checkpoint.run.directory import find_checkpoint
from infinity.checkpoint.run.load import program_of
from infinity.checkpoint.run.opened import OpenCheckpoint, SavedTensor, StoredReader
from infinity.checkpoint.run.references import directory_of_base
from infinity.engine.registry import engine_of
from infinity.engine.state_access import Part, StateAccess
from infinity.errors import ConfigError, UnsupportedError
from infinity.ops.exact import join
from infinity.optimizers.offloaded import OffloadedOptimizer
from infinity.sizes import MIB
from infinity.state.units import MOMENT_KINDS, StateKind, TensorSpec, Unit, weight_of
from infinity.storage.closing import Closing

Kind = Literal["weight", "master", "exp_avg", "exp_avg_sq", "momentum_buffer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_PART_NBYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One tensor of state that belongs to the parameter `name` and has its shape.

    A weight has the compute dtype. A master exists beside a narrower weight only; masters and
    moments are fp32.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StatePart:
    """Consecutive elements of one tensor: flat, on the host, valid until the next part."""

    info: StateInfo
    start: int
    values: torch.Tensor


@contextmanager
def full_state(model: nn.Module, what: str) -> Iterator[StateAccess | None]:
    """Gives the state of an offloaded model, which is at rest during the block.

    `what` names the caller in errors. All ranks call it: the first rank gets the state of all
    ranks; the others get None, and serve the first one until its block ends. Raises as
    `RankSync.collective_section`, and InfinityError while parameters are in use.
    """
    engine = engine_of(model)
    with engine.ranks.collective_section(f"{what}: all are at rest"), engine.at_rest(what):
        pass
    with engine.ranks.collective_section(what), engine.at_rest(what) as state:
        yield state if engine.rank == 0 else None


@contextmanager
def engine_source(
    model: nn.Module, optimizer: OffloadedOptimizer | None, *, what: str
) -> Iterator[StateSource | None]:
    """Gives the state of an offloaded model to export. Ranks and errors as in `full_state`."""
    with full_state(model, what) as state:
        named = None if optimizer is None else optimizer.named_state()
        yield None if state is None else _EngineSource(model, state, named)


class _EngineSource:
    """The state in the tiers of an engine, for the first rank that of all ranks. `optimizer` is
    None or the result of `OffloadedOptimizer.named_state`."""

    def __init__(
        self, model: nn.Module, state: StateAccess, optimizer: dict[str, Any] | None
    ) -> None:
        self._model = model
        self._state = state
        self.optimizer = optimizer
        self._optimized = _optimized(optimizer)
        self.infos = [info for unit in state.full_units for _, info in self._of(unit)]

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().cpu() for name, buffer in buffers_of(self._model).items()}

    def parts(self) -> Iterator[StatePart]:
        for unit in self._state.full_units:
            infos = {(spec, info.kind): info for spec, info in self._of(unit)}
            for kind in KINDS:
                wanted = {spec: info for (spec, k), info in infos.items() if k == kind}
                if wanted:
                    yield from _row_major(wanted, self._raw(unit, kind))

    def _of(self, unit: Unit) -> Iterator[tuple[TensorSpec, StateInfo]]:
        """Yields the tensors of a unit, kind by kind."""
        for spec in unit.tensors:
            yield spec, StateInfo(spec.name, "weight", spec.facts.shape, spec.facts.dtype)
        for spec in unit.trainable():
            if unit.master_dtype is not None and spec.facts.dtype is not torch.float32:
                yield spec, StateInfo(spec.name, "master", spec.facts.shape, torch.float32)
        for state_kind in MOMENT_KINDS:
            specs = [spec for spec in unit.trainable() if spec.name in self._optimized]
            if not specs or not self._state.is_kept(unit, state_kind):
                continue
            if unit.dtype(state_kind) is not torch.float32:
                raise UnsupportedError(
                    f"moments of {unit.name!r} are {unit.dtype(state_kind)}; expected float32 "
                    "ones, which other programs can use"
                )
            for spec in specs:
                kind = cast(Kind, state_kind.value)
                yield spec, StateInfo(spec.name, kind, spec.facts.shape, torch.float32)

    def _raw(self, unit: Unit, kind: Kind) -> Iterator[Part]:
        """Yields parts in memory order; joins a master from weight and residual."""
        if kind == "master":
            return self._masters(unit)
        state_kind = StateKind.PARAMETERS if kind == "weight" else StateKind(kind)
        return self._state.parts(unit, state_kind)

    def _masters(self, unit: Unit) -> Iterator[Part]:
        weight_cache = self._state.weight_cache
        weights = weight_cache.check_out(unit.index, read=True)
        try:
            for part in self._state.parts(unit, StateKind.MASTER):
                if part.spec.facts.dtype is torch.float32:
                    continue
                if unit.has_residual:
                    narrow = weight_of(weights, part.spec)
                    stop = part.start + part.values.numel()
                    part = Part(part.spec, part.start, join(narrow[part.start : stop], part.values))
                yield part
        finally:
            weight_cache.check_in(unit.index, dirty_nbytes=0)


def _optimized(named: dict[str, Any] | None) -> set[str]:
    """Returns the parameters of the optimizer; moments of other parameters are not exported."""
    return set() if named is None else {n for group in named["groups"] for n in group["params"]}


def _row_major(infos: dict[TensorSpec, StateInfo], parts: Iterator[Part]) -> Iterator[StatePart]:
    left = dict(infos)
    for part in in_row_major(part for part in parts if part.spec in infos):
        if part.start + part.values.numel() == part.spec.numel:
            left.pop(part.spec, None)
        yield StatePart(infos[part.spec], part.start, part.values)
    for spec, info in left.items():  # A tensor without an element has no part.
        assert not spec.numel, f"no part of {info.name} {info.kind}"
        yield StatePart(info, 0, torch.empty(0, dtype=info.dtype, device="cpu"))


class CheckpointSource(Closing):
    """The state in a checkpoint, or in the newest checkpoint of a directory.

    Every byte is compared when it is read: a damaged one raises CorruptionError. Raises ConfigError
    if there is no checkpoint. Not thread-safe; close it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        checkpoint = OpenCheckpoint(find_checkpoint(Path(path)))
        self.path = checkpoint.path
        base = directory_of_base(checkpoint.path)
        if base is not None:
            raise ConfigError(
                f"{checkpoint.path} holds what was trained and refers to frozen weights in {base}; "
                "export the offloaded model, or save its adapter and merge it with the base "
                "(infinity merge)"
            )
        self.optimizer: dict[str, Any] | None = program_of(checkpoint)["optimizer"]
        self._optimized = _optimized(self.optimizer)
        self._reader = StoredReader()
        self._stored = {
            _key(name, tensor.kind): tensor for name, tensor in checkpoint.tensors.items()
        }
        self._buffers = checkpoint.buffers(0)  # Every rank saves its own; the first one's count.
        self.infos = list(self._list())

    def close(self) -> None:
        """Closes all files. Idempotent."""
        self._reader.close()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Reads the model's buffers, by name."""
        return {name: self._reader.read_full(tensor) for name, tensor in self._buffers.items()}

    def tensor(self, info: StateInfo) -> torch.Tensor:
        """Returns a fresh tensor on the host. Raises CorruptionError, StorageError."""
        values = torch.empty(math.prod(info.shape), dtype=info.dtype, device="cpu")
        for part in self._parts_of(info):
            values[part.start : part.start + part.values.numel()] = part.values
        return values.view(info.shape)

    def parts(self) -> Iterator[StatePart]:
        """Yields the parts of all tensors of `infos`, in that order."""
        for info in self.infos:
            yield from self._parts_of(info)

    def _parts_of(self, info: StateInfo) -> Iterator[StatePart]:
        numel = math.prod(info.shape)
        sources = self._sources(info)
        # Linked kinds of a parameter are in memory order, streamed ones are row-major.
        is_in_order = all(source.stride == row_major_stride(info.shape) for source in sources)
        step = _PART_NBYTES // 4 if is_in_order else max(numel, 1)
        for start in range(0, max(numel, 1), step):
            stop = min(start + step, numel)
            values = [self._row_major(source, info, start, stop) for source in sources]
            yield StatePart(info, start, join(*values) if len(values) == 2 else values[0])

    def _sources(self, info: StateInfo) -> list[SavedTensor]:
        """Returns the stored tensor; for a master beside bf16 the weight and the residual."""
        if info.kind == "master" and (info.name, "residual") in self._stored:
            return [self._stored[info.name, "weight"], self._stored[info.name, "residual"]]
        source = self._stored[info.name, info.kind]
        if source.info.dtype is not info.dtype:
            raise UnsupportedError(
                f"{info.kind} of {info.name!r} is {source.info.dtype} in {self.path}; expected "
                f"{info.dtype}, which other programs can use"
            )
        return [source]

    def _row_major(
        self, source: SavedTensor, info: StateInfo, start: int, stop: int
    ) -> torch.Tensor:
        """Returns elements in row-major order; all of them if they are stored in another order."""
        values = self._reader.read(source, start, stop)
        if source.stride == row_major_stride(info.shape):
            return values
        return values.as_strided(info.shape, source.stride).contiguous().view(-1)

    def _list(self) -> Iterator[StateInfo]:
        """Yields the tensors unit by unit, kind by kind."""
        by_group: dict[str, list[str]] = {}
        for (name, kind), stored in self._stored.items():
            if kind == "weight":
                by_group.setdefault(stored.group, []).append(name)
        for names in by_group.values():
            for kind in KINDS:
                for name in names:
                    weight = self._stored[name, "weight"].info
                    if self._has(name, kind, weight.dtype):
                        dtype = weight.dtype if kind == "weight" else torch.float32
                        yield StateInfo(name, kind, weight.shape, dtype)

    def _has(self, name: str, kind: Kind, weight_dtype: torch.dtype) -> bool:
        if kind == "master":
            has_one = {(name, "residual"), (name, "master")} & self._stored.keys()
            return bool(has_one) and weight_dtype is not torch.float32
        return kind == "weight" or (name in self._optimized and (name, kind) in self._stored)


StateSource: TypeAlias = _EngineSource | CheckpointSource


def _key(name: str, kind: str) -> tuple[str, str]:
    """Returns (parameter, "weight" or the ending of the name) of a stored tensor."""
    if kind == "parameters":
        return name, "weight"
    parameter, _, ending = name.rpartition(".")
    return parameter, ending
