"""The memory of this machine that a run may still take.

Sources: proc_meminfo(5); the kernel's cgroup-v2 and cgroup-v1 memory controller documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from infinity.sizes import format_nbytes

# The part of available memory that one arena may take. The rest is for activations, the
# interpreter, and other programs.
_MOST_OF_AVAILABLE = 0.95


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


@dataclass(frozen=True, slots=True)
class _Controller:
    """Files of a cgroup's memory controller, and the names of its page cache in memory.stat."""

    base: Path
    limit: str
    usage: str
    cache: tuple[str, str]


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Returns the memory that can be allocated without swapping.

    It is MemAvailable, or less inside a memory cgroup. The space of a cgroup is its limit less
    the memory of its processes; page cache that the kernel can drop does not count.
    Every cgroup above the process limits the memory, too.
    """
    meminfo = dict(
        line.split(":", 1)
        for line in (root / "proc/meminfo").read_text().splitlines()
        if ":" in line
    )
    available_nbytes = int(meminfo["MemAvailable"].split()[0]) * 1024
    limits = [HostMemory(available_nbytes), *_cgroup_limits(root)]
    return min(limits, key=lambda limit: limit.nbytes)


def available_memory_nbytes(root: Path = Path("/")) -> int:
    """The bytes of `host_memory`."""
    return host_memory(root).nbytes


def _cgroup_limits(root: Path) -> Iterator[HostMemory]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            cache = "inactive_file", "active_file"
            found = _Controller(mounted, "memory.max", "memory.current", cache)
        elif "memory" in controllers.split(","):
            cache = "total_inactive_file", "total_active_file"
            base = mounted / "memory"
            found = _Controller(base, "memory.limit_in_bytes", "memory.usage_in_bytes", cache)
        else:
            continue
        group = PurePosixPath(path)
        for level in (group, *group.parents):
            memory = _memory_of(found, found.base / str(level).lstrip("/"))
            if memory is not None:
                yield memory


def _memory_of(controller: _Controller, directory: Path) -> HostMemory | None:
    """Memory left in one cgroup; None without a limit or if the files are not readable."""
    try:
        text = (directory / controller.limit).read_text().strip()
        if not text.isdigit():  # "max"
            return None
        limit_nbytes = int(text)
        usage_nbytes = int((directory / controller.usage).read_text())
    except (OSError, ValueError):
        return None
    left_nbytes = max(0, limit_nbytes - usage_nbytes + _cache_nbytes(controller, directory))
    name = f"the cgroup limit of {format_nbytes(limit_nbytes)} in {directory / controller.limit}"
    return HostMemory(min(limit_nbytes, left_nbytes), name)


def _cache_nbytes(controller: _Controller, directory: Path) -> int:
    """Returns the page cache that is charged to a cgroup. The kernel frees it for other memory."""
    try:
        stat = (directory / "memory.stat").read_text()
    except OSError:
        return 0
    fields = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    return sum(int(fields.get(name, 0)) for name in controller.cache)
