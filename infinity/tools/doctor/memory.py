"""Host memory: space for the arena, huge pages, the memlock limit."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from infinity import uring
from infinity.config import SwapConfig
from infinity.config.machine import HostMemory, host_memory
from infinity.errors import CapacityError
from infinity.sizes import HUGE_PAGE_NBYTES, MIB, format_nbytes
from infinity.storage.arena import Arena, can_share
from infinity.storage.probe import find_uring_refusal
from infinity.tools.doctor.files import read_text
from infinity.tools.doctor.finding import Finding, degraded, missing, ok

_SHARED_FILES_NBYTES = 1024 * MIB  # NCCL's user guide, "Troubleshooting", asks for it in Docker.
_TRIAL_ARENA_NBYTES = 16 * MIB
# Pinning more than this to test a limit would take noticeable memory and time.
_MAX_TRIAL_NBYTES = 256 * MIB


def examine(config: SwapConfig, root: Path) -> Iterator[Finding]:
    """Yields the findings on host memory, huge pages and limits of locked memory."""
    memory = host_memory(root)
    arena_nbytes = config.tiers.host.budget_nbytes(memory.nbytes)
    yield check_capacity(memory, arena_nbytes)
    yield check_huge_pages(
        read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        is_wanted=config.tiers.host.huge_pages,
        share=_huge_page_share() if config.tiers.host.huge_pages else None,
    )
    yield check_sharing(can_share(huge_pages=config.tiers.host.huge_pages))
    yield check_shared_files(_size_nbytes(root / "dev/shm"))
    limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield check_memlock(
        None if limit_nbytes == resource.RLIM_INFINITY else limit_nbytes,
        arena_nbytes=arena_nbytes,
        is_exempt=_pins_more_than(limit_nbytes),
        has_ring=config.io.engine != "threads" and find_uring_refusal() is None,
    )


def check_capacity(memory: HostMemory, arena_nbytes: int) -> Finding:
    """`memory` is available without swapping; the arena takes `arena_nbytes` of it at start."""
    subject = "host memory"
    available = f"{format_nbytes(memory.nbytes)} available"
    if memory.limit is not None:
        available += f" below {memory.limit}"
    if arena_nbytes > memory.most_nbytes:
        return missing(
            subject,
            f"{available}, {format_nbytes(memory.most_nbytes)} of it for an arena; "
            f"tiers.host.capacity asks for {format_nbytes(arena_nbytes)}",
            cost="the arena cannot be allocated: no run starts",
            remedy="Lower tiers.host.capacity, end other programs, or raise the container's limit.",
        )
    return ok(subject, f"{available}, the arena takes {format_nbytes(arena_nbytes)}")


def check_huge_pages(mode: str | None, *, is_wanted: bool, share: float | None) -> Finding:
    """`mode` is the kernel's line, such as "always [madvise] never".

    `share` of a trial arena that huge pages back, 0..1; None when there was no trial.
    """
    subject = "huge pages"
    chosen = mode.partition("[")[2].partition("]")[0] if mode else ""
    cost = "small pages cut every request in pieces: 10-15 times the CPU per byte, less bandwidth"
    if not is_wanted:
        return degraded(
            subject,
            "switched off by tiers.host.huge_pages",
            cost=cost,
            remedy="Set tiers.host.huge_pages = true.",
        )
    if mode is None or chosen == "never":
        return degraded(
            subject,
            "transparent huge pages: never" if mode else "this kernel has none",
            cost=cost,
            remedy="As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
            if mode
            else "Boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE.",
        )
    found = f"transparent huge pages: {chosen}"
    if share is None:
        return ok(subject, f"{found}; not tried, too little memory is free")
    found += f"; {share:.0%} of a trial arena"
    if share < 0.95:
        return degraded(
            subject,
            found,
            cost=cost,
            remedy="Memory is fragmented. As root: echo 1 > /proc/sys/vm/compact_memory, or start "
            "the run soon after boot.",
        )
    return ok(subject, found)


def check_sharing(is_as_good: bool) -> Finding:
    """`is_as_good`: an arena that other processes map has as many huge pages as one of its own."""
    subject = "memory of ranks"
    if is_as_good:
        return ok(subject, "ranks of this machine read each other's arenas")
    return degraded(
        subject,
        "a shared arena has fewer huge pages, or cannot be made",
        cost="contents between ranks of this machine are copied twice; one rank is not concerned",
        remedy="Boot Linux 6.1 or later, or as root: "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def check_shared_files(nbytes: int | None) -> Finding:
    """`nbytes`: the size of the file system at /dev/shm; None if there is none."""
    subject = "/dev/shm"
    found = "there is none" if nbytes is None else format_nbytes(nbytes)
    if nbytes is not None and nbytes >= _SHARED_FILES_NBYTES:
        return ok(subject, found)
    return degraded(
        subject,
        f"{found}; several GPUs may need {format_nbytes(_SHARED_FILES_NBYTES)}",
        cost="NCCL may not start: it keeps segments there; one GPU is not concerned",
        remedy="'docker run --shm-size=1g' or '--ipc=host'; a memory volume in Kubernetes.",
    )


def check_memlock(
    limit_nbytes: int | None, *, arena_nbytes: int, is_exempt: bool, has_ring: bool
) -> Finding:
    """`limit_nbytes` None is no limit; `is_exempt`: the kernel lets this process pin more."""
    subject = "memlock limit"
    limit = "none" if limit_nbytes is None else format_nbytes(limit_nbytes)
    if not has_ring:
        return ok(subject, f"{limit}; the thread engine pins nothing")
    if limit_nbytes is None or limit_nbytes >= arena_nbytes:
        return ok(subject, limit)
    if is_exempt:
        return ok(subject, f"{limit}, but this process may exceed it")
    return degraded(
        subject,
        f"{limit}, the arena has {format_nbytes(arena_nbytes)}",
        cost="the arena is not registered with the ring: somewhat more CPU per byte",
        remedy="Raise it to the arena's size: 'ulimit -l', LimitMEMLOCK= of a systemd unit, or "
        "'docker run --ulimit memlock=-1'.",
    )


def _size_nbytes(path: Path) -> int | None:
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def _huge_page_share() -> float | None:
    try:
        with Arena(_TRIAL_ARENA_NBYTES) as arena:
            return arena.huge_page_nbytes / _TRIAL_ARENA_NBYTES
    except CapacityError:
        return None


def _pins_more_than(limit_nbytes: int) -> bool:
    """Tests by pinning: a capability in /proc has no effect in a container's user namespace."""
    trial_nbytes = limit_nbytes + HUGE_PAGE_NBYTES
    if limit_nbytes < 0 or trial_nbytes > _MAX_TRIAL_NBYTES or not uring.is_built():
        return False
    try:
        return uring.try_registering(trial_nbytes) == 0
    except uring.RingError:
        return False
