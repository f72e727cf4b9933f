"""Old bytes of state that rests in host memory, kept while an update changes them in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from infinity.state.store import HostLocation, LocalStore, changing_kinds
from infinity.state.units import Chunk, StateKind, Unit
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_LABEL = "state before early updates"
_Range = tuple[StateKind, int, int]  # Bytes of a unit's state kind: from, to.


@dataclass(eq=False, slots=True)
class _Copy:
    """The copy of one unit. `ranges` were copied so far, one behind the other."""

    block: Block
    ranges: list[_Range] = field(default_factory=list)
    nbytes: int = 0


class OldCopies:
    """Copies of units' state on the host, until `drop`. Under the engine's lock.

    `spare_nbytes`: returns the free memory of `pool` that copies may take.
    """

    def __init__(self, store: LocalStore, pool: HostPool, spare_nbytes: Callable[[], int]) -> None:
        self._store = store
        self._pool = pool
        self._spare_nbytes = spare_nbytes
        self._copies: dict[int, _Copy] = {}

    def reserve(self, unit: Unit) -> bool:
        """Takes memory for a copy of all that an update changes. Returns whether there was some,
        or none is needed."""
        nbytes = sum(unit.nbytes(kind) for kind in self._kinds(unit))
        if not nbytes or unit.index in self._copies:
            return True
        if self._spare_nbytes() < nbytes:
            return False
        block = self._pool.try_allocate(nbytes, _LABEL)
        if block is not None:
            self._copies[unit.index] = _Copy(block)
        return block is not None

    def keep(self, chunk: Chunk, weights: torch.Tensor) -> None:
        """Copies what the update of a chunk changes, before the update. `weights`: the unit's,
        uint8, checked out."""
        copy = self._copies.get(chunk.unit.index)
        if copy is None:
            return
        for kind in self._kinds(chunk.unit):
            start, stop = _range_of(chunk, kind)
            resting = self._resting(chunk.unit, kind, weights)
            self._part(copy, stop - start).copy_(resting[start:stop])
            copy.ranges.append((kind, start, stop))
            copy.nbytes += stop - start

    def has_weights(self, unit: Unit) -> bool:
        """Whether weights were copied, so that `bring_back` needs them."""
        copy = self._copies.get(unit.index)
        kinds = [] if copy is None else [kind for kind, _, _ in copy.ranges]
        return StateKind.PARAMETERS in kinds

    def bring_back(self, unit: Unit, weights: torch.Tensor | None) -> None:
        """Gives a unit its old bytes, and the memory of the copy back. `weights`: as of `keep`,
        where some were copied."""
        copy = self._copies.get(unit.index)
        if copy is None:
            return
        copy.nbytes = 0
        for kind, start, stop in copy.ranges:
            source = self._part(copy, stop - start)
            self._resting(unit, kind, weights)[start:stop].copy_(source)
            copy.nbytes += stop - start
        self.drop(unit.index)

    def drop(self, unit: int) -> None:
        """Gives the memory of a unit's copy back, if there is one."""
        copy = self._copies.pop(unit, None)
        if copy is not None:
            self._pool.free(copy.block)

    def drop_all(self) -> None:
        """Gives the memory of all copies back."""
        for unit in list(self._copies):
            self.drop(unit)

    def units(self) -> list[int]:
        """Returns the units that have a copy, the oldest first."""
        return list(self._copies)

    def _part(self, copy: _Copy, nbytes: int) -> torch.Tensor:
        return self._pool.tensor(copy.block)[copy.nbytes : copy.nbytes + nbytes]

    def _kinds(self, unit: Unit) -> list[StateKind]:
        return [kind for kind in changing_kinds(unit) if self.is_on_host(unit, kind)]

    def is_on_host(self, unit: Unit, kind: StateKind) -> bool:
        """Whether the state kind of the unit rests in host memory."""
        return isinstance(self._store.location(unit, kind), HostLocation)

    def _resting(self, unit: Unit, kind: StateKind, weights: torch.Tensor | None) -> torch.Tensor:
        # The pages of weights may be elsewhere while they are not checked out.
        found = weights if kind is StateKind.PARAMETERS else self._store.host_view(unit, kind)
        assert found is not None
        return found


def _range_of(chunk: Chunk, kind: StateKind) -> tuple[int, int]:
    """Returns the bytes of a state kind that an update of the chunk changes, in the unit's."""
    if kind is not StateKind.PARAMETERS:
        start = chunk.offset_nbytes(kind)
        return start, start + chunk.nbytes(kind)
    places = [
        (tensor.weight_offset_nbytes + part.start * size, part.stop - part.start, size)
        for part in chunk.slices
        for tensor, size in [(part.tensor, part.tensor.facts.dtype.itemsize)]
    ]
    return min(start for start, _, _ in places), max(start + n * size for start, n, size in places)
