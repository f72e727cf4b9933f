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
    ByNextUse,
    Evictable,
    choose_neighbours,
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
    """Fetches when the furthest next use decides, with a trace that knows the order."""
    trace = AccessOrder()
    visit_all(trace, order)
    resident = ByNextUse(trace)
    fetches = 0
    for _ in range(cycles):
        trace.begin()
        for unit in order:
            trace.visit(unit)
            if unit in resident:
                continue
            fetches += 1
            if len(list(resident)) == capacity:
                victim = resident.victim(lambda unit: True)
                assert victim is not None and victim in resident
                resident.remove(victim)
            resident.add(unit)
    return fetches


def visit_all(trace: AccessOrder, order: list[int]) -> None:
    trace.begin()
    for unit in order:
        trace.visit(unit)


@given(order=orders, cycles=st.integers(1, 3), capacity=st.integers(1, 4))
@example(
    order=[0, 1, 2, 3], cycles=3, capacity=3
)  # A loop larger than the memory: LRU would always miss.
@example(order=[0, 1, 2, 3, 3, 2, 1, 0], cycles=3, capacity=2)  # Forward and backward.
@settings(max_examples=250)
def test_no_eviction_policy_fetches_less(order: list[int], cycles: int, capacity: int) -> None:
    assert fetches_of_the_rule(order, cycles, capacity) == fewest_fetches(order * cycles, capacity)


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["use", "add", "remove"]), st.integers(0, 6)),
        st.tuples(st.sampled_from(["begin", "train", "eval"]), st.just(0)),
    ),
    max_size=30,
)


@given(order=orders, steps=steps, kept=st.sets(st.integers(0, 6)), nearer=st.integers(0, 6),
       wanted=st.integers(0, 9), is_limited=st.booleans())  # fmt: skip
@example(order=[0], steps=[("add", 0)] + [("use", 1)] * 3, kept=set(), nearer=1, wanted=0,
         is_limited=False)  # fmt: skip
@settings(max_examples=300)
def test_units_lie_in_the_order_of_their_next_uses_after_any_uses(
    order: list[int],
    steps: list[tuple[str, int]],
    kept: set[int],
    nearer: int,
    wanted: int,
    is_limited: bool,
) -> None:
    """Unit 6 feeds unit 0, and unit 5 is used by mistake alone. A row that is asked after every
    step, and one that is asked once, against the distance of each unit."""
    trace, nbytes = AccessOrder({6: 0}), [2, 2, 2, 9, 9, 5, 2]
    visit_all(trace, order)
    trace.begin()
    asked, once, plain = ByNextUse(trace, nbytes), ByNextUse(trace, nbytes), ByNextUse(trace)
    there: set[int] = set()
    for what, unit in steps:
        if what == "use":
            trace.visit(unit)
        elif what == "begin":
            trace.begin()
        elif what in ("train", "eval"):
            trace.turn_to(what)
        else:
            for row in (asked, once, plain):
                (row.add if what == "add" else row.remove)(unit)
            (there.add if what == "add" else there.discard)(unit)
        list(asked.later_than(0))
    distance = trace.distance
    limit = distance(nearer) if is_limited else -1
    allowed = [unit for unit in there if unit not in kept and distance(unit) > limit]
    fitting = [unit for unit in allowed if wanted <= nbytes[unit] <= 2 * wanted]
    expected = max(map(distance, allowed), default=None)
    largest = {nbytes[unit] for unit in allowed if distance(unit) == expected}
    for row in (asked, once):
        named = {"nearer_than": nearer} if is_limited else {}
        victim = row.victim(lambda unit: unit not in kept, wanted_nbytes=wanted, **named)
        assert (victim is None) == (not allowed)
        if victim is None or expected is None:
            continue
        assert victim in allowed
        if min(largest) > 2 * wanted and expected < NEVER and fitting:
            assert distance(victim) == max(map(distance, fitting)) and victim in fitting
        elif max(largest) <= 2 * wanted or expected == NEVER or not fitting:
            assert distance(victim) == expected
        later = list(row.later_than(trace.next_use(nearer)))
        assert set(later) == {unit for unit in there if distance(unit) > distance(nearer)}
        assert set(row) == there
    soonest = [distance(unit) for unit in plain.soonest()]
    assert soonest == sorted(distance(unit) for unit in there if distance(unit) < NEVER)


def test_a_row_of_other_indexes_follows_the_same_uses() -> None:
    trace = AccessOrder()
    visit_all(trace, [0, 1, 2])
    trace.begin()
    row = ByNextUse(trace, first=10)
    for unit in (10, 11, 12):
        row.add(unit)
    trace.visit(0)
    assert list(row.soonest()) == [11, 12, 10]
    assert row.victim(lambda unit: True, nearer_than=10) is None


def test_eviction_takes_units_outside_the_prediction_first() -> None:
    assert victim_of([0, 1, 2], [0, 1, 9, 2]) == 9
    assert victim_of([0, 1, 2], [0, 9], nearer_than=2) == 9


def victim_of(order: list[int], candidates: list[int], **named: int) -> int | None:
    trace = AccessOrder()
    visit_all(trace, order)
    trace.begin()
    row = ByNextUse(trace, [2, 2, 2, 9, 9, 0, 0, 0, 0, 2])
    for unit in candidates:
        row.add(unit)
    return row.victim(lambda unit: True, **named)


@pytest.mark.parametrize(
    ("candidates", "wanted", "expected", "nearer_than"),
    [
        ([0, 1, 2, 3], 2, 2, None),
        ([0, 1, 3], 1, 1, None),
        ([0, 1, 2, 3], 3, 3, None),
        ([0, 4], 2, 4, None),  # Never used again.
        ([0, 1, 3], 2, 3, 2),
    ],
)
def test_eviction_prefers_a_fitting_unit_over_an_oversized_one(
    candidates: list[int], wanted: int, expected: int, nearer_than: int | None
) -> None:
    named = {} if nearer_than is None else {"nearer_than": nearer_than}
    assert victim_of([0, 1, 2, 3], candidates, wanted_nbytes=wanted, **named) == expected


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
