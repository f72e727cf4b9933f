"""Describes the environment of a run, so that two results can be compared."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from infinity.config.machine import available_memory_nbytes
from infinity.storage.arena import Arena
from infinity.tools.bench import fio

_PACKAGES = ("infinity-offload", "numpy", "torch")


def describe(directories: Sequence[Path], arena: Arena, root: Path = Path("/")) -> dict[str, Any]:
    """Machine, memory, versions, the file system and drive of each directory, and the command."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "fio": fio.version(),
        "cpu": _cpu_model(root),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "available_memory_nbytes": available_memory_nbytes(root),
        "transparent_huge_pages": _read(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        "arena_nbytes": arena.capacity_nbytes,
        "arena_huge_page_nbytes": arena.huge_page_nbytes,
        "paths": [drive(directory, root) for directory in directories],
    }


def drive(directory: Path, root: Path = Path("/")) -> dict[str, Any]:
    """File system and drive behind a directory; None for what the system does not say."""
    device = directory.stat().st_dev
    found = os.statvfs(directory)
    queue = _queue_directory(root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}")
    mount = _mount(directory, root)
    return {
        "path": str(directory),
        **mount,
        "size_nbytes": found.f_blocks * found.f_frsize,
        "free_nbytes": found.f_bavail * found.f_frsize,
        "drive": None if queue is None else queue.resolve().parent.name,
        "model": None if queue is None else _read(queue.parent / "device/model"),
        "scheduler": None if queue is None else _read(queue / "scheduler"),
        "max_request_kib": None if queue is None else _read(queue / "max_sectors_kb"),
        "num_requests": None if queue is None else _read(queue / "nr_requests"),
    }


def _queue_directory(block: Path) -> Path | None:
    """The queue of the drive; a partition's is its parent's."""
    for place in (block / "queue", block.resolve().parent / "queue"):
        if place.is_dir():
            return place
    return None


def _mount(directory: Path, root: Path) -> dict[str, str | None]:
    """File system type and options: of the longest mount point above the directory. proc(5)."""
    best: tuple[str, str, str] = ("", "", "")
    resolved = os.path.realpath(directory)
    for point, kind, options in _mounts(root):
        is_above = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best[0]):
            best = (point, kind, options)
    return {"mount": best[0] or None, "file_system": best[1] or None, "options": best[2] or None}


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    for line in (_read(root / "proc/self/mounts") or "").splitlines():
        _, point, kind, options, *_ = line.split(" ")
        yield point.replace("\\040", " "), kind, options


def _cpu_model(root: Path) -> str | None:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
