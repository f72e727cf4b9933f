"""The reference that a checkpoint keeps to frozen weights which rest in other files.

A checkpoint of an adapter does not hold its base. `shards.json` names the files of the base: path,
length, modification time, inode, SHA-256 of the header, and the CRC32C checksums that the first
reads have taken. A run that resumes compares the files that it was given with them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.bounded import MalformedError, field, integer, list_of, parse_json, table_of, text_of
from infinity.checkpoint.run.directory import check_extent, read_content, read_manifest
from infinity.checkpoint.run.format import Manifest, is_of_rank
from infinity.errors import ConfigError, corrupt, listed
from infinity.sizes import PAGE_NBYTES
from infinity.storage.checksums import CHECKSUM_NBYTES, joined_crc32
from infinity.storage.shards import CHUNK_NBYTES, RunChecksum, ShardFiles, ShardIdentity

SHARDS_NAME = "shards.json"

_MOST_PARTS = 64  # Of a chunk that are joined: more than ranks cut one into.

_log = logging.getLogger("infinity")


def reference_to_bytes(shards: ShardFiles, *, is_first_rank: bool) -> bytes:
    """Returns the content of `shards.json`. Every rank that resumes knows the checksums of all
    ranks of the run before: the first rank passes them on, each rank adds its own."""
    checksums: dict[str, list[list[int]]] = {}
    for checksum in shards.checksums(with_earlier=is_first_rank):
        checksums.setdefault(checksum.path, []).append(
            [checksum.offset_nbytes, checksum.nbytes, checksum.crc32c]
        )
    rows = [
        {
            "path": identity.path,
            "nbytes": identity.nbytes,
            "mtime_ns": identity.mtime_ns,
            "inode": identity.inode,
            "header_sha256": identity.header_sha256,
            "checksums": checksums.get(identity.path, []),
        }
        for identity in shards.identities.values()
    ]
    return json.dumps({"schema": 1, "files": rows}, indent=1).encode() + b"\n"


def read_reference(path: Path) -> list[tuple[ShardIdentity, list[RunChecksum]]] | None:
    """Returns the files that a checkpoint refers to; None if it holds all of its state.

    In a checkpoint of several ranks each rank has a reference, with the checksums of what it has
    read. Those of adjacent parts of a chunk are joined, so that a run over another number of ranks
    can compare its reads with them. Raises StorageError, and CorruptionError also for ranks that
    have read different bytes.
    """
    rows = [row for file in _reference_files(path) for row in _read_rows(file)]
    if not rows:
        return None
    identities = {identity.path: identity for identity, _ in reversed(rows)}
    # Ranks may have found the files in different directories.
    checksums: dict[str, list[RunChecksum]] = {Path(path).name: [] for path in identities}
    for identity, of_rank in rows:
        checksums[Path(identity.path).name] += of_rank
    merged = {name: _merged(path, of_file) for name, of_file in checksums.items()}
    return [(identity, merged[Path(of).name]) for of, identity in identities.items()]


def check_reference_files(path: Path, manifest: Manifest) -> None:
    """Compares the references of a checkpoint with their SHA-256 in its manifest.

    Raises CorruptionError for one that differs, is missing, or is not named; StorageError.
    """
    named = {path / file.name: file for file in manifest.files}
    for file in _reference_files(path):
        if file not in named:
            raise corrupt(str(file), "the manifest does not name it")
    for file, entry in named.items():
        if file.name == SHARDS_NAME:
            for extent in entry.extents:
                check_extent(file, extent)


def _reference_files(path: Path) -> list[Path]:
    """Returns the references that are there: that of one rank, or those of several."""
    of_ranks = (found for found in path.glob(f"*/{SHARDS_NAME}") if is_of_rank(found.parent.name))
    return [file for file in (path / SHARDS_NAME, *sorted(of_ranks)) if os.path.lexists(file)]


def _merged(checkpoint: Path, checksums: Sequence[RunChecksum]) -> list[RunChecksum]:
    """Returns the checksums of one file, and those of adjacent parts of a chunk together. Raises
    CorruptionError for contradicting ones."""
    known: dict[tuple[int, int], RunChecksum] = {}
    in_chunk: dict[int, list[RunChecksum]] = {}
    for checksum in dict.fromkeys(checksums):
        offset, nbytes = checksum.offset_nbytes, checksum.nbytes
        if offset // CHUNK_NBYTES == (offset + nbytes - 1) // CHUNK_NBYTES:
            in_chunk.setdefault(offset // CHUNK_NBYTES, []).append(checksum)
        _note(checkpoint, known, checksum)
    for parts in in_chunk.values():
        if len(parts) > _MOST_PARTS:
            continue
        from_offset: dict[int, list[RunChecksum]] = {}
        for part in parts:
            from_offset.setdefault(part.offset_nbytes, []).append(part)
        for part in parts:
            reached = [part]
            while reached:
                first = reached.pop()
                for second in from_offset.get(first.end_nbytes, ()):
                    nbytes = first.nbytes + second.nbytes
                    digests_nbytes = second.nbytes // PAGE_NBYTES * CHECKSUM_NBYTES
                    crc = joined_crc32(first.crc32c, second.crc32c, digests_nbytes)
                    joined = RunChecksum(first.path, first.offset_nbytes, nbytes, crc)
                    if _note(checkpoint, known, joined):
                        reached.append(joined)
    return list(known.values())


def _note(
    checkpoint: Path, known: dict[tuple[int, int], RunChecksum], checksum: RunChecksum
) -> bool:
    """Adds a checksum; returns whether it was not known. Raises CorruptionError."""
    first = known.setdefault((checksum.offset_nbytes, checksum.nbytes), checksum)
    if first.crc32c != checksum.crc32c:
        where = "" if first.path == checksum.path else f", which another one found as {first.path}"
        detail = (
            f"ranks have read different bytes of this file{where} (CRC32C; {checkpoint}). Expected "
            "the same files on every machine: compare them, and resume from a checkpoint of before"
        )
        place = checksum.path, detail, checksum.offset_nbytes, checksum.nbytes
        raise corrupt(*place, code=errno.EBADMSG)
    return first is checksum


def _read_rows(file: Path) -> list[tuple[ShardIdentity, list[RunChecksum]]]:
    try:
        table = table_of(parse_json(read_content(file)), "it")
        return [_row(table_of(row, "a file")) for row in list_of(field(table, "files"), "files")]
    except MalformedError as error:
        raise corrupt(str(file), f"it is no reference to shards: {error}") from None


def _row(row: dict[str, Any]) -> tuple[ShardIdentity, list[RunChecksum]]:
    path = text_of(field(row, "path"), "a path")
    identity = ShardIdentity(
        path=path,
        nbytes=integer(field(row, "nbytes"), "a length"),
        mtime_ns=integer(field(row, "mtime_ns"), "a time"),
        inode=integer(field(row, "inode"), "an inode"),
        header_sha256=text_of(field(row, "header_sha256"), "a digest"),
    )
    checksums = []
    for row_of_checksum in list_of(field(row, "checksums"), "checksums"):
        offset, nbytes, crc32c = (
            integer(n, "a checksum") for n in list_of(row_of_checksum, "a row")
        )
        checksums.append(RunChecksum(path, offset, nbytes, crc32c))
    return identity, checksums


def directory_of_base(path: Path) -> str | None:
    """Returns the directory of the files that a checkpoint refers to; None for no reference.

    Raises CorruptionError for a reference that is not the manifest's, StorageError.
    """
    if _reference_files(path):
        check_reference_files(path, read_manifest(path))
    rows = read_reference(path)
    return os.path.dirname(rows[0][0].path) if rows else None


def check_reference(path: Path, shards: ShardFiles | None) -> None:
    """Compares the files of a base with those that the checkpoint at `path` was trained on.

    Files may lie in another directory. Later reads are compared with the checksums of that run.
    Raises ConfigError for another base, CorruptionError for files that changed.
    """
    rows = read_reference(path)
    if (rows is None) != (shards is None):
        raise ConfigError(_other_frozen(path, rows))
    if rows is None or shards is None:
        return
    own = {Path(identity.path).name: identity for identity in shards.identities.values()}
    for identity, _ in rows:
        found = own.get(Path(identity.path).name)
        if found is None:
            raise ConfigError(
                f"{path} was trained over {identity.path}, and none of the files in which the "
                f"weights of this model rest has its name; they are {listed(sorted(own))}. "
                "Give weights= the same base"
            )
        if (found.nbytes, found.header_sha256) != (identity.nbytes, identity.header_sha256):
            detail = (
                f"{path} was trained over a file of this name with {identity.nbytes} bytes and "
                f"another header; this one has {found.nbytes}. Give weights= the same base"
            )
            raise corrupt(found.path, detail, code=errno.ESTALE)
    for identity, checksums in rows:
        found = own[Path(identity.path).name]
        shards.expect(
            RunChecksum(found.path, checksum.offset_nbytes, checksum.nbytes, checksum.crc32c)
            for checksum in checksums
        )
        if found.path == identity.path and found.mtime_ns != identity.mtime_ns:
            _log.warning(
                "%s was modified since %s was saved; %s",
                found.path,
                path,
                "its bytes are compared with the checksums of that run as they are read"
                if checksums
                else "there are no checksums to compare it with (io.verify was false)",
            )


def _other_frozen(path: Path, rows: object) -> str:
    if rows is None:
        return (
            f"{path} holds its frozen weights, and those of this model rest in the files of "
            'weights=; set placement.frozen = "copy" to continue from it'
        )
    return (
        f"{path} refers to frozen weights in {directory_of_base(path)} and does not hold them; "
        'give weights= that directory, with placement.frozen = "checkpoint"'
    )
