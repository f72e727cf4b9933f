"""Every swap path: directory, file system, direct I/O, free space, and the drive below it as sysfs
shows it, with the wear that its own health log tells.

Sources: Documentation/ABI/stable/sysfs-block; NVM Express Base Specification 2.0, "SMART / Health
Information", log page 02h; the kernel's include/uapi/linux/nvme_ioctl.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infinity.config import SwapConfig
from infinity.config.machine import read_int, read_node, read_text
from infinity.config.schema.tiers import NvmeTier
from infinity.sizes import PAGE_NBYTES, format_nbytes
from infinity.storage.probe import crc32c_kernels, direct_alignment
from infinity.tools.doctor import Finding


@dataclass(frozen=True, slots=True)
class DirectTrial:
    """The results of a scratch file. `errno` 0: direct I/O works. Alignments are 0 if unknown."""

    errno: int
    memory_nbytes: int = 0
    offset_nbytes: int = 0


def examine(config: SwapConfig, root: Path) -> Iterator[Finding]:
    """Yields the findings on the swap paths of the configuration."""
    if config.tiers.nvme:
        yield check_checksums(config.io.verify, crc32c_kernels()[0])
    for tier in config.tiers.nvme:
        place = nearest_directory(tier.path)
        directory = check_directory(
            tier.path,
            code=directory_errno(tier.path),
            parent_code=directory_errno(tier.path.parent),
            is_writable=os.access(place, os.W_OK | os.X_OK),
        )
        yield directory
        if directory.status == "missing":
            continue
        path = str(tier.path)
        mount = find_mount(os.path.realpath(place), read_text(root / "proc/self/mountinfo") or "")
        yield check_file_system(path, mount)
        yield check_direct(path, tier.direct, try_direct(place))
        space = os.statvfs(place)
        yield check_space(tier, space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)
        drive = find_drive(root, _device_number(place, mount))
        yield check_drive(path, drive)
        if drive is not None:
            yield examine_wear(path, drive.name)


def check_checksums(is_on: bool, kernel: str) -> Finding:
    """`kernel` is the name of the processor's fastest way to compute checksums."""
    if not is_on:
        return Finding("checksums", "off (io.verify = false)").degraded(
            "a page that a drive, a cable or another program changes is trained on, and saved, "
            "without a word",
            "Remove io.verify from the file, or set it to true.",
        )
    if kernel != "table":
        return Finding("checksums", f"on ({kernel})")
    it = Finding("checksums", "on, without an instruction of this processor for them")
    return it.degraded(
        "some 0.7 seconds of processor time for every GB that is read or written",
        "Run on a processor with SSE4.2 or the CRC extension of ARMv8.",
    )


def directory_errno(path: Path) -> int:
    """Returns 0 for a directory, ENOTDIR for anything else, or the error of stat(2)."""
    try:
        return 0 if stat.S_ISDIR(os.stat(path).st_mode) else errno.ENOTDIR
    except OSError as error:
        return error.errno or errno.EIO


def nearest_directory(path: Path) -> Path:
    """Returns the directory itself, or its first parent that exists and can be seen."""
    while directory_errno(path) and path != path.parent:
        path = path.parent
    return path


def check_directory(path: Path, *, code: int, parent_code: int, is_writable: bool) -> Finding:
    """Codes are those of `directory_errno`; `is_writable` describes the directory, or its parent if
    it is missing."""
    subject, cost = f"{path}: directory", "no swap file can be made here: no run starts"
    if code == errno.ENOENT and parent_code == errno.ENOENT:
        it = Finding(subject, f"neither it nor {path.parent} exists")
        return it.missing(cost, f"Mount the drive, or: mkdir -p {path.parent}")
    if code not in (0, errno.ENOENT):
        return Finding(subject, os.strerror(code)).missing(cost, "Choose another path.")
    if not is_writable:
        it = Finding(subject, "may not be written by this user")
        return it.missing(cost, f"sudo chown $USER {path.parent if code else path}")
    return Finding(subject, f"will be made in {path.parent}" if code else "writable")


def try_direct(directory: Path) -> DirectTrial:
    """Writes and reads 4 KiB directly in a scratch file, which is removed afterwards."""
    try:
        fd, name = tempfile.mkstemp(prefix="infinity-doctor-", dir=directory)
    except OSError as error:
        return DirectTrial(error.errno or errno.EIO)
    direct = -1
    try:
        with mmap.mmap(-1, PAGE_NBYTES) as page:
            page[:] = os.urandom(PAGE_NBYTES)
            written = page[:]
            direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            alignment = direct_alignment(direct)
            if os.pwrite(direct, page, 0) != PAGE_NBYTES:
                return DirectTrial(errno.EIO)
            page[:] = bytes(PAGE_NBYTES)
            if os.preadv(direct, [page], 0) != PAGE_NBYTES or page[:] != written:
                return DirectTrial(errno.EIO)
        return DirectTrial(0, *alignment)
    except OSError as error:
        return DirectTrial(error.errno or errno.EIO)
    finally:
        if direct >= 0:
            os.close(direct)
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def check_direct(path: str, direct: str, trial: DirectTrial) -> Finding:
    """`direct` is the tier's key: "auto", "always" or "never"."""
    subject = f"{path}: direct I/O"
    cost = "every byte is copied through the page cache, which takes memory"
    if direct == "never":
        it = Finding(subject, 'switched off by direct = "never"')
        return it.degraded(cost, 'Set direct = "auto".')
    if trial.errno:
        it = Finding(subject, f"refused: {os.strerror(trial.errno)}")
        if direct != "always":
            return it.degraded(f"buffered I/O: {cost}", "Choose a path on ext4 or XFS.")
        return it.missing(
            'direct = "always" cannot be kept: no run starts',
            'Choose a path on ext4 or XFS, or set direct = "auto".',
        )
    if trial.offset_nbytes == 0:
        return Finding(subject, f"works; alignment not said, {PAGE_NBYTES} is assumed")
    alignment = f"memory {trial.memory_nbytes}, offset {trial.offset_nbytes}"
    it = Finding(subject, f"works; alignment: {alignment}")
    if max(trial.memory_nbytes, trial.offset_nbytes) <= PAGE_NBYTES:
        return it
    return it.missing(
        f"pieces lie at multiples of {PAGE_NBYTES}: requests would be refused",
        'Choose another drive, or set direct = "never".',
    )


def check_space(tier: NvmeTier, free_nbytes: int, total_nbytes: int) -> Finding:
    """Finds whether the free space of a swap path is as large as its capacity."""
    subject = f"{tier.path}: free space"
    if total_nbytes == 0:
        return Finding(subject, "the file system does not say")
    it = Finding(subject, f"{format_nbytes(free_nbytes)} of {format_nbytes(total_nbytes)}")
    wanted_nbytes = tier.capacity.resolve(free_nbytes)
    if wanted_nbytes > free_nbytes:
        return it.more(f", capacity asks for {format_nbytes(wanted_nbytes)}").missing(
            "a run that needs all of it is refused at the start",
            "Free some space, or lower tiers.nvme.capacity.",
        )
    if free_nbytes >= total_nbytes // 10:
        return it
    return it.degraded(
        "a nearly full drive writes slower and wears faster",
        "Free some space, or run fstrim on drives that support it.",
    )


def _device_number(directory: Path, mount: Mount | None) -> int:
    """Returns the device number of the drive: btrfs and overlays give files a number that no device
    has."""
    device = os.stat(directory).st_dev
    if os.major(device) == 0 and mount is not None and mount.source.startswith("/dev/"):
        with contextlib.suppress(OSError):
            return os.stat(mount.source).st_rdev
    return device


# -- File systems ----------------------------------------------------------------------------------


# File systems that do not suit swap files: their kinds, the cost, the remedy.
_COSTLY = (
    (
        ("ramfs", "tmpfs"),
        "swap files here take the very memory they should spare",
        "Choose a path on a drive.",
    ),
    (
        ("9p", "ceph", "cifs", "fuse", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"),
        "every byte crosses a network or a user-space daemon",
        "Choose a path on a local drive.",
    ),
    (
        ("overlay",),
        "the container's own layer: more work for each request, and it grows the image",
        "Mount a directory of the host, such as 'docker run -v /mnt/nvme:/mnt/nvme'.",
    ),
    (
        ("bcachefs", "btrfs", "zfs"),
        "copy-on-write: every write-back goes to new blocks, and may be checksummed and compressed",
        "Use ext4 or XFS; on btrfs: chattr +C on the empty directory.",
    ),
)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo, see proc_pid_mountinfo(5)."""

    point: str
    kind: str
    source: str
    options: str


def find_mount(path: str, mountinfo: str) -> Mount | None:
    """Returns the mount of a real path: the longest mount point above it, the last of equals."""
    found = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and (found is None or len(point) >= len(found.point)):
            options = ",".join(dict.fromkeys(f"{fields[5]},{rest[2]}".split(",")))
            found = Mount(point, rest[0], rest[1], options)
    return found


def check_file_system(path: str, mount: Mount | None) -> Finding:
    """Finds whether the file system of a swap path suits swap files."""
    subject = f"{path}: file system"
    if mount is None:
        return Finding(subject, "not readable")
    it = Finding(subject, f"{mount.kind} on {mount.source}, mounted at {mount.point}")
    kind = "fuse" if mount.kind.startswith("fuse") else mount.kind
    for kinds, cost, remedy in _COSTLY:
        if kind in kinds:
            return it.degraded(cost, remedy)
    return it


# -- Drives ----------------------------------------------------------------------------------------


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
    nodes = [read_node(block / place / "numa_node") for place in ("device", "device/device")]
    return Drive(
        name=block.name,
        model=read_text(block / "device/model") or "",
        is_rotational=read_int(block / "queue/rotational") == 1,
        scheduler=scheduler.partition("[")[2].partition("]")[0],
        max_request_nbytes=1024 * (read_int(block / "queue/max_sectors_kb") or 0),
        numa_node=next((node for node in nodes if node is not None), None),
    )


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
