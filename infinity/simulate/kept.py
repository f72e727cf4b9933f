"""The shards whose weights stay in host memory after their update, as the engine keeps them
(distributed/kept_shards.py). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infinity.simulate.spec import StepSpec
from infinity.simulate.sums import NUM_BLOCKS
from infinity.tiers.ranges import rounded_nbytes


@dataclass(frozen=True, slots=True)
class KeptUnits:
    """`for_use`: units whose shard the first use after an update need not read from a drive;
    `for_update`: whether no update needs to read any."""

    for_use: frozenset[int] = frozenset()
    for_update: bool = False


def kept_shards(job: StepSpec, order: Iterable[int]) -> KeptUnits:
    """Returns what memory keeps. `order`: units in the order of a forward.

    Memory that is free at the step goes to the shards that come first. Weights that are fetched
    take it back, of shards that were used, then of those that come last.
    """
    shards = {
        unit: rounded_nbytes(job.units[unit].written_nbytes)
        for unit in dict.fromkeys(order)
        if job.units[unit].sharded.is_gathered
        and job.units[unit].weights == "nvme"
        and job.units[unit].update_nbytes
    }
    if not (job.defers and shards and job.weights_cache_nbytes):
        return KeptUnits()
    free_nbytes = job.weights_cache_nbytes - NUM_BLOCKS * max(shards.values())
    kept, reserved_nbytes, fetched_nbytes = set(), 0, 0
    for unit, nbytes in shards.items():
        reserved_nbytes += nbytes
        if max(reserved_nbytes, fetched_nbytes + nbytes) <= free_nbytes:
            kept.add(unit)
        fetched_nbytes += rounded_nbytes(job.units[unit].fetched_nbytes)
    return KeptUnits(frozenset(kept), reserved_nbytes + fetched_nbytes <= free_nbytes)
