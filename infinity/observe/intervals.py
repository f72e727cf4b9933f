"""Sets of moments as sorted, disjoint intervals [start_ns, end_ns). Pure."""

from __future__ import annotations

from collections.abc import Iterable

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
