"""Every swap path: the directory, its file system, direct I/O, free space, the drive behind it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infinity.config import SwapConfig
from infinity.config.schema import NvmeTier
from infinity.doctor import nvme_health
from infinity.doctor.files import read_int, read_text
from infinity.doctor.finding import Finding, degraded, missing, ok
from infinity.sizes import PAGE_NBYTES, format_nbytes
from infinity.storage.probe import direct_alignment

_NETWORK = ("9p", "ceph", "cifs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs")
_IN_MEMORY = ("ramfs", "tmpfs")
_VIRTUAL = ("vd", "xvd")  # virtio and Xen, by the names of their block devices


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo, see proc_pid_mountinfo(5)."""

    point: str
    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class Drive:
    """A block device as sysfs shows it. `model` and `scheduler` are empty when not said."""

    name: str
    model: str
    is_rotational: bool
    scheduler: str
    max_request_nbytes: int
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class DirectTrial:
    """What a scratch file answered. `errno` 0: direct I/O works. Alignments: 0 when not said."""

    errno: int
    memory_nbytes: int = 0
    offset_nbytes: int = 0


def examine(config: SwapConfig, root: Path) -> Iterator[Finding]:
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
            yield nvme_health.examine(path, drive.name)


def directory_errno(path: Path) -> int:
    """0 for a directory; ENOTDIR for anything else; what stat(2) answers when it cannot be seen."""
    try:
        return 0 if stat.S_ISDIR(os.stat(path).st_mode) else errno.ENOTDIR
    except OSError as error:
        return error.errno or errno.EIO


def nearest_directory(path: Path) -> Path:
    """The directory itself, or the first above it that exists and can be seen."""
    while directory_errno(path) and path != path.parent:
        path = path.parent
    return path


def check_directory(path: Path, *, code: int, parent_code: int, is_writable: bool) -> Finding:
    """Codes as of `directory_errno`; `is_writable` is the directory, or where it would be made."""
    subject, cost = f"{path}: directory", "no swap file can be made here: no run starts"
    if code == errno.ENOENT and parent_code == errno.ENOENT:
        return missing(
            subject,
            f"neither it nor {path.parent} exists",
            cost=cost,
            remedy=f"Mount the drive, or: mkdir -p {path.parent}",
        )
    if code not in (0, errno.ENOENT):
        return missing(subject, os.strerror(code), cost=cost, remedy="Choose another path.")
    if not is_writable:
        return missing(
            subject,
            "may not be written by this user",
            cost=cost,
            remedy=f"sudo chown $USER {path.parent if code else path}",
        )
    return ok(subject, f"will be made in {path.parent}" if code else "writable")


def find_mount(path: str, mountinfo: str) -> Mount | None:
    """The mount that holds a real path: the longest mount point above it, the last of equals."""
    found = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and (found is None or len(point) >= len(found.point)):
            found = Mount(point, rest[0], rest[1])
    return found


def check_file_system(path: str, mount: Mount | None) -> Finding:
    subject = f"{path}: file system"
    if mount is None:
        return ok(subject, "not readable")
    found = f"{mount.kind} on {mount.source}, mounted at {mount.point}"
    if mount.kind in _IN_MEMORY:
        return degraded(
            subject,
            found,
            cost="swap files here take the very memory they should spare",
            remedy="Choose a path on a drive.",
        )
    if mount.kind in _NETWORK or mount.kind.startswith("fuse"):
        return degraded(
            subject,
            found,
            cost="every byte crosses a network or a user-space daemon",
            remedy="Choose a path on a local drive.",
        )
    if mount.kind == "overlay":
        return degraded(
            subject,
            found,
            cost="the container's own layer: more work for each request, and it grows the image",
            remedy="Mount a directory of the host, such as 'docker run -v /mnt/nvme:/mnt/nvme'.",
        )
    if mount.kind in ("btrfs", "zfs", "bcachefs"):
        return degraded(
            subject,
            found,
            cost="copy-on-write: every write-back goes to new blocks, and may be checksummed and "
            "compressed",
            remedy="Use ext4 or XFS; on btrfs: chattr +C on the empty directory.",
        )
    return ok(subject, found)


def try_direct(directory: Path) -> DirectTrial:
    """Writes and reads 4 KiB directly in a scratch file, which is gone afterwards."""
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
    if direct == "never":
        return degraded(
            subject,
            'switched off by direct = "never"',
            cost="every byte is copied through the page cache, which takes memory",
            remedy='Set direct = "auto".',
        )
    if trial.errno:
        refusal = f"refused: {os.strerror(trial.errno)}"
        if direct == "always":
            return missing(
                subject,
                refusal,
                cost='direct = "always" cannot be kept: no run starts',
                remedy='Choose a path on ext4 or XFS, or set direct = "auto".',
            )
        return degraded(
            subject,
            refusal,
            cost="buffered I/O: every byte is copied through the page cache, which takes memory",
            remedy="Choose a path on ext4 or XFS.",
        )
    if trial.offset_nbytes == 0:
        return ok(subject, f"works; alignment not said, {PAGE_NBYTES} is assumed")
    found = f"works; alignment: memory {trial.memory_nbytes}, offset {trial.offset_nbytes}"
    if max(trial.memory_nbytes, trial.offset_nbytes) > PAGE_NBYTES:
        return missing(
            subject,
            found,
            cost=f"pieces lie at multiples of {PAGE_NBYTES}: requests would be refused",
            remedy='Choose another drive, or set direct = "never".',
        )
    return ok(subject, found)


def check_space(tier: NvmeTier, free_nbytes: int, total_nbytes: int) -> Finding:
    subject = f"{tier.path}: free space"
    if total_nbytes == 0:
        return ok(subject, "the file system does not say")
    found = f"{format_nbytes(free_nbytes)} of {format_nbytes(total_nbytes)}"
    wanted_nbytes = tier.capacity.resolve(free_nbytes)
    if wanted_nbytes > free_nbytes:
        return missing(
            subject,
            f"{found}, capacity asks for {format_nbytes(wanted_nbytes)}",
            cost="a run that needs all of it is refused at the start",
            remedy="Free some space, or lower tiers.nvme.capacity.",
        )
    if free_nbytes < total_nbytes // 10:
        return degraded(
            subject,
            found,
            cost="a nearly full drive writes slower and wears faster",
            remedy="Free some space, or run fstrim on drives that support it.",
        )
    return ok(subject, found)


def find_drive(root: Path, device: int) -> Drive | None:
    """The drive of a device number; the first one below a device mapper or RAID."""
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
    """The node a drive hangs on; None when it does not say or there is none (-1)."""
    for place in ("device/numa_node", "device/device/numa_node"):
        node = read_int(block / place)
        if node is not None and node >= 0:
            return node
    return None


def check_drive(path: str, drive: Drive | None) -> Finding:
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
    if drive.name.startswith(_VIRTUAL):  # They often say that they spin.
        return ok(subject, f"{found}; virtual, what is behind it is not said")
    if drive.is_rotational:
        return degraded(
            subject,
            found,
            cost="it says that it is a spinning disk: 10-50 times slower than NVMe",
            remedy="Choose a path on NVMe.",
        )
    return ok(subject, found)


def _device_number(directory: Path, mount: Mount | None) -> int:
    """Of the drive: btrfs and overlays give their files a number that no device has."""
    device = os.stat(directory).st_dev
    if os.major(device) == 0 and mount is not None and mount.source.startswith("/dev/"):
        with contextlib.suppress(OSError):
            return os.stat(mount.source).st_rdev
    return device
