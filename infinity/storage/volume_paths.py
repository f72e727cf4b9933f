"""The paths of a volume: their settings, direct I/O, bandwidths, and the space on them."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from infinity.errors import CapacityError, StorageError, UnsupportedError
from infinity.sizes import MIB, format_nbytes
from infinity.storage.lock_file import locked
from infinity.storage.protocol import Priority, Segment, StorageEngine
from infinity.storage.swap_directory import SwapDirectory
from infinity.storage.volume_layout import SPARES_REMEDY, Extent, PathSpace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VolumePath:
    """One swap directory. `capacity_nbytes` None takes the free space less a reserve.

    `direct` "auto" uses O_DIRECT where the file system has it, "always" insists on it, "never" goes
    through the page cache. `weight` is the path's bandwidth in GB/s, or a number proportional to it
    where every path has one. None measures it, when there are several paths.

    `shared_with`: a directory around `path` in which other processes measure their paths of the
    same drives; they take turns. None: nobody does.
    """

    path: str
    capacity_nbytes: int | None = None
    direct: Literal["auto", "always", "never"] = "auto"
    weight: float | None = 1.0
    shared_with: str | None = None


@dataclass(slots=True)
class OpenPath:
    """A path with its swap directory, and the engine's files: one for each generation."""

    path: VolumePath
    directory: SwapDirectory
    files: list[int] = field(default_factory=list)


def uses_direct_io(path: VolumePath, directory: SwapDirectory) -> bool:
    """Whether the files of a path are opened with O_DIRECT.

    Warns, once for each path, if "auto" finds that direct I/O is not possible. Raises
    UnsupportedError if "always" finds so.
    """
    if path.direct == "never":
        return False
    refusal = directory.refusal_of_direct_io()
    if refusal is None:
        return True
    if path.direct == "always":
        raise UnsupportedError(
            f"direct I/O was asked for and is not possible in {path.path!r}: {refusal}. "
            "Use another file system (ext4, XFS), or direct='auto'"
        )
    _warn_of_buffering(path.path, refusal)
    return False


@functools.cache  # Once for each path and refusal.
def _warn_of_buffering(path: str, refusal: str) -> None:
    message = (
        f"swap path {path!r} goes through the page cache, because direct I/O is not possible: "
        f"{refusal}. Expect 40-100 times the CPU use and less bandwidth; ext4 and XFS support it, "
        "direct='never' silences this"
    )
    _log.warning("%s", message)
    warnings.warn(message, RuntimeWarning, stacklevel=5)


def find_weights(paths: Sequence[OpenPath], engine: StorageEngine) -> tuple[float, ...]:
    """Returns the weight of each path; measures the paths without one.

    If a path has no space for the measurement, every path without a weight gets the weight 1: a
    guess for one path is no better than that.
    """
    unknown = [path for path in paths if path.path.weight is None and len(paths) > 1]
    can_measure = all(_can_be_measured(path) for path in unknown)
    if not can_measure:
        _log.info("swap paths too small to be measured are striped evenly")
    if not unknown or not can_measure:
        return tuple(path.path.weight or 1.0 for path in paths)
    # Ranks that measured at the same time would find a part of each drive's bandwidth, and a part
    # that differs from drive to drive.
    around = paths[0].path.shared_with
    with locked(around, is_needed=False, waits=True) if around is not None else nullcontext():
        return tuple(_weight_of(path, engine) for path in paths)


def _weight_of(path: OpenPath, engine: StorageEngine) -> float:
    if path.path.weight is not None:
        return path.path.weight
    with path.directory.scratch(SAMPLE_NBYTES) as start_nbytes:
        weight = measure_bandwidth(engine, path.files[0], start_nbytes) / 1e9
    _log.info("swap path %r moves %.2f GB/s", path.directory.path, weight)
    return weight


def _can_be_measured(path: OpenPath) -> bool:
    return all(
        nbytes is None or nbytes >= SAMPLE_NBYTES
        for nbytes in (path.path.capacity_nbytes, path.directory.free_nbytes())
    )


def spaces_of(paths: Sequence[OpenPath], weights: Sequence[float]) -> list[PathSpace]:
    """Returns the bytes by which each path may grow. Paths on one device share its space by
    weight."""
    spaces = []
    weighted = list(zip(paths, weights, strict=True))
    for opened, weight in weighted:
        path, directory = opened.path, opened.directory
        sharing = [
            other_weight
            for other, other_weight in weighted
            if other.directory.device == directory.device and other.path.capacity_nbytes is None
        ]
        free_nbytes = directory.free_nbytes()
        if free_nbytes is not None:
            free_nbytes += directory.adopted_nbytes
        if path.capacity_nbytes is not None:
            space_nbytes = max(0, path.capacity_nbytes - directory.taken_nbytes)
            if free_nbytes is not None:
                space_nbytes = min(space_nbytes, free_nbytes)
        elif free_nbytes is None:
            space_nbytes = 1 << 62
        else:
            space_nbytes = int(free_nbytes * (weight / sum(sharing)))
        spaces.append(PathSpace(directory.size_nbytes, space_nbytes, weight, str(directory.path)))
    return spaces


def check_growths(
    paths: Sequence[OpenPath],
    growths: Sequence[int],
    spaces: Sequence[PathSpace],
    *,
    num_spares: int,
) -> None:
    """Raises CapacityError if a path, or the device of several paths, has no space for the growth.

    growths: bytes of each path, spare files included
    """
    growing = [
        (path.directory, growth, space)
        for path, growth, space in zip(paths, growths, spaces, strict=True)
    ]
    for directory, growth_nbytes, space in growing:
        free_nbytes = directory.free_nbytes()
        same = [other for other, _, _ in growing if other.device == directory.device]
        on_device = sum(growth for other, growth, _ in growing if other in same)
        if free_nbytes is not None:
            free_nbytes += sum(other.adopted_nbytes for other in same)
        if growth_nbytes > space.space_nbytes:
            _refuse(directory, growth_nbytes, space.space_nbytes, "the swap path", num_spares)
        if free_nbytes is not None and on_device > free_nbytes:
            _refuse(directory, on_device, free_nbytes, "the device", num_spares)


def _refuse(
    directory: SwapDirectory, needed_nbytes: int, space_nbytes: int, what: str, num_spares: int
) -> NoReturn:
    spares = f", {num_spares} spare generations included" if num_spares else ""
    raise CapacityError(
        "nvme",
        needed_nbytes=needed_nbytes,
        available_nbytes=space_nbytes,
        key="tiers.nvme.capacity",
        remedy=SPARES_REMEDY if num_spares else "",
        detail=f"{what} of {directory.path!r} is too full "
        f"({format_nbytes(space_nbytes)} free{spares})",
    )


def no_generation(path: str, extent: Extent, num_frozen: int, num_spares: int) -> StorageError:
    """Returns the error of a write for which every generation is frozen."""
    return StorageError(
        errno.ENOSPC,
        operation="write",
        path=path,
        offset_nbytes=extent.offset_nbytes,
        nbytes=extent.nbytes,
        detail=f"{num_frozen} commits are kept and there are {num_spares} spare generations; a "
        "commit that could not be released keeps its generation. Resume from the newest checkpoint",
    )


def close_file(engine: StorageEngine, file: int) -> None:
    """Closes a file, unless the engine was closed first."""
    try:
        engine.close_file(file)
    except StorageError as error:
        if error.errno != errno.EBADF:
            raise


SAMPLE_NBYTES = 32 * MIB
_NUM_ROUNDS = 2


def measure_bandwidth(engine: StorageEngine, file: int, start_nbytes: int = 0) -> float:
    """Bytes per second of writing and reading 32 MiB of a file, better of two rounds.

    The file must be so long; what is there is lost. Raises StorageError.
    """
    with mmap.mmap(-1, SAMPLE_NBYTES) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        sample = [Segment(file, start_nbytes, ctypes.addressof(anchor), SAMPLE_NBYTES)]
        try:
            # Not counted: extents that were never written are slow to write.
            engine.submit("write", sample, Priority.STATE).wait()
            best_s = min(_round_trip_s(engine, sample) for _ in range(_NUM_ROUNDS))
        finally:
            engine.drain()  # An interrupted wait leaves the memory in use.
            del anchor  # Else the memory cannot be unmapped.
    return 2 * SAMPLE_NBYTES / best_s


def _round_trip_s(engine: StorageEngine, sample: list[Segment]) -> float:
    start_s = time.perf_counter()
    engine.submit("write", sample, Priority.STATE).wait()
    engine.submit("read", sample, Priority.STATE).wait()
    return time.perf_counter() - start_s
