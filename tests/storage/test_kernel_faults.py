"""Faults that come through the kernel: a FUSE drive that fails, file systems that are full, and block
devices that lose blocks.

The block devices are loop devices over an image that is cut or cannot grow: the kernel then fails
the commands of the block layer itself, as a broken drive makes it do. Device-mapper's error targets
would do the same; few containers and small kernels have them.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinity.errors import StorageError
from infinity.sizes import KIB, MIB, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.protocol import Priority, Segment, StorageEngine
from infinity.storage.volume import Volume, VolumePath
from tests.support.file_systems import ext4_on_loop
from tests.support.forked import TIME_LIMIT_S

DRIVE = Path(__file__).with_name("fuse_drive.py")
NBYTES = 512 * KIB  # Eight blocks.

may_mount_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"),
    reason="needs root and /dev/fuse; the C++ fault ladder replaces the kernel's answers instead",
)


@contextmanager
def drive(point: Path, *fault: str) -> Iterator[str]:
    """A mounted drive; yields the path of its one file."""
    point.mkdir(exist_ok=True)
    command = [sys.executable, str(DRIVE), str(point), str(NBYTES), *fault]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield str(point / "data")
    finally:
        subprocess.run(["umount", "-l", str(point)], check=False)
        server.kill()
        server.wait()
        server.stdout.close()


def round_trip(engine: StorageEngine, arena: Arena, path: str, seed: int) -> None:
    """Eight blocks written and read back, each request on its own."""
    file = engine.open(path, direct=True)
    try:
        arena.memory(0, NBYTES)[:] = data = random.Random(seed).randbytes(NBYTES)
        for operation, address in (("write", arena.address), ("read", arena.address + NBYTES)):
            tickets = [
                engine.submit(
                    operation, [Segment(file, at, address + at, 64 * KIB)], Priority.STATE
                )
                for at in range(0, NBYTES, 64 * KIB)
            ]
            for ticket in tickets:
                ticket.wait()
        assert arena.memory(NBYTES, NBYTES) == data
    finally:
        engine.drain()
        engine.close_file(file)


@may_mount_fuse
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_error_of_the_drive_reaches_the_ticket(
    open_any, native_name, arena, tmp_path: Path, operation: str, code: int
) -> None:
    engine = open_any(native_name)
    for rung in (1, 2, 8):
        with drive(tmp_path / "drive", operation, str(rung), str(code)) as path:
            with pytest.raises(StorageError) as caught:
                round_trip(engine, arena, path, rung)
            error = caught.value
            assert (error.errno, error.operation, error.path) == (code, operation, path)
            assert error.nbytes == 64 * KIB and error.offset_nbytes % (64 * KIB) == 0
            round_trip(engine, arena, path, rung)  # The fault is over, and nothing is left of it.


@may_mount_fuse
@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        ("read", "short"),  # A short write of FUSE is EIO, see fs/fuse/file.c.
        ("read", str(errno.EINTR)),
        ("write", str(errno.EINTR)),
        ("read", str(errno.EAGAIN)),
        ("write", str(errno.EAGAIN)),
    ],
)
def test_passing_fault_is_made_good(
    open_any, native_name, arena, tmp_path: Path, operation: str, answer: str
) -> None:
    engine = open_any(native_name)
    for rung in (1, 8):
        with drive(tmp_path / "drive", operation, str(rung), answer) as path:
            round_trip(engine, arena, path, rung)
    stats = engine.stats()
    assert all(file.num_errors == 0 for file in stats)
    if answer == "short":
        assert sum(file.num_short_transfers for file in stats) == 2


@may_mount_fuse
def test_a_removed_drive_fails_and_the_other_drive_continues(
    open_any, native_name, arena, tmp_path: Path
) -> None:
    """Every request ends, the error names the drive that is gone, and the other one still works."""
    engine = open_any(native_name)
    with drive(tmp_path / "steady") as steady:
        with drive(tmp_path / "pulled") as pulled:
            file = engine.open(pulled, direct=True)
        for _ in range(3):
            ticket = engine.submit(
                "read", [Segment(file, 0, arena.address, 64 * KIB)], Priority.FORWARD
            )
            with pytest.raises(StorageError) as caught:
                ticket.wait(TIME_LIMIT_S)
            assert caught.value.path == pulled
        with pytest.raises(StorageError, match="close"):
            engine.close_file(file)  # It says so, and has let go all the same.
        round_trip(engine, arena, steady, 0)


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """16 MiB: no cache, no tmpfs, a real full disk."""
    with ext4_on_loop(tmp_path / "image", tmp_path / "ext4", 16 * MIB) as point:
        yield point


def fill(point: Path) -> None:
    """Leaves no free block."""
    with open(point / "ballast", "wb", buffering=0) as ballast:
        for chunk_nbytes in (MIB, 4 * KIB):
            try:
                while True:
                    ballast.write(bytes(chunk_nbytes))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        os.fsync(ballast.fileno())


def test_write_to_a_full_disk_fails_with_enospc_and_recovers(
    open_any: Callable[..., StorageEngine], native_name, arena, small_ext4: Path
) -> None:
    """Into a hole, by direct I/O: only then the file system looks for a block."""
    path = small_ext4 / "data"
    path.touch()
    os.truncate(path, 8 * MIB)
    fill(small_ext4)
    engine = open_any(native_name)
    file = engine.open(str(path), direct=True)
    segment = Segment(file, MIB, arena.address, MIB)
    with pytest.raises(StorageError) as caught:
        engine.submit("write", [segment], Priority.WRITE_BACK).wait()
    assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, str(path))
    assert MIB <= caught.value.offset_nbytes < 2 * MIB
    (small_ext4 / "ballast").unlink()
    arena.memory(0, MIB)[:] = data = random.Random(1).randbytes(MIB)
    engine.submit("write", [segment], Priority.WRITE_BACK).wait()
    engine.submit("read", [Segment(file, MIB, arena.address + MIB, MIB)], Priority.STATE).wait()
    assert arena.memory(MIB, MIB) == data
    engine.close()


def test_blocks_that_a_drive_has_lost_fail_and_the_others_are_read(
    open_any: Callable[..., StorageEngine], native_name, arena, tmp_path: Path, small_ext4: Path
) -> None:
    """The image is cut at the place of the file's middle page: what lies behind it is EIO.

    Method: every page is read by a request of its own, so most of them share a block, and with a
    request for the whole file. Where each page lies is found by looking for it in the image.
    """
    num_pages = 256
    path = small_ext4 / "data"
    data = random.Random(2).randbytes(num_pages * PAGE_NBYTES)
    path.write_bytes(data)
    image = tmp_path / "image"
    subprocess.run(["sync", "-f", str(path)], check=True)
    raw = image.read_bytes()
    pages = [data[at : at + PAGE_NBYTES] for at in range(0, len(data), PAGE_NBYTES)]
    lies_at = [raw.index(page) for page in pages]
    cut_nbytes = sorted(lies_at)[num_pages // 2]
    engine = open_any(native_name)
    file = engine.open(str(path), direct=True)
    os.truncate(image, cut_nbytes)
    tickets = [
        engine.submit(
            "read",
            [Segment(file, at * PAGE_NBYTES, arena.address + at * PAGE_NBYTES, PAGE_NBYTES)],
            Priority.STATE,
        )
        for at in range(num_pages)
    ]
    for at, ticket in enumerate(tickets):
        if lies_at[at] < cut_nbytes:
            ticket.wait()
            assert arena.memory(at * PAGE_NBYTES, PAGE_NBYTES) == pages[at]
            continue
        with pytest.raises(StorageError) as caught:
            ticket.wait()
        error = caught.value
        assert (error.errno, error.path) == (errno.EIO, str(path))
        assert (error.offset_nbytes, error.nbytes) == (at * PAGE_NBYTES, PAGE_NBYTES)
    assert sum(file.num_errors for file in engine.stats()) == num_pages // 2
    with pytest.raises(StorageError) as caught:
        engine.submit("read", [Segment(file, 0, arena.address, len(data))], Priority.STATE).wait()
    assert caught.value.errno == errno.EIO
    engine.drain()
    engine.close_file(file)


@contextmanager
def noting(failures: list[StorageError]) -> Iterator[None]:
    """Appends an error of a drive to the failures, and goes on."""
    try:
        yield
    except StorageError as error:
        failures.append(error)


def test_volume_on_a_drive_that_fails_writes_refuses_further_work(
    open_any: Callable[..., StorageEngine], native_name, arena, tmp_path: Path, mount
) -> None:
    """A thin drive: 64 MiB by its own account, 16 MiB in truth; its block device fails the rest.

    With ENOSPC, where the kernel tells why, else with EIO.
    """
    thin = mount("tmpfs", "size=16m")
    engine = open_any(native_name)
    with (
        ext4_on_loop(thin / "image", tmp_path / "ext4", 64 * MIB) as point,
        Volume(engine, [VolumePath(str(point / "drive"))]) as volume,
    ):
        (extents,) = volume.reserve([40 * MIB])
        arena.memory(0, 40 * MIB)[:] = bytes([7]) * (40 * MIB)
        tickets, failures = [], []
        for at in range(0, 40 * MIB, 8 * MIB):
            with noting(failures):  # Once one has failed, the next is refused.
                tickets.append(
                    volume.write(
                        extents, offset_nbytes=at, nbytes=8 * MIB, address=arena.address + at,
                        priority=Priority.WRITE_BACK,
                    )
                )  # fmt: skip
        for ticket in tickets:
            with noting(failures):
                ticket.wait()
        assert failures
        for error in failures:
            assert error.errno in (errno.ENOSPC, errno.EIO)
            assert (error.operation, error.path) == ("write", volume.file_paths[0])
        with pytest.raises(StorageError) as caught:
            volume.sync()
        assert caught.value.errno == failures[0].errno


def test_stripes_over_two_real_drives_come_back(
    open_any: Callable[..., StorageEngine], native_name, arena, tmp_path: Path, small_ext4: Path
) -> None:
    """A loop device is a drive of its own: the engine gives it a queue, and the volume weighs it.

    Its bandwidth is measured, whatever it is; test_striping.py holds unequal drives to their sum.
    """
    engine = open_any(native_name)
    paths = [
        VolumePath(str(tmp_path / "drive"), weight=1.0),
        VolumePath(str(small_ext4 / "drive"), weight=0.5),
    ]
    with Volume(engine, paths, stripe_nbytes=256 * KIB) as volume:
        (extents,) = volume.reserve([12 * MIB])
        data = random.Random(3).randbytes(12 * MIB)
        arena.memory(0, 12 * MIB)[:] = data
        common = {"offset_nbytes": 0, "nbytes": 12 * MIB, "priority": Priority.STATE}
        volume.write(extents, address=arena.address, **common).wait()
        volume.read(extents, address=arena.address + 16 * MIB, **common).wait()
        assert arena.memory(16 * MIB, 12 * MIB) == data
        devices = {lane["device"] for lane in engine._core.lanes()}
        assert devices == {os.stat(path).st_dev for path in volume.file_paths}
        assert len(devices) == 2
        assert [file.write_nbytes for file in engine.stats()] == [8 * MIB, 4 * MIB]
