"""Maps tensors of a model to tensors of a checkpoint whose large layers have other tiles.

A tile holds consecutive rows of the tiled parameter (`state/tiles.py`), and so do the moments and
the residual of the rows. So a tensor of one cut is a consecutive range of elements, and is joined
from ranges of tensors of the other cut. Pure: names and shapes, no bytes.

Moments of eight bits are left out, because their blocks need not end where a tile ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from infinity.checkpoint.huggingface.safetensors_file import TensorInfo
from infinity.state.tiles import name_of_tiled, number_of_tile


@dataclass(frozen=True, slots=True)
class RecutSource:
    """`count` elements of a tensor in the checkpoint, from `start` on."""

    name: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Recut:
    """A tensor of the model, and the ranges that it is joined from, in order."""

    info: TensorInfo
    sources: tuple[RecutSource, ...]

    def within(self, start: int, count: int) -> Iterator[RecutSource]:
        """Yields the ranges that hold `count` elements from `start` on."""
        first = 0
        for source in self.sources:
            low, high = max(start, first), min(start + count, first + source.count)
            if low < high:
                yield RecutSource(source.name, source.start + low - first, high - low)
            first += source.count


def recut(
    expected: Mapping[str, TensorInfo], saved: Mapping[str, TensorInfo]
) -> tuple[dict[str, Recut], set[str]]:
    """Maps expected tensors to saved tensors of another cut.

    Returns (recut tensors by name, names of the saved tensors that they use). Leaves out tensors
    that cannot be joined; the comparison of names then reports them.
    """
    saved_tiles = _by_parameter(saved)
    found: dict[str, Recut] = {}
    used: set[str] = set()
    for name, tiles in _by_parameter(expected).items():
        sources = saved_tiles.get(name, [])
        cuts = [[(info.name, info.shape) for info in side] for side in (tiles, sources)]
        if cuts[0] != cuts[1] and _can_join(tiles, sources):
            found.update(_join(tiles, sources))
            used.update(info.name for info in sources)
    return found, used


def _by_parameter(infos: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Groups tiles by the name of the tiled parameter, in order; a plain tensor is one tile."""
    groups: dict[str, list[TensorInfo]] = {}
    for info in infos.values():
        groups.setdefault(name_of_tiled(info.name), []).append(info)
    for tiles in groups.values():
        tiles.sort(key=lambda info: number_of_tile(info.name))
    return groups


def _can_join(tiles: list[TensorInfo], sources: list[TensorInfo]) -> bool:
    """Whether both sides are cuts of the same rows."""
    if not sources or any(not info.shape for info in tiles + sources):
        return False
    kinds = {(info.dtype, tuple(info.shape[1:])) for info in tiles + sources}
    rows = [sum(info.shape[0] for info in side) for side in (tiles, sources)]
    return len(kinds) == 1 and tiles[0].dtype is not torch.uint8 and rows[0] == rows[1]


def _join(tiles: list[TensorInfo], sources: list[TensorInfo]) -> Iterator[tuple[str, Recut]]:
    ranges = tuple(RecutSource(info.name, 0, math.prod(info.shape)) for info in sources)
    joined = Recut(sources[0], ranges)
    first = 0
    for info in tiles:
        count = math.prod(info.shape)
        yield info.name, Recut(info, tuple(joined.within(first, count)))
        first += count
