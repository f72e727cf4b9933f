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
from pathlib import Path
from typing import Any

from infinity.bounded import (
    MalformedError,
    field,
    integer,
    list_of,
    parse_json,
    table_of,
    text_of,
)
from infinity.checkpoint.run.directory import read_content
from infinity.checkpoint.run.manifest import is_of_rank
from infinity.errors import ConfigError, CorruptionError, corrupt, listed
from infinity.storage.shards import RunChecksum, ShardFiles, ShardIdentity

SHARDS_NAME = "shards.json"

_log = logging.getLogger("infinity")


def reference_to_bytes(shards: ShardFiles) -> bytes:
    """Returns the content of `shards.json`."""
    checksums: dict[str, list[list[int]]] = {}
    for checksum in shards.checksums():
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
    read. Raises CorruptionError, StorageError.
    """
    of_ranks = (found for found in path.glob(f"*/{SHARDS_NAME}") if is_of_rank(found.parent.name))
    files = [path / SHARDS_NAME, *sorted(of_ranks)]
    rows = [row for file in files if file.exists() for row in _read_rows(file)]
    if not rows:
        return None
    identities = {identity.path: identity for identity, _ in reversed(rows)}
    checksums: dict[str, list[RunChecksum]] = {path: [] for path in identities}
    for identity, of_rank in rows:
        checksums[identity.path] += of_rank
    return [(identities[path], list(dict.fromkeys(found))) for path, found in checksums.items()]


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
    """Returns the directory of the files that a checkpoint refers to; None for no reference."""
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
    saved = {Path(identity.path).name: identity for identity, _ in rows}
    for name, identity in saved.items():
        found = own.get(name)
        if found is None:
            raise ConfigError(
                f"{path} was trained over {identity.path}, and none of the files in which the "
                f"weights of this model rest has its name; they are {listed(sorted(own))}. "
                "Give weights= the same base"
            )
        if (found.nbytes, found.header_sha256) != (identity.nbytes, identity.header_sha256):
            raise CorruptionError(
                errno.ESTALE,
                operation="read",
                path=found.path,
                detail=f"{path} was trained over a file of this name with {identity.nbytes} bytes "
                f"and another header; this one has {found.nbytes}. Give weights= the same base",
            )
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
