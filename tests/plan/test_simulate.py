"""The clock: what holds for every set of operations, and a few worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from infinity.simulate.clock import Operation, Timeline, simulate


@st.composite
def operations(draw: st.DrawFn) -> list[Operation]:
    found: list[Operation] = []
    for index in range(draw(st.integers(0, 30))):
        track = draw(st.sampled_from("abc"))
        seconds = draw(st.integers(0, 9))
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        found.append(Operation(track, str(index), float(seconds), tuple(after)))
    return found


def makespan_s(timeline: Timeline) -> float:
    return max(timeline.finish_s, default=0.0)


def critical_path_s(operations: Sequence[Operation]) -> float:
    """Returns the duration if every track could run all ready operations at the same time."""
    finish_s: list[float] = []
    for operation in operations:
        begin_s = max((finish_s[before] for before in operation.after), default=0.0)
        finish_s.append(begin_s + operation.duration_s)
    return max(finish_s, default=0.0)


def test_a_pipeline_by_hand() -> None:
    # Two reads of 2 s, each computed on for 3 s: the second read hides behind the first compute.
    timeline = simulate(
        [
            Operation("read", "r0", 2),
            Operation("compute", "c0", 3, (0,)),
            Operation("read", "r1", 2),
            Operation("compute", "c1", 3, (2,)),
        ]
    )
    assert timeline.start_s == (0, 2, 2, 5)
    assert makespan_s(timeline) == 8


def test_the_oldest_that_is_ready_goes_first() -> None:
    timeline = simulate(
        [
            Operation("x", "gate", 1),
            Operation("a", "old", 1, (0,)),
            Operation("a", "young", 5),
            Operation("a", "younger", 5),
        ]
    )
    # "young" has begun when "old" gets ready and is not broken off; "younger" has to wait.
    assert timeline.start_s == (0, 5, 0, 6)


@given(operations())
def test_a_track_does_one_thing_at_a_time(drafted: list[Operation]) -> None:
    timeline = simulate(drafted)
    for track in "abc":
        spans = sorted(
            (timeline.start_s[i], timeline.finish_s[i])
            for i, each in enumerate(drafted)
            if each.track == track
        )
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start


@given(operations())
def test_nothing_starts_before_what_it_waits_for(drafted: list[Operation]) -> None:
    timeline = simulate(drafted)
    for index, operation in enumerate(drafted):
        assert timeline.finish_s[index] == timeline.start_s[index] + operation.duration_s
        for before in operation.after:
            assert timeline.finish_s[before] <= timeline.start_s[index]


@given(operations())
def test_between_the_lower_bounds_and_one_after_the_other(drafted: list[Operation]) -> None:
    found_s = makespan_s(simulate(drafted))
    assert found_s >= critical_path_s(drafted)
    for track in "abc":
        assert found_s >= sum(each.duration_s for each in drafted if each.track == track)
    assert found_s <= sum(each.duration_s for each in drafted)
