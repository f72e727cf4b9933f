"""The kernel and its io_uring: whether it is allowed, which setting forbids it, and its
features."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from infinity import uring
from infinity.config import SwapConfig
from infinity.storage.probe import Refusal, find_uring_refusal, probe_uring
from infinity.tools.doctor.files import read_field, read_text
from infinity.tools.doctor.finding import Finding, degraded, missing, ok

_OLDEST = (5, 11)
_RECOMMENDED = (6, 1)
_SECCOMP = {"0": "off", "1": "strict", "2": "filter"}


def examine(config: SwapConfig, root: Path) -> Iterator[Finding]:
    """Yields the findings on the kernel and on io_uring."""
    yield check_kernel(os.uname().release)
    yield check_uring(
        config.io.engine,
        find_uring_refusal(),
        ring_flags=probe_uring()["ring_flags"],
        sysctl=read_text(root / "proc/sys/kernel/io_uring_disabled"),
        seccomp=read_field(root / "proc/self/status", "Seccomp"),
    )
    yield check_binding(uring.probe() if uring.is_built() else None)


def check_kernel(release: str) -> Finding:
    """`release` is that of uname(2). Only a trial shows what works; the release shows what to
    expect."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if version < _OLDEST:
        return degraded(
            "kernel",
            release,
            cost="io_uring is not used before Linux 5.11: I/O threads take 2-3 times its CPU",
            remedy="Boot Linux 6.1 or newer.",
        )
    if version < _RECOMMENDED:
        return degraded(
            "kernel",
            release,
            cost="drives do not say which alignment direct I/O needs (4096 is assumed), and rings "
            "run without DEFER_TASKRUN",
            remedy="Boot Linux 6.1 or newer.",
        )
    return ok("kernel", release)


def check_uring(
    engine: str,
    refusal: Refusal | None,
    *,
    ring_flags: int,
    sysctl: str | None,
    seccomp: str | None,
) -> Finding:
    """`engine` is io.engine; `sysctl` and `seccomp` are the kernel's texts, None if absent."""
    gates = ", ".join(
        [
            f"kernel.io_uring_disabled={sysctl}" if sysctl else "no kernel.io_uring_disabled",
            f"seccomp {_SECCOMP.get(seccomp or '', 'not readable')}",
        ]
    )
    if engine == "threads":
        return ok("io_uring", f'not asked for: io.engine is "threads" ({gates})')
    if refusal is None:
        return ok("io_uring", f"works, rings with {_names(ring_flags)} ({gates})")
    found = f"{refusal.cause} ({gates})"
    if engine == "io_uring":
        return missing(
            "io_uring",
            found,
            cost='io.engine = "io_uring" cannot start',
            remedy=f'{refusal.remedy} Or set io.engine = "auto".'.strip(),
        )
    return degraded(
        "io_uring",
        found,
        cost="the thread engine is used: normally the same bandwidth, 2-3 times the CPU",
        remedy=refusal.remedy,
    )


def check_binding(probe: uring.Probe | None) -> Finding:
    """`probe` is None if the binding is not part of the build."""
    subject = "liburing binding"
    if probe is None:
        return degraded(
            subject,
            "not part of this build",
            cost="no details of io_uring here, and no raw-ring ceiling in benchmarks; training "
            "does without",
            remedy="Install liburing-dev and cffi, and build infinity-offload again.",
        )
    if not probe.is_usable:
        return ok(subject, f"built; the kernel refuses rings ({os.strerror(probe.errno)})")
    return ok(
        subject,
        f"{len(probe.opcodes)} operations, queues up to {probe.max_num_entries} entries, "
        f"{_names(probe.setup_flags)}",
    )


def _names(flags: int) -> str:
    return str(uring.SetupFlag(flags).name) if flags else "no flags"
