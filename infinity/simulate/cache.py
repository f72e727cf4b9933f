"""What a cache of weights holds along a known order of uses, and so which uses have to fetch.

The same decision as the executor's, without bytes. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from infinity.streaming.access_order import AccessOrder
from infinity.streaming.eviction import choose_victim


@dataclass(frozen=True, slots=True)
class Visit:
    """One use of a unit. `evicts` are the earlier visits (indexes) whose room a fetch takes."""

    unit: int
    is_hit: bool
    evicts: tuple[int, ...] = ()


def visits(
    order: Sequence[int],
    nbytes: Sequence[int],
    capacity_nbytes: float,
    *,
    num_passes: int,
    stale: Collection[int] = (),
    changing: Collection[int] = (),
    skipped: Collection[int] = (),
    taken_nbytes: Sequence[int] | None = None,
    held: Sequence[Collection[int]] | None = None,
) -> list[Visit]:
    """Uses of `num_passes` rounds of `order` with a cache that drops what is used last.

    `nbytes` is by unit; a unit of 0 bytes rests where it is used and always hits. In the passes of
    `stale` the first use of a unit of `changing` misses even if it is there. A unit larger than the
    cache takes all of it. Visits of `skipped` (indexes) do without the cache. By use of a round,
    `taken_nbytes` of it are taken by others then, and units of `held` are not dropped. The order is
    known from the first pass on, as in a run after its first step.
    """
    trace = AccessOrder()
    for unit in order:
        trace.visit(unit)
    there: dict[int, int] = {}  # Unit -> its last visit.
    used_nbytes = 0
    found: list[Visit] = []
    for number in range(num_passes):
        trace.begin()
        fresh: set[int] = set()
        for place, unit in enumerate(order):
            trace.visit(unit)
            if number in stale and unit in changing and unit not in fresh and unit in there:
                del there[unit]
                used_nbytes -= nbytes[unit]
            fresh.add(unit)
            evicted = []
            is_skipped = len(found) in skipped and unit not in there
            is_hit = nbytes[unit] == 0 or unit in there or is_skipped
            needed_nbytes = 0 if is_hit else nbytes[unit]
            room_nbytes = capacity_nbytes - (taken_nbytes[place] if taken_nbytes else 0)
            while used_nbytes + needed_nbytes > room_nbytes:
                kept = (unit, *held[place]) if held else (unit,)
                others = (each for each in there if each not in kept)
                victim = choose_victim(trace, others, nbytes=nbytes, wanted_nbytes=needed_nbytes)
                if victim is None:
                    break
                evicted.append(there.pop(victim))
                used_nbytes -= nbytes[victim]
            used_nbytes += needed_nbytes
            if nbytes[unit] and not is_skipped:
                there[unit] = len(found)
            found.append(Visit(unit, is_hit, tuple(evicted)))
    return found
