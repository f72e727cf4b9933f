"""The drive below a path, as sysfs shows it. See Documentation/ABI/stable/sysfs-block."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from infinity.sizes import format_nbytes
from infinity.tools.doctor.files import read_int, read_text
from infinity.tools.doctor.finding import Finding, degraded, ok

_VIRTUAL = ("vd", "xvd")  # virtio and Xen, by the names of their block devices


@dataclass(frozen=True, slots=True)
class Drive:
    """A block device as sysfs shows it. `model` and `scheduler` are empty if unknown."""

    name: str
    model: str
    is_rotational: bool
    scheduler: str
    max_request_nbytes: int
    numa_node: int | None


def find_drive(root: Path, device: int) -> Drive | None:
    """Returns the drive of a device number; the first one below a device mapper or RAID."""
    link = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if not link.exists():
        return None
    block = link.resolve()
    if (block / "partition").exists():
        block = block.parent
    while slaves := sorted((block / "slaves").glob("*")):
        block = slaves[0].resolve()
        if (block / "partition").exists():
            block = block.parent
    scheduler = read_text(block / "queue/scheduler") or ""
    return Drive(
        name=block.name,
        model=read_text(block / "device/model") or "",
        is_rotational=read_int(block / "queue/rotational") == 1,
        scheduler=scheduler.partition("[")[2].partition("]")[0],
        max_request_nbytes=1024 * (read_int(block / "queue/max_sectors_kb") or 0),
        numa_node=find_numa_node(block),
    )


def find_numa_node(block: Path) -> int | None:
    """Returns the NUMA node of a drive; None if it is unknown or there is none (-1)."""
    for place in ("device/numa_node", "device/device/numa_node"):
        node = read_int(block / place)
        if node is not None and node >= 0:
            return node
    return None


def check_drive(path: str, drive: Drive | None) -> Finding:
    """Describes the drive below a swap path; None if it is not visible."""
    subject = f"{path}: drive"
    if drive is None:
        return ok(subject, "not visible from here")
    parts = [" ".join(filter(None, (drive.name, drive.model)))]
    if drive.max_request_nbytes:
        parts.append(f"requests up to {format_nbytes(drive.max_request_nbytes)}")
    if drive.scheduler:
        parts.append(f"scheduler {drive.scheduler}")
    if drive.numa_node is not None:
        parts.append(f"NUMA node {drive.numa_node}")
    found = ", ".join(parts)
    if drive.name.startswith(_VIRTUAL):  # They often claim to spin.
        return ok(subject, f"{found}; virtual, what is behind it is not said")
    if drive.is_rotational:
        return degraded(
            subject,
            found,
            cost="it says that it is a spinning disk: 10-50 times slower than NVMe",
            remedy="Choose a path on NVMe.",
        )
    return ok(subject, found)
