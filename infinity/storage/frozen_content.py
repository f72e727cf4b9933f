"""The content of a volume at one moment, and the ranges of swap files that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from infinity.storage.generations import NOWHERE, GenerationMap, GenerationRun, split_by_frozen

_NO_END = 1 << 62  # Behind the end of every file.


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of the swap file at `path`."""

    path: str
    offset_nbytes: int
    nbytes: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class FrozenContent:
    """The content of the volume at one moment. Its maps are never changed.

    `label`: the present path of the commit that needs it (`relabel`).
    """

    label: str
    maps: tuple[GenerationMap, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """Swap files of a job that has ended, which this job continues to use.

    `jobs`: the job of the files, by path as configured. `contents`: by label, the ranges of the
    files that are frozen. `num_spares`: the spare generations that the files have.
    """

    jobs: Mapping[str, str]
    contents: Mapping[str, Sequence[FileRange]]
    num_spares: int = 0


def maps_of(
    ranges: Sequence[FileRange], swap_paths: Sequence[Sequence[str]]
) -> tuple[GenerationMap, ...]:
    """Returns the maps by which just these ranges are frozen. `swap_paths`: for each path of the
    volume, its swap file of each generation."""
    places = {
        swap_path: (index, generation)
        for index, generations in enumerate(swap_paths)
        for generation, swap_path in enumerate(generations)
    }
    maps = tuple(GenerationMap(NOWHERE) for _ in swap_paths)
    for part in ranges:
        index, generation = places[part.path]
        maps[index].put(GenerationRun(generation, part.offset_nbytes, part.nbytes))
    return maps


def files_of(content: FrozenContent, swap_paths: Sequence[Sequence[str]]) -> set[str]:
    """Returns the swap files that hold a content. `swap_paths`: as in `maps_of`."""
    return {
        paths[run.generation]
        for paths, kept in zip(swap_paths, content.maps, strict=True)
        for run in kept.of(0, _NO_END)
        if run.generation != NOWHERE
    }


def changed_runs(
    before: GenerationMap, after: GenerationMap, size_nbytes: int
) -> Iterator[GenerationRun]:
    """Yields the ranges of a file of `size_nbytes` whose current bytes differ between the maps."""
    for run in after.of(0, size_nbytes):
        for part, is_same in split_by_frozen(run, [before]):
            if not is_same:
                yield part
