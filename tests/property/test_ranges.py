"""The range allocator against a map of pages: what it lends, what it refuses, what comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from infinity.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES
from infinity.tiers.ranges import Range, RangeAllocator, rounded_nbytes

PAGES_PER_HUGE = HUGE_PAGE_NBYTES // PAGE_NBYTES

small = st.one_of(st.integers(0, 3 * PAGE_NBYTES), st.integers(0, 40 * PAGE_NBYTES))
large = st.integers(HUGE_PAGE_NBYTES, 3 * HUGE_PAGE_NBYTES + 1)
near_large = st.integers(HUGE_PAGE_NBYTES - PAGE_NBYTES - 1, HUGE_PAGE_NBYTES + PAGE_NBYTES)
sizes = st.one_of(small, large, near_large)


class Allocation(RuleBasedStateMachine):
    """`free` of the model is the set of free page numbers; nothing else is remembered."""

    @initialize(
        capacity_nbytes=st.one_of(
            st.integers(0, 6 * PAGE_NBYTES),
            st.integers(0, 50 * PAGE_NBYTES),
            st.integers(0, 8 * HUGE_PAGE_NBYTES),
            st.integers(0, 8).map(lambda n: n * HUGE_PAGE_NBYTES),
        ),
        piece=st.one_of(st.none(), st.integers(1, 3)),
    )
    def start(self, capacity_nbytes: int, piece: int | None) -> None:
        registered_nbytes = None if piece is None else piece * HUGE_PAGE_NBYTES
        self.allocator = RangeAllocator(capacity_nbytes, registered_nbytes=registered_nbytes)
        self.piece_pages = max(1, capacity_nbytes // PAGE_NBYTES)
        if piece is not None:
            self.piece_pages = piece * PAGES_PER_HUGE
        self.num_pages = capacity_nbytes // PAGE_NBYTES
        self.is_free = [True] * self.num_pages
        self.lent: list[Range] = []

    def has_hole(self, nbytes: int, step: int) -> bool:
        """Whether `nbytes` fit at some page number that is a multiple of `step`."""
        count = nbytes // PAGE_NBYTES
        run = 0  # Free pages from here on, found from the end.
        for page in reversed(range(self.num_pages)):
            is_border = (page + 1) % self.piece_pages == 0
            run = 0 if not self.is_free[page] else 1 if is_border else run + 1
            if run >= count and page % step == 0:
                return True
        return False

    def fits(self, nbytes: int) -> bool:
        rounded = rounded_nbytes(nbytes)
        return self.has_hole(rounded, PAGES_PER_HUGE if rounded >= HUGE_PAGE_NBYTES else 1)

    @rule(nbytes=sizes, at_top=st.sampled_from([None, None, False, True]))
    def allocate(self, nbytes: int, at_top: bool | None) -> None:
        could = self.fits(nbytes)
        taken = self.allocator.allocate(nbytes, at_top=at_top)
        assert (taken is not None) == could
        if taken is None:
            return
        assert nbytes <= taken.nbytes == rounded_nbytes(nbytes)
        if taken.nbytes >= HUGE_PAGE_NBYTES:
            assert taken.offset_nbytes % HUGE_PAGE_NBYTES == 0
        first, last = taken.offset_nbytes // PAGE_NBYTES, taken.end_nbytes // PAGE_NBYTES
        assert taken.offset_nbytes % PAGE_NBYTES == 0 and 0 <= first < last <= self.num_pages
        assert all(self.is_free[first:last]), "a byte was lent twice"
        assert first // self.piece_pages == (last - 1) // self.piece_pages, "across a border"
        self.is_free[first:last] = [False] * (last - first)
        self.lent.append(taken)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        taken = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        self.allocator.free(taken)
        first, last = taken.offset_nbytes // PAGE_NBYTES, taken.end_nbytes // PAGE_NBYTES
        self.is_free[first:last] = [True] * (last - first)
        with pytest.raises(AssertionError):
            self.allocator.free(taken)

    @precondition(lambda self: self.lent)
    @rule()
    def free_all(self) -> None:
        while self.lent:
            self.allocator.free(self.lent.pop())
        self.is_free = [True] * self.num_pages
        if self.num_pages:
            whole = self.allocator.allocate(PAGE_NBYTES)  # From the top of one hole.
            assert whole == Range((self.num_pages - 1) * PAGE_NBYTES, PAGE_NBYTES)
            self.allocator.free(whole)

    @invariant()
    def counts_every_byte(self) -> None:
        assert self.allocator.free_nbytes == sum(self.is_free) * PAGE_NBYTES


Allocation.TestCase.settings = settings(max_examples=120, stateful_step_count=30)
TestAllocation = Allocation.TestCase


@given(nbytes=st.integers(0, 1 << 45))
def test_rounding_is_to_whole_pages_small_and_huge(nbytes: int) -> None:
    rounded = rounded_nbytes(nbytes)
    granule = HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else PAGE_NBYTES
    assert rounded % granule == 0
    assert max(nbytes, 1) <= rounded < max(nbytes, 1) + granule
    assert rounded_nbytes(rounded) == rounded


@given(
    count=st.integers(1, 40),
    huge=st.integers(1, 3),
)
@settings(max_examples=30)
def test_small_ranges_leave_huge_pages_whole(count: int, huge: int) -> None:
    """As many small ranges as fit in one huge page spoil one huge page, not several."""
    allocator = RangeAllocator((huge + 1) * HUGE_PAGE_NBYTES)
    for _ in range(count):
        assert allocator.allocate(PAGE_NBYTES) is not None
    for _ in range(huge):
        assert allocator.allocate(HUGE_PAGE_NBYTES) is not None
    assert allocator.allocate(HUGE_PAGE_NBYTES) is None


@pytest.mark.parametrize("nbytes", [PAGE_NBYTES, HUGE_PAGE_NBYTES])
def test_a_range_comes_from_the_end_that_is_asked_for(nbytes: int) -> None:
    capacity_nbytes = 4 * HUGE_PAGE_NBYTES
    allocator = RangeAllocator(capacity_nbytes)
    top = allocator.allocate(nbytes, at_top=True)
    bottom = allocator.allocate(nbytes, at_top=False)
    assert top == Range(capacity_nbytes - nbytes, nbytes)
    assert bottom == Range(0, nbytes)
