"""The order in which a pass uses its hooked modules.

The order is that of the engine (`modules/accumulate/layer_major.py`). Modules outside blocks run
once per micro-batch; the end of the model runs forward and backward together. A block is in use
while a group of micro-batches uses its tiles. Pure: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise


@dataclass(frozen=True, slots=True)
class Use:
    """The forward of a hooked module, for all micro-batches that pass a block together: the units
    it needs, and its FLOPs. `saved_nbytes` of its input are saved for the backward, on the tier
    that the job names. Uses of one `block` are consecutive: the block's own units, then its tiles.

    `gradient_ratio` is the FLOPs of gradients over the forward's: 2, and 1 for frozen weights.
    Without `has_backward`, no gradient passes the use. A tile of experts (`is_experts`) serves all
    micro-batches at once, and its backward repeats its forward; `passing_nbytes` are copied to the
    device for it, and from the device after it. `decoded_nbytes` of weights are made of stored ones
    each time. `expert_flops` of the FLOPs are those of routed experts, for which the device reads
    `expert_nbytes` of weights: each expert's once for all tokens that are multiplied together.
    """

    units: tuple[int, ...]
    forward_flops: float
    saved_nbytes: int = 0
    block: int | None = None
    gradient_ratio: float = 2.0
    has_backward: bool = True
    is_experts: bool = False
    passing_nbytes: tuple[int, int] = (0, 0)
    decoded_nbytes: int = 0
    expert_flops: float = 0.0
    expert_nbytes: int = 0


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


def blocks_in_groups(uses: Sequence[Use]) -> frozenset[int]:
    """Returns the blocks that micro-batches pass in groups in the backward: those with tiles that
    are not of experts."""
    return frozenset(
        use.block
        for before, use in pairwise(uses)
        if use.block is not None and use.block == before.block and not use.is_experts
    )


def moves(
    uses: Sequence[Use], *, num_fibers: int, tile_micro_batches: int, backward_ratio: float,
    keeps_experts: bool = False,
) -> list[Move]:  # fmt: skip
    """Returns the moves of one pass. `num_fibers` micro-batches pass block by block, and
    `tile_micro_batches` pass a block with tiles together. `backward_ratio`: see `StepSpec`; above
    2, the forward of a block is repeated, and with 0 there is no backward. `keeps_experts`: the
    outputs of experts are kept for that forward, so that each direction uses each of their tiles
    once."""
    numbers = groupby(range(len(uses)), key=lambda index: uses[index].block)
    segments = [(block is not None, list(indexes)) for block, indexes in numbers]
    num_groups = -(-num_fibers // tile_micro_batches)
    order = _OrderBuilder(uses, num_fibers, num_groups, backward_ratio, keeps_experts)
    found: list[Move] = []
    for is_block, segment in segments:
        if is_block:
            found += order.block_forward(segment)
            continue
        for _ in range(num_fibers):
            found += order.forward(segment)
            if backward_ratio and segment is segments[-1][1]:
                found += order.backward(segment)
    if not backward_ratio:
        return found
    for is_block, segment in reversed(segments):
        if is_block:
            found += order.block_backward(segment)
        elif segment is not segments[-1][1]:
            for _ in range(num_fibers):
                found += order.backward(segment)
    return found


@dataclass(frozen=True, slots=True)
class _OrderBuilder:
    uses: Sequence[Use]
    num_fibers: int
    num_groups: int
    backward_ratio: float
    keeps_experts: bool

    def _repeated(self, index: int) -> float:
        """Returns the FLOPs of the forward that the backward of a use repeats, over its
        forward's."""
        return 1.0 if self.uses[index].is_experts else max(self.backward_ratio - 2.0, 0.0)

    def _ratio(self, index: int) -> float:
        """Returns the FLOPs of a use's backward, with what it repeats, over its forward's."""
        return self._repeated(index) + self.uses[index].gradient_ratio

    def forward(self, segment: list[int]) -> Iterator[Move]:
        for index in segment:
            yield Move(index, False, 1 / self.num_fibers)

    def backward(self, segment: list[int]) -> Iterator[Move]:
        for index in reversed(segment):
            if self.uses[index].has_backward:
                yield Move(index, True, self._ratio(index) / self.num_fibers, has_gradients=True)

    def block_forward(self, segment: list[int]) -> Iterator[Move]:
        first, *tiles = segment
        # A block with experts has all micro-batches in it.
        groups = 1 if any(self.uses[tile].is_experts for tile in tiles) else self.num_groups
        yield Move(first, False, 1.0)
        for _ in range(groups):
            for tile in tiles:
                yield Move(tile, False, 1 / groups, self.uses[first].units)

    def block_backward(self, segment: list[int]) -> Iterator[Move]:
        first, *tiles = segment
        experts = [tile for tile in tiles if self.uses[tile].is_experts]
        others = [tile for tile in tiles if not self.uses[tile].is_experts]
        held, is_repeated = self.uses[first].units, self.backward_ratio > 2.0
        groups = self.num_groups if others else 1
        for group in range(groups):
            yield Move(first, True, self._ratio(first) / groups, has_gradients=True)
            if group == 0:
                for tile in experts if is_repeated and not self.keeps_experts else ():
                    yield Move(tile, True, 1.0, held)
                for tile in reversed(experts):
                    yield Move(tile, True, self._ratio(tile), held, True)
            for tile in others if is_repeated else ():
                yield Move(tile, True, self._repeated(tile) / groups, held)
            for tile in reversed(others):
                yield Move(tile, True, self.uses[tile].gradient_ratio / groups, held, True)
