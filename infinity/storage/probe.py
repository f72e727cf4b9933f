"""Whether io_uring works here, and if not, why and what to do about it."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path

from infinity import _core

_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")


@functools.cache
def explain_missing_uring() -> str | None:
    """None when io_uring works, else cause and remedy in one or two sentences.

    Found by setting up a real ring, once per process.
    """
    found = _core.probe_uring()
    if found["usable"]:
        return None
    return explain_probe_failure(
        code=found["errno"],
        step=found["step"],
        sysctl=_read_sysctl(),
        kernel=os.uname().release,
    )


def explain_probe_failure(*, code: int, step: str, sysctl: str | None, kernel: str) -> str:
    """Words for one failed probe. `sysctl` is the value of kernel.io_uring_disabled, if any."""
    if step == "build":
        return "this build has no liburing. Install liburing-dev and build infinity-offload again."
    if step in ("features", "opcodes"):
        return f"kernel {kernel} is too old (5.11 is needed, 6.1 recommended)."
    refusal = f"{step} returned {errno.errorcode.get(code, str(code))}"
    if code == errno.EPERM and sysctl not in (None, "0"):
        return (
            f"{refusal}, because kernel.io_uring_disabled={sysctl}. An administrator can set it to "
            "0, or with 1 add you to the group in kernel.io_uring_group."
        )
    if code == errno.EPERM:
        return (
            f"{refusal}, so a seccomp profile blocks it (Docker and Kubernetes do this by "
            "default). Run the container with a profile that allows io_uring_setup, "
            "io_uring_enter and io_uring_register."
        )
    if code == errno.ENOSYS:
        return (
            f"{refusal}: this kernel ({kernel}) or sandbox does not implement it (gVisor, WSL1 and "
            "kernels before 5.1 do not)."
        )
    if code == errno.ENOMEM:
        return f"{refusal}: the memlock limit is too low. Raise it with 'ulimit -l'."
    if code in (errno.EMFILE, errno.ENFILE):
        return f"{refusal}: no file descriptor is left. Raise the limit with 'ulimit -n'."
    return f"{refusal} ({os.strerror(code)})."


def _read_sysctl() -> str | None:
    try:
        return _SYSCTL.read_text().strip()
    except OSError:
        return None
