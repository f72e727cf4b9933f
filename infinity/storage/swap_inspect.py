"""Lists the contents of a swap directory, without its lock, and removes what a crash left."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import Any

from infinity.bounded import kind_of
from infinity.errors import StorageError
from infinity.storage.lock_file import open_lock, read_holder, try_lock
from infinity.storage.swap_directory import (
    LOCK_NAME,
    SCHEMA,
    DirectoryLock,
    is_swap_name,
    remove_swap_file,
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
    """A swap directory. `holder` is the content of its lock file: schema, job, pid, host, time.

    `is_held`: the process of that job is alive.
    """

    path: str
    holder: dict[str, Any]
    is_held: bool
    files: tuple[SwapFile, ...]
    faults: tuple[str, ...] = ()  # A file with a swap file's name that is none.

    @property
    def is_newer(self) -> bool:
        """Whether a version with an unknown format has left the directory."""
        schema = self.holder.get("schema", SCHEMA)
        return type(schema) is not int or schema > SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents for JSON; sizes are bytes."""
        return {
            "path": self.path,
            "is_held": self.is_held,
            "is_newer": self.is_newer,
            "holder": self.holder,
            "faults": list(self.faults),
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
    """Returns the contents; None when the directory has neither a lock nor a swap file."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, operation="list", path=path) from None
    files, faults = [], []
    for name in filter(is_swap_name, names):
        place = os.path.join(path, name)
        try:
            found = os.lstat(place)
        except FileNotFoundError:
            continue  # A running job has removed it meanwhile.
        if stat.S_ISREG(found.st_mode):
            files.append(SwapFile(name, found.st_size, found.st_blocks * 512, found.st_nlink))
        else:
            faults.append(f"{place}: it is {kind_of(found.st_mode)}; expected a swap file")
    holder: dict[str, Any] = {}
    is_held = False
    if LOCK_NAME in names:
        try:
            holder, is_held = _look_at_lock(os.path.join(path, LOCK_NAME))
        except FileNotFoundError:
            pass
        except StorageError as error:
            faults.append(str(error))
    elif not files and not faults:
        return None
    return SwapContents(path, holder, is_held, tuple(files), tuple(faults))


def _look_at_lock(path: str) -> tuple[dict[str, Any], bool]:
    fd = open_lock(path, create=False)
    try:
        holder = read_holder(fd)
        return holder, not try_lock(fd, path, fcntl.LOCK_SH)
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
            remove_swap_file(os.path.join(path, name))
            removed.append(name)
    finally:
        lock.release()
    return removed
