"""Laying out a trace: no moment of the training thread twice, none lost."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from infinity.observe import Span, Track
from infinity.observe.timeline import THREAD_TRACKS, clipped, laid_out, total_s, union, without

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)
RAW_TRACKS = (Track.STALLS, Track.UPDATES, Track.ENGINE, Track.MODULES)
SPANS = st.lists(st.tuples(st.sampled_from(RAW_TRACKS), INTERVALS), max_size=4).map(
    lambda tracks: [
        Span(track, f"{track} {number}", start, end)
        for track, intervals in tracks
        for number, (start, end) in enumerate(intervals)
    ]
)


def moments(intervals) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_moments(first, second):
    assert moments(union(first)) == moments(first)
    assert moments(without(first, second)) == moments(first) - moments(second)
    assert moments(clipped(first, (5, 20))) == moments(first) & set(range(5, 20))
    assert round(total_s(first) * 1e9) == len(moments(first))
    for result in (union(first), without(first, second)):
        assert all(before[1] <= after[0] for before, after in pairwise(result))


@given(SPANS)
def test_every_moment_of_the_thread_is_in_one_track_and_none_is_lost(spans):
    shown = [(span.start_ns, span.end_ns) for span in laid_out(spans)]

    recorded = moments((span.start_ns, span.end_ns) for span in spans)
    assert moments(shown) == recorded
    assert sum(end - start for start, end in shown) == len(recorded), "disjoint"


@given(SPANS)
def test_a_stall_is_never_hidden(spans):
    stalls = [(s.start_ns, s.end_ns) for s in spans if s.track == Track.STALLS]
    shown = [(s.start_ns, s.end_ns) for s in laid_out(spans) if s.track == Track.STALLS]
    assert moments(shown) == moments(stalls)


def test_the_hooked_module_entered_last_is_the_one_that_computes():
    """In a backward a block may be entered before the last node of the one behind it has run."""
    spans = [
        Span(Track.MODULES, "block 2", 0, 60),
        Span(Track.MODULES, "block 1", 50, 100),
        Span(Track.ENGINE, "enter", 40, 50),
        Span(Track.STALLS, "block 1 needs its parameters", 42, 48),
    ]
    shown = [(span.track, span.name, span.start_ns, span.end_ns) for span in laid_out(spans)]
    assert shown == [
        (Track.COMPUTE, "block 2", 0, 40),
        (Track.ENGINE, "enter", 40, 42),
        (Track.STALLS, "block 1 needs its parameters", 42, 48),
        (Track.ENGINE, "enter", 48, 50),
        (Track.COMPUTE, "block 1", 50, 100),
    ]
    assert {track for track, *_ in shown} <= set(THREAD_TRACKS)
