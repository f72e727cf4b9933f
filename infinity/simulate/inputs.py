"""Layer inputs in host memory between a forward and its backward, as the engine keeps them
(streaming/inputs/input_memory.py). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.simulate.order import Move
from infinity.simulate.spec import StepSpec


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
