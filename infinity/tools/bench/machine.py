"""Describes the environment of a run, so that two results can be compared."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from infinity.config.machine import available_memory_nbytes
from infinity.storage.arena import Arena
from infinity.tools.bench import fio
from infinity.tools.doctor.drives import find_block
from infinity.tools.doctor.finding import read_field, read_text
from infinity.tools.doctor.paths import find_mount

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
        "cpu": read_field(root / "proc/cpuinfo", "model name") or platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "available_memory_nbytes": available_memory_nbytes(root),
        "transparent_huge_pages": read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        "arena_nbytes": arena.capacity_nbytes,
        "arena_huge_page_nbytes": arena.huge_page_nbytes,
        "paths": [drive(directory, root) for directory in directories],
    }


def drive(directory: Path, root: Path = Path("/")) -> dict[str, Any]:
    """File system and drive behind a directory; None for what the system does not say."""
    found = os.statvfs(directory)
    block = find_block(root, directory.stat().st_dev)
    mounts = read_text(root / "proc/self/mountinfo") or ""
    mount = find_mount(os.path.realpath(directory), mounts)
    return {
        "path": str(directory),
        "mount": mount and mount.point,
        "file_system": mount and mount.kind,
        "options": mount and mount.options,
        "size_nbytes": found.f_blocks * found.f_frsize,
        "free_nbytes": found.f_bavail * found.f_frsize,
        "drive": block and block.name,
        "model": block and read_text(block / "device/model"),
        "scheduler": block and read_text(block / "queue/scheduler"),
        "max_request_kib": block and read_text(block / "queue/max_sectors_kb"),
        "num_requests": block and read_text(block / "queue/nr_requests"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
