"""The part of a checkpoint that is not copied: pieces of state in files shared with the swap files.

The checkpoint has hard links to the swap files, a table that says which ranges of them hold which
piece, and a CRC32C of every page of these. The other ranges of a linked file are no part of it and
may change. Drawn in docs/formats/swap.md.

Where state is divided over ranks each of them has such a table, also of what it copies, and a
tensor is in as many parts as ranks own some of it (docs/formats/checkpoint.md). Imports no torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from infinity.bounded import (
    MalformedError,
    field,
    kind_of,
    list_of,
    parse_json,
    plain_name,
    table_of,
    text_of,
    whole_number,
)
from infinity.errors import InfinityError, StorageError, corrupt
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.storage.checksums import CHECKSUM_NBYTES
from infinity.storage.page_reader import BUFFER_NBYTES, PageReader

TABLE_NAME = "linked.json"
CHECKSUMS_NAME = "linked.crc32c"
# Pieces that are not linked, one after the other: of a rank, or copied from another file system.
COPIES_NAME = "copied.pages"
_MAX_DIMENSIONS = 64  # torch's own bound.
_DTYPE = re.compile(r"BOOL|(?:BF|F|I|U|C)(\d{1,2})(?:_E\dM\d[A-Z]*)?")  # Its number is of bits.


@dataclass(frozen=True, slots=True)
class LinkedRun:
    """A range of a linked file, in whole pages."""

    file: str
    offset_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LinkedTensor:
    """A tensor in a piece: its elements in memory order, or `numel` of them from `start` on.

    `dtype` as in safetensors; shape and stride are the whole tensor's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_nbytes: int
    start: int = 0
    numel: int = -1  # All of them, where it is not given.

    def __post_init__(self) -> None:
        if self.numel < 0:
            object.__setattr__(self, "numel", math.prod(self.shape))

    @property
    def is_whole(self) -> bool:
        return self.numel == math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LinkedPiece:
    """One piece of a unit: its bytes are those of its runs, in order."""

    unit: str
    state_kind: str
    kind: str
    runs: tuple[LinkedRun, ...]
    tensors: tuple[LinkedTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


def to_bytes(kinds: Sequence[LinkedPiece]) -> bytes:
    """The content of the table. Compact: there is one for every commit."""
    rows = [
        {
            "unit": state_kind.unit,
            "piece": state_kind.state_kind,
            "kind": state_kind.kind,
            "runs": [[run.file, run.offset_nbytes, run.nbytes] for run in state_kind.runs],
            "tensors": [
                [t.name, t.dtype, t.shape, t.stride, t.offset_nbytes]
                + ([] if t.is_whole else [t.start, t.numel])
                for t in state_kind.tensors
            ],
        }
        for state_kind in kinds
    ]
    return json.dumps({"pieces": rows}, separators=(",", ":")).encode()


def parse(content: bytes, *, path: str) -> tuple[LinkedPiece, ...]:
    """The pieces of a table whose digest was checked. `path` names it in errors.

    Raises CorruptionError for one that is none.
    """
    try:
        body = table_of(parse_json(content), "it")
        return tuple(map(_state_kind, list_of(field(body, "pieces"), "pieces")))
    except MalformedError as error:
        raise corrupt(path, f"it is no table of linked state: {error}") from None


def _state_kind(value: Any) -> LinkedPiece:
    row = table_of(value, "a piece")
    runs = tuple(map(_run, list_of(field(row, "runs"), "runs")))
    nbytes = sum(run.nbytes for run in runs)
    tensors = list_of(field(row, "tensors"), "tensors")
    return LinkedPiece(
        _text(field(row, "unit"), "a unit"),
        text_of(field(row, "piece"), "a piece"),
        text_of(field(row, "kind"), "a kind"),
        runs,
        tuple(_tensor(each, nbytes) for each in tensors),
    )


def _run(value: Any) -> LinkedRun:
    row = list_of(value, "a run")
    if len(row) != 3:
        raise MalformedError(f"a run has {len(row)} fields; expected 3")
    run = LinkedRun(
        plain_name(row[0], "the file of a run"),
        whole_number(row[1], "the offset of a run"),
        whole_number(row[2], "the length of a run"),
    )
    if (run.offset_nbytes | run.nbytes) % PAGE_NBYTES:
        raise MalformedError(f"{run} is no range of whole pages")
    return run


def _tensor(value: Any, state_kind_nbytes: int) -> LinkedTensor:
    row = list_of(value, "a tensor")
    if len(row) not in (5, 7):
        raise MalformedError(f"a tensor has {len(row)} fields; expected 5 or 7")
    name, dtype = _text(row[0], "the name of a tensor"), text_of(row[1], "a dtype")
    width = _DTYPE.fullmatch(dtype)
    if width is None:
        raise MalformedError(f"{name!r} has the dtype {dtype!r}, which is none")
    shape, stride = (_dimensions(row[each], name) for each in (2, 3))
    place = [whole_number(each, f"the place of {name!r}") for each in row[4:]]
    tensor = LinkedTensor(name, dtype, shape, stride, *place)
    whole = math.prod(shape)
    end_nbytes = tensor.offset_nbytes + tensor.numel * max(1, int(width[1] or 8) // 8)
    if (
        len(stride) != len(shape)
        or tensor.start + tensor.numel > whole
        or (tensor.numel and end_nbytes > state_kind_nbytes)
    ):
        raise MalformedError(f"{name!r} does not fit its shape, or the piece that it lies in")
    return tensor


def _dimensions(value: Any, name: str) -> tuple[int, ...]:
    found = list_of(value, f"the shape of {name!r}")
    if len(found) > _MAX_DIMENSIONS:
        raise MalformedError(f"{name!r} has {len(found)} dimensions")
    return tuple(whole_number(each, f"a length of {name!r}") for each in found)


def _text(value: Any, what: str) -> str:
    """Whatever a module of a model may be called."""
    if not isinstance(value, str) or "\0" in value:
        raise MalformedError(f"{what} is no text")
    return value


def length_of(path: Path) -> int:
    """Bytes of a file of a checkpoint. Raises CorruptionError where there is no regular file."""
    try:
        found = path.stat()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EIO):
            raise StorageError(error.errno, operation="stat", path=str(path)) from None
        raise corrupt(str(path), "it is missing from the checkpoint") from None
    if not stat.S_ISREG(found.st_mode):
        raise corrupt(str(path), f"it is {kind_of(found.st_mode)}; expected a regular file")
    return found.st_size


class LinkedState:
    """The linked pieces of one checkpoint, or of one rank in it, read and checked range by range.

    Their checksums stay in their file: 4 bytes for every page of a model.
    """

    def __init__(self, path: Path, kinds: Sequence[LinkedPiece]) -> None:
        self._path = path
        self.kinds = tuple(kinds)
        starts = accumulate((state_kind.nbytes // PAGE_NBYTES for state_kind in kinds), initial=0)
        self._first_pages = dict(zip(self.kinds, starts, strict=False))
        num_pages = sum(state_kind.nbytes for state_kind in kinds) // PAGE_NBYTES
        nbytes = length_of(path / CHECKSUMS_NAME)
        if nbytes != num_pages * CHECKSUM_NBYTES:
            detail = f"it has {nbytes} bytes, {num_pages} pages need 4 each"
            raise corrupt(str(path / CHECKSUMS_NAME), detail)

    @property
    def nbytes(self) -> int:
        return sum(state_kind.nbytes for state_kind in self.kinds)

    def checksums_of(self, state_kind: LinkedPiece) -> bytes:
        """CRC32C of every page of the piece, 4 bytes each."""
        return self._checksums(self._first_pages[state_kind], state_kind.nbytes // PAGE_NBYTES)

    def _checksums(self, first: int, count: int) -> bytes:
        with (self._path / CHECKSUMS_NAME).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), count * CHECKSUM_NBYTES, first * CHECKSUM_NBYTES)

    def files(self) -> dict[str, int]:
        """The linked files, and how long each must be at least."""
        ends: dict[str, int] = {}
        for run in (run for state_kind in self.kinds for run in state_kind.runs):
            ends[run.file] = max(ends.get(run.file, 0), run.offset_nbytes + run.nbytes)
        return ends

    def check_files(self) -> None:
        """Raises CorruptionError for a linked file that is missing or too short."""
        for name, end_nbytes in self.files().items():
            nbytes = length_of(self._path / name)
            if nbytes < end_nbytes:
                detail = f"it has {nbytes} bytes, the state in it ends at {end_nbytes}"
                raise corrupt(str(self._path / name), detail)

    def read(
        self, reader: PageReader, state_kind: LinkedPiece, offset_nbytes: int, nbytes: int
    ) -> Iterator[memoryview]:
        """The bytes of a range of a piece, part by part, each compared with its checksums first and
        valid until the next. Raises CorruptionError, StorageError."""
        ends = list(accumulate(run.nbytes for run in state_kind.runs))
        end_nbytes = offset_nbytes + nbytes
        while offset_nbytes < end_nbytes:
            index = bisect_right(ends, offset_nbytes)
            run, start = state_kind.runs[index], ends[index] - state_kind.runs[index].nbytes
            low = align_down(offset_nbytes, PAGE_NBYTES)
            high = min(align_up(end_nbytes, PAGE_NBYTES), ends[index], low + BUFFER_NBYTES)
            page = self._first_pages[state_kind] + low // PAGE_NBYTES
            count = (high - low) // PAGE_NBYTES
            view = reader.read(
                self._path / run.file,
                run.offset_nbytes + low - start,
                high - low,
                self._checksums(page, count),
            )
            stop = min(high, end_nbytes)
            yield view[offset_nbytes - low : stop - low]
            offset_nbytes = stop

    def faults(self) -> list[str]:
        """Reads everything; what is wrong with it, one line for each piece."""
        found = []
        with PageReader() as reader:
            for state_kind in self.kinds:
                try:
                    for _ in self.read(reader, state_kind, 0, state_kind.nbytes):
                        pass
                except InfinityError as error:
                    found.append(f"{state_kind.state_kind} of {state_kind.unit}: {error}")
        return found


Part = tuple[LinkedState, LinkedPiece, LinkedTensor]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in linked state: whole, or in parts that follow each other, each of another rank."""

    parts: tuple[Part, ...]

    @property
    def facts(self) -> LinkedTensor:
        """Name, dtype, shape and stride are those of the whole tensor."""
        return self.parts[0][2]

    @property
    def group(self) -> str:
        return self.parts[0][1].unit

    @property
    def kind(self) -> str:
        return self.parts[0][1].kind

    def read(
        self, reader: PageReader, start: int, stop: int, *, item_nbytes: int
    ) -> Iterator[memoryview]:
        """The bytes of elements [start, stop) in memory order, from those parts only that have some
        of them. Each view is valid until the next. Raises as `LinkedState.read`."""
        for (state, state_kind, tensor), low, high in overlaps(self.parts, start, stop):
            offset_nbytes = tensor.offset_nbytes + (low - tensor.start) * item_nbytes
            yield from state.read(reader, state_kind, offset_nbytes, (high - low) * item_nbytes)


def overlaps(parts: Sequence[Part], start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
    """The parts that have some of the elements [start, stop), and which of them."""
    first = max(0, bisect_right(parts, start, key=lambda part: part[2].start) - 1)
    for part in parts[first:]:
        low, high = max(start, part[2].start), min(stop, part[2].start + part[2].numel)
        if low >= stop:
            return
        if low < high:
            yield part, low, high


def stored_tensors(states: Iterable[LinkedState], path: Path) -> dict[str, StoredTensor]:
    """Every tensor in the linked state of the checkpoint `path`, put together from all ranks.

    Raises CorruptionError where parts overlap, disagree, or leave some of a tensor out.
    """
    found: dict[str, list[Part]] = {}
    for state in states:
        for state_kind in state.kinds:
            for tensor in state_kind.tensors:
                found.setdefault(tensor.name, []).append((state, state_kind, tensor))
    for name, parts in found.items():
        parts.sort(key=lambda part: part[2].start)
        facts = {(each.dtype, each.shape, each.stride) for _, _, each in parts}
        end = 0
        for _, _, tensor in parts:
            if tensor.start != end or len(facts) > 1:
                raise corrupt(str(path), f"the parts of {name!r} in it do not fit each other")
            end += tensor.numel
        if end != math.prod(parts[0][2].shape):
            raise corrupt(str(path), f"it has {end} elements of {name!r}, expected all of them")
    return {name: StoredTensor(tuple(parts)) for name, parts in found.items()}
