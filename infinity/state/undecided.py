"""Updates that no step has decided: they read the old state and write the new beside it.

Note [Copy on write]
  Until `publish` the state of the last step counts. To take an update back is to publish nothing.

    state on NVMe              new bytes go to a spare generation; `publish` changes the maps
    weights that other ranks   new ones are in a block beside, which `publish` copies home: other
    read on the host           ranks have the address of the home
    other state on the host    changes at home; `drop` copies the old bytes back from a copy

  The copy of old bytes takes host memory that is free. A unit that finds none, or no generation, is
  updated in place after the decision.

Note [Readers of old bytes]
  Over ranks a thread updates while others serve the state as it was: `read` gives them the old
  bytes of what has changed, and the bytes at home of the rest. The lock is held while a chunk is
  copied, and while a range is read, so what is not copied yet does not change under a reader.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from infinity.ops.host_sums import copy_
from infinity.sizes import PAGE_NBYTES, align_up
from infinity.state.store import HostLocation, LocalStore, NvmeLocation, changing_kinds
from infinity.state.units import Chunk, StateKind, Unit
from infinity.storage.undecided import UndecidedContent
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_LABEL = "state before early updates"
_Range = tuple[StateKind, int, int]  # Bytes of a unit's state kind: from, to.


def can_be_undecided(store: LocalStore, unit: Unit, *, is_beside: bool) -> bool:
    """Whether the unit can be updated before the step has decided. All that an update of it changes
    rests on NVMe, which has generations, or on the host, where it is copied before.

    A unit with nothing on NVMe can only beside a device: where the device is the host, the copy
    costs time and nothing overlaps. `is_beside`: the device that computes has memory of its own.
    """
    kinds = changing_kinds(unit) if unit.state_numel else []
    return (
        bool(kinds)
        and (is_beside or has_generations(store, unit))
        and all(
            isinstance(store.location(unit, kind), HostLocation | NvmeLocation) for kind in kinds
        )
    )


def has_generations(store: LocalStore, unit: Unit) -> bool:
    """Whether some of what an update of the unit changes rests on NVMe."""
    return any(
        isinstance(store.location(unit, kind), NvmeLocation) for kind in changing_kinds(unit)
    )


@dataclass(eq=False, slots=True)
class _Copy:
    """Memory of one unit: its new weights, `beside_nbytes`, then old bytes of `ranges`, one behind
    the other."""

    block: Block
    beside_nbytes: int
    ranges: list[_Range] = field(default_factory=list)
    nbytes: int = 0  # Of the ranges.

    def forget(self) -> None:
        """Nothing is copied."""
        self.ranges.clear()
        self.nbytes = 0


class UndecidedState:
    """The undecided updates of units of a store.

    The training thread takes and frees memory, under the engine's lock. One thread updates a unit;
    `publish` and `drop` follow its last write of the unit. Any thread may `read`.

    `serves_weights`: other ranks read weights where they rest, so these do not change there before
    `publish`.
    """

    def __init__(
        self,
        store: LocalStore,
        pool: HostPool,
        *,
        serves_weights: bool,
    ) -> None:
        self.store = store
        self._pool = pool
        self._serves_weights = serves_weights
        self._lock = threading.Lock()  # Guards the copies, and the bytes at home against a change.
        self._copies: dict[int, _Copy] = {}
        self._contents: dict[int, UndecidedContent] = {}

    @property
    def contents(self) -> Mapping[int, UndecidedContent]:
        """What the writes to NVMe of each undecided unit go to, by unit; it follows changes."""
        return self._contents

    @property
    def has_space(self) -> bool:
        """Whether an undecided write has a generation now."""
        volume = self.store.volume
        return volume is not None and volume.can_be_undecided

    # -- Memory ------------------------------------------------------------------------------------

    def reserve(self, unit: Unit) -> bool:
        """Takes memory for what an undecided update of the unit needs on the host. Returns whether
        some was free, or none is needed."""
        beside_nbytes = self._beside_nbytes(unit)
        nbytes = align_up(beside_nbytes, PAGE_NBYTES)
        nbytes += sum(unit.nbytes(kind) for kind in self._kinds(unit))
        if not nbytes or unit.index in self._copies:
            return True
        if self._pool.spare.unclaimed_nbytes < nbytes:
            return False
        block = self._pool.try_allocate(nbytes, _LABEL)
        if block is not None:
            self._copies[unit.index] = _Copy(block, beside_nbytes)
        return block is not None

    def units_in_memory(self) -> list[int]:
        """Returns the units that memory is taken for, the first first."""
        return list(self._copies)

    def free(self, unit: Unit) -> None:
        """Gives a unit's memory back. No update of it is undecided."""
        assert unit.index not in self._contents
        with self._lock:
            copy = self._copies.pop(unit.index, None)
        if copy is not None:
            self._pool.free(copy.block)

    # -- Content -----------------------------------------------------------------------------------

    def begin(self, unit: Unit) -> UndecidedContent:
        """Begins an update of a unit that `can_be_undecided` and has its memory. Returns what its
        writes to NVMe go to."""
        new = self._new_weights(unit)
        if new is not None:
            copy_(new, self._home(unit)[: new.numel()])
        content = self._contents[unit.index] = UndecidedContent()
        return content

    def resting_weights(self, unit: Unit) -> torch.Tensor | None:
        """Returns the weights in host memory that an update of the unit changes: uint8; None if
        they travel."""
        new = self._new_weights(unit) if unit.index in self._contents else None
        return self.store.host_view(unit, StateKind.PARAMETERS) if new is None else new

    def _home(self, unit: Unit) -> torch.Tensor:
        home = self.store.host_view(unit, StateKind.PARAMETERS)
        assert home is not None
        return home

    def _new_weights(self, unit: Unit) -> torch.Tensor | None:
        copy = self._copies.get(unit.index)
        if copy is None or not copy.beside_nbytes:
            return None
        return self._pool.tensor(copy.block)[: copy.beside_nbytes]

    def keep(self, chunk: Chunk, weights: torch.Tensor) -> None:
        """Copies what the update of a chunk changes at home, before the update. `weights`: the
        unit's, uint8, checked out."""
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

    def publish(self, unit: Unit) -> None:
        """Makes what an undecided update has written the unit's state, if there is one. Nobody
        reads the unit. Its memory stays until `free`."""
        content = self._contents.pop(unit.index, None)
        if content is None:
            return
        if content.runs:
            assert self.store.volume is not None
            self.store.volume.publish(content)
        new = self._new_weights(unit)
        if new is not None:
            copy_(self._home(unit)[: new.numel()], new)
        self._forget_copies(unit)

    def needs_weights(self, unit: Unit) -> bool:
        """Whether `drop` brings old weights home."""
        copy = self._copies.get(unit.index)
        return copy is not None and any(k is StateKind.PARAMETERS for k, _, _ in copy.ranges)

    def drop(self, unit: Unit, weights: torch.Tensor | None = None) -> None:
        """Takes an undecided update back, if there is one. `weights`: as of `keep`, where it
        `needs_weights`. Its memory stays until `free`."""
        if self._contents.pop(unit.index, None) is None:
            return
        with self._lock:
            for (kind, start, stop), source in self._copied(self._copies.get(unit.index)):
                copy_(self._resting(unit, kind, weights)[start:stop], source)
        self._forget_copies(unit)

    def _forget_copies(self, unit: Unit) -> None:
        with self._lock:
            copy = self._copies.get(unit.index)
            if copy is not None:
                copy.forget()

    # -- Readers -----------------------------------------------------------------------------------

    def is_changed_at_home(self, unit: Unit, kind: StateKind) -> bool:
        """Whether an update of the unit changes the state kind in host memory, where it rests."""
        return kind in self._kinds(unit)

    def read(self, unit: Unit, kind: StateKind, start_nbytes: int, sink: torch.Tensor) -> None:
        """Copies a range of the old bytes to `sink`, whatever an update has changed; see
        Note [Readers of old bytes]. The state kind `is_changed_at_home`.

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

    def _copied(self, copy: _Copy | None) -> Iterator[tuple[_Range, torch.Tensor]]:
        """Yields the ranges of a copy, with the bytes that they had."""
        place = 0
        for kind, start, stop in [] if copy is None else copy.ranges:
            assert copy is not None
            yield (kind, start, stop), self._part(copy, place, stop - start)
            place += stop - start

    def _part(self, copy: _Copy, start: int, nbytes: int) -> torch.Tensor:
        start += align_up(copy.beside_nbytes, PAGE_NBYTES)
        return self._pool.tensor(copy.block)[start : start + nbytes]

    def _is_on_host(self, unit: Unit, kind: StateKind) -> bool:
        return isinstance(self.store.location(unit, kind), HostLocation)

    def _beside_nbytes(self, unit: Unit) -> int:
        is_beside = self._serves_weights and self._is_on_host(unit, StateKind.PARAMETERS)
        return unit.trainable_nbytes if is_beside else 0

    def _kinds(self, unit: Unit) -> list[StateKind]:
        """The state kinds that an update changes at home, in host memory."""
        return [
            kind
            for kind in changing_kinds(unit)
            if self._is_on_host(unit, kind)
            and not (self._serves_weights and kind is StateKind.PARAMETERS)
        ]

    def _resting(self, unit: Unit, kind: StateKind, weights: torch.Tensor | None) -> torch.Tensor:
        # The pages of weights may be elsewhere while they are not checked out.
        found = weights if kind is StateKind.PARAMETERS else self.store.host_view(unit, kind)
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
