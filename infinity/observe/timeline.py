"""Derives disjoint tracks from a recording: every moment of the training thread once. Pure.

The training thread is, at any moment, stalled, updating, busy in the engine, or running the model's
own code in a hooked module. Records overlap: a use of a module covers the stall in it, and in a
backward a use may still be open when the next begins. `laid_out` makes the tracks `stalls`,
`updates`, `engine` and `compute` disjoint, each in itself and from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from infinity.observe.intervals import Interval, union, without
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
    holes = list(taken)
    for span in spans:
        track = Track.COMPUTE if span.track == Track.MODULES else span.track
        for start_ns, end_ns in without(owned.get(id(span), ()), holes):
            yield replace(span, track=track, start_ns=start_ns, end_ns=end_ns)
