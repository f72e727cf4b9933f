"""Old bytes of state that rests in host memory, kept while an update changes them in place.

Note [Readers of old bytes]
  Over ranks a thread updates while others serve the state as it was: `read` gives them the old
  bytes of what has changed, and the bytes at home of the rest. The lock is held while a chunk is
  copied, and while a range is read, so what is not copied yet does not change under a reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from infinity.ops.host_sums import copy_
from infinity.sizes import PAGE_NBYTES, align_up
from infinity.state.store import HostLocation, LocalStore, changing_kinds
from infinity.state.units import Chunk, StateKind, Unit
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_LABEL = "state before early updates"
_Range = tuple[StateKind, int, int]  # Bytes of a unit's state kind: from, to.


@dataclass(eq=False, slots=True)
class _Copy:
    """The copy of one unit. `ranges` were copied so far, one behind the other, behind what is
    `beside`."""

    block: Block
    beside_nbytes: int
    ranges: list[_Range] = field(default_factory=list)
    nbytes: int = 0  # Of the ranges.

    def forget(self) -> None:
        """Nothing is copied."""
        self.ranges.clear()
        self.nbytes = 0


class OldCopies:
    """Copies of units' state on the host, until `drop`.

    `spare_nbytes`: returns the free memory of `pool` that copies may take. `changed_in_place`: the
    state kinds that an update of a unit changes where they rest. The engine's lock orders those who
    take and free memory; one thread updates, any thread may `read`.
    """

    def __init__(
        self,
        store: LocalStore,
        pool: HostPool,
        spare_nbytes: Callable[[], int],
        changed_in_place: Callable[[Unit], Sequence[StateKind]] = changing_kinds,
    ) -> None:
        self._store = store
        self._pool = pool
        self._spare_nbytes = spare_nbytes
        self._changed_in_place = changed_in_place
        self._lock = threading.Lock()  # Guards the copies, and the bytes at home against a change.
        self._copies: dict[int, _Copy] = {}

    def reserve(self, unit: Unit, *, beside_nbytes: int = 0) -> bool:
        """Takes memory for a copy of all that an update changes, and so many bytes for `beside`.
        Returns whether there was some, or none is needed."""
        nbytes = align_up(beside_nbytes, PAGE_NBYTES)
        nbytes += sum(unit.nbytes(kind) for kind in self._kinds(unit))
        if not nbytes or unit.index in self._copies:
            return True
        if self._spare_nbytes() < nbytes:
            return False
        block = self._pool.try_allocate(nbytes, _LABEL)
        if block is not None:
            self._copies[unit.index] = _Copy(block, beside_nbytes)
        return block is not None

    def beside(self, unit: Unit) -> torch.Tensor | None:
        """Returns the memory that `reserve` was asked for beside the copy: uint8
        (beside_nbytes,)."""
        copy = self._copies.get(unit.index)
        if copy is None or not copy.beside_nbytes:
            return None
        return self._pool.tensor(copy.block)[: copy.beside_nbytes]

    def keep(self, chunk: Chunk, weights: torch.Tensor) -> None:
        """Copies what the update of a chunk changes, before the update. `weights`: the unit's,
        uint8, checked out."""
        with self._lock:
            copy = self._copies.get(chunk.unit.index)
            if copy is None:
                return
            for kind in self._kinds(chunk.unit):
                start, stop = _range_of(chunk, kind)
                resting = self._resting(chunk.unit, kind, weights)
                copy_(self._part(copy, copy.nbytes, stop - start), resting[start:stop])
                copy.ranges.append((kind, start, stop))
                copy.nbytes += stop - start

    def has_weights(self, unit: Unit) -> bool:
        """Whether weights were copied, so that `bring_back` needs them."""
        copy = self._copies.get(unit.index)
        kinds = [] if copy is None else [kind for kind, _, _ in copy.ranges]
        return StateKind.PARAMETERS in kinds

    def bring_back(self, unit: Unit, weights: torch.Tensor | None) -> None:
        """Gives a unit its old bytes, if some were copied. `weights`: as of `keep`, where some were
        copied. The memory of the copy stays until `drop`."""
        with self._lock:
            copy = self._copies.get(unit.index)
            for (kind, start, stop), source in self._copied(copy):
                copy_(self._resting(unit, kind, weights)[start:stop], source)
            if copy is not None:
                copy.forget()

    def forget(self, unit: int) -> None:
        """What the update of a unit has changed counts from now on. As of `bring_back`, the memory
        stays."""
        with self._lock:
            copy = self._copies.get(unit)
            if copy is not None:
                copy.forget()

    def read(self, unit: Unit, kind: StateKind, start_nbytes: int, sink: torch.Tensor) -> None:
        """Copies a range of the old bytes to `sink`, whatever an update has changed; see
        Note [Readers of old bytes]. The unit `is_changed_in_place`.

        sink: uint8, host, shape (nbytes,); what it has beyond the end of the state is not changed
        """
        resting = self._resting(unit, kind, None)
        stop_nbytes = min(start_nbytes + sink.numel(), resting.numel())
        with self._lock:
            sink[: stop_nbytes - start_nbytes].copy_(resting[start_nbytes:stop_nbytes])
            for (copied, start, stop), source in self._copied(self._copies.get(unit.index)):
                low, high = max(start, start_nbytes), min(stop, stop_nbytes)
                if copied is kind and low < high:
                    old = source[low - start : high - start]
                    sink[low - start_nbytes : high - start_nbytes].copy_(old)

    def drop(self, unit: int) -> None:
        """Gives the memory of a unit's copy back, if there is one."""
        with self._lock:
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

    def _copied(self, copy: _Copy | None) -> Iterator[tuple[_Range, torch.Tensor]]:
        """Yields the ranges of a copy, with the bytes that they had."""
        if copy is None:
            return
        place = 0
        for kind, start, stop in copy.ranges:
            yield (kind, start, stop), self._part(copy, place, stop - start)
            place += stop - start

    def _part(self, copy: _Copy, start: int, nbytes: int) -> torch.Tensor:
        start += align_up(copy.beside_nbytes, PAGE_NBYTES)
        return self._pool.tensor(copy.block)[start : start + nbytes]

    def _kinds(self, unit: Unit) -> list[StateKind]:
        return [k for k in self._changed_in_place(unit) if self._is_on_host(unit, k)]

    def is_changed_in_place(self, unit: Unit, kind: StateKind) -> bool:
        """Whether an update of the unit changes the state kind in host memory, where it rests."""
        return kind in self._kinds(unit)

    def _is_on_host(self, unit: Unit, kind: StateKind) -> bool:
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
