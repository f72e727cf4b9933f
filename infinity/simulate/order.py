"""The order in which a pass uses its sites: a micro-batch on its own, or several block by block.

The engine's own order (`modules/accumulate/layer_major.py`): what is outside of blocks is used by
one micro-batch after the other, the end of the model forward and backward at once; a block is held
while its tiles are used, by a group of micro-batches at a time. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Use:
    """A site's forward, of all micro-batches that go through a block together: the units it holds,
    and its FLOPs. Of its input, `saved_nbytes` wait for the backward on the tier that the job
    names. Uses of the same `block` follow each other: what is held for all of it, and its tiles."""

    units: tuple[int, ...]
    forward_flops: float
    saved_nbytes: int = 0
    block: int | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """One time that a use (by index) is computed: so many times its forward's FLOPs. Units of
    `held` are in use around it. `has_gradients`: of its units, in a backward."""

    use: int
    is_backward: bool
    forwards: float
    held: tuple[int, ...] = ()
    has_gradients: bool = False


def moves(
    uses: Sequence[Use], *, num_fibers: int, tile_micro_batches: int, backward_ratio: float
) -> list[Move]:
    """Of one pass. `num_fibers` micro-batches go block by block, `tile_micro_batches` through a
    block with
    tiles together. `backward_ratio`: as of `StepSpec`; above 2 a block's forward is repeated."""
    numbers = groupby(range(len(uses)), key=lambda index: uses[index].block)
    stretches = [(block is not None, list(indexes)) for block, indexes in numbers]
    order = _OrderBuilder(uses, num_fibers, -(-num_fibers // tile_micro_batches), backward_ratio)
    found: list[Move] = []
    for is_block, stretch in stretches:
        if is_block:
            found += order.block_forward(stretch)
            continue
        for _ in range(num_fibers):
            found += order.forward(stretch)
            if stretch is stretches[-1][1]:
                found += order.backward(stretch)
    for is_block, stretch in reversed(stretches):
        if is_block:
            found += order.block_backward(stretch)
        elif stretch is not stretches[-1][1]:
            for _ in range(num_fibers):
                found += order.backward(stretch)
    return found


@dataclass(frozen=True, slots=True)
class _OrderBuilder:
    uses: Sequence[Use]
    num_fibers: int
    num_groups: int
    backward_ratio: float

    def forward(self, stretch: list[int]) -> Iterator[Move]:
        for index in stretch:
            yield Move(index, False, 1 / self.num_fibers)

    def backward(self, stretch: list[int]) -> Iterator[Move]:
        for index in reversed(stretch):
            yield Move(index, True, self.backward_ratio / self.num_fibers, has_gradients=True)

    def block_forward(self, stretch: list[int]) -> Iterator[Move]:
        first, *tiles = stretch
        yield Move(first, False, 1.0)
        for _ in range(self.num_groups):
            for tile in tiles:
                yield Move(tile, False, 1 / self.num_groups, self.uses[first].units)

    def block_backward(self, stretch: list[int]) -> Iterator[Move]:
        first, *tiles = stretch
        held, repeated = self.uses[first].units, max(self.backward_ratio - 2.0, 0.0)
        groups = self.num_groups if tiles else 1
        for _ in range(groups):
            yield Move(first, True, self.backward_ratio / groups, has_gradients=True)
            for tile in tiles if repeated else ():
                yield Move(tile, True, repeated / groups, held)
            for tile in reversed(tiles):
                yield Move(tile, True, (self.backward_ratio - repeated) / groups, held, True)
