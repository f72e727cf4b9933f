"""Tests for io_uring, with the cause of a refusal and its remedy; alignment of direct I/O."""

from __future__ import annotations

import errno
import functools
import os
import resource
from pathlib import Path
from typing import NamedTuple

from infinity import _core
from infinity._core import crc32c_kernels as crc32c_kernels
from infinity._core import direct_alignment as direct_alignment
from infinity.sizes import format_nbytes

_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")


class Refusal(NamedTuple):
    """Why io_uring does not work, without a full stop, and what to do: sentences, or empty."""

    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}. {self.remedy}".rstrip()


@functools.cache
def probe_uring() -> _core.UringProbe:
    """The engine's own probe: it sets up a real ring, once per process."""
    return _core.probe_uring()


@functools.cache
def find_uring_refusal() -> Refusal | None:
    """None when io_uring works, else cause and remedy."""
    found = probe_uring()
    if found["usable"]:
        return None
    return explain_refused_rings(found["errno"], found["step"])


def explain_refused_rings(code: int, step: str) -> Refusal:
    """Why rings were refused: those of the probe, or larger ones that an engine needs."""
    return judge_probe_failure(
        code=code,
        step=step,
        sysctl=_read_sysctl(),
        kernel=os.uname().release,
        memlock_nbytes=memlock_nbytes(),
    )


def memlock_nbytes() -> int | None:
    """Returns the bytes that RLIMIT_MEMLOCK lets this process pin; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def explain_missing_uring() -> str | None:
    """None when io_uring works, else cause and remedy in one or two sentences."""
    refusal = find_uring_refusal()
    return None if refusal is None else str(refusal)


def judge_probe_failure(
    *, code: int, step: str, sysctl: str | None, kernel: str, memlock_nbytes: int | None = None
) -> Refusal:
    """Explains one failed probe. `sysctl` is the value of kernel.io_uring_disabled, if any."""
    if step == "build":
        return Refusal(
            "this build has no liburing", "Install liburing-dev and build infinity-offload again."
        )
    if step in ("features", "opcodes"):
        return Refusal(
            f"kernel {kernel} is too old (5.11 is needed, 6.1 recommended)", "Boot a newer kernel."
        )
    refusal = f"{step} returned {errno.errorcode.get(code, str(code))}"
    if code == errno.EPERM and sysctl not in (None, "0"):
        return Refusal(
            f"{refusal}, because kernel.io_uring_disabled={sysctl}",
            "An administrator can set it to 0, or with 1 add you to the group in "
            "kernel.io_uring_group.",
        )
    if code == errno.EPERM:
        return Refusal(
            f"{refusal}, so a seccomp profile blocks it (Docker and Kubernetes do this by default)",
            "Run the container with a profile that allows io_uring_setup, io_uring_enter and "
            "io_uring_register.",
        )
    if code == errno.ENOSYS:
        return Refusal(
            f"{refusal}: this kernel ({kernel}) or sandbox does not implement it (gVisor, WSL1 and "
            "kernels before 5.1 do not)",
            "Run on Linux 6.1 or newer, outside such a sandbox.",
        )
    if code == errno.ENOMEM:
        return Refusal(
            f"{refusal}: {_explain_memlock(memlock_nbytes)}",
            "Raise it with 'ulimit -l' (some MiB for the rings, the host budget to pin the arena "
            "as well), LimitMEMLOCK= of systemd or --ulimit memlock=-1 of Docker, or ask for "
            'io.engine = "threads".',
        )
    if code in (errno.EMFILE, errno.ENFILE):
        return Refusal(
            f"{refusal}: no file descriptor is left", "Raise the limit with 'ulimit -n'."
        )
    return Refusal(f"{refusal} ({os.strerror(code)})", "")


def _explain_memlock(nbytes: int | None) -> str:
    if nbytes is None:
        return "the memlock limit, or memory, is too low"
    return f"the memlock limit is too low ({format_nbytes(nbytes)})"


def _read_sysctl() -> str | None:
    try:
        return _SYSCTL.read_text().strip()
    except OSError:
        return None
