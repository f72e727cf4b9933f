"""The state of units for updates that no step has decided: new bytes beside the ones that count.

Note [Old bytes until the decision]
  Whoever reads a unit reads what the last step left, until `publish`. So threads that serve other
  ranks know nothing of undecided updates, and an update that is dropped leaves nothing to undo.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from typing_extensions import override

from infinity.state.store import (
    FirstValues,
    LocalStore,
    NvmeLocation,
    StateLocation,
    StateStore,
    Transfer,
    changing_kinds,
    rewritten_nbytes,
)
from infinity.state.units import StateKind, Unit
from infinity.storage.protocol import Priority
from infinity.storage.shards import ShardFiles
from infinity.storage.undecided import UndecidedContent
from infinity.storage.volume import Volume
from infinity.tiers.host import Block


def has_generations(store: LocalStore, unit: Unit) -> bool:
    """Whether all state that an update of the unit changes rests on NVMe, and has generations."""
    return bool(unit.state_numel) and all(
        isinstance(store.location(unit, kind), NvmeLocation)
        and rewritten_nbytes(unit, kind) is not None
        for kind in changing_kinds(unit)
    )


class UndecidedState(StateStore):
    """A `LocalStore` whose units may have undecided writes. A chunk of such a unit is written after
    it was read. One thread updates; `publish` and `drop` follow its last write of the unit."""

    def __init__(self, local: LocalStore) -> None:
        self._local = local
        self._contents: dict[int, UndecidedContent] = {}  # By unit.

    @property
    def has_space(self) -> bool:
        """Whether an undecided write has space now."""
        volume = self._local.volume
        return volume is not None and volume.can_be_undecided

    def begin(self, unit: Unit) -> None:
        """Makes the writes of a unit undecided. The unit `has_generations`."""
        self._contents[unit.index] = UndecidedContent()

    def publish(self, unit: Unit) -> None:
        """Makes undecided writes of a unit, if there are any, its state. Nobody reads the unit."""
        content = self._contents.pop(unit.index, None)
        if content is not None:
            assert self._local.volume is not None
            self._local.volume.publish(content)

    def drop(self, unit: Unit) -> None:
        """Forgets undecided writes of a unit."""
        self._contents.pop(unit.index, None)

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
    ) -> Transfer:
        return self._local.write(
            unit, kind, block, offset_nbytes=offset_nbytes, nbytes=nbytes, priority=priority,
            undecided=self._contents.get(unit.index),
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
