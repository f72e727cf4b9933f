"""The manifest of a checkpoint: every file, with a SHA-256 of every extent of it.

Pure: bytes to facts and back. docs/formats/checkpoint.md shows the format. `manifest.sha256` has
the SHA-256 of `manifest.json`; `sha256sum -c` reads it too. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infinity.bounded import (
    MalformedError,
    field,
    integer,
    list_of,
    parse_json,
    plain_name,
    table_of,
    text_of,
)
from infinity.errors import UnsupportedError, corrupt
from infinity.sizes import GIB

# 3 for several ranks, 2 for linked state, 1 otherwise, so that older versions read all they can.
SCHEMA = 3
FORMAT = "infinity checkpoint"
MANIFEST_NAME = "manifest.json"
DIGEST_NAME = "manifest.sha256"
PROGRAM_NAME = "program.pt"  # The small state; every rank has its own.
MAX_NBYTES = GIB  # A manifest and a table name every tensor.
MAX_STEP = 10**12
_MAX_RANKS = 1 << 20
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


def to_bytes(manifest: Manifest) -> bytes:
    """Returns the content of `manifest.json`."""
    facts = asdict(manifest)
    if not manifest.ranks:
        del facts["ranks"]
    body = {"format": FORMAT, "schema": facts.pop("schema"), **facts}
    return json.dumps(body, indent=1).encode() + b"\n"


def digest_line(content: bytes) -> bytes:
    """Returns the content of `manifest.sha256`."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST_NAME}\n".encode()


def parse(content: bytes, digest: bytes, *, path: str) -> Manifest:
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
        _tensor_name(field(entry, "name")),
        text_of(field(entry, "kind"), "the kind of an extent"),
        integer(field(entry, "offset_nbytes"), "the offset of an extent"),
        integer(field(entry, "nbytes"), "the length of an extent"),
        sha256,
    )


def _tensor_name(value: Any) -> str:
    """Returns a name that a module may have: any text without a null character."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise MalformedError("the name of an extent is no text")
    return value


def _manifest(body: dict[str, Any], schema: int) -> Manifest:
    files = tuple(map(_file, list_of(field(body, "files"), "files")))
    ranks = tuple(plain_name(name, "a rank") for name in list_of(body.get("ranks", []), "ranks"))
    if len(set(ranks)) < len(ranks) or not (not ranks or 1 < len(ranks) <= _MAX_RANKS):
        raise MalformedError(f"it names {len(ranks)} ranks, or one of them twice")
    for file in files:
        plain_name(file.name.removeprefix(_rank_of(file, frozenset(ranks))), "the name of a file")
    names = {file.name for file in files}
    if len(names) < len(files):
        raise MalformedError("it names a file twice")
    step = integer(field(body, "step"), "step", most=MAX_STEP)
    created, by = field(body, "created"), field(body, "written_by")
    facts = text_of(created, "created", max_length=200), text_of(by, "written_by", max_length=200)
    return Manifest(step, *facts, files, schema, ranks)


def _rank_of(file: FileEntry, ranks: frozenset[str]) -> str:
    """Returns the directory of `ranks` that the file lies in, with a slash, or an empty text."""
    directory, slash, _ = file.name.partition("/")
    return directory + slash if slash and directory in ranks else ""
