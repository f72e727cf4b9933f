"""Files to measure on: of bounded size, written once before anything is timed, removed after.

Each path has one swap file with two regions of equal size. The *still* region holds seed 0 and is
only read; every contender overwrites the *busy* region.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infinity.errors import CapacityError, StorageError
from infinity.sizes import GIB, MIB
from infinity.storage.arena import Arena
from infinity.storage.open import open_engine
from infinity.storage.protocol import Priority
from infinity.storage.volume import Extent, Volume, VolumePath
from infinity.tools.bench import pattern

DIRECTORY_NAME = "infinity-bench"
STILL_SEED = 0
STRIPE_NBYTES = 4 * MIB

RegionName = Literal["still", "busy"]


@dataclass(frozen=True, slots=True)
class SpaceShare:
    """The part of a region that lies in one file: contiguous, because a region is laid out once."""

    path: str
    offset_nbytes: int
    nbytes: int


class BenchDirectory:
    """Two regions of `nbytes` striped over `directories`, filled. Not thread-safe.

    Makes `infinity-bench` below each directory, locked like any swap directory: two benchmarks on
    one path would measure each other. `arena` holds at least `nbytes`. Raises CapacityError before
    a file grows when a drive is too full, StorageError when a directory cannot be used.
    """

    def __init__(
        self,
        arena: Arena,
        directories: Sequence[Path],
        nbytes: int,
        *,
        weights: Sequence[float] = (),
    ) -> None:
        assert nbytes % MIB == 0 and arena.capacity_nbytes >= nbytes
        self.nbytes = nbytes
        self.directories = tuple(directories)
        self._roots = [directory / DIRECTORY_NAME for directory in directories]
        self._stack = contextlib.ExitStack()
        try:
            self._open(arena, weights or [1.0] * len(directories))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BenchDirectory:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the files and the directories that were made. Idempotent."""
        self._stack.close()

    def shares(self, region: RegionName) -> list[SpaceShare]:
        """The contiguous part of a region in every file."""
        return shares_of(self.regions[region], self.file_paths)

    def _open(self, arena: Arena, weights: Sequence[float]) -> None:
        check_space(self._roots, weights, 2 * self.nbytes)
        for root in self._roots:
            self._stack.callback(remove_directory, root)
        engine = open_engine("auto", arena=arena)
        self._stack.callback(engine.close)
        paths = [
            VolumePath(str(root), weight=weight)
            for root, weight in zip(self._roots, weights, strict=True)
        ]
        volume = Volume(engine, paths, stripe_nbytes=STRIPE_NBYTES)
        self._stack.callback(volume.close)
        still, busy = volume.reserve([self.nbytes, self.nbytes])
        self.regions: dict[RegionName, tuple[Extent, ...]] = {"still": still, "busy": busy}
        self.file_paths = volume.file_paths
        self.is_direct = tuple(_takes_direct(path) for path in self.file_paths)
        memory = arena.memory(0, self.nbytes)
        pattern.fill(memory, offset_nbytes=0, seed=STILL_SEED)
        # Reads of unwritten bytes return zeros without touching the drive, and the first
        # write to it is slower: both regions are written before anything is timed.
        for extents in (still, busy):
            volume.write(
                extents, offset_nbytes=0, nbytes=self.nbytes, address=arena.address,
                priority=Priority.STATE,
            ).wait()  # fmt: skip
        volume.sync()


def shares_of(extents: Sequence[Extent], file_paths: Sequence[str]) -> list[SpaceShare]:
    """The range that `extents` cover in each file, in the order of the files."""
    shares = []
    for index, path in enumerate(file_paths):
        own = [extent for extent in extents if extent.path_index == index]
        if own:
            start_nbytes = min(extent.offset_nbytes for extent in own)
            shares.append(SpaceShare(path, start_nbytes, sum(extent.nbytes for extent in own)))
    return shares


def check_space(roots: Sequence[Path], weights: Sequence[float], nbytes: int) -> None:
    """Raises CapacityError unless every drive keeps its reserve with `nbytes` over all paths.

    The reserve is 5 % of the file system or 1 GiB, whichever is smaller, as for swap files.
    """
    wanted: dict[int, int] = {}
    for root, weight in zip(roots, weights, strict=True):
        device = _existing(root).stat().st_dev
        wanted[device] = wanted.get(device, 0) + int(nbytes * weight / sum(weights))
    for root in roots:
        place = _existing(root)
        found = os.statvfs(place)
        reserve_nbytes = min(GIB, found.f_blocks * found.f_frsize // 20)
        free_nbytes = found.f_bavail * found.f_frsize - reserve_nbytes
        needed_nbytes = wanted[place.stat().st_dev]
        if found.f_blocks and needed_nbytes > free_nbytes:
            raise CapacityError(
                "nvme",
                needed_nbytes=needed_nbytes,
                available_nbytes=max(0, free_nbytes),
                key="tiers.nvme.path",
                remedy="choose a smaller --size, or free space on the drive",
                detail=f"the drive of {place} is too full to measure on",
            )


def _existing(root: Path) -> Path:
    if root.parent.is_dir():
        return root.parent
    raise StorageError(
        errno.ENOENT,
        operation="use",
        path=str(root.parent),
        detail="it is no directory; name one on the drive to be measured",
    )


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
