"""The state of units for updates that no step has decided: new bytes beside the ones that count.

Note [Old bytes until the decision]
  Whoever reads a unit reads what the last step left, until `publish`:

    state on NVMe              new bytes go to a generation beside; `publish` changes the maps
    weights on the host        new ones are in a block beside, which `publish` copies home: readers
                               have the address of the home
    other state on the host    changes at home, and `OldCopies` has the old bytes: who reads it
                               before the decision, which is rare, reads it there

  An update of state on NVMe that is dropped leaves nothing to undo; of other state on the host, its
  old bytes are copied home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from infinity.ops.host_sums import copy_
from infinity.state.old_copies import OldCopies
from infinity.state.store import (
    FirstValues,
    HostLocation,
    LocalStore,
    StateLocation,
    StateStore,
    Transfer,
    changing_kinds,
)
from infinity.state.units import Chunk, StateKind, Unit
from infinity.storage.checksums import PageDigests
from infinity.storage.protocol import Priority
from infinity.storage.shards import ShardFiles
from infinity.storage.undecided import UndecidedContent
from infinity.storage.volume import Volume
from infinity.tiers.host import Block


def changed_at_home(unit: Unit) -> Sequence[StateKind]:
    """Returns the state kinds of a unit that an undecided update changes where they rest, if that
    is the host."""
    return [kind for kind in changing_kinds(unit) if kind is not StateKind.PARAMETERS]


class UndecidedState(StateStore):
    """A `LocalStore` whose units may have undecided writes. A chunk of such a unit is written after
    it was read. One thread updates; `publish` and `drop` follow its last write of the unit.

    `copies`: of what is `changed_at_home`. Beside a unit's copy are its new weights.
    """

    def __init__(self, local: LocalStore, copies: OldCopies) -> None:
        self._local = local
        self._copies = copies
        self._contents: dict[int, UndecidedContent] = {}  # By unit, those that are undecided.

    @property
    def has_space(self) -> bool:
        """Whether an undecided write has space now."""
        volume = self._local.volume
        return volume is not None and volume.can_be_undecided

    # -- Memory: training thread -------------------------------------------------------------------

    def reserve(self, unit: Unit) -> bool:
        """Takes memory for what an undecided update keeps on the host. Returns whether some was
        free, or none is needed."""
        location = self._local.location(unit, StateKind.PARAMETERS)
        nbytes = unit.trainable_nbytes if isinstance(location, HostLocation) else 0
        return self._copies.reserve(unit, beside_nbytes=nbytes)

    def is_in_memory(self, unit: Unit) -> bool:
        """Whether memory is taken for the unit."""
        return unit.index in self._copies.units()

    def free(self, unit: Unit) -> None:
        """Gives the memory back. No update of the unit is undecided."""
        assert unit.index not in self._contents
        self._copies.drop(unit.index)

    # -- Content -----------------------------------------------------------------------------------

    def begin(self, unit: Unit) -> None:
        """Makes the writes of a unit undecided. The unit `can_go_back`, and has its memory."""
        new, home = self._copies.beside(unit), self._local.host_view(unit, StateKind.PARAMETERS)
        if new is not None and home is not None:
            copy_(new, home[: new.numel()])
        self._contents[unit.index] = UndecidedContent()

    def keep(self, chunk: Chunk, weights: torch.Tensor) -> None:
        """Keeps the old bytes of a chunk of an undecided unit, before its update."""
        self._copies.keep(chunk, weights)

    def publish(self, unit: Unit) -> None:
        """Makes undecided writes of a unit, if there are any, its state. Nobody reads the unit."""
        content = self._contents.pop(unit.index, None)
        if content is None:
            return
        if self._local.volume is not None:
            self._local.volume.publish(content)
        new, home = self._copies.beside(unit), self._local.host_view(unit, StateKind.PARAMETERS)
        if new is not None and home is not None:
            copy_(home[: new.numel()], new)
        self._copies.forget(unit.index)

    def drop(self, unit: Unit) -> None:
        """Forgets undecided writes of a unit, if there are any."""
        if self._contents.pop(unit.index, None) is not None:
            self._copies.bring_back(unit, None)

    @override
    def write(
        self,
        unit: Unit,
        kind: StateKind,
        block: Block,
        *,
        offset_nbytes: int = 0,
        nbytes: int | None = None,
        priority: Priority = Priority.WRITE_BACK,
        digests: PageDigests | None = None,
    ) -> Transfer:
        return self._local.write(
            unit, kind, block, offset_nbytes=offset_nbytes, nbytes=nbytes, priority=priority,
            undecided=self._contents.get(unit.index), digests=digests,
        )  # fmt: skip

    # -- As the local store ------------------------------------------------------------------------

    @property
    @override
    def units(self) -> tuple[Unit, ...]:
        return self._local.units

    @property
    @override
    def volume(self) -> Volume | None:
        return self._local.volume

    @property
    @override
    def shards(self) -> ShardFiles | None:
        return self._local.shards

    @override
    def location(self, unit: Unit, kind: StateKind) -> StateLocation | None:
        return self._local.location(unit, kind)

    @override
    def placed(self) -> Mapping[tuple[int, StateKind], StateLocation]:
        return self._local.placed()

    @override
    def host_view(self, unit: Unit, kind: StateKind) -> torch.Tensor | None:
        if kind is StateKind.PARAMETERS and unit.index in self._contents:
            new = self._copies.beside(unit)
            if new is not None:
                return new
        return self._local.host_view(unit, kind)

    @override
    def put_first(self, unit: Unit, fill: FirstValues) -> bool:
        return self._local.put_first(unit, fill)

    @override
    def unwritten(self) -> list[Unit]:
        return self._local.unwritten()

    @override
    def read(
        self,
        unit: Unit,
        kind: StateKind,
        block: Block,
        *,
        priority: Priority,
        offset_nbytes: int = 0,
        nbytes: int | None = None,
    ) -> Transfer:
        return self._local.read(
            unit, kind, block, priority=priority, offset_nbytes=offset_nbytes, nbytes=nbytes
        )
