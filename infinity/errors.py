"""The exceptions of the package: one tree, whose nodes are also builtin exceptions.

InfinityError
  ConfigError(ValueError)        a setting or request is impossible: key, value, what is allowed
  CapacityError(MemoryError)     a budget is exhausted: tier, needed, available, the key to change
  StorageError(OSError)          errno, operation, path, offset, length
    CorruptionError              checksum, header or length mismatch
    SwapLockedError              the swap directory belongs to a living process
  UnsupportedError(RuntimeError) a kernel, hardware or PyTorch feature is missing, and the remedy
  DeviceError(RuntimeError)      the device failed: its error, the units that have left it last
  ParameterNotResident(RuntimeError)  a released parameter was used: full name, tier, the fix
  NonFiniteError(ArithmeticError)     a loss or a gradient is not finite: step, unit
  RankError(RuntimeError)        another rank is gone or out of step: rank, cause

Every message says what was expected, what came and what to do next. Bad input raises an error of
this tree. A broken invariant of the package asserts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EACCES, EDQUOT, EILSEQ, EIO, EMFILE, ENOSPC, EPERM, EROFS
from pathlib import Path

from infinity.sizes import format_nbytes

_MAX_NAMES = 5  # In one message.

# What to do about an errno, if the caller has no better advice.
_REMEDIES = {
    EACCES: "check the owner and the mode of it and of the directories above (ls -ld)",
    EPERM: "check the owner and the mode of it and of the directories above (ls -ld)",
    ENOSPC: "free some space there, or use another drive",
    EDQUOT: "the quota is used up; free some space there, or use another drive",
    EROFS: "use a drive that can be written",
    EIO: "the drive failed; see the kernel's log (dmesg)",
    EMFILE: "raise the limit of open files (ulimit -n)",
}


class InfinityError(Exception):
    """Base of every error the package raises on purpose."""


class ConfigError(InfinityError, ValueError):
    """A setting or a request is impossible or contradictory."""


class CapacityError(InfinityError, MemoryError):
    """A tier's budget is exhausted.

    `tier` is "device", "host" or "nvme"; sizes are bytes; `key` is the configuration key that
    changes the budget. `remedy` is the advice at the end of the message; without one the advice is
    to change `key`.
    """

    def __init__(
        self,
        tier: str,
        *,
        needed_nbytes: int,
        available_nbytes: int,
        key: str,
        detail: str,
        remedy: str = "",
    ) -> None:
        self.tier = tier
        self.needed_nbytes = needed_nbytes
        self.available_nbytes = available_nbytes
        self.key = key
        super().__init__(
            f"{detail}: {format_nbytes(needed_nbytes)} needed on the {tier} tier, "
            f"{format_nbytes(available_nbytes)} available; {remedy or f'change {key}'}"
        )


class StorageError(InfinityError, OSError):
    """An operation on a file failed. `errno` is the kernel's error number; sizes are bytes."""

    def __init__(
        self,
        errno: int,
        *,
        operation: str,
        path: str,
        offset_nbytes: int = 0,
        nbytes: int = 0,
        detail: str = "",
    ) -> None:
        self.operation = operation
        self.path = path
        self.offset_nbytes = offset_nbytes
        self.nbytes = nbytes
        self.detail = detail
        where = f" at offset {offset_nbytes}, {nbytes} bytes" if nbytes else ""
        reason = detail or os.strerror(errno)
        if not detail and errno in _REMEDIES:
            reason += f"; {_REMEDIES[errno]}"
        super().__init__(errno, f"{operation} of {path!r}{where} failed: {reason}", path)

    def __str__(self) -> str:
        return f"[Errno {self.errno}] {self.strerror}"

    def with_detail(self, detail: str) -> StorageError:
        """Returns the error of the same operation with another reason."""
        return type(self)(
            self.errno or 0, operation=self.operation, path=self.path,
            offset_nbytes=self.offset_nbytes, nbytes=self.nbytes, detail=detail,
        )  # fmt: skip


def storage_error(error: OSError) -> StorageError | None:
    """Returns the StorageError for an OSError about a file, and None for any other OSError."""
    if error.filename is None or error.errno is None:
        return None
    path = os.fsdecode(error.filename) if not isinstance(error.filename, int) else "a file"
    return StorageError(error.errno, operation="use", path=path)


@contextmanager
def refusing(what: str, *kinds: type[Exception], remedy: str = "") -> Iterator[None]:
    """Turns an exception of these kinds in the block into a ConfigError, which says what cannot be,
    the reason and the remedy. Errors of this package, and the end of memory, go through."""
    try:
        yield
    except (InfinityError, MemoryError):
        raise
    except kinds as error:
        reason = error.strerror if isinstance(error, OSError) else None
        text = reason or " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{what}: {text}{remedy}") from error


@contextmanager
def reporting(
    operation: str, path: str | Path, offset_nbytes: int = 0, nbytes: int = 0
) -> Iterator[None]:
    """Turns an OSError of the block, also one that a library in Rust tells of in an exception of
    its own, into a StorageError with the operation, the path and the range.

    The path is the one that the OSError names, and `path` if it names none.
    """
    try:
        yield
    except InfinityError:
        raise
    except OSError as error:
        where = str(error.filename or path)
        raise StorageError(
            error.errno or 0,
            operation=operation,
            path=where,
            offset_nbytes=offset_nbytes,
            nbytes=nbytes,
        ) from None
    except Exception as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise StorageError(int(code[1]), operation=operation, path=str(path)) from error


class CorruptionError(StorageError):
    """The bytes do not match their header or checksum."""


def corrupt(
    path: str, detail: str, offset_nbytes: int = 0, nbytes: int = 0, *, code: int = EILSEQ
) -> CorruptionError:
    """Returns the error for a file whose content does not match its header or checksum. `code`:
    EBADMSG for bytes that have changed, ESTALE for a file that has."""
    return CorruptionError(
        code, operation="read", path=path, offset_nbytes=offset_nbytes, nbytes=nbytes, detail=detail
    )


class SwapLockedError(StorageError):
    """A living process owns the swap directory. `pid` is that process, or None if unknown."""

    def __init__(self, errno: int, *, path: str, pid: int | None, detail: str) -> None:
        self.pid = pid
        super().__init__(errno, operation="lock", path=path, detail=detail)


class UnsupportedError(InfinityError, RuntimeError):
    """A feature of the kernel, the hardware or PyTorch is missing. The message names the remedy."""


class DeviceError(InfinityError, RuntimeError):
    """The device reported an error of work that was issued before; its own error is the cause.

    `released` are the units whose weights left the device last, the latest first.
    """

    def __init__(self, message: str, released: Sequence[str]) -> None:
        self.released = tuple(released)
        super().__init__(message)


class ParameterNotResident(InfinityError, RuntimeError):
    """An operation on a released parameter cannot fetch it. `name` is the parameter's full name."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        super().__init__(f"parameter {name!r} is not resident: {detail}")


class NonFiniteError(InfinityError, ArithmeticError):
    """A loss or a gradient is not finite. The weights are those of the last good step.

    `step` counts optimizer steps from 1. `unit` names the first module that produced the value, or
    is None if that module is unknown.
    """

    def __init__(self, what: str, *, step: int, unit: str | None) -> None:
        self.step = step
        self.unit = unit
        super().__init__(
            f"{what} is not finite at step {step}, first produced by {unit or 'an unknown module'}"
            "; no weight was changed by this step. Lower the learning rate, check the data, or set "
            "optimizer.max_grad_norm"
        )


class RankError(InfinityError, RuntimeError):
    """A rank of the job is gone, blocked or out of step.

    `rank` is the first rank that failed, among all ranks of the job. Training cannot continue
    without the shards of that rank.
    """

    def __init__(self, rank: int, cause: str) -> None:
        self.rank = rank
        self.cause = cause
        super().__init__(
            f"{cause}. End all ranks and start the job again: it goes on from its last checkpoint "
            "(infinity train --resume, infinity.checkpoint.load)"
        )

    def again(self) -> RankError:
        """Returns the same error with an empty traceback, to raise it in another place."""
        return RankError(self.rank, self.cause)


# -- Words of messages -----------------------------------------------------------------------------


def listed(names: Sequence[str]) -> str:
    """Lists the first few names for a message, and the number of the others."""
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
