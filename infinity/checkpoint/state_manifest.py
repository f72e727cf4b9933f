"""The manifest of a checkpoint: every file, and a SHA-256 of every extent of it.

Pure: bytes to facts and back. Drawn in docs/formats/checkpoint.md. `manifest.json` is vouched for
by `manifest.sha256`, which `sha256sum -c` reads too. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from infinity.errors import UnsupportedError, corrupt

# 3 with several ranks, 2 where state is linked, which older versions cannot read; else 1.
SCHEMA = 3
FORMAT = "infinity checkpoint"
MANIFEST_NAME = "manifest.json"
DIGEST_NAME = "manifest.sha256"


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a file: one tensor, the header, or all of it. `kind` is what it counts as."""

    name: str
    kind: str
    offset_nbytes: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file. Its extents follow each other without a hole and cover it."""

    name: str
    nbytes: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is made of. `step` counts optimizer steps; `created` is ISO 8601, UTC.

    `ranks`: the directories of those that wrote it, by rank; none where it was one.
    """

    step: int
    created: str
    written_by: str
    files: tuple[FileEntry, ...]
    schema: int = 1
    ranks: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """What file names begin with, by rank."""
        return places_of(self.ranks)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def nbytes_by_kind(self) -> dict[str, int]:
        table: dict[str, int] = {}
        for file in self.files:
            for extent in file.extents:
                table[extent.kind] = table.get(extent.kind, 0) + extent.nbytes
        return table


def rank_directories(count: int) -> tuple[str, ...]:
    """Where each of several ranks writes; one writes into the checkpoint itself."""
    return tuple(f"rank-{rank:05d}" for rank in range(count)) if count > 1 else ()


def places_of(ranks: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{rank}/" for rank in ranks) or ("",)


def to_bytes(manifest: Manifest) -> bytes:
    """The content of `manifest.json`."""
    facts = asdict(manifest)
    if not manifest.ranks:
        del facts["ranks"]
    body = {"format": FORMAT, "schema": facts.pop("schema"), **facts}
    return json.dumps(body, indent=1).encode() + b"\n"


def digest_line(content: bytes) -> bytes:
    """The content of `manifest.sha256`."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST_NAME}\n".encode()


def parse(content: bytes, digest: bytes, *, path: str) -> Manifest:
    """The manifest of these bytes. `path` names the file in errors.

    Raises CorruptionError for bytes that their digest does not vouch for, and for a foreign file;
    UnsupportedError for a newer schema.
    """
    if digest != digest_line(content):
        raise corrupt(path, f"it is damaged: its SHA-256 is not the one in {DIGEST_NAME}")
    try:
        body = json.loads(content)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise corrupt(path, f"it is foreign: expected the manifest of an {FORMAT}")
        schema = body["schema"]
        if not isinstance(schema, int) or schema > SCHEMA:
            raise UnsupportedError(
                f"{path} has schema {schema}, this infinity reads up to {SCHEMA}: "
                "upgrade infinity-offload"
            )
        return _manifest(body, path)
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(path, f"it is no manifest of schema {SCHEMA}: {error!r}") from None


def files_to_bytes(files: Sequence[FileEntry]) -> bytes:
    """Entries of one rank, on their way to the one that writes the manifest."""
    return json.dumps([asdict(file) for file in files]).encode()


def files_of_bytes(content: bytes) -> tuple[FileEntry, ...]:
    return tuple(_file(entry) for entry in json.loads(content))


def _file(entry: dict[str, Any]) -> FileEntry:
    extents = tuple(Extent(**extent) for extent in entry["extents"])
    return FileEntry(entry["name"], entry["nbytes"], extents)


def _manifest(body: dict[str, Any], path: str) -> Manifest:
    files = [_file(entry) for entry in body["files"]]
    ranks = tuple(body.get("ranks", ()))
    for name in (*ranks, *(file.name.removeprefix(_rank_of(file, ranks)) for file in files)):
        if PurePath(name).name != name:
            raise corrupt(path, f"{name!r} is no file name")
    for file in files:
        end = 0
        for extent in file.extents:
            if extent.offset_nbytes != end or extent.nbytes < 0:
                raise corrupt(path, f"extent {extent.name!r} of {file.name} is not at byte {end}")
            end += extent.nbytes
        if end != file.nbytes:
            raise corrupt(path, f"the extents of {file.name} end at {end}, not at {file.nbytes}")
    if len({file.name for file in files}) < len(files):
        raise corrupt(path, "it names a file twice")
    facts = body["step"], body["created"], body["written_by"]
    return Manifest(*facts, tuple(files), body["schema"], ranks)


def _rank_of(file: FileEntry, ranks: Collection[str]) -> str:
    """The directory that the name begins with, if it is one of these."""
    directory, slash, _ = file.name.partition("/")
    return directory + slash if slash and directory in ranks else ""
