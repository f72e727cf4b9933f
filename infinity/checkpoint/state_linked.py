"""The part of a checkpoint that is not copied: pieces of state in files shared with the swap files.

The checkpoint has hard links to the swap files, a table that says which ranges of them hold which
piece, and a CRC32C of every page of these. The other ranges of a linked file are no part of it and
may change. Drawn in docs/formats/swap.md. Imports no torch.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any

from infinity.checkpoint.state_manifest import corrupt
from infinity.errors import InfinityError
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.storage.page_reader import BUFFER_NBYTES, PageReader

TABLE_NAME = "linked.json"
CHECKSUMS_NAME = "linked.crc32c"
CHECKSUM_NBYTES = 4


@dataclass(frozen=True, slots=True)
class LinkedRun:
    """A range of a linked file, in whole pages."""

    file: str
    offset_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LinkedTensor:
    """A tensor in a piece: its elements in memory order. `dtype` as in safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_nbytes: int


@dataclass(frozen=True, slots=True)
class LinkedPiece:
    """One piece of a unit: its bytes are those of its runs, in order."""

    unit: str
    piece: str
    kind: str
    runs: tuple[LinkedRun, ...]
    tensors: tuple[LinkedTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


def to_bytes(pieces: Sequence[LinkedPiece]) -> bytes:
    """The content of the table. Compact: there is one for every commit."""
    rows = [
        {
            "unit": piece.unit,
            "piece": piece.piece,
            "kind": piece.kind,
            "runs": [[run.file, run.offset_nbytes, run.nbytes] for run in piece.runs],
            "tensors": [
                [t.name, t.dtype, t.shape, t.stride, t.offset_nbytes] for t in piece.tensors
            ],
        }
        for piece in pieces
    ]
    return json.dumps({"pieces": rows}, separators=(",", ":")).encode()


def parse(content: bytes, *, path: str) -> tuple[LinkedPiece, ...]:
    """The pieces of a table whose digest was checked. `path` names it in errors.

    Raises CorruptionError for one that is none.
    """
    try:
        pieces = tuple(_piece(row) for row in json.loads(content)["pieces"])
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(path, f"it is no table of linked state: {error!r}") from None
    for run in (run for piece in pieces for run in piece.runs):
        if PurePath(run.file).name != run.file:
            raise corrupt(path, f"{run.file!r} is no file name")
        if min(run.offset_nbytes, run.nbytes) < 0 or (run.offset_nbytes | run.nbytes) % PAGE_NBYTES:
            raise corrupt(path, f"{run} is no range of whole pages")
    return pieces


def _piece(row: dict[str, Any]) -> LinkedPiece:
    return LinkedPiece(
        row["unit"],
        row["piece"],
        row["kind"],
        tuple(LinkedRun(*run) for run in row["runs"]),
        tuple(
            LinkedTensor(name, dtype, tuple(shape), tuple(stride), offset)
            for name, dtype, shape, stride, offset in row["tensors"]
        ),
    )


class LinkedState:
    """The linked pieces of one checkpoint, read and checked range by range."""

    def __init__(self, path: Path, pieces: Sequence[LinkedPiece], checksums: bytes) -> None:
        self._path = path
        self.pieces = tuple(pieces)
        self._checksums = checksums
        starts = accumulate((piece.nbytes // PAGE_NBYTES for piece in pieces), initial=0)
        self._first_pages = dict(zip(self.pieces, starts, strict=False))
        num_pages = sum(piece.nbytes for piece in pieces) // PAGE_NBYTES
        if len(checksums) != num_pages * CHECKSUM_NBYTES:
            detail = f"it has {len(checksums)} bytes, {num_pages} pages need 4 each"
            raise corrupt(str(path / CHECKSUMS_NAME), detail)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def checksums_of(self, piece: LinkedPiece) -> bytes:
        """CRC32C of every page of the piece, 4 bytes each."""
        first = self._first_pages[piece] * CHECKSUM_NBYTES
        return self._checksums[first : first + piece.nbytes // PAGE_NBYTES * CHECKSUM_NBYTES]

    def files(self) -> dict[str, int]:
        """The linked files, and how long each must be at least."""
        ends: dict[str, int] = {}
        for run in (run for piece in self.pieces for run in piece.runs):
            ends[run.file] = max(ends.get(run.file, 0), run.offset_nbytes + run.nbytes)
        return ends

    def check_files(self) -> None:
        """Raises CorruptionError for a linked file that is missing or too short."""
        for name, end_nbytes in self.files().items():
            try:
                nbytes = (self._path / name).stat().st_size
            except OSError:
                raise corrupt(str(self._path / name), "it is missing from the checkpoint") from None
            if nbytes < end_nbytes:
                detail = f"it has {nbytes} bytes, the state in it ends at {end_nbytes}"
                raise corrupt(str(self._path / name), detail)

    def read(
        self, reader: PageReader, piece: LinkedPiece, offset_nbytes: int, nbytes: int
    ) -> Iterator[memoryview]:
        """The bytes of a range of a piece, part by part, each compared with its checksums first and
        valid until the next. Raises CorruptionError, StorageError."""
        ends = list(accumulate(run.nbytes for run in piece.runs))
        end_nbytes = offset_nbytes + nbytes
        while offset_nbytes < end_nbytes:
            index = bisect_right(ends, offset_nbytes)
            run, start = piece.runs[index], ends[index] - piece.runs[index].nbytes
            low = align_down(offset_nbytes, PAGE_NBYTES)
            high = min(align_up(end_nbytes, PAGE_NBYTES), ends[index], low + BUFFER_NBYTES)
            page = self._first_pages[piece] + low // PAGE_NBYTES
            count = (high - low) // PAGE_NBYTES
            view = reader.read(
                self._path / run.file,
                run.offset_nbytes + low - start,
                high - low,
                self._checksums[page * CHECKSUM_NBYTES : (page + count) * CHECKSUM_NBYTES],
            )
            stop = min(high, end_nbytes)
            yield view[offset_nbytes - low : stop - low]
            offset_nbytes = stop

    def faults(self) -> list[str]:
        """Reads everything; what is wrong with it, one line for each piece."""
        found = []
        with PageReader() as reader:
            for piece in self.pieces:
                try:
                    for _ in self.read(reader, piece, 0, piece.nbytes):
                        pass
                except InfinityError as error:
                    found.append(f"{piece.piece} of {piece.unit}: {error}")
        return found
