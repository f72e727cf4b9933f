"""Frozen weights as they rest in safetensors shards, and their layout in a host block.

A parameter is made of *pieces*: boxes of its elements, each decoded from byte ranges of shards. The
ranges of a unit lie anywhere in the files. `lay_out_stored` covers them with *runs* of whole pages,
because O_DIRECT moves whole pages (open(2)); neighbours share a run. A host block holds the runs
one behind the other, and a range starts in the block at the offset that it has in its page.

Pure: names, offsets and shapes. `StoredWeights.decode` computes on the tensors that it is given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch

from infinity.sizes import KIB, PAGE_NBYTES, align_down, align_up
from infinity.storage.shards import ShardRange, ShardRun

# A gap up to this size is read: one larger request is faster than two, and the bytes are few.
_GAP_NBYTES = 16 * KIB

Box = tuple[int | slice, ...]


class Decoder(Protocol):
    """The part of a codec (`infinity.codecs`) that makes elements of bytes."""

    def decode(
        self, parts: Sequence[torch.Tensor], shape: tuple[int, ...], out: torch.Tensor
    ) -> None:
        """Fills `out`, shape `shape` and any strides, from the stored parts.

        Parts are flat, uint8, at any alignment, on the device of `out`.
        """

    def rows(
        self, shape: tuple[int, ...], start: int, stop: int
    ) -> Sequence[tuple[int, int]] | None:
        """Returns the byte range [first, end) of each part that makes rows [start, stop) of the
        first axis; None if these rows have no bytes of their own."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a parameter, and the bytes that make it.

    `parameter[box]`, its axes permuted by `axes`, has the shape `shape` of the stored tensor.
    `parts` are the ranges that `codec` decodes, in its order. `source` names the stored tensor.
    """

    source: str
    box: Box
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    codec: Decoder
    parts: tuple[ShardRange, ...]

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the view of `parameter` that the piece fills, in the shape of its source."""
        return parameter[self.box].permute(self.axes)


StoredTensor = tuple[StoredPiece, ...]  # The pieces cover every element once.


def stored_tiles(tensor: StoredTensor, starts: Sequence[int]) -> list[StoredTensor] | None:
    """Returns rows [starts[i], starts[i + 1]) of a stored parameter for every i; None if its codec
    cannot divide a piece there."""
    tiles: list[list[StoredPiece]] = [[] for _ in starts[1:]]
    for piece in tensor:
        first = piece.box[0]
        low, high = (first, first + 1) if isinstance(first, int) else (first.start, first.stop)
        for tile in range(bisect_right(starts, low) - 1, bisect_left(starts, high)):
            begin, end = max(low, starts[tile]), min(high, starts[tile + 1])
            part: StoredPiece | None = piece
            if (begin, end) != (low, high):
                part = _cut_rows(piece, begin - low, end - low)
            if part is None:
                return None
            begin, end = begin - starts[tile], end - starts[tile]
            rows = begin if isinstance(first, int) else slice(begin, end)
            tiles[tile].append(replace(part, box=(rows, *piece.box[1:])))
    return [tuple(pieces) for pieces in tiles]


def _cut_rows(piece: StoredPiece, start: int, stop: int) -> StoredPiece | None:
    """Returns rows of the first axis of the parameter, if that is the first axis of the source."""
    stacked = sum(isinstance(index, int) for index in piece.box)
    if stacked or piece.axes[0] != 0:
        return None
    ranges = piece.codec.rows(piece.shape, start, stop)
    if ranges is None:
        return None
    parts = tuple(
        ShardRange(part.path, part.offset_nbytes + first, end - first)
        for part, (first, end) in zip(piece.parts, ranges, strict=True)
    )
    return replace(piece, shape=(stop - start, *piece.shape[1:]), parts=parts)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeights:
    """The weights of a frozen unit in shards.

    `nbytes`: the host block that holds all `runs`. `pieces`: name of the parameter, piece, and the
    (offset, length) in bytes of every part in the block.
    """

    nbytes: int
    runs: tuple[ShardRun, ...]
    pieces: tuple[tuple[str, StoredPiece, tuple[tuple[int, int], ...]], ...]

    def decode(self, block: torch.Tensor, parameter: Callable[[str], torch.Tensor]) -> None:
        """Fills the parameters from the bytes of the block: uint8, shape (nbytes,).

        `parameter(name)` returns the tensor to fill, on the device of `block`.
        """
        known = cache(parameter)
        for _ in self.decoded(block, lambda name, piece: piece.target(known(name))):
            pass

    def decoded(
        self, block: torch.Tensor, target: Callable[[str, StoredPiece], torch.Tensor]
    ) -> Iterator[tuple[str, StoredPiece, torch.Tensor]]:
        """Yields (parameter, piece, its elements), each decoded into `target(parameter, piece)`: a
        tensor in the shape of the piece's source, on the device of `block`."""
        for name, piece, parts in self.pieces:
            stored = [block[start : start + nbytes] for start, nbytes in parts]
            elements = target(name, piece)
            with torch.no_grad():
                piece.codec.decode(stored, piece.shape, elements)
            yield name, piece, elements


def lay_out_stored(tensors: Mapping[str, StoredTensor]) -> StoredWeights:
    """Covers the ranges of all pieces with runs of pages, in the order of files and offsets.

    Worked example: ranges [100, 5000) and [5000, 9000) of one file are the run [0, 12288); the
    second range starts at byte 5000 of the block.
    """
    ranges = {part for pieces in tensors.values() for piece in pieces for part in piece.parts}
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

    def place(part: ShardRange) -> tuple[int, int]:
        if not part.nbytes:
            return 0, 0
        run = runs[bisect_right(starts, (part.path, part.offset_nbytes)) - 1]
        return run.block_offset_nbytes + part.offset_nbytes - run.offset_nbytes, part.nbytes

    pieces = tuple(
        (name, piece, tuple(place(part) for part in piece.parts))
        for name, sources in tensors.items()
        for piece in sources
    )
    return StoredWeights(max(block_nbytes, PAGE_NBYTES), tuple(runs), pieces)
