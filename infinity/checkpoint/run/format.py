"""The formats of a checkpoint's own files: the manifest, and the table of linked state.

The manifest names every file, with a SHA-256 of every extent of it; docs/formats/checkpoint.md
shows the format. `manifest.sha256` has the SHA-256 of `manifest.json`; `sha256sum -c` reads it too.

Linked state is state in files that the checkpoint shares with the swap files: hard links to them, a
table that gives the ranges of every state kind in them, and a CRC32C of every page of these ranges.
The other ranges of a linked file do not belong to the checkpoint and may change.
docs/formats/swap.md shows the format. If state is sharded, every rank has such a table, which also
lists the state that the rank copies. A tensor then has one part for every rank that owns some of
it. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from infinity.errors import InfinityError, StorageError, UnsupportedError, corrupt, reporting
from infinity.sizes import GIB, PAGE_NBYTES, align_down, align_up
from infinity.storage.checksums import BUFFER_NBYTES, CHECKSUM_NBYTES, PageReader
from infinity.storage.protocol import FileRange

# 3 for several ranks, 2 for linked state, 1 otherwise, so that older versions read all they can.
SCHEMA = 3
FORMAT = "infinity checkpoint"
MANIFEST_NAME = "manifest.json"
DIGEST_NAME = "manifest.sha256"
PROGRAM_NAME = "program.pt"  # The small state; every rank has its own.
MAX_NBYTES = GIB  # A manifest and a table name every tensor.
MAX_STEP = 10**12
_MAX_RANKS = 1 << 20
TABLE_NAME = "linked.json"
CHECKSUMS_NAME = "linked.crc32c"
# State that is not linked, back to back: copied by a rank, or from another file system.
COPIES_NAME = "copied.pages"
_MAX_DIMENSIONS = 64  # torch's own bound.
_ALIGNMENT_NBYTES = 256  # Of a tensor in weights, and of one of fp32 (docs/formats/unit.md).
_STATE_ALIGNMENT = 64  # The same in elements of state.
_ONE_OF_ITS_NAME = frozenset({"parameters", "master", "gradients"})  # Other pieces are moments.
_DTYPE = re.compile(r"BOOL|(?:BF|F|I|U|C)(\d{1,2})(?:_E\dM\d[A-Z]*)?")  # The number counts bits.
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A range of a file: one tensor, the header, or the full file. Sizes are added by `kind`."""

    name: str
    kind: str
    offset_nbytes: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file. Its extents are consecutive, without a hole, and cover the file."""

    name: str
    nbytes: int
    extents: tuple[StoredRange, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a checkpoint. `step` counts optimizer steps; `created` is ISO 8601, UTC.

    `ranks` has the directory of every rank that wrote the checkpoint, and is empty for one rank.
    """

    step: int
    created: str
    written_by: str
    files: tuple[FileEntry, ...]
    schema: int = 1
    ranks: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """The prefix of file names, by rank."""
        return places_of(self.ranks)

    @property
    def nbytes(self) -> int:
        """The bytes of all files that the manifest names."""
        return sum(file.nbytes for file in self.files)

    def nbytes_by_kind(self) -> dict[str, int]:
        """Returns the bytes of each state kind, by its name."""
        table: dict[str, int] = {}
        for file in self.files:
            for extent in file.extents:
                table[extent.kind] = table.get(extent.kind, 0) + extent.nbytes
        return table


def rank_directories(count: int) -> tuple[str, ...]:
    """Returns a directory for each of several ranks. A single rank needs none."""
    return tuple(f"rank-{rank:05d}" for rank in range(count)) if count > 1 else ()


def is_of_rank(directory: str) -> bool:
    """Whether `rank_directories` gives a rank a directory of this name."""
    prefix, _, number = directory.partition("-")
    return prefix == "rank" and number.isdecimal()


def places_of(ranks: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the prefix of file names, by rank."""
    return tuple(f"{rank}/" for rank in ranks) or ("",)


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """Returns the content of `manifest.json`."""
    facts = asdict(manifest)
    if not manifest.ranks:
        del facts["ranks"]
    body = {"format": FORMAT, "schema": facts.pop("schema"), **facts}
    return json.dumps(body, indent=1).encode() + b"\n"


def digest_line(content: bytes) -> bytes:
    """Returns the content of `manifest.sha256`."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST_NAME}\n".encode()


def parse_manifest(content: bytes, digest: bytes, *, path: str) -> Manifest:
    """Parses `manifest.json` after comparing it with `digest`. Errors name `path`.

    Raises CorruptionError for bytes with another digest and for a file of another program,
    UnsupportedError for a newer schema.
    """
    if digest != digest_line(content):
        raise corrupt(path, f"it is damaged: its SHA-256 is not the one in {DIGEST_NAME}")
    try:
        body = parse_json(content)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise corrupt(path, f"it is foreign: expected the manifest of an {FORMAT}")
        schema = integer(field(body, "schema"), "schema", least=1)
        if schema > SCHEMA:
            raise UnsupportedError(
                f"{path} has schema {schema}, this infinity reads up to {SCHEMA}: "
                "upgrade infinity-offload"
            )
        return _manifest(body, schema)
    except MalformedError as error:
        raise corrupt(path, f"it is no manifest of schema {SCHEMA}: {error}") from None


def files_to_bytes(files: Sequence[FileEntry]) -> bytes:
    """Packs the entries of one rank for the rank that writes the manifest."""
    return json.dumps([asdict(file) for file in files]).encode()


def files_of_bytes(content: bytes) -> tuple[FileEntry, ...]:
    """Unpacks the result of `files_to_bytes`. Raises MalformedError."""
    return tuple(map(_file, list_of(parse_json(content), "the files of a rank")))


def _file(value: Any) -> FileEntry:
    entry = table_of(value, "an entry of a file")
    name = text_of(field(entry, "name"), "the name of a file")
    nbytes = integer(field(entry, "nbytes"), f"the length of {name}")
    extents = tuple(_extent(row, name) for row in list_of(field(entry, "extents"), "extents"))
    end = 0
    for extent in extents:
        if extent.offset_nbytes != end:
            raise MalformedError(f"extent {extent.name!r} of {name} is not at byte {end}")
        end += extent.nbytes
    if end != nbytes or not extents:
        raise MalformedError(f"the extents of {name} end at {end}, not at {nbytes}")
    return FileEntry(name, nbytes, extents)


def _extent(value: Any, file: str) -> StoredRange:
    entry = table_of(value, f"an extent of {file}")
    sha256 = field(entry, "sha256")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise MalformedError(f"the SHA-256 of an extent of {file} is none")
    return StoredRange(
        _any_text(field(entry, "name"), "the name of an extent", least=1),
        text_of(field(entry, "kind"), "the kind of an extent"),
        integer(field(entry, "offset_nbytes"), "the offset of an extent"),
        integer(field(entry, "nbytes"), "the length of an extent"),
        sha256,
    )


def _manifest(body: dict[str, Any], schema: int) -> Manifest:
    files = tuple(map(_file, list_of(field(body, "files"), "files")))
    ranks = tuple(plain_name(name, "a rank") for name in list_of(body.get("ranks", []), "ranks"))
    if len(set(ranks)) < len(ranks) or not (not ranks or 1 < len(ranks) <= _MAX_RANKS):
        raise MalformedError(f"it names {len(ranks)} ranks, or one of them twice")
    for file in files:
        plain_name(file.name.removeprefix(_rank_of(file, frozenset(ranks))), "the name of a file")
    if len({file.name for file in files}) < len(files):
        raise MalformedError("it names a file twice")
    step = integer(field(body, "step"), "step", most=MAX_STEP)
    created, by = field(body, "created"), field(body, "written_by")
    facts = text_of(created, "created", max_length=200), text_of(by, "written_by", max_length=200)
    return Manifest(step, *facts, files, schema, ranks)


def _rank_of(file: FileEntry, ranks: frozenset[str]) -> str:
    """Returns the directory of `ranks` that the file lies in, with a slash, or an empty text."""
    directory, slash, _ = file.name.partition("/")
    return directory + slash if slash and directory in ranks else ""


# -- Linked state ----------------------------------------------------------------------------------


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
    """One state kind of a unit. Its bytes are those of its runs, in order: whole pages of linked
    files, whose paths begin at the checkpoint, or in it at the directory of the rank."""

    unit: str
    state_kind: str
    kind: str
    runs: tuple[FileRange, ...]
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


def table_to_bytes(kinds: Sequence[LinkedKind]) -> bytes:
    """Returns the content of the table: compact, because every commit writes one."""
    rows = [
        {
            "unit": entry.unit,
            "piece": entry.state_kind,
            "kind": entry.kind,
            "runs": [[run.path, run.offset_nbytes, run.nbytes] for run in entry.runs],
            "tensors": [
                [t.name, t.dtype, t.shape, t.stride, t.offset_nbytes]
                + ([] if t.is_full else [t.start, t.numel])
                for t in entry.tensors
            ],
        }
        for entry in kinds
    ]
    return json.dumps({"pieces": rows}, separators=(",", ":")).encode()


def parse_table(
    content: bytes, *, path: str, is_of_one_rank: bool = False
) -> tuple[LinkedKind, ...]:
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
        _any_text(field(row, "unit"), "a unit"),
        text_of(field(row, "piece"), "a piece"),
        text_of(field(row, "kind"), "a kind"),
        runs,
        tuple(_linked_tensor(tensor, nbytes) for tensor in tensors),
    )


def _run(value: Any) -> FileRange:
    row = list_of(value, "a run")
    if len(row) != 3:
        raise MalformedError(f"a run has {len(row)} fields; expected 3")
    run = FileRange(
        plain_name(row[0], "the file of a run"),
        integer(row[1], "the offset of a run"),
        integer(row[2], "the length of a run"),
    )
    if (run.offset_nbytes | run.nbytes) % PAGE_NBYTES:
        raise MalformedError(f"{run} is no range of whole pages")
    return run


def _linked_tensor(value: Any, state_kind_nbytes: int) -> LinkedTensor:
    row = list_of(value, "a tensor")
    if len(row) not in (5, 7):
        raise MalformedError(f"a tensor has {len(row)} fields; expected 5 or 7")
    name, dtype = _any_text(row[0], "the name of a tensor"), text_of(row[1], "a dtype")
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
    assert width is not None, "`_linked_tensor` has parsed it"
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
        is_state, has_scales = entry.state_kind != "parameters", _has_scales(entry)
        for tensor in entry.tensors:
            ending = tensor.name.rpartition(".")[2]
            if is_state and ending.startswith("scales"):
                continue
            name = tensor.name.rpartition(".")[0] if is_state else tensor.name
            first = orders.setdefault(name, tensor)
            place = tensor.offset_nbytes // _size_of(tensor)
            if is_state and not has_scales:
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


def _any_text(value: Any, what: str, least: int = 0) -> str:
    """Returns a name that a module may have: any text without a null character, of `least`
    characters or more."""
    if not isinstance(value, str) or "\0" in value or len(value) < least:
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
    checksums that is missing or has another length, and for a linked file that is missing or too
    short.
    """

    def __init__(self, path: Path, kinds: Sequence[LinkedKind]) -> None:
        self._path = path
        self.kinds = tuple(kinds)
        starts = accumulate((entry.nbytes // PAGE_NBYTES for entry in kinds), initial=0)
        # By id: a hash of a kind is one of all its tensors.
        self._first_pages = dict(zip(map(id, self.kinds), starts, strict=False))
        num_pages = sum(entry.nbytes for entry in kinds) // PAGE_NBYTES
        nbytes = length_of(path / CHECKSUMS_NAME)
        if nbytes != num_pages * CHECKSUM_NBYTES:
            detail = f"it has {nbytes} bytes, {num_pages} pages need 4 each"
            raise corrupt(str(path / CHECKSUMS_NAME), detail)
        for name, end_nbytes in self.files().items():
            nbytes = length_of(path / name)
            if nbytes < end_nbytes:
                detail = f"it has {nbytes} bytes, the state in it ends at {end_nbytes}"
                raise corrupt(str(path / name), detail)

    @property
    def nbytes(self) -> int:
        """The bytes of all state kinds."""
        return sum(entry.nbytes for entry in self.kinds)

    def checksums_of(self, entry: LinkedKind) -> bytes:
        """Returns the CRC32C of every page of a state kind, 4 bytes each."""
        return self._checksums(self._first_pages[id(entry)], entry.nbytes // PAGE_NBYTES)

    def _checksums(self, first: int, count: int) -> bytes:
        path = self._path / CHECKSUMS_NAME
        with reporting("read", path), path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), count * CHECKSUM_NBYTES, first * CHECKSUM_NBYTES)

    def files(self) -> dict[str, int]:
        """Returns the least length in bytes of every linked file, by name."""
        ends: dict[str, int] = {}
        for run in (run for entry in self.kinds for run in entry.runs):
            ends[run.path] = max(ends.get(run.path, 0), run.end_nbytes)
        return ends

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
            page = self._first_pages[id(entry)] + low // PAGE_NBYTES
            count = (high - low) // PAGE_NBYTES
            view = reader.read(
                self._path / run.path,
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


def overlaps(parts: Sequence[Part], start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
    """Yields (part, first, end) for the parts that have some of the elements [start, stop)."""
    first = max(0, bisect_right(parts, start, key=lambda part: part[2].start) - 1)
    for part in parts[first:]:
        low, high = max(start, part[2].start), min(stop, part[2].start + part[2].numel)
        if low >= stop:
            return
        if low < high:
            yield part, low, high


def joined_parts(states: Iterable[LinkedState], path: Path) -> dict[str, tuple[Part, ...]]:
    """Returns the parts that the ranks have of every tensor of the checkpoint `path`, in order.

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
    return {name: tuple(parts) for name, parts in found.items()}
