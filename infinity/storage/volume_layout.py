"""The place of every byte of a buffer on the paths: pure functions that touch no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from infinity.errors import CapacityError, ConfigError
from infinity.sizes import PAGE_NBYTES, ByteRange, align_down, align_up, format_nbytes, joined

# Decides the space that is needed with spare generations.
SPARES_REMEDY = "change tiers.nvme.capacity, checkpoint.keep or checkpoint.durability"


@dataclass(frozen=True, slots=True)
class Extent(ByteRange):
    """A contiguous range of the swap file on path `path_index`."""

    path_index: int
    offset_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Spared:
    """A buffer in frozen contents: its first `nbytes` have space in spare files. Contents
    of commits do not keep a buffer that `is_private`; those that only this process needs do."""

    nbytes: int
    is_private: bool = False

    def num_files(self, num_spares: int, num_private: int) -> int:
        """Returns the number of spare files with space for it, the first ones of `num_spares`.
        `num_private` contents that only this process needs are frozen at a time."""
        return num_private if self.is_private else num_spares


def spares_nbytes(spared: Iterable[Spared | None], num_spares: int, num_private: int) -> int:
    """Returns the bytes that all spare files of a volume take."""
    return sum(head.nbytes * head.num_files(num_spares, num_private) for head in spared if head)


@dataclass(frozen=True, slots=True)
class PathGrowth:
    """Space of one path for new buffers: its file grows to `size_nbytes`, and each spare file gets
    space for ranges (offset, bytes). `added_nbytes`: of all files."""

    size_nbytes: int
    spared: Sequence[Sequence[tuple[int, int]]]
    added_nbytes: int


@dataclass(frozen=True, slots=True)
class PathSpace:
    """Space of one path: the next free offset of its file, the bytes by which it may grow, and its
    weight, a number proportional to its bandwidth. `name`: the directory, for errors."""

    start_nbytes: int
    space_nbytes: int
    weight: float = 1.0
    name: str = ""


def stripe(
    sizes_nbytes: Sequence[int], spaces: Sequence[PathSpace], *, stripe_nbytes: int
) -> list[tuple[Extent, ...]]:
    """Lays buffers out over paths: extents of each, in order, that cover it rounded up to 4096.

    Every stripe goes to the path that would have the least bytes per weight with it, so that any
    run of stripes is shared in proportion to the weights until a path is full. Worked example:
    weights 2 and 1, a buffer of 3 stripes: path 0, 1, 0 or 0, 0, 1, never 1, 1, 0. Neighbouring
    stripes on one path become one extent.

    Raises CapacityError if the buffers do not fit all paths together.
    """
    if any(space.weight <= 0 for space in spaces):
        raise ConfigError(f"weights must be positive, got {[space.weight for space in spaces]}")
    rounded = [align_up(nbytes, PAGE_NBYTES) for nbytes in sizes_nbytes]
    free = [max(0, align_down(space.space_nbytes, PAGE_NBYTES)) for space in spaces]
    if sum(rounded) > sum(free):
        per_path = ", ".join(
            f"{space.name or f'path {index}'}: {format_nbytes(nbytes)}"
            for index, (space, nbytes) in enumerate(zip(spaces, free, strict=True))
        )
        raise CapacityError(
            "nvme",
            needed_nbytes=sum(rounded),
            available_nbytes=sum(free),
            key="tiers.nvme.capacity",
            remedy="free space there, add another [[tiers.nvme]] path, or raise "
            "tiers.nvme.capacity where that is the limit",
            detail=f"the swap paths are too small ({per_path})",
        )
    used = [0] * len(spaces)

    # INV-1: an extent has one owner; space is handed out once.
    def lay_out(nbytes: int) -> Iterator[Extent]:
        while nbytes > 0:
            want_nbytes = min(nbytes, stripe_nbytes)
            index = min(
                (i for i, taken in enumerate(used) if taken < free[i]),
                key=lambda i: ((used[i] + want_nbytes) / spaces[i].weight, i),
            )
            taken_nbytes = min(want_nbytes, free[index] - used[index])
            yield Extent(index, spaces[index].start_nbytes + used[index], taken_nbytes)
            used[index] += taken_nbytes
            nbytes -= taken_nbytes

    return [joined(lay_out(nbytes), lambda extent: extent.path_index) for nbytes in rounded]


def share_with_spares(
    spaces: Sequence[PathSpace], sizes_nbytes: Sequence[int], spare_nbytes: int, *, num_spares: int
) -> list[PathSpace]:
    """Returns the capacities without the space that spare files take.

    `spare_nbytes`: of all `num_spares` together. Worked example, buffers of 6 and 2 GiB, all of the
    first spared once. That is 14 GiB for 8, so a capacity of 28 GiB counts as one of 16 GiB. Raises
    CapacityError if all paths together are too small.
    """
    needed_nbytes = sum(align_up(nbytes, PAGE_NBYTES) for nbytes in sizes_nbytes)
    if not spare_nbytes:
        return list(spaces)
    available_nbytes = sum(max(0, space.space_nbytes) for space in spaces)
    if needed_nbytes + spare_nbytes > available_nbytes:
        raise CapacityError(
            "nvme",
            needed_nbytes=needed_nbytes + spare_nbytes,
            available_nbytes=available_nbytes,
            key="tiers.nvme.capacity",
            remedy=SPARES_REMEDY,
            detail=f"the swap paths are too small for {format_nbytes(needed_nbytes)} of state and "
            f"{num_spares} spare generations of what training rewrites, "
            f"{format_nbytes(spare_nbytes)} in all",
        )
    share = needed_nbytes / (needed_nbytes + spare_nbytes)
    # Rounding must not make a sum that fits look as if it did not.
    return [
        replace(space, space_nbytes=int(space.space_nbytes * share) + PAGE_NBYTES)
        for space in spaces
    ]


def growths_of(
    buffers: Sequence[tuple[Extent, ...]],
    heads: Sequence[tuple[int, int]],
    sizes_nbytes: Sequence[int],
    *,
    num_spares: int,
) -> list[PathGrowth]:
    """Returns what new buffers take of each path.

    `heads`: of each buffer, the number of spare files with space for it, and for how many bytes.
    `sizes_nbytes`: of the file of each path, before.
    """
    ends = list(sizes_nbytes)
    spared = [[list[tuple[int, int]]() for _ in range(num_spares)] for _ in sizes_nbytes]
    for extents, (num_files, head_nbytes) in zip(buffers, heads, strict=True):
        for extent in extents:
            ends[extent.path_index] = max(ends[extent.path_index], extent.end_nbytes)
        for extent, _ in slice_extents(extents, offset_nbytes=0, nbytes=head_nbytes):
            for ranges in spared[extent.path_index][:num_files]:
                ranges.append((extent.offset_nbytes, extent.nbytes))
    return [
        PathGrowth(end, of_path, end - size + sum(nbytes for one in of_path for _, nbytes in one))
        for size, end, of_path in zip(sizes_nbytes, ends, spared, strict=True)
    ]


def slice_extents(
    extents: Sequence[Extent], *, offset_nbytes: int, nbytes: int
) -> list[tuple[Extent, int]]:
    """The extents under the range, cut to it, each with its distance from the range's start.

    Raises ValueError when the range is not inside the buffer.
    """
    total_nbytes = sum(extent.nbytes for extent in extents)
    if offset_nbytes < 0 or nbytes < 0 or offset_nbytes + nbytes > total_nbytes:
        raise ValueError(
            f"range {offset_nbytes}..{offset_nbytes + nbytes} is outside the buffer of "
            f"{total_nbytes} bytes"
        )
    found: list[tuple[Extent, int]] = []
    start_nbytes = 0  # of the extent within the buffer
    for extent in extents:
        low = max(offset_nbytes, start_nbytes)
        high = min(offset_nbytes + nbytes, start_nbytes + extent.nbytes)
        if low < high:
            part = Extent(extent.path_index, extent.offset_nbytes + low - start_nbytes, high - low)
            found.append((part, low - offset_nbytes))
        start_nbytes += extent.nbytes
    return found
