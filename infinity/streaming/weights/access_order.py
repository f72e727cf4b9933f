"""The order in which units are used, recorded in one pass and predicted for the next.

A prediction, never a rule: an order that changed costs a fetch on demand and is learned for the
next pass. Pure data structure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

# A pass that never ends (a loop that enters below the root module) must not grow the record.
_RECORD_LIMIT = 1 << 20
NEVER = 1 << 60


class AccessOrder:
    """Cyclic sequence of unit indexes with a cursor at the next expected use.

    `stands_for`: units that are never used themselves, and the unit that each one feeds.
    """

    def __init__(self, stands_for: Mapping[int, int] | None = None) -> None:
        self._stands_for = {} if stands_for is None else stands_for
        self._order: tuple[int, ...] = ()
        self._places: dict[int, list[int]] = {}
        self._cursor = 0
        self._recorded: list[int] = []
        self.misses = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The units in the recorded order of one pass."""
        return self._order

    def begin(self) -> None:
        """A new pass starts; what the last one recorded becomes the prediction."""
        recorded = tuple(self._recorded)
        if recorded and recorded != self._order:
            self._order = recorded
            self._places = {}
            for place, unit in enumerate(recorded):
                self._places.setdefault(unit, []).append(place)
        self._recorded.clear()
        self._cursor = 0

    def visit(self, unit: int) -> bool:
        """Notes a use. Returns whether it was the predicted one."""
        if len(self._recorded) < _RECORD_LIMIT:
            self._recorded.append(unit)
        distance = self.distance(unit)
        if distance == NEVER:
            self.misses += bool(self._order)
            return False
        self._cursor = (self._cursor + distance + 1) % len(self._order)
        self.misses += distance != 0
        return distance == 0

    def distance(self, unit: int, *, beyond: int = -1) -> int:
        """Uses of other units expected before the next use of this one; NEVER if none is known.
        Uses at a distance of `beyond` or less do not count."""
        places = self._places.get(self._stands_for.get(unit, unit))
        if not places:
            return NEVER
        cycles, first = divmod(self._cursor + beyond + 1, len(self._order))
        index = bisect_left(places, first)
        place = places[index] if index < len(places) else places[0] + len(self._order)
        return cycles * len(self._order) + place - self._cursor

    def upcoming(self, *, this_pass: bool = False) -> Iterator[int]:
        """The units of the next full cycle in expected order, each once; with `this_pass`, those
        until the end of the pass that has begun."""
        seen: set[int] = set()
        count = len(self._order)
        if this_pass:
            is_over = self._cursor == 0 and bool(self._recorded)
            count = 0 if is_over else count - self._cursor
        for step in range(count):
            unit = self._order[(self._cursor + step) % len(self._order)]
            if unit not in seen:
                seen.add(unit)
                yield unit


class PassOrders:
    """The orders of training and of evaluation. `now`: that of the pass which runs."""

    def __init__(self, stands_for: Mapping[int, int]) -> None:
        self._orders = {kind: AccessOrder(stands_for) for kind in ("train", "eval")}
        self.now = self._orders["train"]

    def turn_to(self, kind: str) -> AccessOrder:
        """A pass of the kind begins, or goes on. Returns its order."""
        self.now = self._orders[kind]
        return self.now
