"""Layer inputs in host memory between a forward and its backward, as the engine keeps them
(streaming/inputs/activations.py). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infinity.simulate.order import Move
from infinity.simulate.spec import NOT_SHARDED, StepSpec
from infinity.tiers.ranges import rounded_nbytes
from infinity.tiers.spare import SpareMemory


def inputs_on_host(job: StepSpec) -> list[int]:
    """Returns the bytes of each use's saved input that host memory keeps: all of them, or the first
    ones, until it has no more free or from weights that are only kept."""
    if job.saved_on == "host":
        return [use.saved_nbytes for use in job.uses]
    left_nbytes = 0.0
    if job.saved_on == "nvme" and job.inputs_nbytes is not None and not job.shares_host_memory:
        weights_nbytes = sum(unit.fetched_nbytes for unit in job.units)
        left_nbytes = max(job.inputs_nbytes, job.weights_cache_nbytes - weights_nbytes)
    kept = []
    for use in job.uses:
        kept.append(int(min(use.saved_nbytes, left_nbytes)))
        left_nbytes -= kept[-1]
    return kept


def inputs_nbytes(job: StepSpec, moves: Sequence[Move]) -> list[int]:
    """Returns the bytes of inputs in the memory for weights when each move begins. Where the device
    is the host, there are none."""
    if job.shares_host_memory:
        return [0] * len(moves)
    on_host = inputs_on_host(job)
    waiting = set[int]()  # Uses between their forward and their backward.
    found, held_nbytes = [], 0
    for move in moves:
        found.append(held_nbytes)
        if move.is_backward and move.use in waiting:
            waiting.remove(move.use)
            held_nbytes -= on_host[move.use]
        elif not move.is_backward and move.use not in waiting:
            waiting.add(move.use)
            held_nbytes += on_host[move.use]
    return found


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


NUM_BLOCKS = 2  # Of weights of shards that are being updated.
_NUM_LEAVING = 2  # Sums on their way to the drive.


def fetched_nbytes(job: StepSpec) -> int:
    """Returns the bytes if everything that uses fetch to host memory were kept: with ranks, parts
    beside the gathered weights."""
    return sum(
        unit.fetched_nbytes + (unit.weight_nbytes if unit.sharded.is_gathered_on_host else 0)
        for unit in job.units
    )


class SumsInMemory(NamedTuple):
    """Units whose gradients rest on NVMe. `kept`: those whose sums stay in memory until their
    update and are not written; `held`: those whose sums are in memory at their update."""

    kept: frozenset[int]
    held: frozenset[int]


def sums_in_memory(job: StepSpec) -> SumsInMemory:
    """Kept are those that come first (streaming/gradients/blocks.py). Held are these, and the last
    ones, of which the write has not taken the memory."""
    sums, left_nbytes = _sums(job)
    absent_nbytes = max(sum(sums.values()) - left_nbytes, 0)
    leaving_nbytes = min(_NUM_LEAVING * max(sums.values(), default=0), absent_nbytes)
    kept = frozenset(_fitting(sums, left_nbytes - leaving_nbytes))
    written = {unit: sums[unit] for unit in reversed(sums) if unit not in kept}
    left_nbytes -= sum(sums[unit] for unit in kept)
    return SumsInMemory(kept, kept.union(_fitting(written, left_nbytes)))


def _sums(job: StepSpec) -> tuple[dict[int, int], float]:
    """Returns the bytes of sums that rest on NVMe, by unit in the order of the backward, and the
    memory for them: beside all weights, and beside the staging slots where updates do not ride
    along, which have their own."""
    sums = {
        unit: job.units[unit].gradient_nbytes
        for use in reversed(job.uses)
        for unit in use.units
        if job.units[unit].gradients == "nvme" and job.units[unit].gradient_nbytes
    }
    spare = SpareMemory(job.weights_cache_nbytes, fetched_nbytes(job))
    if any(unit.sharded is not NOT_SHARDED for unit in job.units):
        if not job.defers or not job.weights_cache_nbytes:
            return {}, 0
        spare.free_nbytes -= NUM_BLOCKS * max(unit.written_nbytes for unit in job.units)
    elif not job.is_deferred:
        spare.ring_to_come_nbytes = job.ring_nbytes
    return sums, spare.for_sums_nbytes


def _fitting(sums: Mapping[int, int], left_nbytes: float) -> Iterator[int]:
    for unit, nbytes in sums.items():
        left_nbytes -= nbytes
        if left_nbytes < 0:
            return
        yield unit
