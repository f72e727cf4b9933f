"""Choosing the unit to evict: never worse than the best of all possible choices, found by search.

Source of the claim: Belady 1966. The search here looks at every eviction that could be made, so it
has no code in common with the rule.
"""

from __future__ import annotations

from functools import cache

from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinity.streaming.access_order import NEVER, AccessOrder
from infinity.streaming.eviction import choose_victim

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
