"""Tensors of a checkpoint whose large layers were cut into other tiles than the model's are now.

A tile holds rows that lie one after the other in the whole (`state/tiles.py`), and so do the
moments and the residual of the rows. So a tensor of one cut is a run of elements of the whole, put
together from parts of the tensors of the other. Pure: names and shapes, no bytes.

Moments of eight bits are left out: their blocks need not end where a tile does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from infinity.checkpoint.huggingface.safetensors_file import TensorInfo
from infinity.state.tiles import name_of_whole, number_of_tile


@dataclass(frozen=True, slots=True)
class RecutSource:
    """`count` elements of a tensor in the checkpoint, from `start` on."""

    name: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Recut:
    """A tensor of the model, and what it is put together from, in order."""

    info: TensorInfo
    sources: tuple[RecutSource, ...]

    def within(self, start: int, count: int) -> Iterator[RecutSource]:
        """The parts of `count` elements from `start` on."""
        first = 0
        for source in self.sources:
            low, high = max(start, first), min(start + count, first + source.count)
            if low < high:
                yield RecutSource(source.name, source.start + low - first, high - low)
            first += source.count


def recut(
    expected: Mapping[str, TensorInfo], there: Mapping[str, TensorInfo]
) -> tuple[dict[str, Recut], set[str]]:
    """What of `expected` is put together from tensors `there` of another cut, by name; and the
    names of those. What does not fit together is left out, for the comparison of names to tell."""
    mine, theirs = _by_whole(expected), _by_whole(there)
    found: dict[str, Recut] = {}
    used: set[str] = set()
    for whole, here in mine.items():
        other = theirs.get(whole, [])
        facts = [[(each.name, each.shape) for each in side] for side in (here, other)]
        if facts[0] != facts[1] and _is_same_whole(here, other):
            found.update(_put_together(here, other))
            used.update(each.name for each in other)
    return found, used


def _by_whole(infos: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Tiles of a whole in order; what is not cut is its own only tile."""
    groups: dict[str, list[TensorInfo]] = {}
    for info in infos.values():
        groups.setdefault(name_of_whole(info.name), []).append(info)
    for tiles in groups.values():
        tiles.sort(key=lambda info: number_of_tile(info.name))
    return groups


def _is_same_whole(here: list[TensorInfo], other: list[TensorInfo]) -> bool:
    if not other or any(not info.shape for info in here + other):
        return False
    kinds = {(info.dtype, tuple(info.shape[1:])) for info in here + other}
    rows = [sum(info.shape[0] for info in side) for side in (here, other)]
    return len(kinds) == 1 and here[0].dtype is not torch.uint8 and rows[0] == rows[1]


def _put_together(here: list[TensorInfo], other: list[TensorInfo]) -> Iterator[tuple[str, Recut]]:
    sources = Recut(
        other[0], tuple(RecutSource(info.name, 0, math.prod(info.shape)) for info in other)
    )
    first = 0
    for info in here:
        count = math.prod(info.shape)
        yield info.name, Recut(info, tuple(sources.within(first, count)))
        first += count
