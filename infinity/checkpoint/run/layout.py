"""The tensors that a checkpoint holds of a unit: names, shapes and dtypes, without their bytes.

A pure function of the unit. The ending of a name gives the kind of the tensor, so that any reader
of safetensors can use the files: `layers.0.weight` in the compute dtype, `layers.0.weight.residual`
(or `.master`), the moments of the optimizer (`.exp_avg`, `.exp_avg_sq`, `.momentum_buffer`),
`.gradient`. Every tensor has the full shape of its parameter. Moments of eight bits have a second
tensor, which is flat: the scales of their blocks, `.exp_avg.scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from infinity.checkpoint.huggingface.safetensors_file import TensorInfo
from infinity.ops.dynamic_8bit import BLOCK_NUMEL, num_scales
from infinity.state.partition import Partition, ShardSlice
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


def row_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the stride of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()
