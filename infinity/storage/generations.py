"""Maps from offsets to the file, out of several of one layout, with the current bytes; the content
of a volume at one moment. Pure.

A volume with spare files has, per path, files of *generations* 0, 1, ... Every extent has the same
offset in all of them. A map says, for each offset, which generation holds its current bytes. A
commit freezes the map: its bytes are not written until the commit ends. The next write of a range
goes to a generation that no frozen map points to for this range, at the same offset; later writes
go there in place, until the next commit.

Note [Enough generations]
  A frozen map points to one generation per offset. So n frozen maps occupy at most n of them, and
  n + 1 generations always have one to write to, whatever the order and size of writes: the price of
  n commits is n times what is rewritten, in space, and no byte of traffic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from infinity.sizes import ByteRange
from infinity.storage.protocol import FileRange

NOWHERE = -1  # In a frozen map: it needs no generation here.
_NO_END = 1 << 62  # Behind the end of every file.


@dataclass(frozen=True, slots=True)
class GenerationRun(ByteRange):
    """`nbytes` at `offset_nbytes` of the file of one generation."""

    generation: int
    offset_nbytes: int
    nbytes: int


class GenerationMap:
    """A generation for every offset from 0 on; `default` where nothing was put. Not thread-safe."""

    def __init__(self, default: int = 0) -> None:
        # Interval i starts at _starts[i] and ends where the next one starts; the last has no end.
        # Neighbours differ.
        self._starts = [0]
        self._generations = [default]

    def __len__(self) -> int:
        """The number of intervals."""
        return len(self._starts)

    def copy(self) -> GenerationMap:
        """Returns a map that further changes of this one do not reach."""
        other = GenerationMap()
        other._starts, other._generations = self._starts.copy(), self._generations.copy()
        return other

    def at(self, offset_nbytes: int) -> int:
        """Returns the generation that holds the byte at the offset."""
        return self._generations[bisect_right(self._starts, offset_nbytes) - 1]

    def of(self, offset_nbytes: int, nbytes: int) -> list[GenerationRun]:
        """The runs that cover a range, in order; neighbours are of different generations."""
        runs = []
        end = offset_nbytes + nbytes
        index = bisect_right(self._starts, offset_nbytes) - 1
        while offset_nbytes < end:
            index += 1
            stop = min(end, self._starts[index]) if index < len(self._starts) else end
            runs.append(
                GenerationRun(self._generations[index - 1], offset_nbytes, stop - offset_nbytes)
            )
            offset_nbytes = stop
        return runs

    def put(self, run: GenerationRun) -> None:
        """Records that the generation of `run` holds its range."""
        if not run.nbytes:
            return
        start, end = run.offset_nbytes, run.end_nbytes
        after = self.at(end)  # The generation behind the range.
        low = bisect_right(self._starts, start - 1)
        high = bisect_right(self._starts, end)
        starts, generations = [start], [run.generation]
        if low and self._generations[low - 1] == run.generation:
            starts, generations = [], []  # One with the interval before.
        if after != run.generation:
            starts, generations = [*starts, end], [*generations, after]
        self._starts[low:high] = starts
        self._generations[low:high] = generations


def split_by_frozen(
    run: GenerationRun, frozen: Sequence[GenerationMap]
) -> list[tuple[GenerationRun, bool]]:
    """The run in parts, in order, and of each whether some frozen map points to it."""
    cuts = {
        frozen_run.offset_nbytes
        for map_ in frozen
        for frozen_run in map_.of(run.offset_nbytes, run.nbytes)
    }
    parts: list[tuple[GenerationRun, bool]] = []
    for start, stop in pairwise(sorted(cuts | {run.offset_nbytes, run.end_nbytes})):
        is_frozen = any(frozen_map.at(start) == run.generation for frozen_map in frozen)
        if parts and parts[-1][1] == is_frozen:
            start = parts.pop()[0].offset_nbytes
        parts.append((GenerationRun(run.generation, start, stop - start), is_frozen))
    return parts


def choose_targets(
    current: GenerationMap,
    frozen: Sequence[GenerationMap],
    *,
    offset_nbytes: int,
    nbytes: int,
    num_generations: int,
) -> list[GenerationRun] | None:
    """Returns the runs to which a write of a range may go.

    A run is written in place, or, if a frozen map needs its bytes, in the lowest generation that no
    frozen map needs. Returns None if some offset has no such generation: there are fewer than
    len(frozen) + 1.
    """
    if not frozen:
        return current.of(offset_nbytes, nbytes)
    end = offset_nbytes + nbytes
    cuts = {
        run.offset_nbytes
        for generation in (current, *frozen)
        for run in generation.of(offset_nbytes, nbytes)
    }
    targets = GenerationMap()
    for start, stop in pairwise(sorted(cuts | {end})):
        # INV-16: bytes that a frozen map points to are not written.
        needed = {frozen_map.at(start) for frozen_map in frozen}
        generation: int | None = current.at(start)
        if generation in needed:
            generation = next((g for g in range(num_generations) if g not in needed), None)
        if generation is None:
            return None
        targets.put(GenerationRun(generation, start, stop - start))
    return targets.of(offset_nbytes, nbytes)


# -- Contents of a volume --------------------------------------------------------------------------


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


@dataclass(eq=False, slots=True)
class UndecidedContent:
    """Writes that no read sees until `Volume.publish`; without it nothing has changed.

    Each write goes to a generation that neither the current content nor a frozen one needs. One
    thread writes; another one may publish when that thread has queued its writes.
    """

    runs: list[tuple[int, GenerationRun]] = field(default_factory=list)  # By path, in order.
    checksums: list[bytes] = field(default_factory=list)  # Of the runs.
