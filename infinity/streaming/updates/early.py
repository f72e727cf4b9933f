"""Updates in the backward, before `optimizer.step()` has decided; kept or taken back by the step.

An early update of a unit:

  state      changed state          next
  PLANNED    none; read ahead       LEFT (a backward has left the unit), gone (the step decides)
  LEFT       none                   QUEUED (its sums are complete), gone
  QUEUED     none                   RUNNING, taken back, gone
  RUNNING    some chunks            DONE, taken back, finished by the ordinary update if the step
                                    decides as expected
  DONE       all of it              kept or taken back, as the step decides

Note [Old state]
  An early update reads the state of the last step and writes the new beside it
  (`state/undecided.py`). The decision publishes it; to take it back is to publish nothing.

Note [Which first]
  Chunks of drives are read ahead in the order of the gradients, and updated in it. Where all state
  rests on the host, beside a device, nothing is read: every unit is planned, and the one whose
  gradients came last is updated first. What the backward does not get to is then what the forward
  needs last. Over ranks it is so everywhere.

Note [Nobody sees an early update]
  Before the decision every reader of weights or state gets the old ones. On one rank the early
  update is taken back first. Gradients are only read, so nothing is lost but time.

`policy.py` predicts which units, and whether at all.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from infinity.observe import Counters
from infinity.state.placement import updated_nbytes
from infinity.state.undecided import can_be_undecided, has_generations
from infinity.state.units import Chunk, Unit, chunk_unit
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.updates.policy import EarlyPolicy
from infinity.streaming.updates.record import StepRecord, UpdateSettings
from infinity.streaming.updates.unit_update import ChunkUpdates, UnitUpdate

_WAITS = ("read_wait_s", "write_wait_s")


class EarlyUpdates(ABC):
    """Chooses units to update early, and compares their updates with the step's decision. Training
    thread, under the engine's lock.

    A subclass makes the updates, by `chunks`: `UpdateTurns` on one rank, `ShardUpdates` over ranks.
    `units`: by the index that callers use; over ranks this rank's shards. `gradients`: their sums.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: GradientStore,
        chunks: ChunkUpdates,
        counters: Counters,
        settings: UpdateSettings,
        *,
        is_over_ranks: bool = False,
    ) -> None:
        self._units = units
        self._gradients = gradients
        self._chunks = chunks
        self._ring, self._undecided = chunks.ring, chunks.undecided
        self._counters = counters
        self._settings = settings
        store, is_beside = self._undecided.store, settings.is_beside
        able = {
            index: updated_nbytes(unit)
            for index, unit in enumerate(units)
            if settings.in_backward and can_be_undecided(store, unit, is_beside=is_beside)
        }
        # See Note [Which first].
        self._is_newest_first = is_over_ranks or (
            is_beside and not any(has_generations(store, units[index]) for index in able)
        )
        self.policy = EarlyPolicy(able, is_newest_first=self._is_newest_first)
        self._planned: dict[int, None] = {}  # In the order of their gradients.
        self._left: dict[int, UnitUpdate] = {}
        self._early: dict[int, UnitUpdate] = {}  # QUEUED, RUNNING or DONE, in this order.
        self._num_undone = 0  # Taken back before the step has decided.
        self._decided_s = time.monotonic()  # The last decision.
        # The waits at the last decision, and those of the forward since.
        self._waits_before_s = 0.0
        self._forward_wait_s = 0.0

    # -- What makes the updates --------------------------------------------------------------------

    def _prepare(self, planned: list[int]) -> list[int]:
        """Returns the units that can be updated in this backward, which begins."""
        return planned

    @abstractmethod
    def _is_ready(self, unit: Unit) -> bool:
        """Whether the sums are complete, where the update reads them. Never waits."""

    @abstractmethod
    def _start(self, index: int, update: UnitUpdate) -> bool:
        """Queues an update. Returns False if no memory is free for what it needs."""

    @abstractmethod
    def _stop(self, taken_back: Sequence[UnitUpdate]) -> None:
        """Ends updates, drops what they have written, and calls `_note_undone`. Whatever it raises,
        none of them goes on."""

    def _content(self, unit: Unit) -> object:
        """Returns what stands for the content that an update of the unit reads."""
        return [self._gradients.stamp(spec) for spec in unit.trainable()]

    def _waited_s(self) -> float:
        """Returns the time that training has waited for drives."""
        values = self._counters.snapshot()
        return sum(values.get(name, 0.0) for name in _WAITS)

    def _all_chunks(self, unit: Unit) -> list[Chunk]:
        """Returns the chunks of an update of all of the unit."""
        return [chunk for chunk in chunk_unit(unit, self._ring.chunk_nbytes) if chunk.slices]

    # -- The backward ------------------------------------------------------------------------------

    def note_gradient(self, index: int) -> None:
        """A gradient of a parameter of the unit arrived."""
        if self.policy.note_gradient(index):
            if self.policy.adapts:
                self._forward_wait_s = self._waited_s() - self._waits_before_s
            planned = self.policy.plan()
            if not self._undecided.has_space:
                store = self._undecided.store
                planned = [i for i in planned if not has_generations(store, self._units[i])]
            self._planned = dict.fromkeys(self._prepare(planned) if planned else ())
            while not planned and self._undecided.give_back():
                pass  # Memory of homes is for nothing in this step.
        self.take_back(index)  # It was not the last.

    def note_dropped(self, indexes: Collection[int]) -> None:
        """The gradients of the units are dropped. Raises StorageError if a write has failed."""
        for index in [i for i in (*self._left, *self._early) if i in indexes]:
            self.take_back(index)
        if self.policy.note_dropped(indexes):
            self._num_undone = 0  # No prediction was wrong.

    def note_left(self, index: int) -> bool:
        """A backward has left the unit. Returns whether `begin_early` is to follow."""
        is_complete = self.policy.note_left(index)
        return is_complete and index in self._planned and index not in self._early

    def begin_early(self, index: int, update: UnitUpdate | None) -> None:
        """The unit is to be updated by the step that is expected, once its sums are complete. None:
        that step has none of its parameters."""
        if update is not None:
            self._left[index] = update

    def advance(self) -> None:
        """Queues the updates of units whose sums are complete. Never waits."""
        for index in list(self._left):
            # The one before it may have needed memory.
            if index not in self._left or not self._is_ready(self._units[index]):
                continue
            update = self._left.pop(index)
            update.content = self._content(update.unit)
            if self._start(index, update):  # Else the step makes it.
                self._early[index] = update

    # -- The decision ------------------------------------------------------------------------------

    def take_back_others(self, record: StepRecord) -> None:
        """Takes back early updates that are not what the step has decided."""
        others = [i for i, early in self._early.items() if not self._is_as_expected(early, record)]
        self._take_back(others)

    def end_step(self, record: StepRecord, kept: Iterable[int]) -> None:
        """The step has decided, and keeps early updates of these units."""
        now_s, kept = time.monotonic(), set(kept)
        step_s, self._decided_s = now_s - self._decided_s, now_s
        if self._settings.in_backward:
            self._counters.add("early_updates_kept", len(kept))
        done = {index for index in kept if self._early[index].is_done}
        self.policy.end_step(
            num_undone=self._num_undone,
            is_clipped=bool(record.factors),
            missed=[index for index in self._planned if index not in done],
            wait_share=self._forward_wait_s / step_s if step_s else 0.0,
        )
        self._forget()
        self._num_undone = 0
        if self.policy.adapts:
            self._waits_before_s = self._waited_s()

    def _is_as_expected(self, early: UnitUpdate, record: StepRecord) -> bool:
        trainable = early.unit.trainable()
        decided = {spec: record.settings[spec] for spec in trainable if spec in record.settings}
        # A factor changes the stamp of its gradient.
        return decided == early.record.settings and self._content(early.unit) == early.content

    def take_back(self, index: int) -> None:
        """Takes back the unit's early update, if there is one: its state is that of the last step.
        Raises StorageError if a write has failed."""
        self._left.pop(index, None)
        if index in self._early:
            self._take_back([index])

    def withdraw(self) -> None:
        """Takes back every early update, and plans none before the next step."""
        self._take_back(list(self._early))
        self._forget()

    def _take_back(self, indexes: Iterable[int]) -> None:
        taken_back = [self._early.pop(index) for index in indexes]
        if taken_back:
            self._stop(taken_back)

    def _release_last(self) -> bool:
        """Takes back the last early update that has memory on the host. Returns whether some is
        free now."""
        for index, early in reversed(self._early.items()):
            if self._undecided.has_memory(early.unit):
                self._take_back([index])
                break
        return self._undecided.give_back()

    def _note_undone(self, count: int) -> None:
        """So many updates had begun that are taken back."""
        self._num_undone += count
        self._counters.add("early_updates_undone", count)

    def _forget(self) -> None:
        self._planned, self._left, self._early = {}, {}, {}
