"""The machine itself: its kernel and io_uring, its memory, its processor."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from infinity import uring
from infinity.config import SwapConfig
from infinity.config.machine import (
    HostMemory,
    cores_by_node,
    cpu_quota,
    host_memory,
    read_field,
    read_ranges,
    read_text,
)
from infinity.errors import CapacityError
from infinity.sizes import HUGE_PAGE_NBYTES, MIB, format_nbytes
from infinity.storage.arena import Arena, can_share
from infinity.storage.probe import Refusal, find_uring_refusal, probe_uring
from infinity.tools.doctor import Finding
from infinity.tools.doctor.accelerator import left_to_host

# -- The kernel, and what allows or forbids io_uring -----------------------------------------------


_OLDEST = (5, 11)
_RECOMMENDED = (6, 1)
_SECCOMP = {"0": "off", "1": "strict", "2": "filter"}


def examine_kernel(config: SwapConfig, root: Path) -> Iterator[Finding]:
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
    it = Finding("kernel", release)
    if version >= _RECOMMENDED:
        return it
    cost = "io_uring is not used before Linux 5.11: I/O threads take 2-3 times its CPU"
    if version >= _OLDEST:
        cost = (
            "drives do not say which alignment direct I/O needs (4096 is assumed), and rings run "
            "without DEFER_TASKRUN"
        )
    return it.degraded(cost, "Boot Linux 6.1 or newer.")


def check_uring(
    engine: str,
    refusal: Refusal | None,
    *,
    ring_flags: int,
    sysctl: str | None,
    seccomp: str | None,
) -> Finding:
    """`engine` is io.engine; `sysctl` and `seccomp` are the kernel's texts, None if absent."""
    gate = f"kernel.io_uring_disabled={sysctl}" if sysctl else "no kernel.io_uring_disabled"
    gates = f"({gate}, seccomp {_SECCOMP.get(seccomp or '', 'not readable')})"
    if engine == "threads":
        return Finding("io_uring", f'not asked for: io.engine is "threads" {gates}')
    if refusal is None:
        return Finding("io_uring", f"works, rings with {_names(ring_flags)} {gates}")
    it = Finding("io_uring", f"{refusal.cause} {gates}")
    if engine == "io_uring":
        remedy = f'{refusal.remedy} Or set io.engine = "auto".'.strip()
        return it.missing('io.engine = "io_uring" cannot start', remedy)
    return it.degraded(
        "the thread engine is used: normally the same bandwidth, 2-3 times the CPU", refusal.remedy
    )


def check_binding(probe: uring.Probe | None) -> Finding:
    """`probe` is None if the binding is not part of the build."""
    subject = "liburing binding"
    if probe is None:
        return Finding(subject, "not part of this build").degraded(
            "no details of io_uring here, and no raw-ring ceiling in benchmarks; training does "
            "without",
            "Install liburing-dev and cffi, and build infinity-offload again.",
        )
    if not probe.is_usable:
        return Finding(subject, f"built; the kernel refuses rings ({os.strerror(probe.errno)})")
    queues = f"{len(probe.opcodes)} operations, queues up to {probe.max_num_entries} entries"
    return Finding(subject, f"{queues}, {_names(probe.setup_flags)}")


def _names(flags: int) -> str:
    return str(uring.SetupFlag(flags).name) if flags else "no flags"


# -- Host memory: space for the arena, huge pages, the memlock limit -------------------------------


_SHARED_FILES_NBYTES = 1024 * MIB  # NCCL's user guide, "Troubleshooting", asks for it in Docker.
_TRIAL_ARENA_NBYTES = 16 * MIB
# Pinning more than this to test a limit would take noticeable memory and time.
_MAX_TRIAL_NBYTES = 256 * MIB


def examine_memory(config: SwapConfig, root: Path) -> Iterator[Finding]:
    """Yields the findings on host memory, huge pages and limits of locked memory."""
    memory = host_memory(root)
    arena_nbytes = config.tiers.host.budget_nbytes(left_to_host(config, memory.nbytes))
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
    if arena_nbytes <= memory.most_nbytes:
        return Finding(subject, f"{available}, the arena takes {format_nbytes(arena_nbytes)}")
    return Finding(
        subject,
        f"{available}, {format_nbytes(memory.most_nbytes)} of it for an arena; "
        f"tiers.host.capacity asks for {format_nbytes(arena_nbytes)}",
    ).missing(
        "the arena cannot be allocated: no run starts",
        "Lower tiers.host.capacity, end other programs, or raise the container's limit.",
    )


def check_huge_pages(mode: str | None, *, is_wanted: bool, share: float | None) -> Finding:
    """`mode` is the kernel's line, such as "always [madvise] never".

    `share` of a trial arena that huge pages back, 0..1; None when there was no trial.
    """
    subject = "huge pages"
    chosen = mode.partition("[")[2].partition("]")[0] if mode else ""
    cost = "small pages cut every request in pieces: 10-15 times the CPU per byte, less bandwidth"
    if not is_wanted:
        it = Finding(subject, "switched off by tiers.host.huge_pages")
        return it.degraded(cost, "Set tiers.host.huge_pages = true.")
    if mode is None:
        it = Finding(subject, "this kernel has none")
        return it.degraded(cost, "Boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE.")
    it = Finding(subject, f"transparent huge pages: {chosen}")
    if chosen == "never":
        remedy = "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return it.degraded(cost, remedy)
    if share is None:
        return it.more("; not tried, too little memory is free")
    it = it.more(f"; {share:.0%} of a trial arena")
    if share >= 0.95:
        return it
    return it.degraded(
        cost,
        "Memory is fragmented. As root: echo 1 > /proc/sys/vm/compact_memory, or start the run "
        "soon after boot.",
    )


def check_sharing(is_as_good: bool) -> Finding:
    """`is_as_good`: an arena that other processes map has as many huge pages as one of its own."""
    subject = "memory of ranks"
    if is_as_good:
        return Finding(subject, "ranks of this machine read each other's arenas")
    it = Finding(subject, "a shared arena has fewer huge pages, or cannot be made")
    return it.degraded(
        "contents between ranks of this machine are copied twice; one rank is not concerned",
        "Boot Linux 6.1 or later, or as root: "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def check_shared_files(nbytes: int | None) -> Finding:
    """`nbytes`: the size of the file system at /dev/shm; None if there is none."""
    it = Finding("/dev/shm", "there is none" if nbytes is None else format_nbytes(nbytes))
    if nbytes is not None and nbytes >= _SHARED_FILES_NBYTES:
        return it
    wanted = f"; several GPUs may need {format_nbytes(_SHARED_FILES_NBYTES)}"
    return it.more(wanted).degraded(
        "NCCL may not start: it keeps segments there; one GPU is not concerned",
        "'docker run --shm-size=1g' or '--ipc=host'; a memory volume in Kubernetes.",
    )


def check_memlock(
    limit_nbytes: int | None, *, arena_nbytes: int, is_exempt: bool, has_ring: bool
) -> Finding:
    """`limit_nbytes` None is no limit; `is_exempt`: the kernel lets this process pin more."""
    limit = "none" if limit_nbytes is None else format_nbytes(limit_nbytes)
    it = Finding("memlock limit", limit)
    if not has_ring:
        return it.more("; the thread engine pins nothing")
    if limit_nbytes is None or limit_nbytes >= arena_nbytes:
        return it
    if is_exempt:
        return it.more(", but this process may exceed it")
    return it.more(f", the arena has {format_nbytes(arena_nbytes)}").degraded(
        "the arena is not registered with the ring: somewhat more CPU per byte",
        "Raise it to the arena's size: 'ulimit -l', LimitMEMLOCK= of a systemd unit, or "
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


# -- The processor: cores that this process may use, instruction sets, NUMA nodes ------------------


# Instruction sets that speed up arithmetic over flat buffers, by the kernel's names.
_X86 = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16")
_ARM = ("asimd", "fphp", "bf16", "sve", "sve2")


def examine_processor(root: Path) -> Iterator[Finding]:
    """Yields the findings on cores, instruction sets and NUMA nodes."""
    yield check_cores(len(os.sched_getaffinity(0)), cpu_quota(root))
    yield check_instructions(os.uname().machine, *describe_cpu(root))
    nodes, status = cores_by_node(root), root / "proc/self/status"
    cores = read_ranges(read_field(status, "Cpus_allowed_list"))
    yield check_numa(
        frozenset(nodes),
        memory_nodes=read_ranges(read_field(status, "Mems_allowed_list")),
        cpu_nodes=frozenset(node for node, own in nodes.items() if own & cores),
    )


def check_cores(num_cores: int, quota: float | None) -> Finding:
    """`num_cores` by affinity, `quota` in cores."""
    it = Finding("cores", str(num_cores))
    if quota is None or quota >= num_cores:
        return it
    return it.more(f", but time for {quota:g} only (cgroup limit)").degraded(
        "threads beyond the limit stop one another for tens of milliseconds",
        f"Raise the container's limit, or set OMP_NUM_THREADS={max(1, int(quota))}.",
    )


def describe_cpu(root: Path) -> tuple[str, frozenset[str]]:
    """Returns the model and instruction sets of the first core. Arm has "Features" and no model."""
    cpuinfo = root / "proc/cpuinfo"
    model = read_field(cpuinfo, "model name") or "model not said"
    flags = read_field(cpuinfo, "flags") or read_field(cpuinfo, "Features") or ""
    return model, frozenset(flags.split())


def check_instructions(machine: str, model: str, flags: frozenset[str]) -> Finding:
    """`machine` is that of uname(2)."""
    known = _X86 if machine == "x86_64" else _ARM
    has = [name for name in known if name in flags]
    it = Finding("instruction sets", f"{model}: {', '.join(has) or 'none that matter here'}")
    if machine != "x86_64" or {"avx2", "fma"} <= flags:
        return it
    return it.degraded(
        "the optimizer's update on the host runs several times slower without AVX2",
        "In a virtual machine: let it see the host's CPU (-cpu host).",
    )


def check_numa(
    nodes: frozenset[int], *, memory_nodes: frozenset[int], cpu_nodes: frozenset[int]
) -> Finding:
    """Judges the `nodes` of the machine, those of the allowed memory, and those of the allowed
    cores."""
    if len(nodes) <= 1:
        return Finding("NUMA", "one node")
    allowed = memory_nodes & nodes or nodes
    if len(allowed) == 1 and cpu_nodes <= allowed:
        return Finding("NUMA", f"bound to node {min(allowed)} of {len(nodes)}")
    return Finding(
        "NUMA",
        f"{len(nodes)} nodes, this process may use {len(allowed)} of them for memory and "
        f"{len(cpu_nodes) or len(nodes)} to run",
    ).degraded(
        "pages of the arena may lie far from the drive, the device or the core that uses them",
        "numactl --cpunodebind=N --membind=N infinity train ..., with the node N that the drive "
        "and the device hang on, when one node's memory suffices.",
    )
