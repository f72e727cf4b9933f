"""One swap directory: creation, the lock, stale files, and what its file system can do.

A directory belongs to one living process at a time. The lock is a flock on `infinity.lock`, which
the kernel drops when its holder dies; the JSON in it only says who that is. Everything else of ours
is named `infinity-<16 hex digits>.swap`; no other name is ever touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from infinity import _core
from infinity.errors import StorageError, SwapLockedError
from infinity.sizes import GIB, PAGE_NBYTES

LOCK_NAME = "infinity.lock"
_SWAP_NAME = re.compile(r"infinity-[0-9a-f]{16}\.swap")
_NO_RANGE_SUPPORT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class SwapDirectory:
    """A locked swap directory and the one swap file in it.

    Raises SwapLockedError when a living process holds it, StorageError when it cannot be used.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        _ensure_directory(path)
        self._lock = _DirectoryLock(path)
        try:
            self._remove_stale_files()
            self.swap_path = os.path.join(path, f"infinity-{secrets.token_hex(8)}.swap")
            self._fd = _create(self.swap_path)
        except BaseException:
            self._lock.release()
            raise
        self.size_nbytes = 0
        self.device: int = os.fstat(self._fd).st_dev

    def free_nbytes(self) -> int | None:
        """Bytes that may still be taken, less a reserve of 5 % or 1 GiB, whichever is smaller.

        None when the file system does not say (ramfs).
        """
        try:
            found = os.fstatvfs(self._fd)
        except OSError as error:
            raise _failure(error, "statvfs", self.path) from error
        if found.f_blocks == 0:
            return None
        reserve_nbytes = min(GIB, found.f_blocks * found.f_frsize // 20)
        return max(0, found.f_bavail * found.f_frsize - reserve_nbytes)

    def grow(self, size_nbytes: int) -> None:
        """Preallocates the file up to `size_nbytes`; new ranges read as zeros.

        On failure the file has its old size again. fallocate(2); written once where there is none.
        """
        if size_nbytes <= self.size_nbytes:
            return
        try:
            _allocate(self._fd, self.size_nbytes, size_nbytes - self.size_nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size_nbytes)
            raise _failure(
                error,
                "fallocate",
                self.swap_path,
                offset_nbytes=self.size_nbytes,
                nbytes=size_nbytes - self.size_nbytes,
            ) from error
        self.size_nbytes = size_nbytes

    @contextlib.contextmanager
    def scratch(self, nbytes: int) -> Iterator[None]:
        """The file is so long for a while, to be measured; then it is as it was. Nothing may be in
        flight at the end. Only before the file has grown for good."""
        assert self.size_nbytes == 0
        self.grow(nbytes)
        try:
            yield
        finally:
            os.ftruncate(self._fd, 0)
            self.size_nbytes = 0

    def refusal_of_direct_io(self) -> str | None:
        """None when direct I/O in units of 4096 bytes works, found by doing it; else why not."""
        try:
            fd = os.open(self.swap_path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            return f"open with O_DIRECT failed: {error.strerror}"
        try:
            memory_nbytes, offset_nbytes = _core.direct_alignment(fd)
            if max(memory_nbytes, offset_nbytes) > PAGE_NBYTES:
                return f"it needs an alignment of {max(memory_nbytes, offset_nbytes)} bytes"
            with mmap.mmap(-1, PAGE_NBYTES) as page:  # Page-aligned memory.
                os.pwrite(fd, page, self.size_nbytes)
            return None
        except OSError as error:
            return f"a direct write failed: {error.strerror}"
        finally:
            os.ftruncate(fd, self.size_nbytes)
            os.close(fd)

    def close(self, *, remove: bool) -> None:
        """Removes the swap file, or leaves it for good, and releases the lock. Idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.swap_path)
        self._lock.release(keep=() if remove else (os.path.basename(self.swap_path),))

    def _remove_stale_files(self) -> None:
        """We hold the lock, so whoever made them is gone, unless it asked for them to be kept."""
        for name in os.listdir(self.path):
            if _SWAP_NAME.fullmatch(name) and name not in self._lock.kept:
                os.unlink(os.path.join(self.path, name))


class _DirectoryLock:
    """The flock on `infinity.lock`. `kept` names swap files that earlier holders left for good."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, LOCK_NAME)
        self._fd = self._acquire()
        kept = _read_holder(self._fd).get("kept")
        self.kept: tuple[str, ...] = tuple(map(str, kept)) if isinstance(kept, list) else ()
        self._write(pid=os.getpid(), kept=self.kept)
        _held_locks.add(self)

    def release(self, *, keep: tuple[str, ...] = ()) -> None:
        if self._fd < 0:
            return
        kept = tuple(name for name in (*self.kept, *keep) if self._is_there(name))
        if kept:
            self._write(pid=None, kept=kept)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        self.abandon()
        _held_locks.discard(self)

    def abandon(self) -> None:
        """Closes our descriptor only. In a forked child, the parent's lock stays."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _acquire(self) -> int:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise _failure(error, "open", self._path) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder before us may have unlinked the file between our open and our flock.
                if _is_same_file(fd, self._path):
                    return fd
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    raise _failure(error, "lock", self._path) from error
                raise self._refusal(_read_holder(fd)) from error
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _refusal(self, holder: dict[str, object]) -> SwapLockedError:
        pid = holder.get("pid")
        who = f"process {pid} on {holder.get('host')}" if pid else "another process"
        return SwapLockedError(
            errno.EWOULDBLOCK,
            path=self._path,
            pid=pid if isinstance(pid, int) else None,
            detail=f"the swap directory is in use by {who}; give every job its own directory, or "
            "end that process",
        )

    def _write(self, *, pid: int | None, kept: tuple[str, ...]) -> None:
        holder = {"pid": pid, "host": socket.gethostname(), "time": time.time(), "kept": kept}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(holder).encode(), 0)

    def _is_there(self, name: str) -> bool:
        return os.path.exists(os.path.join(os.path.dirname(self._path), name))


_held_locks: weakref.WeakSet[_DirectoryLock] = weakref.WeakSet()


def _abandon_locks_in_child() -> None:
    """A child that outlives us must not keep our directories locked."""
    for lock in list(_held_locks):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_locks_in_child)


def _ensure_directory(path: str) -> None:
    """Creates the last component of `path` if need be; a mistyped mount point stays an error."""
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        if not os.access(path, os.W_OK | os.X_OK):
            raise _unusable(path, _writability_errno(path), "the swap directory is not writable")
        return
    if os.path.lexists(path):
        raise _unusable(path, errno.ENOTDIR, "the swap path exists and is not a directory")
    if not os.path.isdir(parent):
        raise _unusable(
            path,
            errno.ENOENT,
            f"its parent {parent!r} does not exist. Only the last component is created: mount the "
            "drive or create the parent, or correct the path",
        )
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass  # Another rank was faster.
    except OSError as error:
        code = error.errno or errno.EIO
        raise _unusable(
            path, code, f"cannot create it ({os.strerror(code)}); choose a writable parent"
        ) from error


def _writability_errno(path: str) -> int:
    return errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES


def _unusable(path: str, code: int, detail: str) -> StorageError:
    return StorageError(code, operation="create swap directory", path=path, detail=detail)


def _create(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _failure(error, "create", path) from error


def _allocate(fd: int, offset_nbytes: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, offset_nbytes, nbytes)
    except OSError as error:
        if error.errno not in _NO_RANGE_SUPPORT:
            raise
        zeros = bytes(1 << 20)
        for at in range(offset_nbytes, offset_nbytes + nbytes, len(zeros)):
            os.pwrite(fd, zeros[: offset_nbytes + nbytes - at], at)


def _failure(
    error: OSError, operation: str, path: str, *, offset_nbytes: int = 0, nbytes: int = 0
) -> StorageError:
    return StorageError(
        error.errno or errno.EIO,
        operation=operation,
        path=path,
        offset_nbytes=offset_nbytes,
        nbytes=nbytes,
    )


def _read_holder(fd: int) -> dict[str, object]:
    """Whatever the lock file says; nothing when it says nothing we understand."""
    try:
        found = json.loads(os.pread(fd, PAGE_NBYTES, 0) or b"{}")
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_same_file(fd: int, path: str) -> bool:
    try:
        on_disk = Path(path).stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (on_disk.st_dev, on_disk.st_ino)
