"""Files to measure on: of bounded size, written once before anything is timed, removed after.

Each path has one swap file with two regions of equal size. The *still* region holds seed 0 and is
only read; every contender overwrites the *busy* region.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infinity.errors import CapacityError
from infinity.sizes import MIB
from infinity.storage.arena import Arena
from infinity.storage.native_engine import open_engine
from infinity.storage.protocol import FileRange, Priority
from infinity.storage.volume import Extent, Volume, VolumePath
from infinity.tools.bench import pattern

DIRECTORY_NAME = "infinity-bench"
STILL_SEED = 0
STRIPE_NBYTES = 4 * MIB

RegionName = Literal["still", "busy"]


@dataclass(frozen=True, slots=True)
class BenchDirectory:
    """Two regions of `nbytes`, striped over `directories` and filled."""

    nbytes: int
    directories: tuple[Path, ...]
    file_paths: tuple[str, ...]
    is_direct: tuple[bool, ...]
    regions: Mapping[RegionName, tuple[Extent, ...]]

    def shares(self, region: RegionName) -> list[FileRange]:
        """The contiguous part of a region in every file."""
        return shares_of(self.regions[region], self.file_paths)


@contextlib.contextmanager
def bench_directory(
    arena: Arena, directories: Sequence[Path], nbytes: int, *, weights: Sequence[float] = ()
) -> Iterator[BenchDirectory]:
    """Makes `infinity-bench` below each directory for the time of a `with` block.

    It is locked like any swap directory: two benchmarks on one path would measure each other.
    `arena` holds at least `nbytes`. Raises CapacityError before a file grows when a drive is too
    full, StorageError when a directory cannot be used.
    """
    assert nbytes % MIB == 0 and arena.capacity_nbytes >= nbytes
    roots = [directory / DIRECTORY_NAME for directory in directories]
    with contextlib.ExitStack() as stack:
        for root in roots:
            stack.callback(remove_directory, root)
        engine = stack.enter_context(open_engine("auto", arena=arena))
        paths = [
            VolumePath(str(root), weight=weight)
            for root, weight in zip(roots, weights or [1.0] * len(roots), strict=True)
        ]
        volume = stack.enter_context(Volume(engine, paths, stripe_nbytes=STRIPE_NBYTES))
        still, busy = reserve(volume, [nbytes, nbytes])
        pattern.fill(arena.memory(0, nbytes), offset_nbytes=0, seed=STILL_SEED)
        # Reads of unwritten bytes return zeros without touching the drive, and the first
        # write to it is slower: both regions are written before anything is timed.
        for extents in (still, busy):
            volume.write(
                extents, offset_nbytes=0, nbytes=nbytes, address=arena.address,
                priority=Priority.STATE,
            ).wait()  # fmt: skip
        volume.sync()
        is_direct = tuple(_takes_direct(path) for path in volume.file_paths)
        yield BenchDirectory(
            nbytes, tuple(directories), volume.file_paths, is_direct, {"still": still, "busy": busy}
        )


def reserve(volume: Volume, sizes_nbytes: Sequence[int]) -> list[tuple[Extent, ...]]:
    """Reserves buffers of a volume. Raises CapacityError that names --size when a drive is too
    full."""
    try:
        return volume.reserve(sizes_nbytes)
    except CapacityError as error:
        raise CapacityError(
            "nvme", needed_nbytes=error.needed_nbytes, available_nbytes=error.available_nbytes,
            key="tiers.nvme.path",
            remedy="free space on the drive, or name another; infinity bench has --size",
            detail=f"the drive of {volume.file_paths[0]} is too full to measure on",
        ) from error  # fmt: skip


def shares_of(extents: Sequence[Extent], file_paths: Sequence[str]) -> list[FileRange]:
    """The range that `extents` cover in each file, in the order of the files."""
    shares = []
    for index, path in enumerate(file_paths):
        own = [extent for extent in extents if extent.path_index == index]
        if own:
            start_nbytes = min(extent.offset_nbytes for extent in own)
            shares.append(FileRange(path, start_nbytes, sum(extent.nbytes for extent in own)))
    return shares


def _takes_direct(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def remove_directory(root: Path) -> None:
    """Removes a swap directory that is closed. The lock file is ours; anything else there is not,
    and keeps the directory."""
    with contextlib.suppress(OSError):
        (root / "infinity.lock").unlink()
    with contextlib.suppress(OSError):
        root.rmdir()
