"""What this machine has to give: the memory that a run may still take.

Sources: proc_meminfo(5); the kernel's cgroup-v2 and cgroup-v1 memory controller documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_memory_nbytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping: MemAvailable, or less inside a memory cgroup.

    A cgroup's room is its limit less what its processes hold; page cache that the kernel can drop
    (inactive_file) does not count as held. Every cgroup above the process limits it too.
    """
    meminfo = dict(
        line.split(":", 1)
        for line in (root / "proc/meminfo").read_text().splitlines()
        if ":" in line
    )
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_cgroup_rooms(root)]))


def _cgroup_rooms(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = PurePosixPath(path)
        for level in (group, *group.parents):
            room = _room(base / str(level).lstrip("/"), *files)
            if room is not None:
                yield room


def _room(directory: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    """Bytes left in one cgroup; None where there is no limit or the files are not readable."""
    try:
        limit = (directory / limit_file).read_text().strip()
        if not limit.isdigit():  # "max"
            return None
        usage = int((directory / usage_file).read_text())
        stat = (directory / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    cache = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    return int(limit) - usage + int(cache.get(cache_key, 0))
