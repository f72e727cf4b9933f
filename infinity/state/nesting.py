"""Modules inside one another: which units are in use at the same time, and in which block. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nesting:
    """Hooked modules by their indexes.

    `chains`: for every place of a module, the modules around it and itself, from outside to inside,
    in the order of the model. `units`: those that each module needs.
    """

    chains: Sequence[tuple[int, ...]]
    units: Sequence[Sequence[int]]
    blocks: Container[int]

    def most_nbytes(self, nbytes_of_unit: Sequence[int]) -> int:
        """Returns the most bytes of units that nested modules use at the same time."""
        in_use = (
            {unit for number in chain for unit in self.units[number]} for chain in self.chains
        )
        return max(sum(nbytes_of_unit[unit] for unit in units) for units in in_use)

    def block_of(self, chain: tuple[int, ...]) -> int | None:
        """Returns the block that a module belongs to, with the tiles in it; None outside blocks."""
        return next((number for number in chain if number in self.blocks), None)

    def units_by_block(self) -> tuple[list[int], list[set[int]]]:
        """Returns the units that are used outside blocks or by several blocks, and the units of
        each single block with the tiles in it."""
        users: defaultdict[int, set[int | None]] = defaultdict(set)
        for chain in self.chains:
            for unit in self.units[chain[-1]]:
                users[unit].add(self.block_of(chain))
        outside: list[int] = []
        blocks: defaultdict[int, set[int]] = defaultdict(set)
        for unit, (block, *others) in users.items():
            if others or block is None:
                outside.append(unit)
            else:
                blocks[block].add(unit)
        return sorted(outside), list(blocks.values())
