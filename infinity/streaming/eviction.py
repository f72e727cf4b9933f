"""Decisions about residency: pure functions of the trace and of who is resident.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: dropping
what is used furthest in the future moves the fewest bytes, and the order of training is known. That
is proven for units of one size. For several the best choice is a hard problem (Chrobak et al.,
"Caching is hard, even in the fault model", 2012), and an embedding that goes for a block's room is
mostly wasted: it goes only where nothing nearer to the wanted size does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infinity.streaming.access_order import NEVER, AccessOrder

_MOST_WASTED = 2  # A victim this many times as large as what is wanted is looked at twice.


def choose_victim(
    trace: AccessOrder,
    candidates: Iterable[int],
    *,
    nearer_than: int | None = None,
    nbytes: Sequence[int] | None = None,
    wanted_nbytes: int = 0,
) -> int | None:
    """The candidate whose next use is furthest away, or None.

    With `nearer_than` (a unit that wants the room ahead of its use) only a candidate used later
    than that unit is chosen: reading ahead must never cost a read of something needed sooner. With
    sizes, by unit, and the size that is wanted, one that is more than twice as large goes only
    where no candidate of one to two times that size would do, or where its use is not expected.
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
