"""A simulated clock: operations on tracks, their dependencies, and the time when each one runs.

A track (a link, a processor, a thread) runs one operation at a time and never interrupts one. It
runs the oldest operation that is ready, late ones after all others, and is never idle while one is
ready. Such a schedule is at
most twice as long as the best one. A faster track may lengthen it, seldom and by little. Source:
Graham, "Bounds on multiprocessing timing anomalies", 1969.

Pure: no torch, no I/O, no real clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a track. It may start when every operation of `after` (earlier indexes) has
    ended.

    `traffic` names the counter of `nbytes`; `step` is the optimizer step of the operation. One that
    `is_late` goes after others that are ready, as writes go after reads on the drives, until it has
    waited for eight times its own duration.
    """

    track: str
    name: str
    duration_s: float
    after: tuple[int, ...] = ()
    nbytes: int = 0
    traffic: str = ""
    step: int = 0
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all operations: seconds from the start, by the operation's index."""

    operations: tuple[Operation, ...]
    start_s: tuple[float, ...]
    finish_s: tuple[float, ...]


# Of the storage engine: after so many reads of a size it issues a write of the size.
_READS_BEFORE_WRITE = 8


class _Ready:
    """The operations that are ready for one track, by their indexes."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._late: list[tuple[int, float]] = []  # With the time until which it may wait.

    def push(self, index: int, operation: Operation, now_s: float) -> None:
        if operation.is_late:
            until_s = now_s + _READS_BEFORE_WRITE * operation.duration_s
            heapq.heappush(self._late, (index, until_s))
        else:
            heapq.heappush(self._first, index)

    def pop(self, now_s: float) -> int | None:
        """Returns the operation that runs at this time; None if none is ready."""
        if self._late and (not self._first or self._late[0][1] <= now_s):
            return heapq.heappop(self._late)[0]
        return heapq.heappop(self._first) if self._first else None


def simulate(operations: Sequence[Operation]) -> Timeline:
    """Runs the operations. If several are ready for one track, the earliest in the list runs
    first, of those that are not late if there are any. See `Operation` for late ones."""
    missing = [len(operation.after) for operation in operations]
    followers: list[list[int]] = [[] for _ in operations]
    for index, operation in enumerate(operations):
        for before in operation.after:
            assert before < index, f"{operation.name} waits for a later operation"
            followers[before].append(index)

    ready = {operation.track: _Ready() for operation in operations}
    busy: set[str] = set()
    running: list[tuple[float, int]] = []  # A heap, ordered by the end time.
    start_s = [0.0] * len(operations)
    finish_s = [0.0] * len(operations)

    def start_ready(now_s: float, tracks: set[str]) -> None:
        for track in tracks - busy:
            index = ready[track].pop(now_s)
            if index is not None:
                busy.add(track)
                start_s[index] = now_s
                finish_s[index] = now_s + operations[index].duration_s
                heapq.heappush(running, (finish_s[index], index))

    for index, count in enumerate(missing):
        if count == 0:
            ready[operations[index].track].push(index, operations[index], 0.0)
    start_ready(0.0, set(ready))
    while running:
        now_s = running[0][0]
        changed = set()
        while running and running[0][0] == now_s:
            _, index = heapq.heappop(running)
            changed.add(operations[index].track)
            busy.discard(operations[index].track)
            for follower in followers[index]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    operation = operations[follower]
                    ready[operation.track].push(follower, operation, now_s)
                    changed.add(operation.track)
        start_ready(now_s, changed)
    return Timeline(tuple(operations), tuple(start_s), tuple(finish_s))
