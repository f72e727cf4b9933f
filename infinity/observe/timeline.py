"""Derives disjoint tracks from a recording: every moment of the training thread once. Pure.

The training thread is, at any moment, stalled, updating, busy in the engine, or running the model's
own code in a hooked module. Records overlap: a use of a module covers the stall in it, and in a
backward a use may still be open when the next begins. `laid_out` makes the tracks `stalls`,
`updates`, `engine` and `compute` disjoint, each in itself and from the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from infinity.observe.tracer import Span, Track

# Earlier takes precedence where two cover one moment.
THREAD_TRACKS = (Track.STALLS, Track.UPDATES, Track.ENGINE, Track.COMPUTE)


def laid_out(spans: Sequence[Span]) -> list[Span]:
    """The spans a trace shows, by start, longest first."""
    raw = (Track.STALLS, Track.UPDATES, Track.ENGINE, Track.MODULES)
    shown = [span for span in spans if span.track not in raw]
    taken: list[Interval] = []
    for track in raw:
        own = [span for span in spans if span.track == track]
        parts = list(_latest_first(own, taken))
        shown += parts
        taken = union([*taken, *((span.start_ns, span.end_ns) for span in parts)])
    return sorted(shown, key=lambda span: (span.start_ns, -span.end_ns))


def _latest_first(spans: Sequence[Span], taken: Iterable[Interval]) -> Iterator[Span]:
    """Yields intervals: each moment not in `taken` belongs to the span that began last among those
    around it.
    """
    edges = sorted({edge for span in spans for edge in (span.start_ns, span.end_ns)})
    starting = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns), reverse=True)
    active: list[Span] = []
    owned: dict[int, list[Interval]] = {}  # By the span's id().
    for start_ns, end_ns in pairwise(edges):
        active = [span for span in active if span.end_ns > start_ns]
        while starting and starting[-1].start_ns <= start_ns:
            span = starting.pop()
            if span.end_ns > start_ns:
                active.append(span)
        if active:
            owned.setdefault(id(active[-1]), []).append((start_ns, end_ns))
    holes = union(taken)
    starts, ends = [start_ns for start_ns, _ in holes], [end_ns for _, end_ns in holes]
    for span in spans:
        track = Track.COMPUTE if span.track == Track.MODULES else span.track
        near = holes[bisect_right(ends, span.start_ns) : bisect_left(starts, span.end_ns)]
        for start_ns, end_ns in without(owned.get(id(span), ()), near):
            yield replace(span, track=track, start_ns=start_ns, end_ns=end_ns)


# -- Sets of moments as sorted, disjoint intervals [start_ns, end_ns) ------------------------------


Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of them: sorted, disjoint, none empty."""
    merged: list[Interval] = []
    for start_ns, end_ns in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start_ns <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_ns)
        else:
            merged.append((start_ns, end_ns))
    return merged


def without(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The moments in any of `intervals` and in none of `taken`."""
    holes = union(taken)
    left: list[Interval] = []
    first = 0  # Holes before it end before anything that is still to come.
    for start_ns, end_ns in union(intervals):
        while first < len(holes) and holes[first][1] <= start_ns:
            first += 1
        at = first
        while at < len(holes) and holes[at][0] < end_ns:
            if start_ns < holes[at][0]:
                left.append((start_ns, holes[at][0]))
            start_ns = holes[at][1]
            at += 1
        if start_ns < end_ns:
            left.append((start_ns, end_ns))
    return left


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts inside the window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start_ns, end_ns) for start_ns, end_ns in cut if start_ns < end_ns]


def total_s(intervals: Iterable[Interval]) -> float:
    """Seconds in any of them."""
    return sum(end_ns - start_ns for start_ns, end_ns in union(intervals)) / 1e9
