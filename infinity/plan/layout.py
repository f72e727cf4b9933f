"""A model as a plan has it: tensors of units, work of modules, and their tiles. Pure.

Units are laid out by the engine's own functions, and divided by its own rows. Matrices are split by
rows, the experts of a block together, between experts. Each tile is a unit that is used right after
the rest of its own unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from infinity.config import AdapterConfig
from infinity.plan.frozen_base import StoredModel
from infinity.sizes import PAGE_NBYTES, align_up
from infinity.state.nesting import Nesting
from infinity.state.placement import resting_nbytes
from infinity.state.stored import StoredTensor, StoredWeights, stored_tiles
from infinity.state.tiles import ROW_ALIGNMENT, CutRows, is_expert_stack
from infinity.state.units import (
    TENSOR_ALIGNMENT_NBYTES,
    Moments,
    StateKind,
    TensorFacts,
    Unit,
    layout_units,
)


def facts_of_shape(
    name: str, size: tuple[int, ...], dtype: torch.dtype, *, is_trainable: bool
) -> TensorFacts:
    """Returns the facts of a contiguous tensor."""
    strides = torch.empty(size, device="meta").stride()
    return TensorFacts(name, size, tuple(strides), dtype, is_trainable)


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """A tensor of a unit, as the device computes with it. Frozen weights of a block are one or two,
    of which routed experts have a row each.

    `multiplied`: its elements that multiply one token, of routed experts those of the chosen ones.
    `stored_nbytes`: its bytes in a checkpoint; `is_encoded`: they are decoded for a use. `stored`:
    its ranges of files; empty if the files are not there.
    """

    facts: TensorFacts
    multiplied: int
    stored_nbytes: int = 0
    is_encoded: bool = False
    stored: StoredTensor = ()

    @property
    def nbytes(self) -> int:
        """The bytes where the device computes, by which the engine divides."""
        return math.prod(self.facts.shape) * self.facts.dtype.itemsize

    def tiles(self, starts: Sequence[int]) -> list[PlannedWeight]:
        """Returns its rows from each start to the next; nothing where a codec cannot divide it."""
        facts, parts = self.facts, stored_tiles(self.stored, starts)
        if parts is None:
            return []
        return [
            replace(
                self,
                facts=replace(
                    facts,
                    name=f"{facts.name}.tiles.{index}",
                    shape=(stop - start, *facts.shape[1:]),
                ),
                multiplied=self.multiplied * (stop - start) // facts.shape[0],
                stored_nbytes=self.stored_nbytes * (stop - start) // facts.shape[0],
                stored=part,
            )
            for index, ((start, stop), part) in enumerate(zip(pairwise(starts), parts, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class UnitTensors:
    """The tensors of a unit."""

    name: str
    tensors: tuple[PlannedWeight, ...]

    @property
    def stored_nbytes(self) -> int:
        """The bytes of a block of host memory with its stored weights, if no file is there."""
        nbytes = 0
        for tensor in self.tensors:
            nbytes = align_up(nbytes + tensor.stored_nbytes, TENSOR_ALIGNMENT_NBYTES)
        return align_up(max(nbytes, 1), PAGE_NBYTES)

    @property
    def experts(self) -> tuple[PlannedWeight, ...]:
        """The stacks with a row for each routed expert."""
        return tuple(tensor for tensor in self.tensors if is_expert_stack(tensor.facts))

    def divisible(self) -> list[tuple[str, tuple[PlannedWeight, ...], int]]:
        """Returns (name, tensors, alignment) of all that are divided at the same rows."""
        found = []
        for tensor in self.tensors:
            if self.experts and tensor is self.experts[0]:
                found.append((f"{self.name}.experts", self.experts, 1))
            elif len(tensor.facts.shape) == 2:
                found.append((tensor.facts.name, (tensor,), ROW_ALIGNMENT))
        return found

    def divided(self, limit_nbytes: int) -> tuple[list[UnitTensors], list[UnitTensors]]:
        """Returns the unit of what stays whole, if there is any, and the tiles in the order of
        their use."""
        tiles: list[UnitTensors] = []
        gone: list[PlannedWeight] = []
        for name, tensors, alignment in self.divisible():
            nbytes, num_rows = nbytes_of(tensors), tensors[0].facts.shape[0]
            rows = CutRows(num_rows, nbytes, nbytes // max(num_rows, 1), alignment)
            starts = rows.starts(limit_nbytes)
            cut = [tensor.tiles(starts) for tensor in tensors] if starts else [[]]
            if all(cut):
                gone += tensors
                parts = enumerate(zip(*cut, strict=True))
                tiles += [UnitTensors(f"{name}.tiles.{index}", part) for index, part in parts]
        left = tuple(t for t in self.tensors if not any(t is other for other in gone))
        return [UnitTensors(self.name, left)] * bool(left), tiles


def nbytes_of(tensors: Sequence[PlannedWeight]) -> int:
    """Returns the bytes of tensors where the device computes."""
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class ModuleWork:
    """One forward of a hooked module: its units, and the width of attention scores and mixing (0
    without attention, as outside blocks).

    `within`: the module around it, as the block around a tile. `is_experts`: a tile of experts.
    `multiplies` is false for a table, and for a norm. `has_backward` is false where no gradient
    passes. `frozen_params` and `trained_params` multiply one token; `PlannedModel` counts them.
    `mlp_params` are those of MLPs that are no routed experts.
    """

    units: tuple[int, ...]
    attention_width: int = 0
    within: int | None = None
    is_experts: bool = False
    multiplies: bool = True
    has_backward: bool = True
    frozen_params: int = 0
    trained_params: int = 0
    mlp_params: int = 0

    def forward_flops(self, num_tokens: int, sequence_length: int) -> float:
        """Returns the FLOPs of `num_tokens` in sequences of this length. Causal attention covers
        half of the length."""
        attended = self.attention_width * sequence_length / 2
        return 2.0 * num_tokens * (self.frozen_params + self.trained_params + attended)

    def gradient_ratio(self, sequence_length: int, *, slices_mlps: bool = False) -> float:
        """Returns the FLOPs of gradients over those of the forward: 2 where all weights are
        trained, 1 for frozen weights, whose own gradients are not needed. The forward of MLPs in
        slices is among them."""
        changed = self.trained_params + self.attention_width * sequence_length / 2
        both = self.frozen_params + changed
        repeated = slices_mlps * self.mlp_params
        return (both + changed + repeated) / both if both else 1.0

    def counted(self, groups: Sequence[UnitTensors]) -> ModuleWork:
        """Returns the work with the parameters of its units counted."""
        params = {True: 0, False: 0}
        for tensor in (t for unit in self.units for t in groups[unit].tensors):
            params[tensor.facts.is_trainable] += tensor.multiplied * self.multiplies
        mlp_params = min(self.mlp_params, sum(params.values()))  # Less what runs as tiles.
        return replace(
            self, frozen_params=params[False], trained_params=params[True], mlp_params=mlp_params
        )


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """The frozen weights of a model under adapters of `trained_params`, or alone. `is_copied`:
    the engine copies them, decoded, to the tiers of `parameters`, and reads them there."""

    stored: StoredModel
    adapters: tuple[AdapterConfig, ...]
    trained_params: int
    is_copied: bool = False


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The facts of a model that the planner needs, from any source. `units` are those of `groups`,
    laid out."""

    name: str
    groups: tuple[UnitTensors, ...]
    hooked_modules: tuple[ModuleWork, ...]
    moments: Moments
    num_params: int
    checkpoint_width: int  # Values per token that a checkpointed block saves.
    hf_config: Any = None  # The configuration of a transformers model.
    frozen: FrozenBase | None = None  # None if all weights are trained.
    units: tuple[Unit, ...] = field(init=False)

    def __post_init__(self) -> None:
        works = tuple(work.counted(self.groups) for work in self.hooked_modules)
        object.__setattr__(self, "hooked_modules", works)
        groups = [(g.name, [tensor.facts for tensor in g.tensors]) for g in self.groups]
        stored: dict[str, StoredTensor] = {}
        if self.has_base_in_place:
            every = (tensor for group in self.groups for tensor in group.tensors)
            stored = {t.facts.name: t.stored for t in every if not t.facts.is_trainable}
        are_there = any(stored.values())
        units = layout_units(groups, self.moments, stored if are_there else None)
        if stored and not are_there:
            units = tuple(
                unit
                if unit.state_numel
                else replace(unit, stored=StoredWeights(group.stored_nbytes, (), ()))
                for unit, group in zip(units, self.groups, strict=True)
            )
        object.__setattr__(self, "units", units)

    @property
    def has_base_in_place(self) -> bool:
        """Whether frozen weights are read from the files of their checkpoint."""
        return self.frozen is not None and not self.frozen.is_copied

    @property
    def nesting(self) -> Nesting:
        """The units that modules need inside one another."""
        chains: list[tuple[int, ...]] = []
        for number, work in enumerate(self.hooked_modules):
            chains.append((*(() if work.within is None else chains[work.within]), number))
        works = self.hooked_modules
        blocks = {number for number, work in enumerate(works) if work.attention_width}
        return Nesting(chains, [work.units for work in works], blocks)

    @property
    def blocks(self) -> list[int | None]:
        """The block that each hooked module belongs to, by the number of its module."""
        nesting = self.nesting
        return [nesting.block_of(chain) for chain in nesting.chains]

    @property
    def held_nbytes(self) -> int:
        """The most bytes that nested modules use at the same time, as they rest."""
        kind = StateKind.PARAMETERS
        return self.nesting.most_nbytes([resting_nbytes(unit, kind) for unit in self.units])

    @property
    def most_decoded_nbytes(self) -> int:
        """The most bytes of weights that are decoded at the same time: a block's own, and those of
        one tile of its experts."""
        return self.nesting.most_nbytes([self.decoded_nbytes(unit) for unit in self.units])

    def decoded_nbytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit's weights (or of a tile's) that are decoded for a use."""
        tensors = self.groups[unit.index].tensors if self.has_base_in_place else ()
        return sum(tensor.nbytes for tensor in tensors if tensor.is_encoded)

    @property
    def active_params(self) -> int:
        """The parameters that one token uses, without an adapter: of routed experts, the chosen
        ones."""
        frozen = sum(work.frozen_params for work in self.hooked_modules)
        return frozen or sum(work.trained_params for work in self.hooked_modules)

    @property
    def has_experts(self) -> bool:
        """Whether some unit has routed experts."""
        return any(group.experts for group in self.groups)

    @property
    def largest_nbytes(self) -> int:
        """The bytes of the largest set of tensors that are divided at the same rows."""
        sets = (found for group in self.groups for found in group.divisible())
        return max((nbytes_of(tensors) for _, tensors, _ in sets), default=0)

    def copied(self) -> PlannedModel:
        """Returns the model as the engine trains it where it copies the base: with placement.frozen
        = "copy"."""
        assert self.frozen is not None
        return replace(self, frozen=replace(self.frozen, is_copied=True))

    def with_tiles(self, limit_nbytes: int | None) -> PlannedModel:
        """Returns the model with every matrix, and every block's experts, above the limit split
        into tiles. None: the model itself."""
        if limit_nbytes is None:
            return self
        groups: list[UnitTensors] = []
        places: list[tuple[range, range]] = []  # By unit: that of what stays whole, the tiles'.
        for group in self.groups:
            left, tiles = group.divided(limit_nbytes)
            first, end = len(groups), len(groups) + len(left) + len(tiles)
            places.append((range(first, first + len(left)), range(first + len(left), end)))
            groups += [*left, *tiles]
        works: list[ModuleWork] = []
        numbers: list[int | None] = []  # By module, the number of the one that it has become.
        for work in self.hooked_modules:
            around = None if work.within is None else numbers[work.within]
            left_units = tuple(unit for old in work.units for unit in places[old][0])
            if left_units or work.attention_width:
                works.append(replace(work, units=left_units, within=around))
                around = len(works) - 1
            numbers.append(around)
            works += [
                ModuleWork(
                    (unit,), within=around, is_experts=bool(groups[unit].experts),
                    multiplies=work.multiplies, has_backward=work.has_backward,
                )
                for old in work.units
                for unit in places[old][1]
            ]  # fmt: skip
        return replace(self, groups=tuple(groups), hooked_modules=tuple(works))
