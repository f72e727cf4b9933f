"""The access order against a model that writes the predicted future out and looks through it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.streaming.weights.access_order import NEVER, AccessOrder

NUM_UNITS = 5
uses = st.integers(0, NUM_UNITS - 1)
passes = st.lists(st.lists(uses, max_size=12), min_size=1, max_size=5)


class Future:
    """`ahead` is the endless prediction, as far as a test can look."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.ahead: list[int] = []
        self.misses = 0

    def begin(self, last_pass: list[int]) -> None:
        if last_pass:
            self.order = list(last_pass)
        self.ahead = self.order * 60

    def distance(self, unit: int, beyond: int = -1) -> int:
        return self.ahead.index(unit, beyond + 1) if unit in self.order else NEVER

    def upcoming(self) -> list[int]:
        return list(dict.fromkeys(self.ahead[: len(self.order)]))

    def visit(self, unit: int) -> bool:
        distance = self.distance(unit)
        self.misses += bool(self.order) and distance != 0
        if distance != NEVER:
            self.ahead = self.ahead[distance + 1 :]
        return distance == 0


@given(passes=passes)
@settings(max_examples=200)
def test_it_predicts_what_the_model_predicts(passes: list[list[int]]) -> None:
    trace, future = AccessOrder(), Future()
    last: list[int] = []
    for one in passes:
        trace.begin()
        future.begin(last)
        for unit in one:
            _same_view(trace, future)
            assert trace.visit(unit) == future.visit(unit)
        _same_view(trace, future)
        last = one
    assert trace.misses == future.misses


def _same_view(trace: AccessOrder, future: Future) -> None:
    assert list(trace.order) == future.order
    for unit in range(NUM_UNITS + 1):
        assert trace.distance(unit) == future.distance(unit)
        for beyond in (0, 2, 30):
            assert trace.distance(unit, beyond=beyond) == future.distance(unit, beyond)
    assert list(trace.upcoming()) == future.upcoming()
    ahead = [trace.unit_at(use) for use in range(trace.now, trace.end())]
    assert ahead == future.ahead[: len(future.order)]


@given(order=st.lists(uses, min_size=1, max_size=12), cycles=st.integers(1, 4))
@settings(max_examples=100)
def test_an_order_that_repeats_is_predicted_wholly(order: list[int], cycles: int) -> None:
    trace = AccessOrder()
    trace.begin()
    assert not any([trace.visit(unit) for unit in order]), "nothing was known yet"  # noqa: C419
    for _ in range(cycles):
        trace.begin()
        assert all([trace.visit(unit) for unit in order])  # noqa: C419 (each visit counts)
    assert trace.misses == 0
    # The end of a pass is the start of the next: it looks round the corner.
    assert list(trace.upcoming()) == list(dict.fromkeys(order))


@given(order=st.lists(uses, min_size=1, max_size=12), wrong=st.lists(uses, max_size=6))
@settings(max_examples=100)
def test_a_pass_in_another_order_is_learnt_at_once(order: list[int], wrong: list[int]) -> None:
    trace = AccessOrder()
    for one in (wrong, order):
        trace.begin()
        for unit in one:
            trace.visit(unit)
    trace.begin()
    misses = trace.misses
    assert all([trace.visit(unit) for unit in order])  # noqa: C419 (each visit counts)
    assert trace.misses == misses


@given(order=st.lists(uses, min_size=1, max_size=12))
@settings(max_examples=50)
def test_a_pass_without_uses_keeps_the_prediction(order: list[int]) -> None:
    trace = AccessOrder()
    trace.begin()
    for unit in order:
        trace.visit(unit)
    trace.begin()
    trace.begin()
    assert list(trace.order) == order


def test_the_end_of_this_pass_is_that_of_the_pass_that_has_begun() -> None:
    trace = AccessOrder()

    def left() -> list[int]:
        return [trace.unit_at(use) for use in range(trace.now, trace.end(this_pass=True))]

    for _ in range(2):
        trace.begin()
        for unit in (0, 1, 2, 1, 0):
            trace.visit(unit)
    assert left() == [], "the pass is over"
    trace.begin()
    assert left() == [0, 1, 2, 1, 0]
    for unit in (0, 1, 2):
        trace.visit(unit)
    assert left() == [1, 0]
