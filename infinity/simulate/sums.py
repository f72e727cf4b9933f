"""Sums of gradients that stay in host memory until their update, in the simulated step. Pure."""

from __future__ import annotations

from infinity.simulate.spec import NOT_SHARDED, StepSpec

NUM_BLOCKS = 2  # Of weights of shards that are being updated.


def fetched_nbytes(job: StepSpec) -> int:
    """Returns the bytes if everything that uses fetch to host memory were kept: with ranks, parts
    beside the gathered weights."""
    return sum(
        unit.fetched_nbytes + (unit.weight_nbytes if unit.sharded.is_gathered_on_host else 0)
        for unit in job.units
    )


def kept_sums(job: StepSpec) -> frozenset[int]:
    """Returns the units whose gradients rest on NVMe and are still in memory at their update.

    Memory beside all weights holds them, and the staging slots where updates ride along have their
    own. The engine frees the sums that the next forward needs last. Over ranks the sums that come
    first stay, and are not written (distributed/owned_sums.py).
    """
    order = dict.fromkeys(unit for use in job.uses for unit in use.units)
    left_nbytes = job.weights_cache_nbytes - fetched_nbytes(job)
    if any(unit.sharded is not NOT_SHARDED for unit in job.units):
        if not job.defers or not job.weights_cache_nbytes:
            return frozenset()
        order = dict.fromkeys(reversed(order))
        left_nbytes -= NUM_BLOCKS * max(unit.written_nbytes for unit in job.units)
    elif not job.is_deferred:
        left_nbytes -= job.ring_nbytes
    kept: list[int] = []
    for unit in order:
        load = job.units[unit]
        if load.gradients != "nvme" or not load.gradient_nbytes:
            continue
        left_nbytes -= load.gradient_nbytes
        if left_nbytes < 0:
            break
        kept.append(unit)
    return frozenset(kept)
