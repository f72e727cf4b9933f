"""Which tensors a checkpoint holds of a unit: names, shapes and dtypes, without a byte of them.

A pure function of the unit. Names say what a tensor is, so that any safetensors reader can use the
files: `layers.0.weight` in the compute dtype, `layers.0.weight.residual` (or `.master`), the
moments that the optimizer keeps (`.exp_avg`, `.exp_avg_sq`, `.momentum_buffer`), `.gradient`. Every
one has the parameter's full shape; but moments of eight bits also have the scales of their blocks,
`.exp_avg.scales`, flat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from infinity.checkpoint.huggingface.safetensors_file import TensorInfo
from infinity.ops.dynamic_8bit import BLOCK_NUMEL, num_scales
from infinity.state.partition import Partition, ShardSlice
from infinity.state.units import MOMENT_PIECES, StateKind, TensorFacts, TensorSpec, Unit

# Pieces that are streamed; gradients are few and taken one by one.
STREAMED = (StateKind.PARAMETERS, StateKind.MASTER, *MOMENT_PIECES)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a checkpoint, and what it is in the engine: `spec`, in a piece of a unit.

    Where state is divided over ranks `spec` is the part of it that lies in a shard, by `share`.
    """

    name: str
    state_kind: StateKind
    spec: TensorSpec
    dtype: torch.dtype
    is_scales: bool = False  # Of the codes that have the name without the last part.
    share: ShardSlice | None = None

    @property
    def whole(self) -> TensorSpec:
        """The whole parameter."""
        return self.spec if self.share is None else self.share.whole

    @property
    def facts(self) -> TensorFacts:
        """Of the whole parameter."""
        return self.whole.facts

    @property
    def start(self) -> int:
        """Which element of the whole tensor, in memory order, is the first of this part of it. A
        share begins where a block of codes does."""
        start = 0 if self.share is None else self.share.start
        return start // BLOCK_NUMEL if self.is_scales else start

    @property
    def info(self) -> TensorInfo:
        """As the file has it."""
        shape = (num_scales(self.whole.numel),) if self.is_scales else self.facts.shape
        return TensorInfo(name=self.name, dtype=self.dtype, shape=shape)


def state_tensors(
    unit: Unit,
    *,
    has_kind: Callable[[StateKind], bool],
    has_gradient: Callable[[TensorSpec], bool],
    shares: Mapping[TensorSpec, ShardSlice] | None = None,
) -> Iterator[StateTensor]:
    """Every tensor of the unit that a checkpoint holds. `has_kind` says what the engine keeps;
    `shares`: of which whole tensors those of a shard are parts."""
    for spec in unit.tensors:
        share = None if shares is None else shares.get(spec)
        weight = StateTensor(spec.name, StateKind.PARAMETERS, spec, spec.facts.dtype, share=share)
        yield weight
        if spec.state_offset < 0:
            continue
        for state_kind in (StateKind.MASTER, *MOMENT_PIECES):
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
                    name = f"{name}.{scales_suffix(weight.whole)}"
                    yield StateTensor(name, state_kind, spec, torch.float32, True, share)
        if has_gradient(spec):
            name = f"{spec.name}.gradient"
            yield StateTensor(name, StateKind.GRADIENTS, spec, torch.float32)


def tensors_of_rank(
    divided: Partition, *, has_kind: Callable[[Unit, StateKind], bool]
) -> Iterator[tuple[Unit, list[StateTensor]]]:
    """What one rank keeps of a model, unit by unit: its shards, and the weights that every rank has
    whole."""
    shares = {share.part: share for each in divided.mine for share in (*each.shares, *each.frozen)}
    for unit in divided.units:
        has = partial(has_kind, unit)
        tensors = state_tensors(unit, has_kind=has, has_gradient=lambda spec: False, shares=shares)
        yield unit, [each for each in tensors if has(each.state_kind)]


def _suffix(unit: Unit, state_kind: StateKind) -> str:
    return "residual" if state_kind is StateKind.MASTER and unit.has_residual else state_kind.value


def scales_suffix(spec: TensorSpec) -> str:
    """Blocks are counted in memory order, which codes in a file do not show: where it is not
    that of a file, the name says which it is, and a model with another one does not find it."""
    if is_row_major(spec):
        return "scales"
    strides = spec.facts.stride
    order = sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
    return "scales_" + "_".join(map(str, order))


def is_row_major(spec: TensorSpec) -> bool:
    """Whether memory order is the order of a file."""
    return spec.facts.stride == row_major_stride(spec.facts.shape)


def row_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
