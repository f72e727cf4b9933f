"""Chooses the tier of each state kind of each unit: a pure function of sizes and budgets.

`[placement]` gives, per state kind, an ordered list of tiers. Units are placed in model order, each
on the first tier of the list that still has space; so a kind that does not fit the host is divided:
the first units rest on the host, the others on NVMe. Frozen weights that can be read in place rest
in their checkpoint ("checkpoint"), whatever the list says. Kinds that may not go to NVMe are placed
first, so that a kind that may go there never takes their space; of the other kinds, those that
travel more often come first, because their resident bytes save more traffic. Frozen weights
come after all state of trained units: that is written as well as read, and drives write slower than
they read and wear out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.errors import CapacityError
from infinity.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES, align_down, align_up, format_nbytes
from infinity.state.units import MOMENT_KINDS, STATE_GRANULE, STATE_ITEM_NBYTES, StateKind, Unit
from infinity.tiers.ranges import rounded_nbytes

# By traffic per step: parameters move twice per micro-batch, gradients once, the rest once a step.
_PLACING_ORDER = (StateKind.PARAMETERS, StateKind.GRADIENTS, StateKind.MASTER, *MOMENT_KINDS)

_BUDGET_KEYS = {
    "device": "tiers.device.capacity",
    "host": "tiers.host.capacity",
    "nvme": "tiers.nvme.capacity",
}


@dataclass(frozen=True, slots=True)
class StatePlacement:
    """Tier names by (unit index, state kind), and the bytes placed on each tier."""

    tiers: Mapping[tuple[int, StateKind], str]
    placed_nbytes: Mapping[str, int]

    def tier(self, unit: Unit, state_kind: StateKind) -> str:
        """Returns the name of the tier on which the state kind of the unit rests."""
        return self.tiers[unit.index, state_kind]

    def travelling(self) -> tuple[StateKind, ...]:
        """State kinds that reach the optimizer through host memory, for at least one unit."""
        away = {state_kind for (_, state_kind), tier in self.tiers.items() if tier != "host"}
        return tuple(state_kind for state_kind in STATE_KINDS if state_kind in away)


def place(
    units: Sequence[Unit],
    preferences: Mapping[str, Sequence[str]],
    *,
    host_nbytes: int,
    device_nbytes: int | None,
) -> StatePlacement:
    """Chooses a tier for every state kind of every unit.

    `preferences` maps kind to tier names. `host_nbytes` and `device_nbytes` are the bytes that may
    hold state at rest (None: unlimited), without working memory. NVMe is not limited here: the
    volume limits it. Raises CapacityError when a list ends on a tier that is full.
    """
    free_nbytes: dict[str, float] = {
        "host": max(host_nbytes, 0),
        "device": float("inf") if device_nbytes is None else max(device_nbytes, 0),
        "nvme": float("inf"),
        "checkpoint": float("inf"),
    }
    tiers: dict[tuple[int, StateKind], str] = {}
    placed_nbytes = dict.fromkeys(free_nbytes, 0)
    for state_kind, unit in _in_order(units, preferences):
        needed_nbytes = resting_nbytes(unit, state_kind)
        if needed_nbytes == 0:
            continue
        order = preferences[state_kind.kind]
        if state_kind is StateKind.PARAMETERS and unit.stored is not None:
            order = ("checkpoint",)
        tier = next((tier for tier in order if free_nbytes[tier] >= needed_nbytes), None)
        if tier is None:
            raise _no_space(units, state_kind, unit, order, free_nbytes)
        tiers[unit.index, state_kind] = tier
        free_nbytes[tier] -= needed_nbytes
        placed_nbytes[tier] += needed_nbytes
    return StatePlacement(tiers, placed_nbytes)


def _in_order(
    units: Sequence[Unit], preferences: Mapping[str, Sequence[str]]
) -> list[tuple[StateKind, Unit]]:
    """Returns every state kind of every unit in the order of placement (a stable sort)."""
    found: list[tuple[StateKind, Unit]] = []
    for can_be_on_nvme, is_frozen in itertools.product((False, True), repeat=2):
        chosen = [unit for unit in units if (not unit.state_numel) is is_frozen]
        found += [
            (state_kind, unit)
            for state_kind in _PLACING_ORDER
            if ("nvme" in preferences[state_kind.kind]) is can_be_on_nvme
            for unit in chosen
            if not is_frozen or state_kind is StateKind.PARAMETERS
        ]
    return found


def resting_nbytes(unit: Unit, state_kind: StateKind) -> int:
    """Bytes that the state kind takes where it rests, rounded up; 0 if the unit has none of it."""
    nbytes = unit.nbytes(state_kind)
    return rounded_nbytes(nbytes) if nbytes else 0


def _no_space(
    units: Sequence[Unit],
    state_kind: StateKind,
    unit: Unit,
    order: Sequence[str],
    free_nbytes: Mapping[str, float],
) -> CapacityError:
    total_nbytes = sum(resting_nbytes(other, state_kind) for other in units)
    last = order[-1]
    return CapacityError(
        last,
        needed_nbytes=resting_nbytes(unit, state_kind),
        available_nbytes=int(free_nbytes[last]),
        key=_BUDGET_KEYS[last],
        remedy=f"change {_BUDGET_KEYS[last]}, or add 'nvme' to placement.{state_kind.kind}",
        detail=f"{state_kind.value} of {unit.name!r} has no space "
        f"(all units: {format_nbytes(total_nbytes)})",
    )


# The least bytes that the optimizer moves at a time; smaller requests are slow.
_SMALLEST_CHUNK_NBYTES = 16 * PAGE_NBYTES
_GRANULE_NBYTES = STATE_GRANULE * STATE_ITEM_NBYTES
_LEAST_SLOTS = 3  # One being read, one updated, one written, if they fit.
_SMOOTH_SLOTS = 12
_EFFICIENT_CHUNK_NBYTES = 2 << 20  # Smaller requests cost bandwidth and CPU.
_LITTLE = 8  # A chunk is larger by an eighth at the most.
STATE_KINDS = (StateKind.GRADIENTS, *MOMENT_KINDS, StateKind.MASTER)


def updated_nbytes(unit: Unit) -> int:
    """Returns the bytes that an update of the unit reads or writes."""
    return unit.trainable_nbytes + sum(unit.nbytes(kind) for kind in STATE_KINDS)


def least_chunk_nbytes(units: Sequence[Unit]) -> int:
    """The smallest chunk that the layout of every unit allows, in bytes of fp32: a granule, or the
    largest unit where that is smaller."""
    numel = max(min(unit.granule_numel, unit.state_numel) for unit in units)
    return max(STATE_ITEM_NBYTES * numel, _GRANULE_NBYTES)


def staging_nbytes(
    units: Sequence[Unit], kinds: Sequence[StateKind], chunk_nbytes: int
) -> dict[StateKind, int]:
    """Bytes of a staging slot per state kind: the most that a chunk of `chunk_nbytes` of fp32
    has. Worked example: chunks of 16 MiB need 16 MiB of each moment, 8 MiB of a residual."""
    numel = chunk_nbytes // STATE_ITEM_NBYTES
    return {
        state_kind: max(unit.nbytes(state_kind, min(numel, unit.state_numel)) for unit in units)
        for state_kind in kinds
    }


def smallest_working_nbytes(
    units: Sequence[Unit],
    preferences: Mapping[str, Sequence[str]],
    *,
    held_nbytes: int,
    chunk_nbytes: int,
    staged_nbytes: int = 0,
    gathered_nbytes: int = 0,
    summed_nbytes: int = 0,
) -> int:
    """The least host memory training can work in, beside what rests on the host.

    `gathered_nbytes`: the largest unit's weights that are gathered from the shards of ranks.
    `summed_nbytes`: sums of micro-batches that wait to be sent to other ranks.
    `staged_nbytes`: blocks for gradients that leave a device with its own memory.
    `held_nbytes`: the most weight bytes that nested modules use at once. In a backward these are
    in memory and, where gradients do not rest on the host, those of one unit being summed and of
    one being written; when the program sets a master, one unit's weights and the master of a
    tensor; in an update, which may run while outer modules are in use, one chunk of every state
    kind that travels.
    """
    streamed = {kind for kind, order in preferences.items() if set(order) != {"host"}}
    if any(unit.stored is not None for unit in units):
        streamed.add("parameters")
    are_weights_away = "parameters" in streamed or gathered_nbytes > 0
    weights_nbytes = _most(units, StateKind.PARAMETERS) if "parameters" in streamed else 0
    weights_nbytes = max(weights_nbytes, gathered_nbytes)
    held_nbytes = max(held_nbytes, weights_nbytes) if are_weights_away else 0
    gradients_nbytes = 2 * _most(units, StateKind.GRADIENTS) if "gradients" in streamed else 0
    master_nbytes = _most(units, StateKind.MASTER) if "master" in streamed else 0
    travelling = sum(
        state_kind.kind in streamed
        for state_kind in STATE_KINDS
        if state_kind not in MOMENT_KINDS or any(state_kind in unit.moments.kinds for unit in units)
    )
    chunk_nbytes = max(min(chunk_nbytes, _SMALLEST_CHUNK_NBYTES), least_chunk_nbytes(units))
    working_nbytes = max(
        held_nbytes + gradients_nbytes + staged_nbytes + summed_nbytes,
        weights_nbytes + master_nbytes,
        held_nbytes + rounded_nbytes(travelling * chunk_nbytes),
    )
    # Large blocks start at huge pages, which may cost the head of one.
    return working_nbytes + (HUGE_PAGE_NBYTES if working_nbytes >= HUGE_PAGE_NBYTES else 0)


def _most(units: Sequence[Unit], state_kind: StateKind) -> int:
    return max((resting_nbytes(other, state_kind) for other in units), default=0)


def plan_staging_slots(
    free_nbytes: int,
    chunk_nbytes: int,
    *,
    units_nbytes: Sequence[int],
    travelling_nbytes: int,
    granule_nbytes: int = _GRANULE_NBYTES,
) -> tuple[int, int]:
    """(bytes of a chunk, staging slots) of the optimizer's pipeline in `free_nbytes`.

    Chunks are measured by what fp32 would take, as are units (`units_nbytes`), and are whole
    granules; for each granule `travelling_nbytes` travel. The goal is slots for two of the largest
    units, one being written back while the next is read, in at most half of the free memory. Chunks
    are at most `chunk_nbytes`, and smaller where that gives the ring enough slots to turn smoothly,
    but a little larger than that where units then have fewer chunks (`_with_fewest`). With
    little memory there are three small slots (one being read, one updated, one written), and
    fewer when chunks would get too small. Worked example: moments and gradients of fp32, units of
    48 MiB, chunks of 16 MiB: 2 GiB free give 6 slots of 3 x 16 MiB; 512 MiB free allow 256 MiB,
    which are 12 slots of 3 x 7.1 MiB, in whole granules.
    """
    if free_nbytes >= HUGE_PAGE_NBYTES:
        free_nbytes = align_down(free_nbytes, HUGE_PAGE_NBYTES)
    travelling_nbytes, unit_nbytes = max(travelling_nbytes, PAGE_NBYTES), max(units_nbytes)
    chunk_nbytes = min(chunk_nbytes, align_up(max(unit_nbytes, 1), granule_nbytes))
    chunk_nbytes = max(align_down(chunk_nbytes, granule_nbytes), granule_nbytes)
    smallest_nbytes = max(min(chunk_nbytes, _SMALLEST_CHUNK_NBYTES), granule_nbytes)

    def slot(size_nbytes: int) -> int:
        return -(-size_nbytes // granule_nbytes) * travelling_nbytes

    def share(ring_nbytes: int, staging_slots: int) -> int:
        return ring_nbytes // (staging_slots * travelling_nbytes) * granule_nbytes

    if share(free_nbytes, _LEAST_SLOTS) < smallest_nbytes:
        return smallest_nbytes, max(1, free_nbytes // slot(smallest_nbytes))
    ring_nbytes = min(free_nbytes // 2, 2 * slot(align_up(unit_nbytes, chunk_nbytes)))
    efficient_nbytes = min(chunk_nbytes, _EFFICIENT_CHUNK_NBYTES)
    size_nbytes = min(chunk_nbytes, max(efficient_nbytes, share(ring_nbytes, _SMOOTH_SLOTS)))
    size_nbytes = max(align_down(size_nbytes, granule_nbytes), granule_nbytes)
    size_nbytes = _with_fewest(size_nbytes, units_nbytes, chunk_nbytes, granule_nbytes)
    staging_slots = ring_nbytes // slot(size_nbytes)
    if staging_slots >= _LEAST_SLOTS:
        return size_nbytes, staging_slots
    return min(chunk_nbytes, share(free_nbytes, _LEAST_SLOTS)), _LEAST_SLOTS


def _with_fewest(
    size_nbytes: int, units_nbytes: Sequence[int], most_nbytes: int, granule_nbytes: int
) -> int:
    """Returns the size of chunks, at most a little larger, with which units have the fewest: a unit
    that is a little larger than a chunk has two, and the second costs as many requests."""
    most_nbytes = min(most_nbytes, size_nbytes + size_nbytes // _LITTLE)
    sizes = Counter(units_nbytes)
    found = {size_nbytes}
    for unit_nbytes in sizes:
        for count in range(max(1, unit_nbytes // most_nbytes), unit_nbytes // size_nbytes + 1):
            found.add(align_up(-(-unit_nbytes // count), granule_nbytes))
    allowed = (size for size in found if size_nbytes <= size <= most_nbytes)

    def num_chunks(size: int) -> int:
        return sum(count * -(-unit_nbytes // size) for unit_nbytes, count in sizes.items())

    return min(allowed, key=lambda size: (num_chunks(size), size))
