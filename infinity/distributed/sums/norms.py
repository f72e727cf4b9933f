"""Norms of gradients that rest in shards: the bits do not depend on the number of ranks.

Squares are summed in fp64, first within blocks of SQUARES_NUMEL elements that no partition cuts,
then by a tree over the blocks of a tensor. A rank keeps and sends the roots of its part: at most
two for each doubling of the number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from infinity.ops.norms import SQUARES_NUMEL, num_roots, roots_of, sum_squares, tree_sum
from infinity.state.partition import ShardSlice
from infinity.state.units import STATE_GRANULE, TensorSpec
from infinity.streaming.gradients.tensors import CompleteSums

assert STATE_GRANULE % SQUARES_NUMEL == 0, "a partition cuts between granules"

Roots = numpy.ndarray[Any, numpy.dtype[numpy.float64]]


def measured_shards(shares: Iterable[ShardSlice]) -> CompleteSums:
    """Returns what measures sums of these parts when they are complete, by `roots_of_part`: fp64,
    on the host."""
    of_part = {share.part: share for share in shares}
    return CompleteSums(
        lambda flat, part: torch.from_numpy(roots_of_part(flat, of_part[part])),
        counts=False,
        is_on_device=True,
    )


def roots_of_part(values: torch.Tensor, share: ShardSlice) -> Roots:
    """Returns the roots of a rank's part of a tensor. values: fp32 (numel,), on the host or on a
    device."""
    first = min(-(share.full.state_offset + share.start) % SQUARES_NUMEL, values.numel())
    sums = sum_squares(values[first:])
    if first:
        sums = torch.cat([sum_squares(values[:first]), sums])
    return roots_of(sums.cpu(), blocks_of(share)[0])


def blocks_of(share: ShardSlice) -> tuple[int, int]:
    """Returns the blocks [first, last) of a tensor that a part of it has, which is not empty."""
    offset = share.full.state_offset
    before = offset // SQUARES_NUMEL
    first = (offset + share.start) // SQUARES_NUMEL - before
    return first, math.ceil((offset + share.stop) / SQUARES_NUMEL) - before


class NormsOfRanks:
    """The norms of all ranks' sums, from the roots that ranks have told each other.

    Training thread. `shares`: the parts of each tensor, in the order of its elements. A tensor is
    named by its number in `shares`.
    """

    def __init__(self, shares: Mapping[TensorSpec, Sequence[ShardSlice]]) -> None:
        self._shares = [
            [share for share in of_tensor if share.part.numel] for of_tensor in shares.values()
        ]
        self._roots: dict[tuple[int, int], Roots] = {}  # By tensor and rank.
        self._norms: dict[int, torch.Tensor] = {}
        self._are_needed = False

    def take_needed(self) -> bool:
        """Returns whether norms were asked for since the last call."""
        needed, self._are_needed = self._are_needed, False
        return needed

    def take(self, rank: int, tensors: Iterable[int], content: bytes | memoryview) -> None:
        """Takes the roots of a rank's parts of these tensors, one behind the other as fp64."""
        roots, start = numpy.frombuffer(content, numpy.float64), 0
        for tensor in tensors:
            for share in self._shares[tensor]:
                if share.rank == rank:
                    stop = start + num_roots(*blocks_of(share))
                    self._roots[tensor, rank] = roots[start:stop]
                    start = stop

    def has(self, tensor: int) -> bool:
        """Whether the norm of a tensor's gradient is known: all ranks have told their roots."""
        return all((tensor, share.rank) in self._roots for share in self._shares[tensor])

    def norm(self, tensor: int) -> torch.Tensor:
        """Returns the 2-norm of a tensor's gradient: fp32 scalar on the host."""
        self._are_needed = True
        if tensor not in self._norms:
            bounds, roots = [0], list[float]()
            for share in self._shares[tensor]:
                bounds.append(blocks_of(share)[1])
                roots += self._roots[tensor, share.rank].tolist()
            total = torch.tensor(tree_sum(roots, bounds), dtype=torch.float64, device="cpu")
            self._norms[tensor] = total.sqrt().float()
        return self._norms[tensor]

    def forget(self, tensor: int) -> None:
        """Forgets what ranks have told of a tensor: its sum has changed."""
        self._norms.pop(tensor, None)
        for share in self._shares[tensor]:
            self._roots.pop((tensor, share.rank), None)

    def clear(self) -> None:
        """Forgets what ranks have told of all tensors."""
        self._norms.clear()
        self._roots.clear()
