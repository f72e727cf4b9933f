"""Memory, cores and NUMA nodes that the machine grants this process.

Sources: proc_meminfo(5); sched_getaffinity(2); sched_setaffinity(2), which is of one thread;
set_mempolicy(2): a page lies on the node of the thread that touches it first; the kernel's
documents of the memory and CPU controllers of cgroup-v2 and cgroup-v1, and
Documentation/ABI/stable/sysfs-devices-node; torch/distributed/run.py, which sets OMP_NUM_THREADS=1
for several processes on a node.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from infinity.errors import ConfigError, UnsupportedError
from infinity.sizes import format_nbytes

THREADS_VARIABLE = "INFINITY_THREADS"
SIMD_VARIABLE = "INFINITY_SIMD"
_MOST_NORM_THREADS = 8
BINDING_VARIABLE = "INFINITY_NUMA_BINDING"
_CHOICES = ("node", "none")
# The part of available memory that one arena may take. The rest is for activations, the
# interpreter, and other programs.
_MOST_OF_AVAILABLE = 0.95


# -- The kernel's small files, any of which may be absent or forbidden -----------------------------


def read_text(path: Path) -> str | None:
    """The stripped contents; None when they cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_int(path: Path) -> int | None:
    """The number in a file; None when there is none."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def read_node(path: Path) -> int | None:
    """The NUMA node in a file; None when it is not known, which is -1 there."""
    node = read_int(path)
    return None if node == -1 else node


def read_field(path: Path, key: str) -> str | None:
    """The value of a line "key: value"; None when there is no such line."""
    for line in (read_text(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return None


def read_nbytes(path: Path, key: str) -> int | None:
    """The bytes of a line "key: number kB"; None when there is no such line."""
    value = read_field(path, key)
    return None if value is None else 1024 * int(value.split()[0])


# -- Memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that a process may still take. `limit` names the cgroup that sets it; None: the
    machine itself does."""

    nbytes: int
    limit: str | None = None

    @property
    def most_nbytes(self) -> int:
        """The part that an arena may take: to populate all of it would end in the OOM killer."""
        return int(_MOST_OF_AVAILABLE * self.nbytes)


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Returns the memory that can be allocated without swapping.

    It is MemAvailable, or less inside a memory cgroup. The space of a cgroup is its limit less
    the memory of its processes; page cache that the kernel can drop does not count.
    Every cgroup above the process limits the memory, too.
    """
    available_nbytes = read_nbytes(root / "proc/meminfo", "MemAvailable")
    assert available_nbytes is not None, "Linux has it since 3.14"
    limits = [HostMemory(available_nbytes), *_cgroup_limits(root)]
    return min(limits, key=lambda limit: limit.nbytes)


def _cgroup_limits(root: Path) -> Iterator[HostMemory]:
    mounted = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, prefix = mounted, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, prefix = mounted / "memory", "total_"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = PurePosixPath(path)
        for level in (group, *group.parents):
            directory = base / str(level).lstrip("/")
            memory = _memory_of(directory / limit, directory / usage, prefix)
            if memory is not None:
                yield memory


def _memory_of(limit: Path, usage: Path, prefix: str) -> HostMemory | None:
    """Memory left in one cgroup; None without a limit or if the files are not readable. `prefix`:
    of the names of counters in memory.stat."""
    limit_nbytes, usage_nbytes = read_int(limit), read_int(usage)
    if limit_nbytes is None or usage_nbytes is None:  # The limit may be "max".
        return None
    # The kernel frees the page cache that is charged to a cgroup for other memory.
    words = _words(limit.parent / "memory.stat")
    counters = dict(zip(words[::2], words[1::2], strict=False))
    cache_nbytes = sum(int(counters.get(f"{prefix}{c}_file", 0)) for c in ("inactive", "active"))
    left_nbytes = max(0, limit_nbytes - usage_nbytes + cache_nbytes)
    name = f"the cgroup limit of {format_nbytes(limit_nbytes)} in {limit}"
    return HostMemory(min(limit_nbytes, left_nbytes), name)


# -- Cores and threads -----------------------------------------------------------------------------


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


@functools.cache
def threads_here(torch_threads: int) -> int:
    """`own_threads` of this process, as it was when the number was asked for first."""
    cores = node_cores = usable_cores()
    with contextlib.suppress(OSError):
        node_cores = max(cores, len(os.sched_getaffinity(os.getppid())))
    return own_threads(torch_threads, cores=cores, node_cores=node_cores, environment=os.environ)


def chosen_simd(instruction_sets: Callable[[], Iterable[str]]) -> str:
    """Returns the instruction set that INFINITY_SIMD asks for, "" for the widest. The bits are the
    same on all. Raises UnsupportedError for one that is not here."""
    simd = os.environ.get(SIMD_VARIABLE, "")
    if simd and simd not in (known := list(instruction_sets())):
        raise UnsupportedError(
            f"expected {SIMD_VARIABLE} to be one of {', '.join(known)} on this machine, got "
            f"{simd!r}; unset it to use the widest"
        )
    return simd


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


def pci_address(properties: object) -> str:
    """Returns the address of a device as in /sys/bus/pci/devices, from its properties in torch;
    empty if torch does not report it."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    numbers: list[Any] = [getattr(properties, name, None) for name in names]
    if not all(isinstance(number, int) for number in numbers):
        return ""
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def node_of_device(pci_address: str, root: Path = Path("/")) -> int | None:
    """Returns the NUMA node of a device by its address as in /sys/bus/pci/devices; None where the
    machine has one node, or sysfs does not say."""
    nodes = root / "sys/devices/system/node"
    if len(list(nodes.glob("node[0-9]*"))) < 2 or not pci_address:
        return None
    return read_node(root / "sys/bus/pci/devices" / pci_address / "numa_node")


def read_ranges(text: str | None) -> frozenset[int]:
    """Returns the numbers of a kernel list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _words(path: Path) -> list[str]:
    return (read_text(path) or "").split()


# -- Binding to NUMA nodes -------------------------------------------------------------------------


# Ranks that share a machine otherwise run on all of its cores, and their pages lie where the thread
# that touches them first happens to run: half of all copies and updates then cross to another node.
# `torchrun --numa-binding=node` does the same; nothing is left to do then.


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether ranks are bound, as INFINITY_NUMA_BINDING says: "node" (default) or "none". Raises
    ConfigError."""
    word = environment.get(BINDING_VARIABLE, "") or "node"
    if word not in _CHOICES:
        raise ConfigError(
            f'{BINDING_VARIABLE}: expected "node" or "none", got {word!r}; "none" leaves the '
            "threads of a rank where they are"
        )
    return word == "node"


def cores_by_node(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """Returns the cores of each NUMA node of the machine."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    texts = {folder.name: read_text(folder / "cpulist") for folder in folders}
    return {
        int(name.removeprefix("node")): read_ranges(text)
        for name, text in texts.items()
        if text is not None
    }


def nodes_of_rank(
    nodes: Mapping[int, Set[int]],
    allowed: Set[int],
    *,
    rank: int,
    num_ranks: int,
    device_node: int | None,
) -> tuple[int, ...]:
    """Returns the NUMA nodes that one of the `num_ranks` of a machine is bound to; empty if it
    stays as it is. Pure.

    nodes: the cores of each node
    allowed: the cores of the rank's affinity, which it never leaves
    device_node: the node of the rank's device; None if the device is the host, or sysfs does not
        say. Ranks then take the nodes in turn, so that all cores are used.
    """
    here = sorted(node for node, cores in nodes.items() if cores & allowed)
    if num_ranks < 2 or len(here) < 2:
        return ()
    if device_node is not None:
        return (device_node,) if device_node in here else ()
    return tuple(here[rank % len(here) :: num_ranks])


def bind_rank(
    *,
    rank: int,
    num_ranks: int,
    device_node: int | None,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> tuple[int, ...]:
    """Binds all threads of this process to NUMA nodes, and returns these; empty if nothing changes.

    Called before host memory is touched. Threads that are bound more narrowly stay so. `rank` is
    that among the `num_ranks` of the machine. Raises ConfigError as `is_wanted`.
    """
    if not is_wanted(os.environ if environment is None else environment):
        return ()
    nodes = cores_by_node(root)
    allowed = os.sched_getaffinity(0)
    chosen = nodes_of_rank(nodes, allowed, rank=rank, num_ranks=num_ranks, device_node=device_node)
    cores = {core for node in chosen for core in nodes[node]} & allowed
    if not chosen or cores == allowed:
        return ()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # A thread may have ended.
            own = os.sched_getaffinity(int(task)) & cores
            if own:
                os.sched_setaffinity(int(task), own)
    threads_here.cache_clear()
    return chosen
