"""Finds the operations that an idle track of a simulated step waits for. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from infinity.simulate.clock import Timeline

EARLIER = "the step before"


def idle_by_cause(timeline: Timeline, track: str, step_s: float) -> Mapping[tuple[str, str], float]:
    """Returns the idle seconds of `track` between 0 and `step_s`, by (track, what it moves).

    An operation that starts after a gap started because another one ended at that moment, which in
    turn was started by the end of a third: the path to the gap's end. The gap is counted for the
    track on this path that was busiest since the operation before the gap began, because a faster
    one of the others would only wait for it; of equally busy ones for the last on the path. A gap
    without such a path is counted for the step before. The simulated clock starts an operation at
    the very time of an end, so times are compared for equality.
    """
    loads = _Loads(timeline)
    idle_s: dict[tuple[str, str], float] = defaultdict(float)
    for begin_s, start_s, end_s in _gaps(timeline, track, step_s):
        on_path = [other for other in loads.path(end_s, begin_s) if other != track]
        busy_s = loads.between(begin_s, end_s, on_path)
        if busy_s:
            slowest = max(on_path, key=lambda other: sum(busy_s[other].values()))
            cause = slowest, max(busy_s[slowest], key=lambda what: busy_s[slowest][what])
        else:
            cause = EARLIER, ""
        idle_s[cause] += end_s - start_s
    return dict(idle_s)


class _Loads:
    """The operations of a timeline that take time, by track and by the time of their end."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._ended_at: dict[float, list[int]] = defaultdict(list)
        self._of_track: dict[str, list[int]] = defaultdict(list)
        order = sorted(range(len(timeline.operations)), key=lambda index: timeline.finish_s[index])
        for index in order:
            operation = timeline.operations[index]
            if operation.duration_s:
                self._ended_at[timeline.finish_s[index]].append(index)
                self._of_track[operation.track].append(index)
        self._ends = {
            track: [timeline.finish_s[index] for index in indexes]
            for track, indexes in self._of_track.items()
        }

    def path(self, at_s: float, from_s: float) -> Iterable[str]:
        """Returns the tracks of the operations that led, one after the other, to `at_s`, the last
        first."""
        tracks: dict[str, None] = {}
        while at_s > from_s and (ended := self._ended_at.get(at_s)):
            tracks.setdefault(self._timeline.operations[ended[0]].track)
            at_s = self._timeline.start_s[ended[0]]
        return tracks

    def between(
        self, from_s: float, to_s: float, tracks: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        """Returns the busy seconds of tracks in a time, by what they moved."""
        busy_s: dict[str, dict[str, float]] = {track: defaultdict(float) for track in tracks}
        for track in tracks:
            first = bisect_left(self._ends[track], from_s)
            for index in self._of_track[track][first:]:
                start_s = max(self._timeline.start_s[index], from_s)
                if start_s >= to_s:
                    break
                name = _moved(self._timeline.operations[index].name)
                busy_s[track][name] += min(self._timeline.finish_s[index], to_s) - start_s
        return busy_s


def _gaps(timeline: Timeline, track: str, step_s: float) -> Iterator[tuple[float, float, float]]:
    """Yields the stretches of the step in which no operation of the track runs, as (start of the
    operation before, start, end)."""
    busy = sorted(
        (timeline.start_s[index], timeline.finish_s[index])
        for index, operation in enumerate(timeline.operations)
        if operation.track == track and operation.duration_s
    )
    begin_s = free_s = 0.0
    for start_s, finish_s in [*busy, (step_s, step_s)]:
        if min(start_s, step_s) > free_s:
            yield begin_s, free_s, min(start_s, step_s)
        if finish_s > free_s:
            begin_s, free_s = max(start_s, 0.0), finish_s


def _moved(name: str) -> str:
    """Returns "weights" of "backward: weights of block 3", "backward" of "backward: block 3"."""
    before, _, what = name.partition(": ")
    word, found, _ = what.partition(" of ")
    return word if found else before
