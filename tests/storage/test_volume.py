"""Swap volumes: striped buffers, and full, foreign, locked and odd directories."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.errors import (
    CapacityError,
    ConfigError,
    StorageError,
    SwapLockedError,
    UnsupportedError,
)
from infinity.sizes import KIB, MIB, PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.lock_file import DirectoryLock
from infinity.storage.protocol import Priority, StorageEngine
from infinity.storage.swap_directory import examine
from infinity.storage.volume import Extent, Volume, VolumePath
from infinity.testing.faulty_engine import Fault, FaultyEngine
from tests.support.forked import TIME_LIMIT_S

Mount = Callable[..., Path]
SWAP_GLOB = "infinity-*.swap"

HOLDER = """
import signal, sys
from infinity.storage.native_engine import open_engine
from infinity.storage.volume import Volume, VolumePath
engine = open_engine("threads", arena=None)
volume = Volume(engine, [VolumePath(sys.argv[1])])
volume.reserve([1 << 20])
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def native_engine(native_name: str, open_any) -> StorageEngine:
    return open_any(native_name)


@pytest.fixture
def threads(open_any) -> StorageEngine:
    """Where the engine does not matter."""
    return open_any("threads")


@pytest.fixture
def start_holder() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts a process that locks a swap directory until it is killed."""
    holders: list[subprocess.Popen[str]] = []

    def start(path: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(path)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def write_and_read(
    volume: Volume, arena: Arena, extents: tuple[Extent, ...], seed: int = 0
) -> None:
    """Fills a buffer and reads it back."""
    nbytes = sum(extent.nbytes for extent in extents)
    data = random.Random(seed).randbytes(nbytes)
    arena.memory(0, nbytes)[:] = data
    whole = {"offset_nbytes": 0, "nbytes": nbytes}
    volume.write(extents, **whole, address=arena.address, priority=Priority.WRITE_BACK).wait()
    target = arena.address + 32 * MIB
    volume.read(extents, **whole, address=target, priority=Priority.FORWARD).wait()
    assert arena.memory(32 * MIB, nbytes) == data


@pytest.mark.parametrize("num_paths", [1, 2, 3])
def test_buffers_keep_their_bytes_on_any_number_of_paths(
    native_engine: StorageEngine, arena: Arena, tmp_path: Path, num_paths: int
) -> None:
    """Ranges at random, against a model; every buffer is written in full first."""
    paths = [VolumePath(str(tmp_path / f"drive{index}")) for index in range(num_paths)]
    prng = random.Random(num_paths)
    with Volume(native_engine, paths, stripe_nbytes=256 * KIB) as volume:
        sizes = [3 * MIB, 5000, 100 * KIB, 2 * MIB + 1]
        pieces = volume.reserve(sizes)
        models = [bytearray(sum(extent.nbytes for extent in piece)) for piece in pieces]
        for _ in range(60):
            index = prng.randrange(len(pieces))
            model, piece = models[index], pieces[index]
            num_pages = len(model) // PAGE_NBYTES
            low = prng.randrange(num_pages)
            high = prng.randrange(low, num_pages) + 1
            low, nbytes = low * PAGE_NBYTES, (high - low) * PAGE_NBYTES
            where = {"offset_nbytes": low, "nbytes": nbytes, "address": arena.address}
            if prng.random() < 0.5:
                model[low : low + nbytes] = arena.memory(0, nbytes)[:] = prng.randbytes(nbytes)
                volume.write(piece, **where, priority=Priority.WRITE_BACK).wait()
            else:
                volume.read(piece, **where, priority=Priority.FORWARD).wait()
                assert arena.memory(0, nbytes) == model[low : low + nbytes]


def test_fresh_buffers_read_as_zeros(
    native_engine: StorageEngine, arena: Arena, tmp_path: Path
) -> None:
    with Volume(native_engine, [VolumePath(str(tmp_path / "drive"))]) as volume:
        (piece,) = volume.reserve([MIB])
        arena.memory(0, MIB)[:] = b"x" * MIB
        volume.read(
            piece, offset_nbytes=0, nbytes=MIB, address=arena.address, priority=Priority.STATE
        ).wait()
        assert arena.memory(0, MIB) == bytes(MIB)


def test_second_reserve_leaves_the_first_alone(
    threads: StorageEngine, arena: Arena, tmp_path: Path
) -> None:
    with Volume(threads, [VolumePath(str(tmp_path / "drive"))]) as volume:
        (first,) = volume.reserve([MIB])
        write_and_read(volume, arena, first, seed=1)
        (second,) = volume.reserve([MIB])
        write_and_read(volume, arena, second, seed=2)
        volume.read(
            first, offset_nbytes=0, nbytes=MIB, address=arena.address, priority=Priority.STATE
        ).wait()
        assert arena.memory(0, MIB) == random.Random(1).randbytes(MIB)


def test_files_are_preallocated_in_full(threads: StorageEngine, tmp_path: Path) -> None:
    with Volume(threads, [VolumePath(str(tmp_path / "drive"))]) as volume:
        volume.reserve([8 * MIB])
        status = os.stat(volume.file_paths[0])
        assert status.st_size == 8 * MIB
        assert status.st_blocks * 512 >= 8 * MIB


@pytest.mark.parametrize("field", ["offset_nbytes", "nbytes", "address"])
def test_unaligned_ranges_are_refused(
    threads: StorageEngine, arena: Arena, tmp_path: Path, field: str
) -> None:
    with Volume(threads, [VolumePath(str(tmp_path / "drive"))]) as volume:
        (piece,) = volume.reserve([MIB])
        where = {"offset_nbytes": 0, "nbytes": PAGE_NBYTES, "address": arena.address}
        where[field] += 512
        with pytest.raises(ValueError, match="multiples of 4096"):
            volume.read(piece, **where, priority=Priority.FORWARD)


def test_close_removes_its_own_files_only(threads: StorageEngine, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    foreign = [drive / name for name in ("notes.txt", "infinity-mine.swap", "infinity.swap")]
    for path in foreign:
        path.write_text("keep")
    with Volume(threads, [VolumePath(str(drive))]) as volume:
        volume.reserve([MIB])
        assert len(list(drive.iterdir())) == 5
    assert sorted(drive.iterdir()) == sorted(foreign)
    volume.close()


def test_files_kept_on_request_survive_later_volumes(
    threads: StorageEngine, tmp_path: Path
) -> None:
    path = VolumePath(str(tmp_path / "drive"))
    volume = Volume(threads, [path])
    volume.reserve([MIB])
    (kept,) = volume.file_paths
    volume.close(remove=False)
    for _ in range(2):
        with Volume(threads, [path]) as later:
            assert later.file_paths != (kept,)
    assert os.path.getsize(kept) == MIB


def test_closed_volume_refuses_work(threads: StorageEngine, arena: Arena, tmp_path: Path) -> None:
    volume = Volume(threads, [VolumePath(str(tmp_path / "drive"))])
    (piece,) = volume.reserve([MIB])
    volume.close()
    with pytest.raises(StorageError, match="closed"):
        volume.read(
            piece, offset_nbytes=0, nbytes=4096, address=arena.address, priority=Priority(0)
        )
    with pytest.raises(StorageError, match="closed"):
        volume.reserve([1])


def test_engine_outlives_its_volumes_and_frees_their_space(
    native_engine: StorageEngine, arena: Arena, mount: Mount
) -> None:
    """The ring's table of files must not keep a removed file open."""
    point = mount("tmpfs", "size=16m")
    for cycle in range(5):
        with Volume(native_engine, [VolumePath(str(point / "drive"))]) as volume:
            (piece,) = volume.reserve([12 * MIB])  # Of 16, so two of them do not fit.
            write_and_read(volume, arena, piece, seed=cycle)


# Locks and stale files.


def test_directory_of_a_living_process_is_refused_with_its_pid(
    threads: StorageEngine, tmp_path: Path, start_holder
) -> None:
    drive = tmp_path / "drive"
    holder = start_holder(drive)
    with pytest.raises(SwapLockedError, match=f"process {holder.pid}") as caught:
        Volume(threads, [VolumePath(str(drive))])
    assert caught.value.pid == holder.pid
    assert len(list(drive.glob(SWAP_GLOB))) == 1, "the holder's file must stay"


def test_same_directory_twice_in_one_process_is_refused(
    threads: StorageEngine, tmp_path: Path
) -> None:
    path = VolumePath(str(tmp_path / "drive"))
    with Volume(threads, [path]), pytest.raises(SwapLockedError) as caught:
        Volume(threads, [path])
    assert caught.value.pid == os.getpid()
    with pytest.raises(SwapLockedError):
        Volume(threads, [path, path])
    Volume(threads, [path]).close()


def test_a_full_drive_is_named_and_its_lock_file_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock = tmp_path / "infinity.lock"
    for content, left in (
        (None, []),
        (json.dumps({"schema": 1, "kept": ["infinity-x.swap"]}), [lock]),
    ):
        if content is not None:
            lock.write_text(content)
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=r"write of .*infinity\.lock.*No space left"):
            DirectoryLock(str(tmp_path), "job")
        monkeypatch.undo()
        assert list(tmp_path.iterdir()) == left
    assert lock.read_text() == content


def test_a_drive_that_fails_where_direct_writes_are_tried_is_named(
    threads: StorageEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate = os.ftruncate

    def broken(fd: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".swap"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        truncate(fd, length)

    monkeypatch.setattr(os, "ftruncate", broken)
    with pytest.raises(StorageError, match=r"truncate of .*\.swap.*Input/output error"):
        Volume(threads, [VolumePath(str(tmp_path / "drive"))])


def test_directory_of_a_killed_process_is_taken_over_and_cleaned(
    threads: StorageEngine, tmp_path: Path, start_holder
) -> None:
    drive = tmp_path / "drive"
    holder = start_holder(drive)
    (stale,) = drive.glob(SWAP_GLOB)
    foreign = drive / "model.safetensors"
    foreign.write_text("keep")
    holder.kill()
    holder.wait()
    removed = Volume(threads, [VolumePath(str(drive))])
    assert not stale.exists()
    assert json.loads((drive / "infinity.lock").read_text())["pid"] == os.getpid()
    (drive / "infinity.lock").unlink()
    with Volume(threads, [VolumePath(str(drive))]):
        removed.close()
        assert (drive / "infinity.lock").exists(), "it is another job's"
    assert list(drive.iterdir()) == [foreign]


def test_unreadable_lock_file_of_a_dead_process_is_taken_over(
    threads: StorageEngine, tmp_path: Path
) -> None:
    """A crash may have cut it short."""
    drive = tmp_path / "drive"
    drive.mkdir()
    for text in ("", '{"sch', '{"schema": 1, "pid": 1', "\x00" * 100):
        (drive / "infinity.lock").write_text(text)
        Volume(threads, [VolumePath(str(drive))]).close()
        assert not list(drive.iterdir())


def _make_fifo(path: Path, tmp_path: Path) -> None:
    os.mkfifo(path, 0o600)


FOREIGN: dict[str, Callable[[Path, Path], object]] = {
    "is a symbolic link": lambda path, tmp_path: path.symlink_to(tmp_path / "precious"),
    "is a symbolic link ": lambda path, tmp_path: path.symlink_to(tmp_path / "nowhere"),
    "another name": lambda path, tmp_path: path.hardlink_to(tmp_path / "precious"),
    "is a FIFO": _make_fifo,
    "is a directory": lambda path, tmp_path: path.mkdir(),
    "no lock file": lambda path, tmp_path: path.write_text("[" * 100_000),
    "others may write": lambda path, tmp_path: path.touch() or path.chmod(0o666),
}


@pytest.mark.parametrize("why", FOREIGN)
def test_a_foreign_file_with_the_name_of_the_lock_is_refused_and_stays_as_it_is(
    threads: StorageEngine, tmp_path: Path, why: str
) -> None:
    drive, precious = tmp_path / "drive", tmp_path / "precious"
    drive.mkdir()
    precious.write_bytes(b"x" * 8000)
    FOREIGN[why](drive / "infinity.lock", tmp_path)
    before = (drive / "infinity.lock").lstat()
    with pytest.raises(StorageError, match=f"infinity.lock.*{why.strip()}"):
        Volume(threads, [VolumePath(str(drive))])
    found = examine(str(drive))
    assert found is not None and why.strip() in found.faults[0]
    after = (drive / "infinity.lock").lstat()
    assert (after.st_ino, after.st_size, after.st_mode) == (
        before.st_ino,
        before.st_size,
        before.st_mode,
    )
    assert precious.read_bytes() == b"x" * 8000 and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("kind", ["directory", "dangling link"])
def test_what_has_the_name_of_a_swap_file_and_is_none_is_named_and_stays(
    threads: StorageEngine, tmp_path: Path, kind: str
) -> None:
    name = tmp_path / "drive" / "infinity-0123456789abcdef.swap"
    name.parent.mkdir()
    name.mkdir() if kind == "directory" else name.symlink_to("nowhere")
    with pytest.raises(StorageError, match=f"{name.name}.*move it away"):
        Volume(threads, [VolumePath(str(name.parent))])
    found = examine(str(name.parent))
    assert found is not None and name.name in found.faults[0]
    assert os.listdir(name.parent) == [name.name], "and no lock is left behind"


@pytest.mark.parametrize("code", ["ENOLCK", "EOPNOTSUPP", "EIO"])
def test_a_drive_without_file_locks_is_named_with_what_to_do(
    threads: StorageEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="local drive") as caught:
        Volume(threads, [VolumePath(str(tmp_path / "drive"))])
    assert caught.value.errno == getattr(errno, code)
    assert not (tmp_path / "drive").exists()


def test_lock_is_not_held_by_a_child_that_outlives_the_parent(
    threads: StorageEngine, run_python, tmp_path: Path
) -> None:
    script = """
    import os, sys, time
    from infinity.storage.native_engine import open_engine
    from infinity.storage.volume import Volume, VolumePath
    volume = Volume(open_engine("threads", arena=None), [VolumePath(sys.argv[1])])
    if os.fork() == 0:
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        time.sleep(5)
        os._exit(0)
    os._exit(0)  # As if killed: nothing is closed in order.
    """
    run_python(script, str(tmp_path / "drive"))
    Volume(threads, [VolumePath(str(tmp_path / "drive"))]).close()


# Directories that cannot be used.


def test_missing_parent_is_named_and_nothing_is_created(
    threads: StorageEngine, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="parent") as caught:
        Volume(threads, [VolumePath(str(tmp_path / "unmounted" / "drive"))])
    assert caught.value.errno == errno.ENOENT
    assert str(tmp_path / "unmounted" / "drive") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_path_under_a_file_is_refused(threads: StorageEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "drive"):
        with pytest.raises(StorageError, match=str(path)):
            Volume(threads, [VolumePath(str(path))])


def test_read_only_directory_is_refused(threads: StorageEngine, mount: Mount) -> None:
    point = mount("tmpfs", "ro,size=4m")
    for path, words in (
        (point, "is mounted read-only"),
        (point / "drive", "Read-only file system"),
    ):
        with pytest.raises(StorageError, match=words) as caught:
            Volume(threads, [VolumePath(str(path))])
        assert caught.value.errno == errno.EROFS
        assert str(path) in str(caught.value)


def test_second_path_that_fails_releases_the_first(threads: StorageEngine, tmp_path: Path) -> None:
    good = VolumePath(str(tmp_path / "drive"))
    with pytest.raises(StorageError):
        Volume(threads, [good, VolumePath(str(tmp_path / "no" / "drive"))])
    assert not list((tmp_path / "drive").iterdir())
    Volume(threads, [good]).close()


@pytest.mark.parametrize(("paths", "stripe_nbytes"), [(0, MIB), (1, 1000), (1, 0)])
def test_senseless_volumes_are_refused(
    threads: StorageEngine, tmp_path: Path, paths: int, stripe_nbytes: int
) -> None:
    with pytest.raises(ConfigError):
        Volume(threads, [VolumePath(str(tmp_path / "d"))] * paths, stripe_nbytes=stripe_nbytes)


# Capacity.


def test_capacity_is_refused_before_any_file_grows(threads: StorageEngine, tmp_path: Path) -> None:
    paths = [
        VolumePath(str(tmp_path / "a"), capacity_nbytes=4 * MIB),
        VolumePath(str(tmp_path / "b"), capacity_nbytes=2 * MIB),
    ]
    with Volume(threads, paths, stripe_nbytes=MIB) as volume:
        with pytest.raises(CapacityError, match=r"/b: 2.0 MiB") as caught:
            volume.reserve([5 * MIB, 2 * MIB])
        assert (caught.value.needed_nbytes, caught.value.available_nbytes) == (7 * MIB, 6 * MIB)
        assert [os.path.getsize(path) for path in volume.file_paths] == [0, 0]
        volume.reserve([5 * MIB])
        volume.reserve([MIB])
        with pytest.raises(CapacityError):
            volume.reserve([1])


def test_full_disk_is_refused_before_any_file_grows(
    threads: StorageEngine, arena: Arena, mount: Mount
) -> None:
    point = mount("tmpfs", "size=8m")
    (point / "foreign").write_bytes(bytes(4 * MIB))
    for capacity_nbytes in (None, 1 << 40):
        path = VolumePath(str(point / "drive"), capacity_nbytes=capacity_nbytes)
        with Volume(threads, [path]) as volume:
            with pytest.raises(CapacityError, match="nvme"):
                volume.reserve([5 * MIB])
            assert os.path.getsize(volume.file_paths[0]) == 0
            (piece,) = volume.reserve([3 * MIB])
            write_and_read(volume, arena, piece)


def test_paths_on_one_device_share_its_space(threads: StorageEngine, mount: Mount) -> None:
    point = mount("tmpfs", "size=8m")
    for capacity_nbytes in (None, 7 * MIB):
        paths = [VolumePath(str(point / name), capacity_nbytes=capacity_nbytes) for name in "ab"]
        with Volume(threads, paths, stripe_nbytes=MIB) as volume:
            with pytest.raises(CapacityError):
                volume.reserve([10 * MIB])
            assert [os.path.getsize(path) for path in volume.file_paths] == [0, 0]
            volume.reserve([6 * MIB])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_fills_during_preallocation_leaves_no_file_grown(
    code: int, threads: StorageEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take the space between the check and fallocate."""

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes // 2)
        raise OSError(code, os.strerror(code))

    with Volume(threads, [VolumePath(str(tmp_path / "drive"))]) as volume:
        volume.reserve([0])
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(StorageError, match="fallocate") as caught:
            volume.reserve([MIB])
        assert caught.value.errno == code
        assert os.path.getsize(volume.file_paths[0]) == 0


# File systems without direct I/O.


@pytest.fixture
def indirect(mount: Mount) -> Path:
    """A directory whose file system has neither O_DIRECT nor fallocate nor free-space figures."""
    return mount("ramfs")


def test_file_system_without_direct_io_falls_back_with_one_warning(
    native_engine: StorageEngine, arena: Arena, indirect: Path
) -> None:
    path = VolumePath(str(indirect / f"drive-{native_engine.name}"))
    with pytest.warns(RuntimeWarning, match="page cache") as caught:
        for _ in range(2):
            with Volume(native_engine, [path]) as volume:
                (piece,) = volume.reserve([3 * MIB + 1])
                write_and_read(volume, arena, piece)
    assert len(caught) == 1
    assert path.path in str(caught[0].message)


def test_insisting_on_direct_io_is_refused_where_there_is_none(
    threads: StorageEngine, indirect: Path
) -> None:
    with pytest.raises(UnsupportedError, match="direct='auto'"):
        Volume(threads, [VolumePath(str(indirect / "drive"), direct="always")])
    assert not list((indirect / "drive").iterdir())


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
def test_tmpfs_works_in_every_mode_it_offers(
    native_engine: StorageEngine, arena: Arena, mount: Mount, direct: str
) -> None:
    """tmpfs takes O_DIRECT since Linux 6.6; before, "auto" warns and "always" is refused."""
    point = mount("tmpfs", "size=16m")
    probe = point / "probe"
    probe.touch()
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_DIRECT))
    except OSError:
        if direct != "never":
            pytest.skip("this tmpfs has no O_DIRECT; covered by ramfs")
    with Volume(native_engine, [VolumePath(str(point / "drive"), direct=direct)]) as volume:
        (piece,) = volume.reserve([3 * MIB])
        write_and_read(volume, arena, piece)


# Failing writes.


def test_failed_write_poisons_the_volume_even_when_nobody_waits(
    threads: StorageEngine, arena: Arena, tmp_path: Path
) -> None:
    faulty = FaultyEngine(threads, [Fault(nth=2, operation="write", errno=errno.EIO)])
    with Volume(faulty, [VolumePath(str(tmp_path / "drive"))]) as volume:
        (piece,) = volume.reserve([MIB])
        where = {"nbytes": 4096, "address": arena.address, "priority": Priority.WRITE_BACK}
        volume.write(piece, offset_nbytes=0, **where).wait()
        volume.write(piece, offset_nbytes=8192, **where)
        deadline_s = time.monotonic() + TIME_LIMIT_S
        with pytest.raises(StorageError) as first:
            while time.monotonic() < deadline_s:
                volume.read(piece, offset_nbytes=0, **where)
        assert (first.value.errno, first.value.offset_nbytes) == (errno.EIO, 8192)
        for call in (lambda: volume.reserve([1]), volume.sync):
            with pytest.raises(StorageError) as again:
                call()
            assert again.value is first.value


def test_failed_read_leaves_the_volume_usable(
    threads: StorageEngine, arena: Arena, tmp_path: Path
) -> None:
    faulty = FaultyEngine(threads, [Fault(nth=1, operation="read", errno=errno.EIO)])
    with Volume(faulty, [VolumePath(str(tmp_path / "drive"))]) as volume:
        (piece,) = volume.reserve([MIB])
        ticket = volume.read(
            piece, offset_nbytes=0, nbytes=MIB, address=arena.address, priority=Priority.STATE
        )
        with pytest.raises(StorageError):
            ticket.wait()
        write_and_read(volume, arena, piece)


def test_volume_may_be_closed_after_its_engine(open_any, native_name, tmp_path: Path) -> None:
    engine = open_any(native_name)
    volume = Volume(engine, [VolumePath(str(tmp_path / "drive"))])
    volume.reserve([MIB])
    engine.close()
    volume.close()
    assert not list((tmp_path / "drive").iterdir())
