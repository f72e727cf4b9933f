"""Norms of gradients that rest in shards: the bits do not depend on the number of ranks.

Squares are summed in fp64, first within blocks of SQUARES_NUMEL elements that no partition cuts,
then over the blocks in their order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy
import torch

from infinity.ops.squares import SQUARES_NUMEL, sum_squares
from infinity.sizes import MIB
from infinity.state.partition import ShardSlice
from infinity.state.units import STATE_GRANULE, TensorSpec
from infinity.streaming.gradients.norms import CompleteSums

assert STATE_GRANULE % SQUARES_NUMEL == 0, "a partition cuts between granules"

MEETING_NBYTES = 64 * MIB  # Of the sums of a rank that go in one message.
_SUM_NBYTES = 8


def all_norms(
    specs: Sequence[TensorSpec],
    slices: Mapping[TensorSpec, Sequence[ShardSlice]],
    gather: Callable[[Sequence[TensorSpec]], Sequence[bytes]],
) -> dict[TensorSpec, torch.Tensor]:
    """Returns `norms_of`. All ranks call it with the same tensors; `gather` returns the
    `sums_by_rank` of some of them, and its messages have a limit."""
    norms: dict[TensorSpec, torch.Tensor] = {}
    for some in meetings(specs, slices):
        norms |= norms_of(some, slices, gather(some))
    return norms


def meetings(
    specs: Sequence[TensorSpec], slices: Mapping[TensorSpec, Sequence[ShardSlice]]
) -> Iterator[Sequence[TensorSpec]]:
    """Yields runs of the tensors, the same on all ranks, whose sums take every rank at most
    MEETING_NBYTES, unless a run is one tensor. `slices`: as of `norms_of`."""
    counts = ((spec.numel // SQUARES_NUMEL + 2 * len(slices[spec])) for spec in specs)
    if sum(counts) * _SUM_NBYTES <= MEETING_NBYTES:
        yield specs
        return
    start, nbytes = 0, Counter[int]()
    for index, spec in enumerate(specs):
        more = Counter[int]()
        for part in slices[spec]:
            count = num_blocks(part.stop - part.start, first_block(part))
            more[part.rank] += count * _SUM_NBYTES
        if index > start and any(nbytes[r] + more[r] > MEETING_NBYTES for r in more):
            yield specs[start:index]
            start, nbytes = index, Counter()
        nbytes.update(more)
    yield specs[start:]


def norms_of(
    specs: Iterable[TensorSpec],
    slices: Mapping[TensorSpec, Sequence[ShardSlice]],
    sums_by_rank: Sequence[bytes],
) -> dict[TensorSpec, torch.Tensor]:
    """Returns the 2-norm of each tensor's gradient: fp32 scalars on the host.

    `slices`: the parts of each tensor in the order of its elements. `sums_by_rank`: for each rank,
    the `block_sums` of its slices, in the order of `specs`, as fp64 bytes.
    """
    sums = [
        torch.from_numpy(numpy.frombuffer(content, dtype=numpy.float64).copy())
        for content in sums_by_rank
    ]
    places = [0] * len(sums)
    norms = {}
    for spec in specs:
        parts = []
        for part in slices[spec]:
            count = num_blocks(part.stop - part.start, first_block(part))
            place = places[part.rank]
            parts.append(sums[part.rank][place : place + count])
            places[part.rank] = place + count
        total = torch.cat(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
        norms[spec] = total.sqrt().float()
    return norms


def measured_shards(shares: Iterable[ShardSlice]) -> CompleteSums:
    """Returns what measures sums of these parts when they are complete, by `block_sums`: fp64, on
    the host."""
    first = {share.part: first_block(share) for share in shares}
    return CompleteSums(
        lambda flat, part: block_sums(flat, first[part]).cpu(), counts=False, is_on_device=True
    )


def first_block(part: ShardSlice) -> int:
    """Returns the number of elements before the first block that begins in the part."""
    start = part.full.state_offset + part.start
    return min(-start % SQUARES_NUMEL, part.stop - part.start)


def num_blocks(numel: int, first: int) -> int:
    """Returns the number of sums that `block_sums` returns."""
    return (first > 0) + math.ceil((numel - first) / SQUARES_NUMEL)


def block_sums(values: torch.Tensor, first: int) -> torch.Tensor:
    """Returns sums of squares, fp64, of `values[:first]` and then of each SQUARES_NUMEL elements.
    values: fp32 (numel,), on the host or on a device, where the sums are, too.

    Each sum is a tree of its own, so that its bits do not depend on what else is summed.
    """
    sums = sum_squares(values[first:])
    return torch.cat([sum_squares(values[:first]), sums]) if first else sums
