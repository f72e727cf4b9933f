"""What is in a swap directory, seen from outside, and the explicit removal of what a crash left."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from typing import Any

from infinity.errors import StorageError
from infinity.storage.swap_directory import (
    LOCK_NAME,
    SCHEMA,
    DirectoryLock,
    is_swap_name,
    read_holder,
)


@dataclass(frozen=True, slots=True)
class SwapFile:
    """A swap file. `taken_nbytes` are its blocks on the drive; `num_links` above 1 says that
    commits or checkpoints share them."""

    name: str
    nbytes: int
    taken_nbytes: int
    num_links: int


@dataclass(frozen=True, slots=True)
class SwapContents:
    """A swap directory. `holder` is what its lock file says of the last job: schema, job, pid,
    host, time; `is_held` whether that job lives."""

    path: str
    holder: dict[str, Any]
    is_held: bool
    files: tuple[SwapFile, ...]

    @property
    def is_newer(self) -> bool:
        """Left by a version whose format is not known here."""
        schema = self.holder.get("schema", SCHEMA)
        return not isinstance(schema, int) or schema > SCHEMA

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "is_held": self.is_held,
            "is_newer": self.is_newer,
            "holder": self.holder,
            "files": [
                {
                    "name": file.name,
                    "nbytes": file.nbytes,
                    "taken_nbytes": file.taken_nbytes,
                    "num_links": file.num_links,
                }
                for file in self.files
            ],
        }


def examine(path: str) -> SwapContents | None:
    """What there is; None when the directory has neither a lock nor a swap file of ours."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, operation="list", path=path) from None
    files = []
    for name in filter(is_swap_name, names):
        found = os.stat(os.path.join(path, name))
        files.append(SwapFile(name, found.st_size, found.st_blocks * 512, found.st_nlink))
    if LOCK_NAME not in names:
        return SwapContents(path, {}, False, tuple(files)) if files else None
    holder, is_held = _look_at_lock(os.path.join(path, LOCK_NAME))
    return SwapContents(path, holder, is_held, tuple(files))


def _look_at_lock(path: str) -> tuple[dict[str, Any], bool]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, operation="open", path=path) from None
    try:
        holder = dict(read_holder(fd))
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise StorageError(error.errno or errno.EIO, operation="lock", path=path) from None
            return holder, True
        return holder, False
    finally:
        os.close(fd)


def remove_stale(path: str) -> list[str]:
    """Removes the swap files of jobs that are gone, and their lock. Returns the names.

    Raises SwapLockedError while a living process holds the directory, UnsupportedError when a
    newer version has left it.
    """
    lock = DirectoryLock(path, job="")
    try:
        removed = []
        for name in sorted(filter(is_swap_name, os.listdir(path))):
            try:
                os.unlink(os.path.join(path, name))
            except OSError as error:
                raise StorageError(
                    error.errno or errno.EIO, operation="remove", path=os.path.join(path, name)
                ) from None
            removed.append(name)
    finally:
        lock.release()
    return removed
