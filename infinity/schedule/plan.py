"""Decisions about residency: pure functions of the trace and of who is resident.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: dropping
what is used furthest in the future moves the fewest bytes, and the order of training is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from infinity.schedule.trace import Trace


def choose_victim(
    trace: Trace, candidates: Iterable[int], *, nearer_than: int | None = None
) -> int | None:
    """The candidate whose next use is furthest away, or None.

    With `nearer_than` (a unit that wants the room ahead of its use) only a candidate used later
    than that unit is chosen: reading ahead must never cost a read of something needed sooner.
    """
    limit = -1 if nearer_than is None else trace.distance(nearer_than)
    best, best_distance = None, limit
    for unit in candidates:
        distance = trace.distance(unit)
        if distance > best_distance:
            best, best_distance = unit, distance
    return best
