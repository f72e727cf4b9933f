"""Which tier each piece of each unit rests on: a pure function of sizes and budgets.

`[placement]` gives, per state kind, an ordered list of tiers. Pieces are placed unit by unit in model
order, and a piece goes to the first tier of its list that still has room; so a kind that does not
fit the host is split: the first units on the host, the rest on NVMe. Kinds that may not go to NVMe
are placed first, so that a kind that may never takes their room; among the others those that travel
more often come first, because a resident byte of theirs saves more traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infinity.errors import CapacityError
from infinity.sizes import PAGE_NBYTES, format_nbytes
from infinity.state.units import Piece, Unit
from infinity.tiers.ranges import rounded_nbytes

# By traffic per step: parameters move twice per micro-batch, gradients once, the rest once a step.
_PLACING_ORDER = (
    Piece.PARAMETERS,
    Piece.GRADIENTS,
    Piece.MASTER,
    Piece.EXP_AVG,
    Piece.EXP_AVG_SQ,
)

_BUDGET_KEYS = {"device": "tiers.device.capacity", "host": "tiers.host.capacity"}


@dataclass(frozen=True, slots=True)
class Placement:
    """tier name by (unit index, piece), and the bytes placed on each tier."""

    tiers: Mapping[tuple[int, Piece], str]
    placed_nbytes: Mapping[str, int]

    def tier(self, unit: Unit, piece: Piece) -> str:
        return self.tiers[unit.index, piece]


def place(
    units: Sequence[Unit],
    preferences: Mapping[str, Sequence[str]],
    *,
    host_nbytes: int,
    device_nbytes: int | None,
) -> Placement:
    """Chooses a tier for every piece.

    `preferences` maps kind to tier names. `host_nbytes` and `device_nbytes` are what may be filled
    for good (None: unlimited); working memory is already subtracted. NVMe is not limited here: the
    volume knows its own space. Raises CapacityError when a list ends on a tier that is full.
    """
    free_nbytes: dict[str, float] = {
        "host": max(host_nbytes, 0),
        "device": float("inf") if device_nbytes is None else max(device_nbytes, 0),
        "nvme": float("inf"),
    }
    tiers: dict[tuple[int, Piece], str] = {}
    placed_nbytes = dict.fromkeys(free_nbytes, 0)
    for piece in sorted(_PLACING_ORDER, key=lambda piece: "nvme" in preferences[piece.kind]):
        for unit in units:
            needed_nbytes = resting_nbytes(unit, piece)
            if needed_nbytes == 0:
                continue
            order = preferences[piece.kind]
            tier = next((tier for tier in order if free_nbytes[tier] >= needed_nbytes), None)
            if tier is None:
                raise _no_room(units, piece, unit, order, free_nbytes)
            tiers[unit.index, piece] = tier
            free_nbytes[tier] -= needed_nbytes
            placed_nbytes[tier] += needed_nbytes
    return Placement(tiers, placed_nbytes)


def resting_nbytes(unit: Unit, piece: Piece) -> int:
    """Bytes the piece takes where it rests, rounding included; 0 when there is none."""
    nbytes = unit.nbytes(piece)
    return rounded_nbytes(nbytes) if nbytes else 0


def _no_room(
    units: Sequence[Unit],
    piece: Piece,
    unit: Unit,
    order: Sequence[str],
    free_nbytes: Mapping[str, float],
) -> CapacityError:
    total_nbytes = sum(resting_nbytes(each, piece) for each in units)
    last = order[-1]
    return CapacityError(
        last,
        needed_nbytes=resting_nbytes(unit, piece),
        available_nbytes=int(free_nbytes[last]),
        key=f"{_BUDGET_KEYS.get(last, 'tiers.nvme')}, or add 'nvme' to placement.{piece.kind}",
        detail=f"{piece.value} of {unit.name!r} has no room (all units: {format_nbytes(total_nbytes)})",
    )


_SMALLEST_CHUNK_NBYTES = 16 * PAGE_NBYTES


def smallest_working_nbytes(
    units: Sequence[Unit], preferences: Mapping[str, Sequence[str]], *, held_nbytes: int
) -> int:
    """The least host memory training can work in, beside what rests on the host.

    `held_nbytes`: the most weight bytes that nested modules hold at once. Backward: the held weights
    and, when gradients rest elsewhere, the gradients of one unit being summed and of one being
    written. Update: one unit's weights and one chunk of every streamed piece.
    """
    streamed = {kind for kind, order in preferences.items() if set(order) != {"host"}}
    largest_weights = max((rounded_nbytes(u.weight_nbytes) for u in units), default=0)
    largest_state = max(
        (rounded_nbytes(u.nbytes(Piece.GRADIENTS)) for u in units if u.state_numel), default=0
    )
    weights_nbytes = max(held_nbytes, largest_weights) if "parameters" in streamed else 0
    gradients_nbytes = 2 * largest_state if "gradients" in streamed else 0
    chunks_nbytes = 4 * rounded_nbytes(_SMALLEST_CHUNK_NBYTES)
    return max(weights_nbytes + gradients_nbytes, weights_nbytes + chunks_nbytes)


def chunk_for(free_nbytes: int, configured_nbytes: int) -> int:
    """The optimizer chunk that lets three steps of the update pipeline be in memory at once.

    Four pieces (master, two moments, gradients) for each of read, compute and write: a twelfth of
    the free memory, never more than configured and never less than the smallest.
    """
    share_nbytes = free_nbytes // 12 // PAGE_NBYTES * PAGE_NBYTES
    return max(_SMALLEST_CHUNK_NBYTES, min(configured_nbytes, share_nbytes))
