"""The file system of a path, and its cost."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infinity.tools.doctor.finding import Finding, degraded, ok

_NETWORK = ("9p", "ceph", "cifs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs")
_IN_MEMORY = ("ramfs", "tmpfs")
_COPY_ON_WRITE = ("bcachefs", "btrfs", "zfs")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo, see proc_pid_mountinfo(5)."""

    point: str
    kind: str
    source: str


def find_mount(path: str, mountinfo: str) -> Mount | None:
    """Returns the mount of a real path: the longest mount point above it, the last of equals."""
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
    """Finds whether the file system of a swap path suits swap files."""
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
    if mount.kind in _COPY_ON_WRITE:
        return degraded(
            subject,
            found,
            cost="copy-on-write: every write-back goes to new blocks, and may be checksummed and "
            "compressed",
            remedy="Use ext4 or XFS; on btrfs: chattr +C on the empty directory.",
        )
    return ok(subject, found)
