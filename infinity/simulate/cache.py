"""Predicts which uses of units find their weights in a cache, for a known order of uses.

The decisions are those of the weight cache, without bytes. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from infinity.streaming.access_order import AccessOrder
from infinity.streaming.eviction import choose_victim


@dataclass(frozen=True, slots=True)
class Visit:
    """One use of a unit. `evicts` are the indexes of earlier visits whose space a fetch takes."""

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
    """Returns the uses of `num_passes` rounds of `order`, with a cache that evicts the unit whose
    next use is furthest away.

    `nbytes` is by unit. A unit of 0 bytes rests where it is used and always hits. In the passes of
    `stale`, the first use of a unit in `changing` misses even if the unit is in the cache. A unit
    larger than the cache takes all of it. Visits in `skipped` (indexes) bypass the cache.
    `taken_nbytes` gives, by use of a round, the bytes of the cache that something else occupies.
    Units of `held` are not evicted. The order is known from the first pass on, as in a run after
    its first step.
    """
    trace = AccessOrder()
    for unit in order:
        trace.visit(unit)
    cached: dict[int, int] = {}  # Unit -> its last visit.
    used_nbytes = 0
    found: list[Visit] = []
    for number in range(num_passes):
        trace.begin()
        fresh: set[int] = set()
        for place, unit in enumerate(order):
            trace.visit(unit)
            if number in stale and unit in changing and unit not in fresh and unit in cached:
                del cached[unit]
                used_nbytes -= nbytes[unit]
            fresh.add(unit)
            evicted = []
            is_skipped = len(found) in skipped and unit not in cached
            is_hit = nbytes[unit] == 0 or unit in cached or is_skipped
            needed_nbytes = 0 if is_hit else nbytes[unit]
            space_nbytes = capacity_nbytes - (taken_nbytes[place] if taken_nbytes else 0)
            while used_nbytes + needed_nbytes > space_nbytes:
                kept = (unit, *held[place]) if held else (unit,)
                others = (other for other in cached if other not in kept)
                victim = choose_victim(trace, others, nbytes=nbytes, wanted_nbytes=needed_nbytes)
                if victim is None:
                    break
                evicted.append(cached.pop(victim))
                used_nbytes -= nbytes[victim]
            used_nbytes += needed_nbytes
            if nbytes[unit] and not is_skipped:
                cached[unit] = len(found)
            found.append(Visit(unit, is_hit, tuple(evicted)))
    return found
