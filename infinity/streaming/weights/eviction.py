"""Decisions about residency: pure functions of the access order and of the resident units.

Shown by `tests/property/test_eviction.py`; the plan's use of it by `test_simulated_cache.py`, and
the bytes of a run by `tests/parity/test_in_place_bytes.py` and `test_reads_ahead.py`.

Memory that is allocated in one range needs neighbours to go: `choose_neighbours`.
Elsewhere one unit after the other goes: `ByNextUse.victim`.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: evicting
the page whose next use is furthest away moves the fewest bytes, and the order of training is known.
That is proven for units of one size. For several sizes the best choice is a hard problem (Chrobak
et al., "Caching is hard, even in the fault model", 2012), and evicting an embedding for a block
mostly wastes space: it is evicted only if no unit nearer to the needed size is.

Note [Holes]
  A unit that takes the place of units of no more bytes leaves no new hole. Blocks of a model have
  few sizes, so units of each size keep their places, and which of them are kept makes no difference
  to the bytes that a sweep there and back reads: a kept byte saves two. If only the next use
  decided, a tile would take the place of a larger block, and what is left of it be of no use.

Note [Reads ahead]
  A read ahead of a use makes the eviction that the use would make if nothing were read ahead, or it
  waits. It compares the uses after that use, and waits if the unit that should go is needed before.
  So reads ahead cost no bytes. If any unit that is used later could go, the one that should go
  would stay and another be read again. (Cao et al., "A study of integrated prefetching and caching
  strategies", 1995, call the two rules conservative and aggressive.) While the unit that should go
  is needed before, and no block comes or goes, the answer is the same and is not computed again.

Note [Two in turns]
  In sweeps without a backward the unit whose next use is furthest away is always the last one, and
  its bytes are on their way to the device while the next unit is read. If it went for that unit,
  one block would be read, copied and read again, and drives and link would wait for each other. So
  beside a device a read ahead takes a block of the `last_uses` only if no others may go. It costs
  one unit of those that are kept: from then on two blocks take turns. In a sweep there and back it
  costs nothing, because there the last units are furthest away only where all others are needed
  before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from infinity.sizes import align_up
from infinity.streaming.weights.access_order import NEVER, AccessOrder
from infinity.tiers.ranges import Range, fits_within, granule_of, rounded_nbytes

_OF_A_HOLE = 1 << 62  # Further away than any block.
MOST_WASTED = 2  # A victim this many times as large as the needed size is avoided.


class ByNextUse:
    """Units in the order of their expected next uses. What a call costs does not grow with the
    number of units, but for the first one after an unexpected use.

    nbytes: bytes by unit; None: of one size. A model has units of few sizes
    first: index of the unit here that unit 0 of the order is
    """

    def __init__(
        self, order: AccessOrder, nbytes: Sequence[int] | None = None, *, first: int = 0
    ) -> None:
        self._order = order
        self._nbytes = nbytes
        self._first = first
        self._epoch = order.epoch  # Of the uses.
        self._num_seen = 0  # Of what has moved.
        self._uses: dict[int, int] = {}
        # By size, ascending: the next use, and the unit below 0, so that the first unit is the
        # last among equals.
        self._rows: dict[int, list[tuple[int, int]]] = {}

    def add(self, unit: int) -> None:
        """Adds a unit, if it is not there."""
        if unit not in self._uses:
            use = self._uses[unit] = self._order.next_use(unit - self._first)
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
        order = self._order
        if self._epoch != order.epoch:
            units = list(self._uses)
            self.clear()
            for unit in units:
                self.add(unit)
            self._epoch = order.epoch
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
            that size would do, or if its use is not expected (Note [Holes])
        """
        self._follow()
        limit = -1
        if nearer_than is not None:
            limit = self._order.next_use(nearer_than - self._first)
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


@dataclass(frozen=True, slots=True)
class Evictable:
    """A block that may be freed. `distance`: uses of other units before the bytes are needed;
    more than NEVER if no read brings them back."""

    range: Range
    unit: int
    distance: int
    is_decoded: bool = False


def main_sizes(nbytes: Iterable[int]) -> tuple[int, int]:
    """Returns the least and the largest of the sizes within an eighth of each other that units with
    the most bytes have: those of blocks, or of tiles, whose whole pages make them differ a little.
    Their ranges come from the bottom of the memory and all others from the top: where they lay by
    turns, small units would leave holes that no block fits. (0, 0) without units."""
    total_nbytes = Counter[int]()
    for size in nbytes:
        total_nbytes[size] += size
    best, most_nbytes = (0, 0), 0
    for largest in total_nbytes:
        least = largest - largest // 8
        found = sum(total for size, total in total_nbytes.items() if least <= size <= largest)
        if found > most_nbytes:
            best, most_nbytes = (least, largest), found
    return best


def last_uses(before: Iterable[int], nbytes: Sequence[int], wanted_nbytes: int) -> tuple[int, ...]:
    """Returns the first units of `before`, the uses from now back, up to one that would make the
    wanted space: a tile, and what its block and an adapter have used since."""
    last: list[int] = []
    for unit in before:
        last.append(unit)
        if MOST_WASTED * nbytes[unit] >= wanted_nbytes:
            break
    return tuple(last)


def choose_neighbours(
    blocks: Iterable[Evictable], holes: Iterable[Range], wanted_nbytes: int
) -> list[Evictable]:
    """Returns blocks that make space for `wanted_nbytes` together with the holes between them.

    Of all such neighbours those whose first use is furthest away, and among equals the fewest
    bytes. Neighbours of which no use is expected go before all others, then those of no more than
    the wanted bytes, because they leave no new hole (Note [Holes]), then those of at most twice the
    wanted bytes. Empty if no neighbours make enough space.
    """
    blocks = list(blocks)
    size_nbytes = rounded_nbytes(wanted_nbytes)
    furthest = max(blocks, key=lambda block: (block.distance, -block.range.nbytes), default=None)
    if furthest is not None and furthest.distance < NEVER and _takes(furthest, size_nbytes):
        return [furthest]  # The rule finds the same.
    found: list[tuple[Range, Evictable | None]] = [(hole, None) for hole in holes]
    found += [(block.range, block) for block in blocks]
    found.sort(key=lambda item: item[0].offset_nbytes)
    # Of plain numbers, because a simulated step asks thousands of times.
    distances = [_OF_A_HOLE if block is None else block.distance for _, block in found]
    ends = [taken.end_nbytes for taken, _ in found]
    offsets = [taken.offset_nbytes for taken, _ in found]
    granule_nbytes = granule_of(size_nbytes)
    starts = [align_up(offset, granule_nbytes) for offset in offsets]  # Where `allocate` begins.
    nbytes_before = [0]
    for taken, block in found:
        nbytes_before.append(nbytes_before[-1] + (0 if block is None else taken.nbytes))
    best: tuple[tuple[int, int, int], int, int] | None = None
    first = 0
    for last, end in enumerate(ends):
        if last and ends[last - 1] != offsets[last]:
            first = last
        # The shortest row of neighbours that ends here.
        while first <= last and starts[first] + size_nbytes <= end:
            soonest = min(distances[first : last + 1])
            soonest = NEVER if soonest == _OF_A_HOLE else soonest
            nbytes = nbytes_before[last + 1] - nbytes_before[first]
            score = _score(soonest, nbytes, wanted_nbytes, size_nbytes)
            if best is None or score > best[0]:
                best = score, first, last
            first += 1
    if best is None:
        return []
    return [block for _, block in found[best[1] : best[2] + 1] if block is not None]


def _takes(block: Evictable, size_nbytes: int) -> bool:
    """Whether the block leaves a range of exactly this size, which `rounded_nbytes` returned."""
    taken = block.range
    return taken.nbytes == size_nbytes and fits_within(
        taken.offset_nbytes, taken.end_nbytes, size_nbytes
    )


def _score(soonest: int, nbytes: int, wanted_nbytes: int, size_nbytes: int) -> tuple[int, int, int]:
    """Returns what is largest for the row that should go: by its first use, and its bytes."""
    if soonest >= NEVER:
        rank = 3
    elif nbytes <= size_nbytes:
        rank = 2
    else:
        rank = int(nbytes <= MOST_WASTED * wanted_nbytes)
    return rank, soonest, -nbytes
