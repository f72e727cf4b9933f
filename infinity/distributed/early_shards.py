"""Updates of this rank's shards in the backward, before the step has decided.

A shard's update begins when its sums over all ranks are complete, if this step is like the last.
The step keeps it if it is what the step decided, else takes it back. Ranks need not agree: an
update that is kept has the bits of an ordinary one (docs/design/0003-updates.md). Until the
decision every rank reads the bytes of the last step (`state/undecided.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from infinity.distributed.shard_updates import ShardUpdates
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.reduce import DistributedGradients
from infinity.observe import Counters
from infinity.state.undecided import UndecidedState
from infinity.state.units import Unit
from infinity.streaming.updates.early import Early, EarlyUpdates
from infinity.streaming.updates.unit_update import UnitUpdate


class EarlyShards(EarlyUpdates):
    """Early updates that the thread of updates makes. Units are those of the model; each stands for
    this rank's shard of it."""

    def __init__(
        self,
        store: DistributedStore,
        gradients: DistributedGradients,
        undecided: UndecidedState,
        updates: ShardUpdates,
        counters: Counters,
        *,
        is_beside: bool,
    ) -> None:
        """`is_beside`: the device that computes has memory of its own."""
        shards = [shard.unit for shard in store.partition.local]
        super().__init__(
            shards, gradients.owned, undecided, counters,
            is_beside=is_beside, is_newest_first=True,
        )  # fmt: skip
        self._pending = store.pending
        self._progress = gradients.progress
        self._updates = updates

    @property
    def is_active(self) -> bool:
        """Whether updates may begin before the next decision."""
        return bool(self._planned)

    @override
    def _take_memory(self, planned: list[int]) -> list[int]:
        return planned  # Memory is taken for the first of them, by `_start`.

    @override
    def _is_ready(self, unit: Unit) -> bool:
        if not self._progress.is_complete(unit.index):
            return False
        self._gradients.write_out(unit)
        return self._gradients.is_complete(unit)

    @override
    def _start(self, index: int, update: UnitUpdate) -> bool:
        if not self._updates.take_memory():
            self.pause()
            return False
        return self._updates.begin_early(update)

    @override
    def _content(self, unit: Unit) -> object:
        return super()._content(unit), self._pending.num_changes(unit.index)

    @override
    def _stop(self, taken_back: Mapping[int, Early]) -> None:
        shards = [early.unit.index for early in taken_back.values()]
        self._note_undone(len(self._updates.withdraw(shards)))

    def kept(self, shards: set[int]) -> list[int]:
        """Returns the units with an early update whose shard is one of these."""
        return [index for index, early in self._early.items() if early.unit.index in shards]

    def pause(self) -> None:
        """Takes back early updates that are not made, and begins none before the next step: memory
        is needed."""
        self._left.clear()
        self._planned.clear()
        self._take_back([i for i, early in self._early.items() if not early.update.is_done])

    def release(self) -> bool:
        """Takes back the last early update that has memory on the host. Returns whether there was
        one."""
        for index, early in reversed(self._early.items()):
            if self._undecided.has_memory(early.unit):
                self._take_back([index])
                return self._undecided.give_back()
        return False
