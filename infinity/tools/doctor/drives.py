"""The drive below a path as sysfs shows it, and the wear that its own health log tells.

Sources: Documentation/ABI/stable/sysfs-block; NVM Express Base Specification 2.0, "SMART / Health
Information", log page 02h; the kernel's include/uapi/linux/nvme_ioctl.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from infinity.config.machine import read_int, read_text
from infinity.sizes import format_nbytes
from infinity.tools.doctor import Finding

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


def find_block(root: Path, device: int) -> Path | None:
    """Returns the directory of the drive of a device number; the first one below a device mapper or
    RAID."""
    link = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if not link.exists():
        return None
    block = link.resolve()
    while True:
        if (block / "partition").exists():
            block = block.parent
        slaves = sorted((block / "slaves").glob("*"))
        if not slaves:
            return block
        block = slaves[0].resolve()


def find_drive(root: Path, device: int) -> Drive | None:
    """Returns the drive of a device number, as `find_block` finds it."""
    block = find_block(root, device)
    if block is None:
        return None
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
        return Finding(subject, "not visible from here")
    parts = [" ".join(filter(None, (drive.name, drive.model)))]
    if drive.max_request_nbytes:
        parts.append(f"requests up to {format_nbytes(drive.max_request_nbytes)}")
    if drive.scheduler:
        parts.append(f"scheduler {drive.scheduler}")
    if drive.numa_node is not None:
        parts.append(f"NUMA node {drive.numa_node}")
    it = Finding(subject, ", ".join(parts))
    if drive.name.startswith(_VIRTUAL):  # They often claim to spin.
        return it.more("; virtual, what is behind it is not said")
    if not drive.is_rotational:
        return it
    cost = "it says that it is a spinning disk: 10-50 times slower than NVMe"
    return it.degraded(cost, "Choose a path on NVMe.")


# -- Wear, if this process may read the log --------------------------------------------------------


_LOG_NBYTES = 512
_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD
_GET_LOG_PAGE = 0x02
_HEALTH = 0x02
_ALL_NAMESPACES = 0xFFFFFFFF
_DATA_UNIT_NBYTES = 512_000


@dataclass(frozen=True, slots=True)
class Health:
    """`used_percent` of the rated life may exceed 100; `warning` 0 is none."""

    warning: int
    spare_percent: int
    used_percent: int
    written_nbytes: int


def examine_wear(path: str, block_name: str) -> Finding:
    """`block_name` as in /sys/block, such as "nvme0n1"."""
    controller = re.fullmatch(r"(nvme\d+)(c\d+)?n\d+", block_name)
    if controller is None:
        return check_wear(path, None, errno.ENOTTY)
    try:
        return check_wear(path, parse_health(_read_log(f"/dev/{controller[1]}")), 0)
    except OSError as error:
        return check_wear(path, None, error.errno or errno.EIO)


def check_wear(path: str, health: Health | None, code: int) -> Finding:
    """`code` is the error if there is no `health`: ENOTTY for a drive without such a log."""
    subject = f"{path}: wear"
    if health is None and code == errno.ENOTTY:
        return Finding(subject, "not readable: no NVMe drive, or a virtual one; ask its host")
    if health is None:
        return Finding(subject, f"not readable: {os.strerror(code)}").degraded(
            "training state is written again at every step, and the drive's wear is not known",
            "Run as root, outside a container: infinity doctor, or nvme smart-log.",
        )
    written = format_nbytes(health.written_nbytes)
    it = Finding(subject, f"{health.used_percent} % of its life used, {written} written")
    if not health.warning and health.used_percent < 90:
        return it
    warning = f", critical warning {health.warning:#04x}" if health.warning else ""
    return it.more(f", {health.spare_percent} % spare{warning}").degraded(
        "training state is written again at every step: the drive may fail, or refuse writes, "
        "during a run",
        "Use another drive for swap, or keep moments on the host.",
    )


def parse_health(log: bytes) -> Health:
    """Parses the 512 bytes of the log page. Raises OSError(EIO) if all are zero, which means no
    log."""
    if len(log) != _LOG_NBYTES or not any(log):
        raise OSError(errno.EIO, "the drive gave no health log")
    return Health(
        warning=log[0],
        spare_percent=log[3],
        used_percent=log[5],
        written_nbytes=int.from_bytes(log[48:64], "little") * _DATA_UNIT_NBYTES,
    )


def _read_log(device: str) -> bytes:
    """Reads the log from the controller. Needs CAP_SYS_ADMIN. Raises OSError."""
    log = ctypes.create_string_buffer(_LOG_NBYTES)
    num_dwords = _LOG_NBYTES // 4 - 1  # The log's length, as the command counts it.
    command = bytearray(struct.pack(
        "<BBHIIIQQII6III",
        _GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0,
        0, ctypes.addressof(log), 0, _LOG_NBYTES,
        num_dwords << 16 | _HEALTH, 0, 0, 0, 0, 0,
        0, 0,
    ))  # fmt: skip
    fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = fcntl.ioctl(fd, _ADMIN_COMMAND, command)
    finally:
        os.close(fd)
    if status != 0:
        raise OSError(errno.EIO, f"the drive answered status {status:#x}")
    return log.raw
