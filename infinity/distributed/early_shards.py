"""Updates of this rank's shards in the backward, before the step has decided.

A shard's update begins when its sums over all ranks are complete, if this step is like the last.
The step keeps it if it is what the step decided, else takes it back. Ranks need not agree: an
update that is kept has the bits of an ordinary one (docs/design/0003-updates.md). Until
the decision every rank reads the bytes of the last step (`state/undecided.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from infinity.distributed.shard_updates import ShardUpdates
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.reduce import DistributedGradients
from infinity.observe import Counters
from infinity.state.placement import updated_nbytes
from infinity.state.undecided import can_be_undecided, has_generations
from infinity.state.units import TensorSpec
from infinity.streaming.updates.policy import EarlyPolicy
from infinity.streaming.updates.record import StepRecord
from infinity.streaming.updates.unit_update import UnitUpdate

_WAITS = ("read_wait_s", "write_wait_s")


@dataclass(frozen=True, slots=True)
class _EarlyShard:
    """An update that the thread of updates has, with what it reads: sums, and weights."""

    update: UnitUpdate
    stamps: dict[TensorSpec, tuple[int, int] | None]
    num_changes: int


class EarlyShards:
    """Chooses shards to update early, and compares their updates with the step's decision. Training
    thread, under the engine's lock.

    Units are those of the model; each stands for this rank's shard of it.
    """

    def __init__(
        self,
        store: DistributedStore,
        gradients: DistributedGradients,
        updates: ShardUpdates,
        counters: Counters,
        *,
        is_beside: bool,
    ) -> None:
        """`is_beside`: the device that computes has memory of its own."""
        self._pending = store.pending
        self._local = store.local
        self._shards = [shard.unit for shard in store.partition.local]
        self._sums = gradients.owned
        self._progress = gradients.progress
        self._updates = updates
        self._counters = counters
        self.policy = EarlyPolicy(
            {
                index: updated_nbytes(shard)
                for index, shard in enumerate(self._shards)
                if can_be_undecided(store.local, shard, is_beside=is_beside)
            },
            is_newest_first=True,
        )
        self._planned: set[int] = set()
        self._left: dict[int, UnitUpdate] = {}  # By this rank's backward; sums may lack parts.
        self._early: dict[int, _EarlyShard] = {}  # With the thread, or made.
        self._num_undone = 0  # Taken back before the step has decided.
        # For `wait_share`: the waits at the last decision, and those of the forward since.
        self._waits_before_s = 0.0
        self._forward_wait_s = 0.0

    @property
    def is_active(self) -> bool:
        """Whether updates may begin before the next decision."""
        return bool(self._planned)

    # -- The backward ------------------------------------------------------------------------------

    def note_gradient(self, unit: int) -> None:
        """This rank has a gradient of the unit."""
        if self.policy.note_gradient(unit):
            self._forward_wait_s = self._waited_s() - self._waits_before_s
            planned = self.policy.plan()
            if not self._updates.has_space:
                planned = [u for u in planned if not has_generations(self._local, self._shards[u])]
            self._planned = set(planned)

    def note_left(self, unit: int) -> bool:
        """This rank's backward has left the unit. Returns whether `begin` is to follow."""
        is_complete = self.policy.note_left(unit)
        return is_complete and unit in self._planned and unit not in self._early

    def begin(self, unit: int, update: UnitUpdate) -> None:
        """The unit's shard is to be updated by the step that is expected, once its sums are
        complete."""
        self._left[unit] = update

    def advance(self) -> None:
        """Gives shards whose sums are complete to the thread of updates. Never waits."""
        for unit in list(self._left):
            shard = self._shards[unit]
            # The one before it may have needed memory, see `pause`.
            if unit not in self._left or not self._progress.is_complete(shard.index):
                continue
            self._sums.write_out(shard)
            if not self._sums.is_complete(shard):
                continue
            update = self._left.pop(unit)
            if not self._updates.take_memory():
                self.pause()
                return
            stamps = {spec: self._sums.stamp(spec) for spec in shard.trainable()}
            early = _EarlyShard(update, stamps, self._pending.num_changes(shard.index))
            if self._updates.begin_early(update):  # Else it is updated after the step.
                self._early[unit] = early

    # -- The decision ------------------------------------------------------------------------------

    def take_back_others(self, record: StepRecord) -> None:
        """Takes back early updates that are not what the step has decided. `record`: by shards."""
        self._take_back(
            unit
            for unit, early in self._early.items()
            if not self._is_as_expected(unit, early, record)
        )

    def end_step(self, record: StepRecord, kept: set[int], step_s: float) -> None:
        """The step has decided and has kept early updates of these shards."""
        units = {unit for unit in self._early if self._shards[unit].index in kept}
        self._counters.add("early_updates_kept", len(units))
        self.policy.end_step(
            num_undone=self._num_undone,
            is_clipped=bool(record.factors),
            missed=[unit for unit in self._planned if unit not in units],
            wait_share=self._forward_wait_s / step_s if step_s else 0.0,
        )
        self._forget()
        self._num_undone = 0
        self._waits_before_s = self._waited_s()

    def _is_as_expected(self, unit: int, early: _EarlyShard, record: StepRecord) -> bool:
        shard = self._shards[unit]
        decided = {s: record.settings[s] for s in shard.trainable() if s in record.settings}
        return (
            decided == early.update.record.settings
            and self._pending.num_changes(shard.index) == early.num_changes
            and all(self._sums.stamp(spec) == stamp for spec, stamp in early.stamps.items())
        )

    def take_back(self, unit: int) -> None:
        """Takes back the early update of the unit's shard, if there is one."""
        self._left.pop(unit, None)
        self._take_back([unit] if unit in self._early else [])

    def withdraw(self) -> None:
        """Takes back every early update, and begins none before the next step."""
        self._take_back(self._early)
        self._forget()

    def pause(self) -> None:
        """Takes back early updates that are not made, and begins none before the next step: memory
        is needed."""
        self._left.clear()
        self._planned.clear()
        self._take_back(unit for unit, early in self._early.items() if not early.update.is_done)

    def release(self) -> bool:
        """Takes back the last early update that has memory on the host. Returns whether there was
        one."""
        for unit in reversed(self._early):
            if self._updates.is_in_memory(self._shards[unit]):
                self._take_back([unit])
                return True
        return False

    def _take_back(self, units: Iterable[int]) -> None:
        by_shard = {self._shards[unit].index: unit for unit in list(units)}
        if not by_shard:
            return
        num_begun = len(self._updates.withdraw(by_shard))
        self._num_undone += num_begun
        self._counters.add("early_updates_undone", num_begun)
        for unit in by_shard.values():
            del self._early[unit]

    def _forget(self) -> None:
        self._planned, self._left, self._early = set(), {}, {}

    def _waited_s(self) -> float:
        values = self._counters.snapshot()
        return sum(values.get(name, 0.0) for name in _WAITS)
