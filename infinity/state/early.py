"""Which units can be updated before the step has decided: those whose old state can come back."""

from __future__ import annotations

from infinity.state.store import HostLocation, LocalStore, NvmeLocation, changing_kinds
from infinity.state.units import Unit


def can_go_back(store: LocalStore, unit: Unit, *, is_beside: bool) -> bool:
    """Whether all that an update of the unit changes can be brought back: state on NVMe, which has
    generations, and state on the host, which is copied before.

    Units that have nothing on NVMe are updated early only beside a device: where the device is the
    host, the copy costs time and nothing overlaps. `is_beside`: the device that computes has memory
    of its own.
    """
    kinds = changing_kinds(unit) if unit.state_numel else []
    return (
        bool(kinds)
        and (is_beside or has_generations(store, unit))
        and all(
            isinstance(store.location(unit, kind), HostLocation | NvmeLocation) for kind in kinds
        )
    )


def has_generations(store: LocalStore, unit: Unit) -> bool:
    """Whether some of what an update of the unit changes rests on NVMe."""
    return any(
        isinstance(store.location(unit, kind), NvmeLocation) for kind in changing_kinds(unit)
    )
