"""What a checkpoint holds of a unit: tensors, and the ranges of state kinds that they lie in.

A pure function of the unit. The ending of a name gives the kind of the tensor, so that any reader
of safetensors can use the files: `layers.0.weight` in the compute dtype, `layers.0.weight.residual`
(or `.master`), the moments of the optimizer (`.exp_avg`, `.exp_avg_sq`, `.momentum_buffer`),
`.gradient`. Every tensor has the full shape of its parameter. Moments of eight bits have a second
tensor, which is flat: the scales of their blocks, `.exp_avg.scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from infinity.checkpoint.huggingface.safetensors_file import TensorInfo, dtype_name
from infinity.checkpoint.run.linked import LinkedKind, LinkedRun, LinkedTensor
from infinity.engine.state_access import Part, StateAccess
from infinity.ops.dynamic_8bit import BLOCK_NUMEL, num_scales
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.state.moments_8bit import runs_within
from infinity.state.partition import Partition, ShardSlice
from infinity.state.store import NvmeLocation
from infinity.state.units import MOMENT_KINDS, StateKind, TensorFacts, TensorSpec, Unit

# State kinds that are streamed; gradients are few and handled one by one.
STREAMED = (StateKind.PARAMETERS, StateKind.MASTER, *MOMENT_KINDS)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a checkpoint, and the `spec` of the engine that it belongs to.

    If state is sharded, `spec` is the part of the parameter that lies in a shard, and `share` tells
    which part.
    """

    name: str
    state_kind: StateKind
    spec: TensorSpec
    dtype: torch.dtype
    is_scales: bool = False  # The codes have this name without its ending.
    share: ShardSlice | None = None

    @property
    def full(self) -> TensorSpec:
        """The full parameter."""
        return self.spec if self.share is None else self.share.full

    @property
    def facts(self) -> TensorFacts:
        """Shape, stride and dtype of the full parameter."""
        return self.full.facts

    @property
    def start(self) -> int:
        """The index of the first element of this part in the full tensor, in memory order.

        Scales count blocks of codes. A shard begins at the start of a block.
        """
        start = 0 if self.share is None else self.share.start
        return start // BLOCK_NUMEL if self.is_scales else start

    @property
    def info(self) -> TensorInfo:
        """Name, dtype and shape, as a file has them."""
        shape = (num_scales(self.full.numel),) if self.is_scales else self.facts.shape
        return TensorInfo(name=self.name, dtype=self.dtype, shape=shape)


def state_tensors(
    unit: Unit,
    *,
    has_kind: Callable[[StateKind], bool],
    has_gradient: Callable[[TensorSpec], bool],
    shares: Mapping[TensorSpec, ShardSlice] | None = None,
) -> Iterator[StateTensor]:
    """Yields every tensor of the unit that a checkpoint holds.

    `has_kind` and `has_gradient` tell which state the engine keeps. `shares` maps the specs of a
    shard to the full parameters; None for a model that is not sharded.
    """
    for spec in unit.tensors:
        share = None if shares is None else shares.get(spec)
        weight = StateTensor(spec.name, StateKind.PARAMETERS, spec, spec.facts.dtype, share=share)
        yield weight
        if spec.state_offset < 0:
            continue
        for state_kind in (StateKind.MASTER, *MOMENT_KINDS):
            dtype = unit.dtype(state_kind)
            # A residual beside fp32 weights is zero, always.
            is_zero = (
                state_kind is StateKind.MASTER
                and unit.has_residual
                and spec.facts.dtype is not torch.bfloat16
            )
            if dtype is not None and has_kind(state_kind) and not is_zero:
                name = f"{spec.name}.{_suffix(unit, state_kind)}"
                yield StateTensor(name, state_kind, spec, dtype, share=share)
                if unit.is_8bit(state_kind):
                    name = f"{name}.{scales_suffix(weight.full)}"
                    yield StateTensor(name, state_kind, spec, torch.float32, True, share)
        if has_gradient(spec):
            name = f"{spec.name}.gradient"
            yield StateTensor(name, StateKind.GRADIENTS, spec, torch.float32)


def tensors_of(state: StateAccess, unit: Unit) -> list[StateTensor]:
    """Returns the tensors that a checkpoint holds of a unit in the present state of the engine.

    A unit that rests in the files of its base has none (`references.py`).
    """
    if unit.stored is not None:
        return []
    return list(
        state_tensors(
            unit,
            has_kind=lambda state_kind: state.has_kind(unit, state_kind),
            has_gradient=state.has_gradient,
        )
    )


KeptTensors = list[tuple[Unit, list[StateTensor]]]


def kept_tensors(state: StateAccess) -> KeptTensors:
    """Returns the tensors that this process keeps, unit by unit."""
    if state.partition is None:
        return [(unit, tensors_of(state, unit)) for unit in state.units]
    return list(tensors_of_rank(state.partition, has_kind=state.has_kind))


def tensors_of_rank(
    divided: Partition, *, has_kind: Callable[[Unit, StateKind], bool]
) -> Iterator[tuple[Unit, list[StateTensor]]]:
    """Yields the tensors that one rank keeps, unit by unit.

    These are the tensors of its shards, and the weights that every rank has in full. Units that
    rest in the files of their base have none.
    """
    shares = {
        share.part: share for shard in divided.local for share in (*shard.shares, *shard.frozen)
    }
    for unit in (unit for unit in divided.units if unit.stored is None):
        has = partial(has_kind, unit)
        tensors = state_tensors(unit, has_kind=has, has_gradient=lambda _: False, shares=shares)
        yield unit, [tensor for tensor in tensors if has(tensor.state_kind)]


def _suffix(unit: Unit, state_kind: StateKind) -> str:
    return "residual" if state_kind is StateKind.MASTER and unit.has_residual else state_kind.value


def scales_suffix(spec: TensorSpec) -> str:
    """Returns the ending of the name of the scales of a parameter.

    Scales belong to blocks in memory order, which a file of codes does not show. If memory order is
    not row-major, the ending contains the order, so that a model with another order is refused.
    """
    if is_row_major(spec):
        return "scales"
    strides = spec.facts.stride
    order = sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
    return "scales_" + "_".join(map(str, order))


def is_row_major(spec: TensorSpec) -> bool:
    """Whether memory order is row-major, the order of elements in a file."""
    return spec.facts.stride == row_major_stride(spec.facts.shape)


def in_row_major(parts: Iterable[Part]) -> Iterator[Part]:
    """Yields the same elements in row-major order; holds a full tensor if its strides differ.

    `scales` of a part belong to blocks in memory order, and are left out then.
    """
    full: torch.Tensor | None = None
    for part in parts:
        spec, stop = part.spec, part.start + part.values.numel()
        if is_row_major(spec):
            yield part
            continue
        if full is None:
            full = torch.empty(spec.numel, dtype=part.values.dtype)
        full[part.start : stop] = part.values
        if stop == spec.numel:
            shaped = full.as_strided(spec.facts.shape, spec.facts.stride)
            yield Part(spec, 0, shaped.contiguous().view(-1))
            full = None


def row_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the stride of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


@dataclass(frozen=True, slots=True)
class KindRange:
    """Full pages of a state kind, and the tensors in them. Offsets count from `start_nbytes`."""

    unit: Unit
    state_kind: StateKind
    start_nbytes: int
    stop_nbytes: int
    tensors: tuple[LinkedTensor, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the range."""
        return self.stop_nbytes - self.start_nbytes

    def stored(self, runs: Iterable[LinkedRun]) -> LinkedKind:
        """Returns the row of the table for these pages in `runs`."""
        unit, state_kind = self.unit, self.state_kind
        return LinkedKind(unit.name, state_kind.value, state_kind.kind, tuple(runs), self.tensors)


def is_linkable(state: StateAccess, unit: Unit, state_kind: StateKind) -> bool:
    """Whether the state kind rests in swap files that a checkpoint may link to.

    Gradients are written in place even while the volume is frozen, and moments of eight bits have
    no spare generation; both must be copied.
    """
    if state_kind is StateKind.GRADIENTS or unit.is_8bit(state_kind):
        return False
    return isinstance(state.store.location(unit, state_kind), NvmeLocation)


def state_kind_ranges(tensors: Iterable[tuple[Unit, StateTensor]]) -> list[KindRange]:
    """Returns full state kinds of units, with these tensors in them."""
    of_state_kind: dict[tuple[Unit, StateKind], list[LinkedTensor]] = {}
    for unit, tensor in tensors:
        of_state_kind.setdefault((unit, tensor.state_kind), []).extend(linked_tensors(unit, tensor))
    return [
        KindRange(unit, state_kind, 0, unit.nbytes(state_kind), tuple(rows))
        for (unit, state_kind), rows in of_state_kind.items()
    ]


def own_weights(divided: Partition) -> Iterator[KindRange]:
    """Yields the part that this rank owns of the weights that every rank keeps in full."""
    for full_unit, shard in zip(divided.full_units, divided.local, strict=True):
        for shares in (shard.shares, shard.frozen):
            places = [_weight_range(share) for share in shares]
            if not places:
                continue
            low = align_down(min(start for start, _ in places), PAGE_NBYTES)
            high = align_up(max(stop for _, stop in places), PAGE_NBYTES)
            tensors = tuple(
                LinkedTensor(
                    share.full.name,
                    dtype_name(share.full.facts.dtype),
                    share.full.facts.shape,
                    share.full.facts.stride,
                    start - low,
                    share.start,
                    share.part.numel,
                )
                for share, (start, _) in zip(shares, places, strict=True)
            )
            yield KindRange(full_unit, StateKind.PARAMETERS, low, high, tensors)


def _weight_range(share: ShardSlice) -> tuple[int, int]:
    """Returns the byte range [start, stop) of a shard in the weights of the full unit."""
    at, size = share.full.weight_offset_nbytes, share.full.facts.dtype.itemsize
    return at + share.start * size, at + share.stop * size


def linked_tensors(unit: Unit, tensor: StateTensor) -> Iterator[LinkedTensor]:
    """Yields the rows of the table for a tensor: its place in the state kind.

    A tensor has one row. Codes of eight bits alternate with their scales, so both have one row for
    every granule.
    """
    for first, numel, offset_nbytes in _ranges_of(unit, tensor):
        yield LinkedTensor(
            tensor.name,
            dtype_name(tensor.dtype),
            tensor.info.shape,
            (1,) if tensor.is_scales else tensor.facts.stride,
            offset_nbytes,
            tensor.start + first,
            numel,
        )


def _ranges_of(unit: Unit, tensor: StateTensor) -> Iterator[tuple[int, int, int]]:
    """Yields (first element, number of elements, byte offset in the state kind) for every row."""
    spec, state_kind = tensor.spec, tensor.state_kind
    if state_kind is StateKind.PARAMETERS:
        yield 0, spec.numel, spec.weight_offset_nbytes
    elif not unit.is_8bit(state_kind):
        yield 0, spec.numel, unit.nbytes(state_kind, spec.state_offset)
    else:
        stop = spec.state_offset + spec.numel
        for run in runs_within(unit.state_numel, spec.state_offset, stop):
            first = run.start - spec.state_offset
            if tensor.is_scales:
                yield first // BLOCK_NUMEL, num_scales(run.numel), run.scales_offset_nbytes
            else:
                yield first, run.numel, run.codes_offset_nbytes
