"""Decisions about residency: pure functions of the access order and of the resident units.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: evicting
the page whose next use is furthest away moves the fewest bytes, and the order of training is known.
That is proven for units of one size. For several sizes the best choice is a hard problem (Chrobak
et al., "Caching is hard, even in the fault model", 2012), and evicting an embedding for a block
mostly wastes space: it is evicted only if no unit nearer to the needed size is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity.streaming.access_order import NEVER, AccessOrder

_MOST_WASTED = 2  # A victim this many times as large as the needed size is avoided.


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
