"""Training state as a stream of tensors, whoever has it: a living engine, or a checkpoint of a run.

What exporters read. Nothing is held but one part; every tensor comes once, whole, as flat parts in
row-major order that follow each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

import torch
from torch import nn

from infinity.checkpoint.run.directory import find_checkpoint
from infinity.checkpoint.run.files import buffers_of
from infinity.checkpoint.run.layout import is_row_major, row_major_stride
from infinity.checkpoint.run.open_checkpoint import OpenCheckpoint
from infinity.checkpoint.run.stored import StoredReader
from infinity.engine.optimizer import OffloadedOptimizer
from infinity.engine.registry import engine_of
from infinity.engine.state_access import Part, StateAccess
from infinity.errors import UnsupportedError
from infinity.ops.split_master import join
from infinity.sizes import MIB
from infinity.state.units import MOMENT_PIECES, StateKind, TensorSpec, Unit, weight_of

if TYPE_CHECKING:
    pass

Kind = Literal["weight", "master", "exp_avg", "exp_avg_sq", "momentum_buffer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_PART_NBYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One tensor of state: of the parameter `name`, in the parameter's shape.

    A weight is in the compute dtype; a master (only beside a narrower weight) and moments are fp32.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StatePart:
    """Elements of one tensor from `start` on: flat, on the host, valid until the next part."""

    info: StateInfo
    start: int
    values: torch.Tensor


class StateSource(Protocol):
    """What there is to export. `optimizer` is None, or as `named_state` of one gives it."""

    @property
    def infos(self) -> list[StateInfo]: ...

    @property
    def optimizer(self) -> dict[str, Any] | None: ...

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer, on the host."""

    def parts(self) -> Iterator[StatePart]:
        """All tensors of `infos`, in that order."""


@contextmanager
def whole_state(model: nn.Module, what: str) -> Iterator[StateAccess | None]:
    """The state of an offloaded model, at rest while the block runs; `what` names the caller.

    Several ranks all come here: the first one gets the state of all of them, the others None, and
    serve it until its block is over. Errors are those of `Engine.collective_section`.
    """
    engine = engine_of(model)
    with engine.collective_section(f"{what}: all are at rest"), engine.at_rest(what):
        pass
    with engine.collective_section(what), engine.at_rest(what) as state:
        yield state if engine.rank == 0 else None


@contextmanager
def engine_source(
    model: nn.Module, optimizer: OffloadedOptimizer | None, *, what: str
) -> Iterator[StateSource | None]:
    """The state of an offloaded model, as `whole_state` gives it."""
    with whole_state(model, what) as state:
        named = None if optimizer is None else optimizer.named_state()
        yield None if state is None else _EngineSource(model, state, named)


class _EngineSource:
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
                wanted = {spec: info for (spec, one), info in infos.items() if one == kind}
                if wanted:
                    yield from _row_major(wanted, self._raw(unit, kind))

    def _of(self, unit: Unit) -> Iterator[tuple[TensorSpec, StateInfo]]:
        """Tensors of a unit, kind by kind."""
        for spec in unit.tensors:
            yield spec, StateInfo(spec.name, "weight", spec.facts.shape, spec.facts.dtype)
        for spec in unit.trainable():
            if unit.master_dtype is not None and spec.facts.dtype is not torch.float32:
                yield spec, StateInfo(spec.name, "master", spec.facts.shape, torch.float32)
        for state_kind in MOMENT_PIECES:
            specs = [spec for spec in unit.trainable() if spec.name in self._optimized]
            if not specs or not self._state.is_kept(unit, state_kind):
                continue
            if unit.dtype(state_kind) is not torch.float32:
                raise UnsupportedError(
                    f"moments of {unit.name!r} are {unit.dtype(state_kind)}; expected float32 "
                    f"ones, "
                    "which other programs can use"
                )
            for spec in specs:
                kind = cast(Kind, state_kind.value)
                yield spec, StateInfo(spec.name, kind, spec.facts.shape, torch.float32)

    def _raw(self, unit: Unit, kind: Kind) -> Iterator[Part]:
        """Parts in memory order; masters are put together from their halves."""
        if kind == "master":
            yield from self._masters(unit)
        elif kind == "weight":
            yield from self._state.parts(unit, StateKind.PARAMETERS)
        else:
            yield from self._state.parts(unit, StateKind(kind))

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
    """Parameters that an optimizer has; moments of others are nobody's."""
    return set() if named is None else {n for group in named["groups"] for n in group["params"]}


def _row_major(infos: dict[TensorSpec, StateInfo], parts: Iterator[Part]) -> Iterator[StatePart]:
    """The same elements in the order of a file. A tensor of other strides is held whole."""
    left = dict(infos)
    whole: torch.Tensor | None = None
    for part in parts:
        spec = part.spec
        if spec not in infos:
            continue
        stop = part.start + part.values.numel()
        if stop == spec.numel:
            left.pop(spec, None)
        if is_row_major(spec):
            yield StatePart(infos[spec], part.start, part.values)
            continue
        if whole is None:
            whole = torch.empty(spec.numel, dtype=part.values.dtype)
        whole[part.start : stop] = part.values
        if stop == spec.numel:
            shaped = whole.as_strided(spec.facts.shape, spec.facts.stride)
            yield StatePart(infos[spec], 0, shaped.contiguous().view(-1))
            whole = None
    for spec, info in left.items():  # Tensors without an element have no part of their own.
        assert not spec.numel, f"no part of {info.name} {info.kind}"
        yield StatePart(info, 0, torch.empty(0, dtype=info.dtype))


class CheckpointSource:
    """The state in a checkpoint of a run, or in the newest of a directory of them.

    What is read is checked; CorruptionError names what is damaged. Close it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        checkpoint = OpenCheckpoint(find_checkpoint(Path(path)))
        self.path = checkpoint.path
        self.optimizer: dict[str, Any] | None = checkpoint.program()["optimizer"]
        self._optimized = _optimized(self.optimizer)
        self._reader = StoredReader()
        self._stored = {
            _key(name, tensor.kind): tensor for name, tensor in checkpoint.tensors.items()
        }
        self._buffers = checkpoint.buffers(0)  # Every rank saves its own; the first one's count.
        self.infos = list(self._list())

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: self._reader.read_whole(tensor) for name, tensor in self._buffers.items()}

    def raw_tensors(self) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
        """Yields every stored tensor as it is stored: ((parameter, ending of its name), values)."""
        for key, tensor in self._stored.items():
            yield key, self._reader.read_whole(tensor)

    def tensor(self, info: StateInfo) -> torch.Tensor:
        """One tensor of `infos`, whole: a fresh one on the host."""
        values = torch.empty(math.prod(info.shape), dtype=info.dtype)
        for part in self._parts_of(info):
            values[part.start : part.start + part.values.numel()] = part.values
        return values.view(info.shape)

    def parts(self) -> Iterator[StatePart]:
        for info in self.infos:
            yield from self._parts_of(info)

    def _parts_of(self, info: StateInfo) -> Iterator[StatePart]:
        numel = math.prod(info.shape)
        stride = self._stored[info.name, "weight"].stride
        is_row_major = stride == row_major_stride(info.shape)
        step = _PART_NBYTES // 4 if is_row_major else max(numel, 1)
        for start in range(0, max(numel, 1), step):
            values = self._values(info, start, min(start + step, numel))
            if not is_row_major:
                values = values.as_strided(info.shape, stride).contiguous().view(-1)
            yield StatePart(info, start, values)

    def _values(self, info: StateInfo, start: int, stop: int) -> torch.Tensor:
        """Elements in the order in which they are stored."""
        if info.kind == "master" and (info.name, "residual") in self._stored:
            narrow = self._reader.read(self._stored[info.name, "weight"], start, stop)
            residual = self._reader.read(self._stored[info.name, "residual"], start, stop)
            return join(narrow, residual)
        values = self._reader.read(self._stored[info.name, info.kind], start, stop)
        if values.dtype is not info.dtype:
            raise UnsupportedError(
                f"{info.kind} of {info.name!r} is {values.dtype} in {self.path}; expected "
                f"{info.dtype}, which other programs can use"
            )
        return values

    def _list(self) -> Iterator[StateInfo]:
        """Unit by unit, kind by kind."""
        by_group: dict[str, list[str]] = {}
        for (name, kind), stored in self._stored.items():
            if kind == "weight":
                by_group.setdefault(stored.group, []).append(name)
        kinds = KINDS
        for names in by_group.values():
            for kind in kinds:
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


def _key(name: str, kind: str) -> tuple[str, str]:
    """(parameter, "weight" or the ending of the name) of a tensor of a unit."""
    if kind == "parameters":
        return name, "weight"
    parameter, _, ending = name.rpartition(".")
    return parameter, ending
