"""The processor cores that this process may use, the threads that its own work gets, NUMA nodes.

Sources: sched_getaffinity(2); the kernel's cgroup-v2 and cgroup-v1 CPU controller documents;
torch/distributed/run.py, which sets OMP_NUM_THREADS=1 for several processes on a node.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

THREADS_VARIABLE = "INFINITY_THREADS"
_MOST_NORM_THREADS = 8


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the CPU time that the cgroup grants, in cores; None without a limit."""
    version_2 = _words(root / "sys/fs/cgroup/cpu.max")
    version_1 = [
        word
        for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        for word in _words(root / "sys/fs/cgroup/cpu" / name)
    ]
    for fields in (version_2, version_1):
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]):
            return int(fields[0]) / int(fields[1])
    return None


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the cores of this process by affinity, or fewer where its cgroup grants less."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def own_threads(
    torch_threads: int, *, cores: int, node_cores: int, environment: Mapping[str, str]
) -> int:
    """Returns the threads for work outside torch's operations: updates, decoding, checksums.

    `torch_threads` is torch's number, which a user sets. torchrun sets it to 1 for every rank,
    because it knows no better; each rank then gets its share of `node_cores`, the cores of the
    process that started the ranks, or of its own `cores` where the ranks were bound to parts of
    the node. The variable INFINITY_THREADS decides for all. More threads than `cores` are never
    used: they would stop one another.
    """
    chosen = environment.get(THREADS_VARIABLE, "")
    if chosen.isdigit() and int(chosen):
        return int(chosen)
    ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    num_ranks = int(ranks) if ranks.isdigit() and int(ranks) else 1
    is_of_torchrun = "TORCHELASTIC_RUN_ID" in environment and num_ranks > 1
    if not (is_of_torchrun and environment.get("OMP_NUM_THREADS") == "1" and torch_threads == 1):
        return max(1, min(torch_threads, cores))
    sharing = max(1, round(num_ranks * min(cores, node_cores) / max(node_cores, 1)))
    return max(1, cores // sharing)


def norm_threads(own: int) -> int:
    """Returns the threads that compute norms while `own` threads update and a device computes.

    Each reads some 12 GB/s, so eight of them read gradients as fast as any link brings them; half
    of the threads leave updates the other half.
    """
    return max(1, min(own // 2, _MOST_NORM_THREADS))


def _cores() -> tuple[int, int]:
    """The cores of this process, and of the one that started it."""
    own = usable_cores()
    try:
        parent = len(os.sched_getaffinity(os.getppid()))
    except OSError:
        parent = own
    return own, max(own, parent)


@functools.cache
def threads_here(torch_threads: int) -> int:
    """`own_threads` of this process, as it was when the number was asked for first."""
    cores, node_cores = _cores()
    return own_threads(torch_threads, cores=cores, node_cores=node_cores, environment=os.environ)


def last_cache_nbytes(root: Path = Path("/")) -> int:
    """Returns the bytes of the largest cache of the first core; 0 if the kernel does not say.

    Source: Documentation/ABI/testing/sysfs-devices-system-cpu, `cache/index3/size`.
    """
    caches = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    return max(
        (
            int(size[:-1]) * units[size[-1]]
            for path in caches
            for size in _words(path)
            if size[-1] in units and size[:-1].isdigit()
        ),
        default=0,
    )


def node_of_device(pci_address: str, root: Path = Path("/")) -> int | None:
    """Returns the NUMA node of a device by its address as in /sys/bus/pci/devices; None where the
    machine has one node, or sysfs does not say."""
    nodes = root / "sys/devices/system/node"
    if len(list(nodes.glob("node[0-9]*"))) < 2 or not pci_address:
        return None
    found = _words(root / "sys/bus/pci/devices" / pci_address / "numa_node")
    return int(found[0]) if found and found[0].isdigit() else None  # -1: not known.


def read_ranges(text: str | None) -> frozenset[int]:
    """Returns the numbers of a kernel list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
