"""The free byte ranges of an arena: a pure first-fit allocator.

Large ranges come from the bottom, aligned to huge pages; small ones come from the top, aligned to
pages. So a small range never splits a huge page that a large range needs, and long-lived small
ranges do not scatter over the space of large ones.

No range lies across a border. Devices register the arena in parts that end at borders, and a copy
across two parts may be refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from infinity.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES, ByteRange, align_down, align_up


@dataclass(frozen=True, slots=True)
class Range(ByteRange):
    """`nbytes` bytes from `offset_nbytes`; both multiples of PAGE_NBYTES."""

    offset_nbytes: int
    nbytes: int


def rounded_nbytes(nbytes: int) -> int:
    """Returns the bytes that `allocate(nbytes)` takes: full huge pages if large, else full
    pages."""
    return align_up(max(nbytes, 1), granule_of(nbytes))


def granule_of(nbytes: int) -> int:
    """Returns what a range of so many bytes, in full pages, begins at a multiple of."""
    return HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else PAGE_NBYTES


def fits_within(start_nbytes: int, end_nbytes: int, nbytes: int) -> bool:
    """Returns whether `allocate(nbytes)` finds space in a hole between two offsets, where there is
    no border."""
    size_nbytes = rounded_nbytes(nbytes)
    return align_up(start_nbytes, granule_of(size_nbytes)) + size_nbytes <= end_nbytes


def is_stacked(taken: Range, free: Iterable[Range], spare_nbytes: int) -> bool:
    """Returns whether at most `spare_nbytes` are free between a range and those that were allocated
    before it: above a small one, below a large one. `free`: disjoint ranges."""
    if taken.nbytes < HUGE_PAGE_NBYTES:
        ends = {other.offset_nbytes: other.end_nbytes for other in free}
        end_nbytes = taken.end_nbytes
        while end_nbytes in ends:
            end_nbytes = ends[end_nbytes]
        return end_nbytes - taken.end_nbytes <= spare_nbytes
    starts = {other.end_nbytes: other.offset_nbytes for other in free}
    start_nbytes = taken.offset_nbytes
    while start_nbytes in starts:
        start_nbytes = starts[start_nbytes]
    return taken.offset_nbytes - align_up(start_nbytes, HUGE_PAGE_NBYTES) <= spare_nbytes


class RangeAllocator:
    """Free list over `capacity_nbytes`. Not thread-safe; the owner locks.

    `registered_nbytes`: the distance of borders, a multiple of HUGE_PAGE_NBYTES; None: no borders.
    """

    def __init__(self, capacity_nbytes: int, *, registered_nbytes: int | None = None) -> None:
        assert registered_nbytes is None or registered_nbytes % HUGE_PAGE_NBYTES == 0
        self._registered_nbytes = registered_nbytes
        self.capacity_nbytes = align_down(capacity_nbytes, PAGE_NBYTES)
        self.free_nbytes = self.capacity_nbytes
        # Disjoint, sorted, never adjacent: neighbours are merged when freed.
        self._starts: list[int] = [0] if self.capacity_nbytes else []
        self._ends: list[int] = [self.capacity_nbytes] if self.capacity_nbytes else []

    def allocate(self, nbytes: int, *, at_top: bool | None = None) -> Range | None:
        """Returns a free range of `rounded_nbytes(nbytes)`; None if no hole is large enough, or if
        the range is larger than `registered_nbytes`. `at_top`: the end it comes from; None: by its
        size."""
        size_nbytes = rounded_nbytes(nbytes)
        if self._registered_nbytes is not None and size_nbytes > self._registered_nbytes:
            return None
        if at_top is None:
            at_top = size_nbytes < HUGE_PAGE_NBYTES
        taken = self._from_top(size_nbytes) if at_top else self._from_bottom(size_nbytes)
        if taken is not None:
            self.free_nbytes -= size_nbytes
        return taken

    def free(self, taken: Range) -> None:
        """Gives back a range that `allocate` lent. A range that is already free asserts."""
        start, end = taken.offset_nbytes, taken.end_nbytes
        index = bisect_left(self._starts, start)
        # INV-1: a range has one owner.
        assert index == 0 or self._ends[index - 1] <= start, f"{taken} is already free"
        assert index == len(self._starts) or end <= self._starts[index], f"{taken} is already free"
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        if index + 1 < len(self._starts) and self._ends[index] == self._starts[index + 1]:
            del self._ends[index], self._starts[index + 1]
        if index > 0 and self._ends[index - 1] == self._starts[index]:
            del self._ends[index - 1], self._starts[index]
        self.free_nbytes += taken.nbytes

    def holes(self) -> list[Range]:
        """Returns the free ranges, by offset; neighbours are one."""
        ends = zip(self._starts, self._ends, strict=True)
        return [Range(start, end - start) for start, end in ends]

    def _from_bottom(self, nbytes: int) -> Range | None:
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            aligned = align_up(start, granule_of(nbytes))
            if self._registered_nbytes is not None and self._is_across(aligned, nbytes):
                aligned = align_up(aligned, self._registered_nbytes)
            if aligned + nbytes <= end:
                return self._take(index, aligned, nbytes)
        return None

    def _from_top(self, nbytes: int) -> Range | None:
        granule = granule_of(nbytes)
        for index in range(len(self._starts) - 1, -1, -1):
            start = align_up(self._starts[index], granule)
            end = align_down(self._ends[index], granule)
            if self._registered_nbytes is not None and self._is_across(end - nbytes, nbytes):
                end = align_down(end, self._registered_nbytes)
            if end - start >= nbytes:
                return self._take(index, end - nbytes, nbytes)
        return None

    def _is_across(self, offset_nbytes: int, nbytes: int) -> bool:
        """Whether a border lies inside the range."""
        assert self._registered_nbytes is not None
        last = offset_nbytes + nbytes - 1
        return offset_nbytes // self._registered_nbytes != last // self._registered_nbytes

    def _take(self, index: int, offset_nbytes: int, nbytes: int) -> Range:
        """Cuts the range out of hole `index`, leaving what is before and after it."""
        start, end = self._starts[index], self._ends[index]
        rest = [(start, offset_nbytes), (offset_nbytes + nbytes, end)]
        rest = [(low, high) for low, high in rest if low < high]
        self._starts[index : index + 1] = [low for low, _ in rest]
        self._ends[index : index + 1] = [high for _, high in rest]
        return Range(offset_nbytes, nbytes)
