"""Decisions about residency: pure functions of the access order and of the resident units.

Memory that is allocated in one range needs neighbours to go: `choose_neighbours`.
Elsewhere one unit after the other goes: `choose_victim`.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: evicting
the page whose next use is furthest away moves the fewest bytes, and the order of training is known.
That is proven for units of one size. For several sizes the best choice is a hard problem (Chrobak
et al., "Caching is hard, even in the fault model", 2012), and evicting an embedding for a block
mostly wastes space: it is evicted only if no unit nearer to the needed size is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinity.streaming.access_order import NEVER, AccessOrder
from infinity.tiers.ranges import Range, fits_within

_MOST_WASTED = 2  # A victim this many times as large as the needed size is avoided.


@dataclass(frozen=True, slots=True)
class Evictable:
    """A block that may be freed. `distance`: uses of other units before the bytes are needed;
    more than NEVER if no read brings them back."""

    range: Range
    unit: int
    distance: int
    is_decoded: bool = False


def choose_neighbours(
    blocks: Iterable[Evictable], holes: Iterable[Range], wanted_nbytes: int
) -> list[Evictable]:
    """Returns blocks that make space for `wanted_nbytes` together with the holes between them.

    Of all such neighbours those whose first use is furthest away, and among equals the fewest
    bytes. Neighbours of more than twice the wanted bytes are chosen only if there are no others,
    or if no use of them is expected. Empty if no neighbours make enough space.
    """
    found: list[tuple[Range, Evictable | None]] = [(hole, None) for hole in holes]
    found += [(block.range, block) for block in blocks]
    found.sort(key=lambda item: item[0].offset_nbytes)
    best: tuple[tuple[bool, int, int], list[Evictable]] | None = None
    first = 0
    for last, (end, _) in enumerate(found):
        if last and found[last - 1][0].end_nbytes != end.offset_nbytes:
            first = last
        # The shortest row of neighbours that ends here.
        while fits_within(found[first][0].offset_nbytes, end.end_nbytes, wanted_nbytes):
            row = [block for _, block in found[first : last + 1] if block is not None]
            first += 1
            soonest = min((block.distance for block in row), default=NEVER)
            nbytes = sum(block.range.nbytes for block in row)
            fits = nbytes <= _MOST_WASTED * wanted_nbytes or soonest >= NEVER
            score = (fits, soonest, -nbytes)
            if best is None or score > best[0]:
                best = score, row
            if first > last:
                break
    return [] if best is None else best[1]


def choose_victim(
    trace: AccessOrder,
    candidates: Iterable[int],
    *,
    nearer_than: int | None = None,
    nbytes: Sequence[int] | None = None,
    wanted_nbytes: int = 0,
) -> int | None:
    """Returns the candidate whose next use is furthest away, or None.

    nearer_than: a unit that is read ahead of its use. Only candidates that are used later than it
        are chosen, because a read ahead must never cost a read of a unit that is needed sooner
    nbytes: bytes by unit. A candidate of more than twice `wanted_nbytes` is chosen only if none of
        one to two times that size would do, or if its use is not expected
    """
    limit = -1 if nearer_than is None else trace.distance(nearer_than)
    distances = {unit: trace.distance(unit) for unit in candidates}
    allowed = [unit for unit, distance in distances.items() if distance > limit]
    if not allowed:
        return None
    victim = max(allowed, key=distances.__getitem__)
    most_nbytes = _MOST_WASTED * wanted_nbytes
    if nbytes is not None and nbytes[victim] > most_nbytes and distances[victim] < NEVER:
        fitting = [unit for unit in allowed if wanted_nbytes <= nbytes[unit] <= most_nbytes]
        victim = max(fitting, key=distances.__getitem__, default=victim)
    return victim
