"""A model's shapes with tiles, as `modules/tiling/split.py` splits its modules. Pure.

Matrices are split by rows. A stack of two or three matrices in a shape is split as the one matrix
that it is. The experts of a block are split together, between experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from infinity.plan.model import ModuleWork, PlannedModel
from infinity.state.tiles import ROW_ALIGNMENT, CutRows, experts_of
from infinity.state.units import TensorFacts, Unit, layout_unit
from infinity.tiers.ranges import rounded_nbytes

_MOST_STACKED = 3  # Gate, up and down of a feed-forward.


def largest_nbytes(model: PlannedModel) -> int:
    """Returns the bytes of the largest set of parameters that are split at the same rows."""
    nbytes_of = _nbytes_of(model)
    every = [tensor.facts for unit in model.units for tensor in unit.tensors]
    sizes = [nbytes_of(facts) for facts in every if _is_matrix(facts)]
    sizes += [sum(map(nbytes_of, experts_of(unit))) for unit in model.units]
    return max(sizes, default=0)


def with_tiles(model: PlannedModel, limit_nbytes: int | None) -> PlannedModel:
    """Returns the model with every matrix, and every block's experts, above the limit split into
    tiles. Each tile is a unit that is used right after the rest of its own unit. None: the model
    itself."""
    if limit_nbytes is None:
        return model
    units: list[Unit] = []
    parts: list[_Parts] = []  # One per unit.
    for unit in model.units:
        first = len(units)
        left, tiles = _cut(unit, limit_nbytes, _nbytes_of(model))
        for name, tensors in [(unit.name, left)] * bool(left) + tiles:
            units.append(layout_unit(len(units), name, tensors, unit.moments))
        parts.append((tuple(range(first, first + bool(left))), _to_end(first + bool(left), units)))
    held = [
        _held_nbytes([parts[unit] for unit in hooked.units], units)
        for hooked in model.hooked_modules
    ]
    return replace(
        model,
        units=tuple(units),
        hooked_modules=tuple(
            hooked
            for work in model.hooked_modules
            for hooked in _hooked_modules(work, [parts[unit] for unit in work.units], units)
        ),
        held_nbytes=max(held) + _nested_nbytes(model),
    )


# Indexes of the rest of a unit (one or none), and of its tiles.
_Parts = tuple[tuple[int, ...], tuple[int, ...]]


def _to_end(first: int, units: list[Unit]) -> tuple[int, ...]:
    return tuple(range(first, len(units)))


def _is_matrix(facts: TensorFacts) -> bool:
    shape = facts.shape
    return len(shape) == 2 or (len(shape) == 3 and shape[0] <= _MOST_STACKED)


_NbytesOf = Callable[[TensorFacts], int]


def _nbytes_of(model: PlannedModel) -> _NbytesOf:
    """Returns the function that gives the bytes of a tensor where the device computes with it, by
    which the engine divides: of stored weights, the decoded ones."""

    def nbytes(facts: TensorFacts) -> int:
        per_byte = 1.0 if model.frozen is None else model.frozen.attached_per_byte(facts.name)
        return int(math.prod(facts.shape) * facts.dtype.itemsize * per_byte)

    return nbytes


_Tiles = list[tuple[str, list[TensorFacts]]]  # (name, tensors) of each tile.


def _cut(unit: Unit, limit_nbytes: int, nbytes_of: _NbytesOf) -> tuple[list[TensorFacts], _Tiles]:
    """Returns the tensors that remain, and the tiles in the order of their use."""
    left: list[TensorFacts] = []
    tiles: _Tiles = []
    experts = experts_of(unit)
    for facts in (tensor.facts for tensor in unit.tensors):
        uncut, found = [facts], _Tiles()
        if experts and facts is experts[0]:
            uncut = experts
            found = _tiles(f"{unit.name}.experts", experts, limit_nbytes, nbytes_of, alignment=1)
        elif any(facts is expert for expert in experts):
            continue
        elif _is_matrix(facts):
            rows, columns = math.prod(facts.shape[:-1]), facts.shape[-1]
            flat = replace(facts, shape=(rows, columns), stride=(columns, 1))
            found = _tiles(facts.name, [flat], limit_nbytes, nbytes_of)
        tiles += found
        left += [] if found else uncut
    return left, tiles


def _tiles(
    name: str,
    tensors: list[TensorFacts],
    limit_nbytes: int,
    nbytes_of: _NbytesOf,
    alignment: int = ROW_ALIGNMENT,
) -> _Tiles:
    """Returns the tiles of tensors that are cut at the same rows; none where they stay whole."""
    nbytes, num_rows = sum(map(nbytes_of, tensors)), tensors[0].shape[0]
    rows = CutRows(num_rows, nbytes, nbytes // max(num_rows, 1), alignment)
    return [
        (
            f"{name}.tiles.{index}",
            [
                replace(
                    facts,
                    name=f"{facts.name}.tiles.{index}",
                    shape=(stop - start, *facts.shape[1:]),
                )
                for facts in tensors
            ],
        )
        for index, (start, stop) in enumerate(pairwise(rows.starts(limit_nbytes)))
    ]


def _hooked_modules(
    work: ModuleWork, parts: list[_Parts], units: list[Unit]
) -> Iterator[ModuleWork]:
    """Returns one use of the rest of the unit, with the attention, then one use of every tile."""
    left = tuple(unit for rest, _ in parts for unit in rest)
    tiles = [unit for _, tiles in parts for unit in tiles]
    shares = _shares(work, left, tiles, units)
    if left or work.attention_width:
        active_params = work.active_params - sum(shares)
        yield replace(work, units=left, active_params=active_params, expert_params=0)
    for unit, share in zip(tiles, shares, strict=True):
        yield ModuleWork(
            (unit,),
            share,
            is_tile=work.attention_width > 0,
            is_experts=bool(experts_of(units[unit])),
            trained_params=None if work.trained_params is None else 0,
            has_backward=work.has_backward,
        )


def _shares(
    work: ModuleWork, left: tuple[int, ...], tiles: list[int], units: list[Unit]
) -> list[int]:
    """Returns the active parameters of every tile: even parts of those of routed experts if they
    are known, else in proportion to elements."""
    shared, divided = work.active_params, (*left, *tiles)
    if work.expert_params:
        shared, divided = work.expert_params, tuple(tiles)
    num_params = sum(_numel(units[unit]) for unit in divided)
    return [shared * _numel(units[unit]) // max(num_params, 1) for unit in tiles]


def _numel(unit: Unit) -> int:
    return sum(tensor.numel for tensor in unit.tensors)


def _held_nbytes(parts: list[_Parts], units: list[Unit]) -> int:
    """Returns the bytes of the rest of each unit and one tile."""
    left = sum(rounded_nbytes(units[unit].weight_nbytes) for rest, _ in parts for unit in rest)
    tiles = (rounded_nbytes(units[unit].weight_nbytes) for _, tiles in parts for unit in tiles)
    return left + max(tiles, default=0)


def _nested_nbytes(model: PlannedModel) -> int:
    """Returns the bytes that surrounding modules use beside the largest; they are not split."""
    largest = max(
        sum(rounded_nbytes(model.units[unit].weight_nbytes) for unit in hooked.units)
        for hooked in model.hooked_modules
    )
    return max(model.held_nbytes - largest, 0)
