"""Units in the order of their next uses: the first that an update is for, the last that may go."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from infinity.streaming.weights.access_order import NEVER, AccessOrder, PassOrders
from infinity.streaming.weights.eviction import MOST_WASTED


class ByNextUse:
    """Units in the order of their expected next uses. What a call costs does not grow with the
    number of units, but for the first one after an unexpected use.

    nbytes: bytes by unit; None: of one size. A model has units of few sizes
    first: index of the unit here that unit 0 of the orders is
    """

    def __init__(
        self, orders: PassOrders, nbytes: Sequence[int] | None = None, *, first: int = 0
    ) -> None:
        self._orders = orders
        self._nbytes = nbytes
        self._first = first
        self._seen: tuple[AccessOrder, int] | None = None  # The order and the epoch of the uses.
        self._num_seen = 0  # Of what has moved.
        self._uses: dict[int, int] = {}
        # By size, ascending: the next use, and the unit below 0, so that the first unit is the
        # last among equals.
        self._rows: dict[int, list[tuple[int, int]]] = {}

    def add(self, unit: int) -> None:
        """Adds a unit, if it is not there."""
        if unit not in self._uses:
            use = self._uses[unit] = self._orders.now.next_use(unit - self._first)
            nbytes = 0 if self._nbytes is None else self._nbytes[unit]
            insort(self._rows.setdefault(nbytes, []), (use, -unit))

    def remove(self, unit: int) -> None:
        """Removes a unit, if it is there."""
        use = self._uses.pop(unit, None)
        if use is not None:
            row = self._rows[0 if self._nbytes is None else self._nbytes[unit]]
            del row[bisect_left(row, (use, -unit))]

    def clear(self) -> None:
        """Removes all units."""
        self._uses.clear()
        self._rows.clear()

    def __contains__(self, unit: int) -> bool:
        return unit in self._uses

    def __iter__(self) -> Iterator[int]:
        """The units, in the order in which they came."""
        return iter(self._uses)

    def _follow(self) -> None:
        """Puts units where their next uses have moved to."""
        order = self._orders.now
        if self._seen != (order, order.epoch):
            units = list(self._uses)
            self.clear()
            for unit in units:
                self.add(unit)
            self._seen = order, order.epoch
        else:
            for moved in order.moved[self._num_seen :]:
                if moved + self._first in self._uses:
                    self.remove(moved + self._first)
                    self.add(moved + self._first)
        self._num_seen = len(order.moved)

    def soonest(self) -> Iterator[int]:
        """Yields the units with a next use, the soonest first. Of units of one size."""
        self._follow()
        for use, unit in self._rows.get(0, ()):
            if use == NEVER:
                return
            yield -unit

    def later_than(self, use: int) -> Iterator[int]:
        """Yields the units with a later next use, the latest of each size first."""
        self._follow()
        for row in self._rows.values():
            for latest, unit in reversed(row):
                if latest <= use:
                    break
                yield -unit

    def victim(
        self,
        may_go: Callable[[int], bool],
        *,
        nearer_than: int | None = None,
        wanted_nbytes: int = 0,
    ) -> int | None:
        """Returns the unit whose next use is furthest away, of those that may go, or None.

        nearer_than: a unit that is read ahead of its use. Only units that are used later than it
            are chosen, because a read ahead must never cost a read of a unit that is needed sooner
        wanted_nbytes: a unit of more than twice as much is chosen only if none of one to two times
            that size would do, or if its use is not expected (eviction.py, Note [Holes])
        """
        self._follow()
        limit = -1
        if nearer_than is not None:
            limit = self._orders.now.next_use(nearer_than - self._first)
        last: list[tuple[int, int, int]] = []  # Of each size.
        for nbytes, row in self._rows.items():
            for use, unit in reversed(row):
                if use <= limit:
                    break
                if may_go(-unit):
                    last.append((use, unit, nbytes))
                    break
        use, unit, nbytes = max(last, default=(0, 1, 0))
        if nbytes > MOST_WASTED * wanted_nbytes and use < NEVER:
            most_nbytes = MOST_WASTED * wanted_nbytes
            fitting = [one for one in last if wanted_nbytes <= one[2] <= most_nbytes]
            _, unit, _ = max(fitting, default=(use, unit, nbytes))
        return None if unit > 0 else -unit
