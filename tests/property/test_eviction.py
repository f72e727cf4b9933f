"""Choosing the unit to evict: never worse than the best of all possible choices, found by search.

Source of the claim: Belady 1966. The search here looks at every eviction that could be made, so it
has no code in common with the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from infinity.sizes import PAGE_NBYTES
from infinity.streaming.weights.access_order import NEVER, AccessOrder
from infinity.streaming.weights.eviction import (
    Evictable,
    choose_neighbours,
    choose_victim,
    main_sizes,
)
from infinity.tiers.ranges import Range, RangeAllocator

uses = st.integers(0, 4)
orders = st.lists(uses, min_size=1, max_size=8)


def fewest_fetches(sequence: list[int], capacity: int) -> int:
    """The fewest fetches with which `sequence` can be served when `capacity` units fit, by
    search."""

    @cache
    def least(position: int, resident: frozenset[int]) -> int:
        if position == len(sequence):
            return 0
        unit = sequence[position]
        if unit in resident:
            return least(position + 1, resident)
        if len(resident) < capacity:
            return 1 + least(position + 1, resident | {unit})
        return 1 + min(least(position + 1, resident - {each} | {unit}) for each in resident)

    return least(0, frozenset())


def fetches_of_the_rule(order: list[int], cycles: int, capacity: int) -> int:
    """Fetches when `choose_victim` decides, with a trace that knows the order from the start."""
    trace = AccessOrder()
    trace.begin()
    for unit in order:
        trace.visit(unit)
    resident: set[int] = set()
    fetches = 0
    for _ in range(cycles):
        trace.begin()
        for unit in order:
            trace.visit(unit)
            if unit in resident:
                continue
            fetches += 1
            if len(resident) == capacity:
                victim = choose_victim(trace, sorted(resident))
                assert victim in resident
                resident.discard(victim)
            resident.add(unit)
    return fetches


@given(order=orders, cycles=st.integers(1, 3), capacity=st.integers(1, 4))
@example(
    order=[0, 1, 2, 3], cycles=3, capacity=3
)  # A loop larger than the memory: LRU would always miss.
@example(order=[0, 1, 2, 3, 3, 2, 1, 0], cycles=3, capacity=2)  # Forward and backward.
@settings(max_examples=250)
def test_no_eviction_policy_fetches_less(order: list[int], cycles: int, capacity: int) -> None:
    assert fetches_of_the_rule(order, cycles, capacity) == fewest_fetches(order * cycles, capacity)


@given(order=orders, start=st.integers(0, 7), candidates=st.sets(st.integers(0, 6)),
       wanted=st.one_of(st.none(), uses))  # fmt: skip
@settings(max_examples=200)
def test_the_victim_is_the_one_used_last_and_later_than_who_asks(
    order: list[int], start: int, candidates: set[int], wanted: int | None
) -> None:
    trace = AccessOrder()
    trace.begin()
    for unit in order:
        trace.visit(unit)
    trace.begin()
    for unit in order[:start]:
        trace.visit(unit)
    if wanted is not None and wanted not in order:
        return  # Only units of the prediction are ever wanted ahead.
    victim = choose_victim(trace, sorted(candidates), nearer_than=wanted)
    allowed = [
        unit
        for unit in candidates
        if wanted is None or trace.distance(unit) > trace.distance(wanted)
    ]
    if not allowed:
        assert victim is None
        return
    assert victim in allowed
    assert trace.distance(victim) == max(map(trace.distance, allowed))


def test_eviction_takes_units_outside_the_prediction_first() -> None:
    trace = AccessOrder()
    trace.begin()
    for unit in (0, 1, 2):
        trace.visit(unit)
    trace.begin()
    assert trace.distance(9) == NEVER
    assert choose_victim(trace, [0, 1, 9, 2]) == 9
    assert choose_victim(trace, [0, 9], nearer_than=2) == 9


def test_eviction_prefers_a_fitting_unit_over_an_oversized_one() -> None:
    trace = AccessOrder()
    trace.begin()
    for unit in (0, 1, 2, 3):
        trace.visit(unit)
    trace.begin()
    nbytes = [2, 2, 2, 9, 9]
    assert choose_victim(trace, [0, 1, 2, 3], nbytes=nbytes, wanted_nbytes=2) == 2
    assert choose_victim(trace, [0, 1, 3], nbytes=nbytes, wanted_nbytes=1) == 1
    assert choose_victim(trace, [0, 1, 2, 3], nbytes=nbytes, wanted_nbytes=3) == 3
    assert choose_victim(trace, [0, 4], nbytes=nbytes, wanted_nbytes=2) == 4, "never used again"
    assert choose_victim(trace, [0, 1, 3], nearer_than=2, nbytes=nbytes, wanted_nbytes=2) == 3


# (pages, what is there): a hole, a block that stays, or a block with the distance of its next use.
rows = st.lists(
    st.tuples(st.integers(1, 4), st.one_of(st.sampled_from(["hole", "stays"]), st.integers(0, 6))),
    min_size=1,
    max_size=9,
)


def arena(
    row: list[tuple[int, str | int]], without: set[int]
) -> tuple[RangeAllocator, list[Range]]:
    """An arena with the blocks of `row` at ascending offsets, less the holes and `without`; and the
    range of each."""
    allocator = RangeAllocator(sum(pages for pages, _ in row) * PAGE_NBYTES)
    places = []
    for pages, _ in reversed(row):  # Small ranges come from the top.
        place = allocator.allocate(pages * PAGE_NBYTES)
        assert place is not None
        places.insert(0, place)
    for index, (_, content) in enumerate(row):
        if content == "hole" or index in without:
            allocator.free(places[index])
    return allocator, places


@given(row=rows, wanted=st.integers(1, 8))
@example(row=[(2, 5), (2, 6), (1, "hole"), (2, 4)], wanted=4)  # Two neighbours used late.
@example(row=[(2, 9), (1, "stays"), (2, 8), (2, 3)], wanted=3)  # The latest has no neighbour.
@example(row=[(4, 9), (1, 3)], wanted=1)  # The large block would leave a hole.
@example(row=[(2, 5), (1, "hole"), (4, 6)], wanted=3)  # A smaller one, with the hole beside it.
@settings(max_examples=300)
def test_the_neighbours_that_go_are_those_whose_first_use_is_furthest_away(
    row: list[tuple[int, str | int]], wanted: int
) -> None:
    """Against every row of blocks that could go, on the allocator of the arena."""
    allocator, places = arena(row, set())
    blocks = [
        Evictable(places[index], index, content)
        for index, (_, content) in enumerate(row)
        if isinstance(content, int)
    ]
    holes = allocator.holes()
    wanted_nbytes = wanted * PAGE_NBYTES
    assume(all(hole.nbytes < wanted_nbytes for hole in holes))

    def makes_room(chosen: tuple[Evictable, ...]) -> bool:
        without = {each.unit for each in chosen}
        return arena(row, without)[0].allocate(wanted_nbytes) is not None

    def score(chosen: Sequence[Evictable]) -> tuple[bool, bool, int, int]:
        nbytes, soonest = sum(b.range.nbytes for b in chosen), min(b.distance for b in chosen)
        return nbytes <= wanted_nbytes, nbytes <= 2 * wanted_nbytes, soonest, -nbytes

    every = [blocks[i:j] for i in range(len(blocks)) for j in range(i + 1, len(blocks) + 1)]
    possible = [chosen for chosen in every if makes_room(tuple(chosen))]
    found = choose_neighbours(blocks, holes, wanted_nbytes)
    assert bool(found) == bool(possible)
    if possible:
        assert makes_room(tuple(found))
        assert score(found) == max(map(score, possible))


def test_blocks_that_no_use_is_expected_of_go_first() -> None:
    _, places = arena([(1, 0), (3, 0), (1, 0)], set())
    used, never, same = (
        Evictable(place, unit, distance)
        for unit, (place, distance) in enumerate(zip(places, (9, NEVER, 8), strict=True))
    )
    assert choose_neighbours([used, never, same], [], PAGE_NBYTES) == [never]
    assert choose_neighbours([used, never, same], [], 4 * PAGE_NBYTES) == [used, never]


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        ([], (0, 0)),
        ([90], (79, 90)),
        ([90, 80, 10, 10, 10], (79, 90)),  # Tiles that differ by a page, and small units.
        ([90, *[60] * 4, 62], (55, 62)),  # Attention, and tiles that have most of the bytes.
    ],
)
def test_the_main_sizes_are_those_of_most_bytes(
    nbytes: list[int], expected: tuple[int, int]
) -> None:
    assert main_sizes(nbytes) == expected
