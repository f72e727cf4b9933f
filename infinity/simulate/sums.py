"""Sums of gradients that stay in host memory until their update, in the simulated step. Pure."""

from __future__ import annotations

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


def kept_sums(job: StepSpec) -> frozenset[int]:
    """Returns the units whose gradients rest on NVMe, but stay in memory until their update and are
    not written.

    Memory beside all weights holds those that come first, and the staging slots where updates ride
    along have their own. The last ones have memory on their way to the drive, two at a time
    (streaming/gradient_blocks.py).
    """
    sums = {
        unit: job.units[unit].gradient_nbytes
        for use in reversed(job.uses)
        for unit in use.units
        if job.units[unit].gradients == "nvme" and job.units[unit].gradient_nbytes
    }
    left_nbytes = job.weights_cache_nbytes - fetched_nbytes(job)
    if any(unit.sharded is not NOT_SHARDED for unit in job.units):
        if not job.defers or not job.weights_cache_nbytes:
            return frozenset()
        left_nbytes -= NUM_BLOCKS * max(unit.written_nbytes for unit in job.units)
    elif not job.is_deferred:
        left_nbytes -= job.ring_nbytes
    left_nbytes -= _NUM_LEAVING * max(sums.values(), default=0)
    kept: list[int] = []
    for unit, nbytes in sums.items():
        # The memory is asked for when the sum is complete, in its block.
        left_nbytes -= nbytes
        if left_nbytes < 0:
            break
        kept.append(unit)
    return frozenset(kept)
