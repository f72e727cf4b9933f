"""A model's shapes with tiles, as `engine.tiling` cuts its modules. Pure.

Matrices are cut by rows, and a stack of two or three of them, as shapes are written down here, as
the one matrix under the other that it is. Experts are packed in one parameter that no linear layer
runs, so they stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from infinity.plan.model import Model, SiteWork
from infinity.state.tiles import cut_rows
from infinity.state.units import TensorFacts, TensorSpec, Unit, layout_unit
from infinity.tiers.ranges import rounded_nbytes

_MOST_STACKED = 3  # Gate, up and down of a feed-forward.


def largest_nbytes(model: Model) -> int:
    """Of the parameters that can be cut."""
    sizes = (t.weight_nbytes for unit in model.units for t in unit.tensors if _can_be_cut(t))
    return max(sizes, default=0)


def with_tiles(model: Model, limit_nbytes: int | None) -> Model:
    """The model with every matrix of more than the limit as tiles, each of them a unit that is used
    right after what is left of its own. None: the model itself."""
    if limit_nbytes is None:
        return model
    units: list[Unit] = []
    parts: list[_Parts] = []  # Of every unit.
    for unit in model.units:
        first = len(units)
        left, tiles = _cut(unit, limit_nbytes)
        for name, tensors in [(unit.name, left)] * bool(left) + tiles:
            units.append(layout_unit(len(units), name, tensors))
        parts.append((tuple(range(first, first + bool(left))), _to_end(first + bool(left), units)))
    held = [_held_nbytes([parts[unit] for unit in site.units], units) for site in model.sites]
    return replace(
        model,
        units=tuple(units),
        sites=tuple(
            site
            for whole in model.sites
            for site in _sites(whole, [parts[unit] for unit in whole.units], units)
        ),
        held_nbytes=max(held) + _nested_nbytes(model),
    )


# Indexes of what is left of a unit (one or none), and of its tiles.
_Parts = tuple[tuple[int, ...], tuple[int, ...]]


def _to_end(first: int, units: list[Unit]) -> tuple[int, ...]:
    return tuple(range(first, len(units)))


def _can_be_cut(tensor: TensorSpec) -> bool:
    shape = tensor.facts.shape
    return len(shape) == 2 or (len(shape) == 3 and shape[0] <= _MOST_STACKED)


def _cut(
    unit: Unit, limit_nbytes: int
) -> tuple[list[TensorFacts], list[tuple[str, list[TensorFacts]]]]:
    """Tensors that are left, and (name, tensors) of every tile."""
    left: list[TensorFacts] = []
    tiles: list[tuple[str, list[TensorFacts]]] = []
    for tensor in unit.tensors:
        facts = tensor.facts
        columns, rows = math.prod(facts.shape[-1:]), math.prod(facts.shape[:-1])
        starts = cut_rows(rows, columns * facts.dtype.itemsize, limit_nbytes)
        is_small = tensor.weight_nbytes <= limit_nbytes or len(starts) == 2
        if is_small or not _can_be_cut(tensor):
            left.append(facts)
            continue
        for index, (start, stop) in enumerate(pairwise(starts)):
            name = f"{facts.name}.tiles.{index}"
            shape = (stop - start, columns)
            tiles.append((name, [replace(facts, name=name, shape=shape, stride=(columns, 1))]))
    return left, tiles


def _sites(whole: SiteWork, parts: list[_Parts], units: list[Unit]) -> Iterator[SiteWork]:
    """One use of what is left, with the attention, then one of every tile."""
    left = tuple(unit for rest, _ in parts for unit in rest)
    tiles = [unit for _, tiles in parts for unit in tiles]
    num_params = sum(_numel(units[unit]) for unit in (*left, *tiles))
    shares = [whole.active_params * _numel(units[unit]) // max(num_params, 1) for unit in tiles]
    if left or whole.attention_width:
        yield SiteWork(left, whole.active_params - sum(shares), whole.attention_width)
    for unit, share in zip(tiles, shares, strict=True):
        yield SiteWork((unit,), share)


def _numel(unit: Unit) -> int:
    return sum(tensor.numel for tensor in unit.tensors)


def _held_nbytes(parts: list[_Parts], units: list[Unit]) -> int:
    """What is left of each unit, and one tile."""
    left = sum(rounded_nbytes(units[unit].weight_nbytes) for rest, _ in parts for unit in rest)
    tiles = (rounded_nbytes(units[unit].weight_nbytes) for _, tiles in parts for unit in tiles)
    return left + max(tiles, default=0)


def _nested_nbytes(model: Model) -> int:
    """What sites around others hold beside the largest; it is not cut."""
    largest = max(
        sum(rounded_nbytes(model.units[unit].weight_nbytes) for unit in site.units)
        for site in model.sites
    )
    return max(model.held_nbytes - largest, 0)
