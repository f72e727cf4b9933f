"""Predicts which uses of units find their weights in a cache, for a known order of uses.

The decisions are those of the weight cache, without bytes. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from infinity.streaming.weights.access_order import AccessOrder
from infinity.streaming.weights.eviction import (
    ByNextUse,
    Evictable,
    choose_neighbours,
    last_uses,
    main_sizes,
)
from infinity.tiers.ranges import Range, RangeAllocator


@dataclass(frozen=True, slots=True)
class Visit:
    """One use of a unit. `evicts` are the indexes of earlier visits whose space a fetch takes."""

    unit: int
    is_hit: bool
    evicts: tuple[int, ...] = ()


class _Sum:
    """A cache that is full when the sum of its units' bytes is its capacity."""

    def __init__(self, order: AccessOrder, nbytes: Sequence[int], capacity_nbytes: float) -> None:
        self._nbytes = nbytes
        self._capacity_nbytes = capacity_nbytes
        self._used_nbytes = 0
        self.cached = ByNextUse(order, nbytes)

    def admit(self, unit: int, kept: Sequence[Collection[int]], taken_nbytes: int) -> list[int]:
        """Makes space for a unit that is not in the cache; returns the units that go: those outside
        the first of `kept`, or else, of the next one."""
        gone = self.shrink(kept, taken_nbytes, self._nbytes[unit])
        self.cached.add(unit)
        self._used_nbytes += self._nbytes[unit]
        return gone

    def shrink(
        self, kept: Sequence[Collection[int]], taken_nbytes: int, wanted_nbytes: int = 0
    ) -> list[int]:
        """Makes space beside something else of `taken_nbytes`; returns the units that go."""
        gone: list[int] = []
        while self._used_nbytes + wanted_nbytes > self._capacity_nbytes - taken_nbytes:
            victims = (
                self.cached.victim(partial(_is_outside, spared), wanted_nbytes=wanted_nbytes)
                for spared in kept
            )
            victim = next((unit for unit in victims if unit is not None), None)
            if victim is None:
                break
            self.drop(victim)
            gone.append(victim)
        return gone

    def drop(self, unit: int) -> None:
        self.cached.remove(unit)
        self._used_nbytes -= self._nbytes[unit]

    def state(self) -> Hashable:
        """Equal where the cache decides alike from now on."""
        return frozenset(self.cached)


def _is_outside(kept: Collection[int], unit: int) -> bool:
    return unit not in kept


class _Arena:
    """A cache in one range of memory, with the allocator and the choice of the engine: what does
    not fit between its holes is not there. Reads ahead are not in it: they cost no bytes
    (streaming/weights/eviction.py, Note [Reads ahead]), but for a block that `visits` counts."""

    def __init__(self, order: AccessOrder, nbytes: Sequence[int], capacity_nbytes: float) -> None:
        self._trace = order
        self._nbytes = nbytes
        self._ranges = RangeAllocator(int(capacity_nbytes))
        self._main_sizes = main_sizes(nbytes)  # Units that are not stored are far smaller.
        self.cached: dict[int, Range | None] = {}  # None: too large, and there until the next one.

    def admit(self, unit: int, kept: Sequence[Collection[int]], taken_nbytes: int) -> list[int]:
        """As of `_Sum`. A unit that finds no space is there until the next one comes."""
        gone = [
            other for other, place in self.cached.items() if place is None and other not in kept[-1]
        ]
        for other in gone:
            self.drop(other)
        taken = self._place(taken_nbytes, kept[-1], gone) if taken_nbytes else None
        places = (self._place(self._nbytes[unit], spared, gone) for spared in kept)
        place = next((place for place in places if place is not None), None)
        self.cached[unit] = place
        if taken is not None:
            self._ranges.free(taken)
        return gone

    def shrink(self, kept: Sequence[Collection[int]], taken_nbytes: int) -> list[int]:
        """As of `_Sum`."""
        gone: list[int] = []
        taken = self._place(taken_nbytes, kept[-1], gone) if taken_nbytes else None
        if taken is not None:
            self._ranges.free(taken)
        return gone

    def _place(self, nbytes: int, kept: Collection[int], gone: list[int]) -> Range | None:
        """Allocates a range, and appends the units that go for it."""
        least, largest = self._main_sizes
        at_top = not least <= nbytes <= largest
        while (place := self._ranges.allocate(nbytes, at_top=at_top)) is None:
            blocks = [
                Evictable(place, unit, self._trace.distance(unit))
                for unit, place in self.cached.items()
                if place is not None and unit not in kept
            ]
            chosen = choose_neighbours(blocks, self._ranges.holes(), nbytes)
            if not chosen:
                chosen = [max(blocks, key=lambda block: block.distance)] if blocks else []
            if not chosen:
                return None
            for block in chosen:
                self.drop(block.unit)
                gone.append(block.unit)
        return place

    def drop(self, unit: int) -> None:
        place = self.cached.pop(unit)
        if place is not None:
            self._ranges.free(place)

    def state(self) -> Hashable:
        """As of `_Sum`."""
        return frozenset(self.cached.items())


@lru_cache(maxsize=16)
def visits(
    order: tuple[int, ...],
    nbytes: tuple[int, ...],
    capacity_nbytes: float,
    *,
    num_passes: int,
    stale: Collection[int] = (),
    changing: frozenset[int] = frozenset(),
    skipped: frozenset[int] = frozenset(),
    taken_nbytes: tuple[int, ...] | None = None,
    held: tuple[tuple[int, ...], ...] | None = None,
    in_turns: bool = False,
    is_arena: bool = False,
) -> tuple[Visit, ...]:
    """Returns the uses of `num_passes` rounds of `order`, with a cache that evicts the unit whose
    next use is furthest away.

    `nbytes` is by unit. A unit of 0 bytes rests where it is used and always hits. In the passes of
    `stale`, the first use of a unit in `changing` misses even if the unit is in the cache. A unit
    larger than the cache takes all of it. Visits in `skipped` (indexes) bypass the cache.
    `taken_nbytes` gives, by use of a round, the bytes of the cache that something else occupies.
    Units of `held` are not evicted, and with `in_turns` those of the last uses only if no others
    may. With `is_arena` each unit has one range of the cache, as stored weights have in host
    memory. The order is known from the first pass on, as in a run after its first step. The last
    results are remembered: what a faster machine would do asks again. So all arguments are
    hashable.
    """
    taken_nbytes = taken_nbytes or (0,) * len(order)
    held = held or ((),) * len(order)
    trace, length = AccessOrder(), len(order)
    for unit in order:
        trace.visit(unit)
    make: Callable[[AccessOrder, Sequence[int], float], _Sum | _Arena]
    make = _Arena if is_arena else _Sum
    cache = make(trace, nbytes, capacity_nbytes)
    skipped_of = [set[int]() for _ in range(num_passes)]  # Places, by pass.
    for index in skipped:
        skipped_of[index // length].add(index % length)
    kinds = [(number in stale, skipped_of[number]) for number in range(num_passes)]
    states: list[Hashable] = []  # At the start of each pass.
    last_visits: dict[int, int] = {}
    found: list[Visit] = []
    for number in range(num_passes):
        states.append(cache.state())
        if (first := _same_pass(states, kinds)) is not None:
            _repeat(found, (number - first) * length, num_passes * length)
            break
        trace.begin()
        fresh: set[int] = set()
        for place, unit in enumerate(order):
            trace.visit(unit)
            is_cached = unit in cache.cached
            if number in stale and unit in changing and unit not in fresh and is_cached:
                cache.drop(unit)
                is_cached = False
            fresh.add(unit)
            is_skipped = len(found) in skipped and not is_cached
            is_hit = nbytes[unit] == 0 or is_cached or is_skipped
            kept: list[Collection[int]] = [(unit, *held[place])]
            if in_turns:  # See streaming/weights/eviction.py, Note [Two in turns].
                before = (order[place - back] for back in range(1, length))
                kept.insert(0, {*kept[0], *last_uses(before, nbytes, nbytes[unit])})
            taken = taken_nbytes[place]
            gone = cache.shrink(kept[-1:], taken) if is_hit else cache.admit(unit, kept, taken)
            found.append(Visit(unit, is_hit, tuple(last_visits[other] for other in gone)))
            last_visits[unit] = len(found) - 1
    return tuple(found)


def _repeat(found: list[Visit], period: int, count: int) -> None:
    """Repeats the last `period` visits until there are `count`."""
    while len(found) < count:
        last = found[-period]
        evicts = tuple(evicted + period for evicted in last.evicts)
        found.append(Visit(last.unit, last.is_hit, evicts))


def _same_pass(states: Sequence[Hashable], kinds: Sequence[object]) -> int | None:
    """Returns an earlier pass that began as the last of `states` did, if all passes that are left
    are of the kinds of those since then: they repeat. Not pass 0, which evicts nothing of a pass
    before it."""
    number = len(states) - 1
    for first in range(number - 1, 0, -1):
        period = number - first
        rest = range(number, len(kinds))
        if states[first] == states[number] and all(kinds[i] == kinds[i - period] for i in rest):
            return first
    return None
