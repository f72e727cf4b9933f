"""The file `infinity.lock`: opened without harm to foreign files, read and written.

Any user who may write to the directory can put any file under that name. So a link is not followed,
a FIFO is not waited for, and a foreign file is not changed: it is refused by name. The content is
shown in messages; only its names of swap files to keep are acted on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infinity.bounded import MAX_INT, MalformedError, kind_of, parse_json
from infinity.errors import ConfigError, StorageError, SwapLockedError, UnsupportedError, reporting

_log = logging.getLogger(__name__)

SCHEMA = 1
LOCK_NAME = "infinity.lock"
_SWAP_NAME = re.compile(r"infinity-[0-9a-f]{16}(-\d+)?\.swap")
LOCK_NBYTES = 1 << 16  # More than any lock needs: it names the swap files that are kept.
_BEGINS = b'{"schema": '  # As every lock does that was ever written here.
_LOCAL = (
    "file locks do not work there; put the directory on a local drive (ext4, XFS), or mount the "
    "network drive with locks"
)


class DirectoryLock:
    """The flock on `infinity.lock`. `kept` names swap files that checkpoints of earlier holders
    use.
    """

    def __init__(self, directory: str, job: str) -> None:
        self._path = os.path.join(directory, LOCK_NAME)
        self._job = job
        self._fd = self._acquire()
        try:
            kept = self._holder_before().get("kept")
            names = kept if isinstance(kept, list) else []
            self.kept: tuple[str, ...] = tuple(
                name for name in names if isinstance(name, str) and is_swap_name(name)
            )
            self._write(pid=os.getpid(), kept=self.kept)
        except BaseException:
            self.abandon()
            raise
        _held_locks.add(self)

    def _holder_before(self) -> dict[str, object]:
        """Reads what the last holder wrote; empty for a file that a crash has cut short."""
        holder = read_holder(self._fd)
        schema = holder.get("schema", SCHEMA)
        if type(schema) is not int or schema > SCHEMA:
            raise UnsupportedError(
                f"{self._path}: the swap directory was left by a newer infinity (schema {schema}, "
                f"this one knows up to {SCHEMA}); upgrade infinity-offload, or give another "
                "directory"
            )
        return holder

    def release(self, *, keep: Iterable[str] = ()) -> None:
        """Ends the lock. Its file stays to name the swap files of `kept` and `keep`, if any exist.

        Idempotent.
        """
        if self._fd < 0:
            return
        names, place = (*self.kept, *keep), os.path.dirname(self._path)
        kept = tuple(name for name in names if os.path.exists(os.path.join(place, name)))
        if not is_same_file(self._fd, self._path):
            pass  # The directory was removed, and may be another job's by now.
        elif kept:
            try:
                self._write(pid=None, kept=kept)
            except StorageError as error:  # On closing: as in _unlink.
                _log.warning("%s still names process %s: %s", self._path, os.getpid(), error)
        else:
            unlink_logged(self._path)
        self.abandon()
        _held_locks.discard(self)

    def abandon(self) -> None:
        """Closes our descriptor only. In a forked child, the parent's lock stays."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _acquire(self) -> int:
        while True:
            fd = open_lock(self._path, create=True)
            try:
                if not self._try(fd):
                    raise self._refusal(read_holder(fd))
                # The holder before us may have unlinked the file between our open and our flock.
                if is_same_file(fd, self._path):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _try(self, fd: int) -> bool:
        try:
            return try_lock(fd, self._path)
        except StorageError:
            if not os.fstat(fd).st_size:  # A new file, still empty.
                unlink_logged(self._path)
            raise

    def _refusal(self, holder: dict[str, object]) -> SwapLockedError:
        pid = pid_in(holder)
        who = f"process {pid} on {holder.get('host')}" if pid else "another process"
        return SwapLockedError(
            errno.EWOULDBLOCK,
            path=self._path,
            pid=pid,
            detail=f"the swap directory is in use by {who}; give every job its own directory, or "
            "end that process",
        )

    def _write(self, *, pid: int | None, kept: tuple[str, ...]) -> None:
        holder = {
            "schema": SCHEMA,
            "job": self._job,
            "pid": pid,
            "host": socket.gethostname(),
            "time": time.time(),
            "kept": kept,
        }
        write_holder(self._fd, self._path, holder)


_held_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _abandon_locks_in_child() -> None:
    """A child that outlives us must not keep our directories locked."""
    for lock in list(_held_locks):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_locks_in_child)


def open_lock(path: str, *, create: bool) -> int:
    """A descriptor of the lock file, made if need be; it is not locked yet. With `create` for
    reading and writing, else for reading.

    Raises StorageError for whatever else has that name, and FileNotFoundError without `create`.
    """
    flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
    try:
        # O_NONBLOCK: the open of a FIFO would wait for its other end.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ENOENT and not create:
            raise
        raise _refused(path, error.errno or errno.EIO, _name_in_the_way(path)) from None
    try:
        with reporting("read", path):
            _check_own(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _name_in_the_way(path: str) -> str:
    """Why a lock cannot be opened, where the name is of something else; "" where it is not."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    if stat.S_ISREG(mode):
        return ""
    return f"it is {kind_of(mode)}; expected the lock file of this package. Move it away"


def _check_own(fd: int, path: str) -> None:
    """Raises StorageError unless it is a file that this package wrote, or that is empty."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, errno.EINVAL, _name_in_the_way(path) or "it is no regular file")
    if found.st_nlink > 1:
        detail = "it is a link to a file that has another name, too; move it away"
        raise _refused(path, errno.EMLINK, detail)
    if found.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        detail = f"it belongs to user {found.st_uid}; use a directory of your own"
        raise _refused(path, errno.EACCES, detail)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        detail = (
            f"others may write it (mode {stat.S_IMODE(found.st_mode):o}); expected 600. Look at "
            "who made it, then remove it"
        )
        raise _refused(path, errno.EACCES, detail)
    start = os.pread(fd, len(_BEGINS), 0)
    # A crash may have cut a lock short, or left zeros in place of its last bytes.
    if found.st_size > LOCK_NBYTES or not _BEGINS.startswith(start.rstrip(b"\0")):
        raise _refused(path, errno.EEXIST, "it is no lock file of this package; move it away")


def read_holder(fd: int) -> dict[str, Any]:
    """Returns the content of a lock file; an empty dict for content that is not understood."""
    try:
        found = parse_json(os.pread(fd, LOCK_NBYTES, 0) or b"{}", max_depth=3)
    except (MalformedError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def pid_in(holder: dict[str, Any]) -> int | None:
    """Returns the process that a lock names; None if it names no possible one."""
    pid = holder.get("pid")
    return pid if type(pid) is int and 0 < pid < MAX_INT else None


def write_holder(fd: int, path: str, holder: dict[str, Any]) -> None:
    """Writes `holder` into the lock. The old content is valid until the new content is. Raises
    StorageError; a file that was empty is removed then, so that a full drive keeps no trace."""
    content = json.dumps(holder).encode()
    was_empty = os.fstat(fd).st_size == 0
    try:
        if os.pwrite(fd, content, 0) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, len(content))
    except OSError as error:
        if was_empty:
            os.unlink(path)
        detail = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            detail = (
                f"{os.strerror(error.errno)}: not even a lock of {len(content)} bytes fits; free "
                "some space there, or use another directory"
            )
        raise StorageError(
            error.errno or errno.EIO, operation="write", path=path, detail=detail
        ) from None


def try_lock(fd: int, path: str, operation: int = fcntl.LOCK_EX) -> bool:
    """Takes the lock; returns False if another process holds it. Does not wait.

    Raises StorageError where file locks do not work.
    """
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            return False
        code = error.errno or errno.EIO
        detail = f"{os.strerror(code)}: {_LOCAL}"
        raise StorageError(code, operation="lock", path=path, detail=detail) from error
    return True


def is_same_file(fd: int, path: str) -> bool:
    """Returns whether the name still belongs to the open file."""
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    own = os.fstat(fd)
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)


def _refused(path: str, code: int, detail: str) -> StorageError:
    return StorageError(code, operation="open", path=path, detail=detail)


def swap_names(job: str, num_spares: int) -> list[str]:
    """The swap files of a job, by generation."""
    return [f"infinity-{job}.swap", *(f"infinity-{job}-{n}.swap" for n in range(1, num_spares + 1))]


def job_of(name: str) -> str | None:
    """The job that a swap file of this name belongs to; None when it is none."""
    return name[len("infinity-") :][:16] if is_swap_name(name) else None


def is_swap_name(name: str) -> bool:
    """Returns whether a file of this name in a swap directory belongs to this package."""
    return _SWAP_NAME.fullmatch(name) is not None


def unlink_logged(path: str) -> None:
    """Removes a file during close. Logs a failure: the other files are closed too."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("%s stays: %s", path, error.strerror)


# -- Locks of directories, without a file ----------------------------------------------------------


@contextmanager
def locked(
    directory: str | Path, busy: str = "", *, is_needed: bool = True, waits: bool = False
) -> Iterator[None]:
    """Holds the lock of the directory during the block; the kernel drops it with the process.

    Raises ConfigError, which `busy` completes, if another process holds it, unless it `waits` for
    that process; StorageError where file systems have no locks, unless the lock is not `is_needed`.
    """
    with reporting("open", directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise ConfigError(f"{directory}: {busy}") from None
            if is_needed:
                code = error.errno or 0
                raise StorageError(code, operation="lock", path=str(directory)) from None
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # A child that was forked meanwhile has it, too.
        with contextlib.suppress(OSError):
            os.close(fd)
