"""The order in which a pass uses its hooked modules.

The order is that of the engine (`modules/accumulate/layer_major.py`). Modules outside blocks run
once per micro-batch; the end of the model runs forward and backward together. A block is in use
while a group of micro-batches uses its tiles. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Use:
    """The forward of a hooked module, for all micro-batches that pass a block together: the units
    it needs, and its FLOPs. `saved_nbytes` of its input are saved for the backward, on the tier
    that the job names. Uses of one `block` are consecutive: the block's own units, then its tiles.
    """

    units: tuple[int, ...]
    forward_flops: float
    saved_nbytes: int = 0
    block: int | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """One computation of a use (by index), with the multiple of its forward's FLOPs. Units of
    `held` are in use around it. `has_gradients`: it computes gradients of its units, in a backward.
    """

    use: int
    is_backward: bool
    forwards: float
    held: tuple[int, ...] = ()
    has_gradients: bool = False


def moves(
    uses: Sequence[Use], *, num_fibers: int, tile_micro_batches: int, backward_ratio: float
) -> list[Move]:
    """Returns the moves of one pass. `num_fibers` micro-batches pass block by block, and
    `tile_micro_batches` pass a block with tiles together. `backward_ratio`: see `StepSpec`; above
    2, the forward of a block is repeated."""
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
