"""Linked state: the state of a checkpoint in files that the checkpoint shares with the swap files.

The checkpoint has hard links to the swap files, a table that gives the ranges of every state kind
in them, and a CRC32C of every page of these ranges. The other ranges of a linked file do not belong
to the checkpoint and may change. docs/formats/swap.md shows the format.

If state is sharded, every rank has such a table, which also lists the state that the rank copies. A
tensor then has one part for every rank that owns some of it (docs/formats/checkpoint.md). Imports
no torch.
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
    integer,
    kind_of,
    list_of,
    parse_json,
    plain_name,
    table_of,
    text_of,
)
from infinity.errors import InfinityError, StorageError, corrupt
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.storage.checksums import CHECKSUM_NBYTES
from infinity.storage.page_reader import BUFFER_NBYTES, PageReader

TABLE_NAME = "linked.json"
CHECKSUMS_NAME = "linked.crc32c"
# State that is not linked, back to back: copied by a rank, or from another file system.
COPIES_NAME = "copied.pages"
_MAX_DIMENSIONS = 64  # torch's own bound.
_ALIGNMENT_NBYTES = 256  # Of a tensor in weights, and of one of fp32 (docs/formats/unit.md).
_STATE_ALIGNMENT = 64  # The same in elements of state.
_ONE_OF_ITS_NAME = frozenset({"parameters", "master", "gradients"})  # Other pieces are moments.
_DTYPE = re.compile(r"BOOL|(?:BF|F|I|U|C)(\d{1,2})(?:_E\dM\d[A-Z]*)?")  # The number counts bits.


@dataclass(frozen=True, slots=True)
class LinkedRun:
    """A range of a linked file, in whole pages."""

    file: str
    offset_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LinkedTensor:
    """A tensor in a state kind: all elements in memory order, or `numel` of them from `start` on.

    `dtype` has the name that safetensors uses. Shape and stride belong to the full tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_nbytes: int
    start: int = 0
    numel: int = -1  # All elements, if it is not given.

    def __post_init__(self) -> None:
        if self.numel < 0:
            object.__setattr__(self, "numel", math.prod(self.shape))

    @property
    def is_full(self) -> bool:
        """Whether these are all elements of the tensor, and not the part of one rank."""
        return self.numel == math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LinkedKind:
    """One state kind of a unit. Its bytes are those of its runs, in order."""

    unit: str
    state_kind: str
    kind: str
    runs: tuple[LinkedRun, ...]
    tensors: tuple[LinkedTensor, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all runs."""
        return sum(run.nbytes for run in self.runs)


@dataclass(frozen=True, slots=True)
class Stored:
    """State that was linked or copied page by page, and the checksums of all pages in order."""

    kinds: tuple[LinkedKind, ...] = ()
    checksums: bytes = b""

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.kinds + other.kinds, self.checksums + other.checksums)


def to_bytes(kinds: Sequence[LinkedKind]) -> bytes:
    """Returns the content of the table: compact, because every commit writes one."""
    rows = [
        {
            "unit": entry.unit,
            "piece": entry.state_kind,
            "kind": entry.kind,
            "runs": [[run.file, run.offset_nbytes, run.nbytes] for run in entry.runs],
            "tensors": [
                [t.name, t.dtype, t.shape, t.stride, t.offset_nbytes]
                + ([] if t.is_full else [t.start, t.numel])
                for t in entry.tensors
            ],
        }
        for entry in kinds
    ]
    return json.dumps({"pieces": rows}, separators=(",", ":")).encode()


def parse(content: bytes, *, path: str, is_of_one_rank: bool = False) -> tuple[LinkedKind, ...]:
    """Parses a table whose SHA-256 was compared before. Errors name `path`. `is_of_one_rank`: of a
    checkpoint that one rank has written.

    Raises CorruptionError for a table that is malformed, or in which places, orders of elements or
    kinds contradict each other.
    """
    try:
        body = table_of(parse_json(content), "it")
        kinds = tuple(map(_state_kind, list_of(field(body, "pieces"), "pieces")))
        for entry in kinds:
            _check_places(entry, is_of_one_rank=is_of_one_rank)
        _check_agreement(kinds)
        return kinds
    except MalformedError as error:
        raise corrupt(path, f"it is no table of linked state: {error}") from None


def _state_kind(value: Any) -> LinkedKind:
    row = table_of(value, "a piece")
    runs = tuple(map(_run, list_of(field(row, "runs"), "runs")))
    nbytes = sum(run.nbytes for run in runs)
    tensors = list_of(field(row, "tensors"), "tensors")
    return LinkedKind(
        _text(field(row, "unit"), "a unit"),
        text_of(field(row, "piece"), "a piece"),
        text_of(field(row, "kind"), "a kind"),
        runs,
        tuple(_tensor(tensor, nbytes) for tensor in tensors),
    )


def _run(value: Any) -> LinkedRun:
    row = list_of(value, "a run")
    if len(row) != 3:
        raise MalformedError(f"a run has {len(row)} fields; expected 3")
    run = LinkedRun(
        plain_name(row[0], "the file of a run"),
        integer(row[1], "the offset of a run"),
        integer(row[2], "the length of a run"),
    )
    if (run.offset_nbytes | run.nbytes) % PAGE_NBYTES:
        raise MalformedError(f"{run} is no range of whole pages")
    return run


def _tensor(value: Any, state_kind_nbytes: int) -> LinkedTensor:
    row = list_of(value, "a tensor")
    if len(row) not in (5, 7):
        raise MalformedError(f"a tensor has {len(row)} fields; expected 5 or 7")
    name, dtype = _text(row[0], "the name of a tensor"), text_of(row[1], "a dtype")
    if _DTYPE.fullmatch(dtype) is None:
        raise MalformedError(f"{name!r} has the dtype {dtype!r}, which is none")
    shape, stride = (_dimensions(row[index], name) for index in (2, 3))
    place = [integer(number, f"the place of {name!r}") for number in row[4:]]
    tensor = LinkedTensor(name, dtype, shape, stride, *place)
    full_numel = math.prod(shape)
    end_nbytes = tensor.offset_nbytes + tensor.numel * _size_of(tensor)
    if (
        len(stride) != len(shape)
        or not _is_dense(shape, stride)
        or tensor.offset_nbytes % _size_of(tensor)
        or tensor.start + tensor.numel > full_numel
        or (tensor.numel and end_nbytes > state_kind_nbytes)
    ):
        raise MalformedError(f"{name!r} does not fit its shape, or the piece that it lies in")
    return tensor


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements fill their memory without a gap, in some order of the dimensions."""
    numel = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length != 1 and step != numel:
            return math.prod(shape) == 0
        numel *= length
    return True


def _size_of(tensor: LinkedTensor) -> int:
    """Returns the bytes of an element."""
    width = _DTYPE.fullmatch(tensor.dtype)
    assert width is not None, "`_tensor` has parsed it"
    return max(1, int(width[1] or 8) // 8)


def _check_places(entry: LinkedKind, *, is_of_one_rank: bool) -> None:
    """Raises MalformedError for tensors that overlap, or that do not lie where the layout of a unit
    has them, as far as the table shows that."""
    kind = entry.state_kind if entry.state_kind in _ONE_OF_ITS_NAME else "moments"
    if entry.kind != kind:
        raise MalformedError(f"{entry.state_kind!r} has the kind {entry.kind!r}, expected {kind!r}")
    end = 0
    tensors = list(entry.tensors)
    if _has_scales(entry):  # They alternate with codes.
        tensors.sort(key=lambda tensor: (tensor.offset_nbytes, tensor.numel))
    # Masters of some dtypes are left out, and a shard begins anywhere.
    has_gaps = not is_of_one_rank or entry.state_kind == "master" or _has_scales(entry)
    for tensor in tensors:
        starts = {align_up(end, _ALIGNMENT_NBYTES)}
        if entry.state_kind == "parameters":
            starts.add(align_up(end, PAGE_NBYTES))  # Frozen ones begin on a page.
        is_cut = is_of_one_rank and tensor.offset_nbytes % (_STATE_ALIGNMENT * _size_of(tensor))
        is_off = is_cut if has_gaps else tensor.offset_nbytes not in starts
        if tensor.offset_nbytes < end or (is_off and not _has_scales(entry)):
            raise MalformedError(
                f"{tensor.name!r} begins at byte {tensor.offset_nbytes} of "
                f"{entry.state_kind} of {entry.unit}, expected {min(starts)}"
            )
        end = tensor.offset_nbytes + tensor.numel * _size_of(tensor)


def _has_scales(entry: LinkedKind) -> bool:
    return any(tensor.dtype == "U8" for tensor in entry.tensors)


def _check_agreement(kinds: Iterable[LinkedKind]) -> None:
    """Raises MalformedError unless all tensors of one parameter have its shape and its order of
    elements, and the same place in all arrays of state."""
    orders: dict[str, LinkedTensor] = {}
    places: dict[tuple[str, int], int] = {}
    for entry in kinds:
        is_state = entry.state_kind != "parameters"
        for tensor in entry.tensors:
            ending = tensor.name.rpartition(".")[2]
            if is_state and ending.startswith("scales"):
                continue
            name = tensor.name.rpartition(".")[0] if is_state else tensor.name
            first = orders.setdefault(name, tensor)
            place = tensor.offset_nbytes // _size_of(tensor)
            if is_state and not _has_scales(entry):
                place -= places.setdefault((name, tensor.start), place)
            else:
                place = 0
            if (first.shape, first.stride) != (tensor.shape, tensor.stride) or place:
                raise MalformedError(f"{first.name!r} and {tensor.name!r} do not fit each other")


def _dimensions(value: Any, name: str) -> tuple[int, ...]:
    found = list_of(value, f"the shape of {name!r}")
    if len(found) > _MAX_DIMENSIONS:
        raise MalformedError(f"{name!r} has {len(found)} dimensions")
    return tuple(integer(length, f"a length of {name!r}") for length in found)


def _text(value: Any, what: str) -> str:
    """Returns a name that a module may have: any text without a null character."""
    if not isinstance(value, str) or "\0" in value:
        raise MalformedError(f"{what} is no text")
    return value


def length_of(path: Path) -> int:
    """Returns the length of a file of a checkpoint in bytes.

    Raises CorruptionError if there is no regular file, StorageError if it may not be examined.
    """
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
    """The linked state of one checkpoint, or of one rank in it, read and compared by ranges.

    The checksums stay in their file, 4 bytes for every page. Raises CorruptionError for a file of
    checksums that is missing or has another length.
    """

    def __init__(self, path: Path, kinds: Sequence[LinkedKind]) -> None:
        self._path = path
        self.kinds = tuple(kinds)
        starts = accumulate((entry.nbytes // PAGE_NBYTES for entry in kinds), initial=0)
        self._first_pages = dict(zip(self.kinds, starts, strict=False))
        num_pages = sum(entry.nbytes for entry in kinds) // PAGE_NBYTES
        nbytes = length_of(path / CHECKSUMS_NAME)
        if nbytes != num_pages * CHECKSUM_NBYTES:
            detail = f"it has {nbytes} bytes, {num_pages} pages need 4 each"
            raise corrupt(str(path / CHECKSUMS_NAME), detail)

    @property
    def nbytes(self) -> int:
        """The bytes of all state kinds."""
        return sum(entry.nbytes for entry in self.kinds)

    def checksums_of(self, entry: LinkedKind) -> bytes:
        """Returns the CRC32C of every page of a state kind, 4 bytes each."""
        return self._checksums(self._first_pages[entry], entry.nbytes // PAGE_NBYTES)

    def _checksums(self, first: int, count: int) -> bytes:
        with (self._path / CHECKSUMS_NAME).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), count * CHECKSUM_NBYTES, first * CHECKSUM_NBYTES)

    def files(self) -> dict[str, int]:
        """Returns the least length in bytes of every linked file, by name."""
        ends: dict[str, int] = {}
        for run in (run for entry in self.kinds for run in entry.runs):
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
        self, reader: PageReader, entry: LinkedKind, offset_nbytes: int, nbytes: int
    ) -> Iterator[memoryview]:
        """Yields the bytes of a range of a state kind, part by part.

        Every part is compared with its checksums before it is yielded, and is valid until the next
        one. Raises CorruptionError, StorageError.
        """
        ends = list(accumulate(run.nbytes for run in entry.runs))
        end_nbytes = offset_nbytes + nbytes
        while offset_nbytes < end_nbytes:
            index = bisect_right(ends, offset_nbytes)
            run, start = entry.runs[index], ends[index] - entry.runs[index].nbytes
            low = align_down(offset_nbytes, PAGE_NBYTES)
            high = min(align_up(end_nbytes, PAGE_NBYTES), ends[index], low + BUFFER_NBYTES)
            page = self._first_pages[entry] + low // PAGE_NBYTES
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
        """Reads everything; returns one line for every state kind that is damaged."""
        found = []
        with PageReader() as reader:
            for entry in self.kinds:
                try:
                    for _ in self.read(reader, entry, 0, entry.nbytes):
                        pass
                except InfinityError as error:
                    found.append(f"{entry.state_kind} of {entry.unit}: {error}")
        return found


Part = tuple[LinkedState, LinkedKind, LinkedTensor]


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor in linked state: in one part, or in consecutive parts of several ranks."""

    parts: tuple[Part, ...]

    @property
    def facts(self) -> LinkedTensor:
        """Name, dtype, shape and stride of the full tensor."""
        return self.parts[0][2]

    @property
    def group(self) -> str:
        """The name of the unit."""
        return self.parts[0][1].unit

    @property
    def kind(self) -> str:
        """The name of the state kind."""
        return self.parts[0][1].kind

    @property
    def stride(self) -> tuple[int, ...]:
        """The order in which the elements are stored."""
        return self.facts.stride

    def read(
        self, reader: PageReader, start: int, stop: int, *, item_nbytes: int
    ) -> Iterator[memoryview]:
        """Yields the bytes of the elements [start, stop) in memory order.

        Reads only the parts that have some of the elements. A view is valid until the next one.
        Raises as `LinkedState.read`.
        """
        for (state, entry, tensor), low, high in overlaps(self.parts, start, stop):
            offset_nbytes = tensor.offset_nbytes + (low - tensor.start) * item_nbytes
            yield from state.read(reader, entry, offset_nbytes, (high - low) * item_nbytes)


def overlaps(parts: Sequence[Part], start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
    """Yields (part, first, end) for the parts that have some of the elements [start, stop)."""
    first = max(0, bisect_right(parts, start, key=lambda part: part[2].start) - 1)
    for part in parts[first:]:
        low, high = max(start, part[2].start), min(stop, part[2].start + part[2].numel)
        if low >= stop:
            return
        if low < high:
            yield part, low, high


def joined_tensors(states: Iterable[LinkedState], path: Path) -> dict[str, JoinedTensor]:
    """Joins the parts that the ranks have of every tensor of the checkpoint `path`.

    Raises CorruptionError if parts of a tensor overlap, disagree, or leave elements out.
    """
    found: dict[str, list[Part]] = {}
    for state in states:
        for entry in state.kinds:
            for tensor in entry.tensors:
                found.setdefault(tensor.name, []).append((state, entry, tensor))
    for name, parts in found.items():
        parts.sort(key=lambda part: part[2].start)
        facts = {(tensor.dtype, tensor.shape, tensor.stride) for _, _, tensor in parts}
        end = 0
        for _, _, tensor in parts:
            if tensor.start != end or len(facts) > 1:
                raise corrupt(str(path), f"the parts of {name!r} in it do not fit each other")
            end += tensor.numel
        if end != math.prod(parts[0][2].shape):
            raise corrupt(str(path), f"it has {end} elements of {name!r}, expected all of them")
    return {name: JoinedTensor(tuple(parts)) for name, parts in found.items()}
