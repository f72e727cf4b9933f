"""The wear of an NVMe drive: its own health log, if this process may read it.

Source: NVM Express Base Specification 2.0, "SMART / Health Information", log page 02h; the kernel's
include/uapi/linux/nvme_ioctl.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct
from dataclasses import dataclass

from infinity.sizes import format_nbytes
from infinity.tools.doctor.finding import Finding, degraded, ok

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


def examine(path: str, block_name: str) -> Finding:
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
        return ok(subject, "not readable: no NVMe drive, or a virtual one; ask its host")
    if health is None:
        return degraded(
            subject,
            f"not readable: {os.strerror(code)}",
            cost="training state is written again at every step, and the drive's wear is not known",
            remedy="Run as root, outside a container: infinity doctor, or nvme smart-log.",
        )
    written = format_nbytes(health.written_nbytes)
    found = f"{health.used_percent} % of its life used, {written} written"
    if health.warning or health.used_percent >= 90:
        return degraded(
            subject,
            f"{found}, {health.spare_percent} % spare"
            + (f", critical warning {health.warning:#04x}" if health.warning else ""),
            cost="training state is written again at every step: the drive may fail, or refuse "
            "writes, during a run",
            remedy="Use another drive for swap, or keep moments on the host.",
        )
    return ok(subject, found)


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
