"""Frozen weights as they rest in safetensors shards, and their layout in a host block.

A parameter is made of *slices*: boxes of its elements, each decoded from byte ranges of shards. The
ranges of a unit lie anywhere in the files. `lay_out_stored` covers them with *runs* of whole pages,
because O_DIRECT moves whole pages (open(2)); neighbours share a run. A host block holds the runs
one behind the other, and a range starts in the block at the offset that it has in its page.

Pure: names, offsets and shapes. `StoredWeights.decoded` computes on the tensors that it is given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from infinity.codecs.on_device import WeightPlace
from infinity.codecs.part import Decoder
from infinity.sizes import KIB, PAGE_NBYTES, align_down, align_up
from infinity.storage.protocol import FileRange
from infinity.storage.shards import ShardRun

# A gap up to this size is read: one larger request is faster than two, and the bytes are few.
_GAP_NBYTES = 16 * KIB

Box = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A box of a parameter, and the bytes that make it.

    `parameter[box]`, its axes permuted by `axes`, has the shape `shape` of the stored tensor.
    `parts` are the ranges that `codec` decodes, in its order. `source` names the stored tensor.
    """

    source: str
    box: Box
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    codec: Decoder
    parts: tuple[FileRange, ...]

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the view of `parameter` that the slice fills, in the shape of its source."""
        return parameter[self.box].permute(self.axes)


StoredTensor = tuple[StoredSlice, ...]  # Of a parameter; they cover every element once.


def stored_tiles(tensor: StoredTensor, starts: Sequence[int]) -> list[StoredTensor] | None:
    """Returns rows [starts[i], starts[i + 1]) of a stored parameter for every i; None if its codec
    cannot divide a slice there."""
    tiles: list[list[StoredSlice]] = [[] for _ in starts[1:]]
    for stored_slice in tensor:
        first = stored_slice.box[0]
        low, high = (first, first + 1) if isinstance(first, int) else (first.start, first.stop)
        for tile in range(bisect_right(starts, low) - 1, bisect_left(starts, high)):
            begin, end = max(low, starts[tile]), min(high, starts[tile + 1])
            part: StoredSlice | None = stored_slice
            if (begin, end) != (low, high):
                part = _cut_rows(stored_slice, begin - low, end - low)
            if part is None:
                return None
            begin, end = begin - starts[tile], end - starts[tile]
            rows = begin if isinstance(first, int) else slice(begin, end)
            tiles[tile].append(replace(part, box=(rows, *stored_slice.box[1:])))
    return [tuple(slices) for slices in tiles]


def _cut_rows(stored_slice: StoredSlice, start: int, stop: int) -> StoredSlice | None:
    """Returns rows of the first axis of the parameter, if that is the first axis of the source."""
    stacked = sum(isinstance(index, int) for index in stored_slice.box)
    if stacked or stored_slice.axes[0] != 0:
        return None
    ranges = stored_slice.codec.rows(stored_slice.shape, start, stop)
    if ranges is None:
        return None
    parts = tuple(
        FileRange(part.path, part.offset_nbytes + first, end - first)
        for part, (first, end) in zip(stored_slice.parts, ranges, strict=True)
    )
    return replace(stored_slice, shape=(stop - start, *stored_slice.shape[1:]), parts=parts)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeights:
    """The weights of a frozen unit in shards.

    `nbytes`: the host block that holds all `runs`. `slices`: name of the parameter, slice, and the
    (offset, length) in bytes of every part in the block.
    """

    nbytes: int
    runs: tuple[ShardRun, ...]
    slices: tuple[tuple[str, StoredSlice, tuple[tuple[int, int], ...]], ...]

    def cut(self, start_nbytes: int, stop_nbytes: int) -> StoredWeights:
        """Returns bytes [start, stop) of the block, both at pages, as a block without slices: what
        one of several ranks reads of them."""
        assert start_nbytes % PAGE_NBYTES == stop_nbytes % PAGE_NBYTES == 0
        runs = []
        for run in self.runs:
            low = max(run.block_offset_nbytes, start_nbytes)
            high = min(run.block_offset_nbytes + run.nbytes, stop_nbytes)
            if low < high:
                offset_nbytes = run.offset_nbytes + low - run.block_offset_nbytes
                runs.append(ShardRun(run.path, offset_nbytes, high - low, low - start_nbytes))
        return StoredWeights(max(stop_nbytes - start_nbytes, PAGE_NBYTES), tuple(runs), ())

    def divided(self, borders: Sequence[int]) -> StoredWeights:
        """Returns the same block, no run of which crosses a border (at pages, from 0 to `nbytes`).
        Reads of the block and of a part then have the same runs, and the same checksums."""
        runs = [
            replace(run, block_offset_nbytes=run.block_offset_nbytes + start)
            for start, stop in pairwise(borders)
            for run in self.cut(start, stop).runs
        ]
        return replace(self, runs=tuple(runs))

    def places(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[WeightPlace]:
        """Yields the place of each slice in the block, and in a region with these parameters, which
        are on meta."""
        for name, stored_slice, parts in self.slices:
            # The strides are those of torch's own views.
            target = stored_slice.target(parameters[name])
            yield WeightPlace(
                stored_slice.codec,
                stored_slice.shape,
                parts,
                target.dtype,
                int(target.storage_offset()),
                target.stride(),
            )

    def decoded(
        self, block: torch.Tensor, dtype: Callable[[str], torch.dtype]
    ) -> Iterator[torch.Tensor]:
        """Yields the elements of each slice, in the shape of its source, decoded from the block:
        uint8, shape (nbytes,), on the host. `dtype(name)`: of a parameter."""
        for name, stored_slice, parts in self.slices:
            stored = [block[start : start + nbytes] for start, nbytes in parts]
            elements = torch.empty(stored_slice.shape, dtype=dtype(name), device="cpu")
            with torch.no_grad():
                stored_slice.codec.decode(stored, stored_slice.shape, elements)
            yield elements


def lay_out_stored(tensors: Mapping[str, StoredTensor]) -> StoredWeights:
    """Covers the ranges of all slices with runs of pages, in the order of files and offsets.

    Worked example: ranges [100, 5000) and [5000, 9000) of one file are the run [0, 12288); the
    second range starts at byte 5000 of the block.
    """
    every_slice = [stored_slice for slices in tensors.values() for stored_slice in slices]
    ranges = {part for stored_slice in every_slice for part in stored_slice.parts}
    runs: list[ShardRun] = []
    block_nbytes = 0
    for part in sorted(ranges, key=lambda part: (part.path, part.offset_nbytes, part.nbytes)):
        if not part.nbytes:
            continue
        start = align_down(part.offset_nbytes, PAGE_NBYTES)
        stop = align_up(part.offset_nbytes + part.nbytes, PAGE_NBYTES)
        last = runs[-1] if runs else None
        if last and last.path == part.path and start <= last.end_nbytes + _GAP_NBYTES:
            grown_nbytes = max(last.nbytes, stop - last.offset_nbytes)
            runs[-1] = ShardRun(
                last.path, last.offset_nbytes, grown_nbytes, last.block_offset_nbytes
            )
            block_nbytes = last.block_offset_nbytes + grown_nbytes
        else:
            runs.append(ShardRun(part.path, start, stop - start, block_nbytes))
            block_nbytes += stop - start
    starts = [(run.path, run.offset_nbytes) for run in runs]

    def place(part: FileRange) -> tuple[int, int]:
        if not part.nbytes:
            return 0, 0
        run = runs[bisect_right(starts, (part.path, part.offset_nbytes)) - 1]
        return run.block_offset_nbytes + part.offset_nbytes - run.offset_nbytes, part.nbytes

    slices = tuple(
        (name, stored_slice, tuple(place(part) for part in stored_slice.parts))
        for name, sources in tensors.items()
        for stored_slice in sources
    )
    return StoredWeights(max(block_nbytes, PAGE_NBYTES), tuple(runs), slices)
