"""The order in which units are used, recorded in one pass and predicted for the next.

A prediction, never a rule: an order that changed costs a fetch on demand and is learned for the
next pass. Pure data structure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

# A pass that never ends (a loop that enters below the root module) must not grow the record.
_RECORD_LIMIT = 1 << 20
NEVER = 1 << 60
# A use that is so much later than expected, in uses, is the end of an epoch.
_MOST_SKIPPED = 64


class AccessOrder:
    """Cyclic sequence of unit indexes with a cursor at the next expected use: that of training, and
    another one for evaluation.

    `stands_for`: units that are never used themselves, and the unit that each one feeds. `moved`:
    units whose next use has changed since `epoch` was counted last; all others have theirs.
    """

    def __init__(self, stands_for: Mapping[int, int] | None = None) -> None:
        self._stands_for = {} if stands_for is None else stands_for
        self._feeders: dict[int, list[int]] = {}
        for feeder, unit in self._stands_for.items():
            self._feeders.setdefault(unit, []).append(feeder)
        self.epoch = 0
        self.moved: list[int] = []
        self.now = 0  # The next use of all, counted as `next_use` does.
        self.order: tuple[int, ...] = ()  # As recorded, of one pass.
        self._places: dict[int, list[int]] = {}
        self._cursor = 0
        self._recorded: list[int] = []
        self._kind = "train"
        self._other: tuple[Any, ...] = (), {}, 0, []  # The order of the other kind of pass.
        self.misses = 0

    def turn_to(self, kind: str) -> None:
        """A pass of the kind, "train" or "eval", begins or goes on."""
        if kind != self._kind:
            other = self.order, self._places, self._cursor, self._recorded
            self.order, self._places, self._cursor, self._recorded = self._other
            self._kind, self._other = kind, other
            self._begin_epoch()

    def begin(self) -> None:
        """A new pass starts; what the last one recorded becomes the prediction."""
        recorded = tuple(self._recorded)
        if recorded and recorded != self.order:
            self.order = recorded
            self._places = {}
            for place, unit in enumerate(recorded):
                self._places.setdefault(unit, []).append(place)
        self._recorded.clear()
        self._cursor = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.now = 0
        self.moved.clear()

    def visit(self, unit: int) -> bool:
        """Notes a use. Returns whether it was the predicted one."""
        if len(self._recorded) < _RECORD_LIMIT:
            self._recorded.append(unit)
        use = self.next_use(unit)
        if use == NEVER:
            self.misses += bool(self.order)
            return False
        distance = use - self.now
        if distance > _MOST_SKIPPED or len(self.moved) > _RECORD_LIMIT:
            self._begin_epoch()
        else:
            for step in range(distance + 1):
                reached = self.order[(self._cursor + step) % len(self.order)]
                self.moved += (reached, *self._feeders.get(reached, ()))
            self.now += distance + 1
        self._cursor = (self._cursor + distance + 1) % len(self.order)
        self.misses += distance != 0
        return distance == 0

    def next_use(self, unit: int, *, beyond: int = -1) -> int:
        """The expected next use, counted in uses from the start of the epoch: it changes for the
        units in `moved` alone. NEVER if none is known. `beyond`: see `distance`."""
        places = self._places.get(self._stands_for.get(unit, unit))
        if not places:
            return NEVER
        cycles, first = divmod(self._cursor + beyond + 1, len(self.order))
        index = bisect_left(places, first)
        place = places[index] if index < len(places) else places[0] + len(self.order)
        return self.now + cycles * len(self.order) + place - self._cursor

    def distance(self, unit: int, *, beyond: int = -1) -> int:
        """Uses of other units expected before the next use of this one; NEVER if none is known.
        Uses at a distance of `beyond` or less do not count."""
        use = self.next_use(unit, beyond=beyond)
        return use if use == NEVER else use - self.now

    def unit_at(self, use: int) -> int:
        """The unit of an expected use, counted as `next_use` does."""
        return self.order[(self._cursor + use - self.now) % len(self.order)]

    def end(self, *, this_pass: bool = False) -> int:
        """The use behind those of the next full cycle; with `this_pass`, behind those of the pass
        that has begun."""
        count = len(self.order)
        if this_pass:
            is_over = self._cursor == 0 and bool(self._recorded)
            count = 0 if is_over else count - self._cursor
        return self.now + count

    def upcoming(self) -> Iterator[int]:
        """The units of the next full cycle in expected order, each once."""
        yield from dict.fromkeys((*self.order[self._cursor :], *self.order[: self._cursor]))
