"""Sums of gradients that stay in host memory until their update, in the simulated step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from infinity.simulate.spec import NOT_SHARDED, StepSpec

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
    left_nbytes = job.weights_cache_nbytes - fetched_nbytes(job)
    if any(unit.sharded is not NOT_SHARDED for unit in job.units):
        if not job.defers or not job.weights_cache_nbytes:
            return {}, 0
        left_nbytes -= NUM_BLOCKS * max(unit.written_nbytes for unit in job.units)
    elif not job.is_deferred:
        left_nbytes -= job.ring_nbytes
    return sums, left_nbytes


def _fitting(sums: Mapping[int, int], left_nbytes: float) -> Iterator[int]:
    for unit, nbytes in sums.items():
        left_nbytes -= nbytes
        if left_nbytes < 0:
            return
        yield unit
