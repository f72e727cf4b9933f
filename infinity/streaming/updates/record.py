"""The decision of one optimizer step, and the interfaces of the classes that carry it out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.ops.rules import Settings
from infinity.state.units import TensorSpec
from infinity.tiers.device import DeviceAdapter


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything one optimizer step decided: what each parameter's update needs to know."""

    settings: Mapping[TensorSpec, Settings]  # Only parameters that have a gradient.
    # fp32 values by which the update multiplies gradients as it reads them; none is 1.
    factors: Mapping[TensorSpec, float]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """`num_staging_slots` chunks of `chunk_nbytes` of fp32 are in memory at once; at least one.
    With `reads_ahead` chunks of units that are needed later are read into slots that are free.
    `on_device`: the device that computes updates; None: the host does. `in_backward`: units may be
    updated before the step has decided. `is_beside`: the device that computes has memory of its
    own, so the host is free meanwhile. `rides_along`: updates wait for the next use of a unit, and
    take spare memory for state on its way."""

    chunk_nbytes: int
    num_staging_slots: int
    reads_ahead: bool
    on_device: DeviceAdapter | None
    in_backward: bool = False
    is_beside: bool = False
    rides_along: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether updates read and write state while passes run."""
        return self.rides_along and self.reads_ahead


class UpdatedWeights(Protocol):
    """Weights, as an update sees them: a `WeightCache`, or the shards of one."""

    def await_update(self, unit: int, is_awaited: bool) -> None:
        """Marks a unit's weights as out of date until the step has updated them; or ends it. Over
        ranks no shard is attached then, and `PendingShards` knows those that await an update."""
        del unit, is_awaited

    def check_out(self, unit: int, *, read: bool, stays_on_device: bool = False) -> torch.Tensor:
        """Returns the unit's weights as host bytes to change: uint8, shape (weight_nbytes,).

        Without `read` the caller overwrites all of them. With `stays_on_device` weights that rest
        on the device may be given there, to change in the order of the current stream. The unit is
        not in use until `check_in`.
        """

    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        """Ends `check_out`. The first `dirty_nbytes` were changed, and go to where they rest.

        write_now: starts the write at once, not when the block is evicted or writes are finished
        is_valid: False if an error left the bytes incomplete
        """


class StepRunner(Protocol):
    """Runs optimizer steps over the model's units.

    Local: `Updater`. Over ranks: `distributed.step.DistributedUpdater`. Called under the engine's
    lock.
    """

    chunk_nbytes: int  # The fp32 bytes of a unit that are updated at a time.
    follows_gradients: bool  # Whether `note_gradient` does anything.

    def start_worker(
        self, lock: threading.RLock, begin_thread: Callable[[], None], resources: ExitStack
    ) -> None:
        """From now on a thread adds gradients to sums on the host, and makes its updates, early and
        pending ones, if these follow the step, until `resources` are closed. `lock` is the
        engine's; the thread calls `begin_thread` first. Over ranks `ShardUpdates` has a thread."""
        del lock, begin_thread, resources

    def apply(self, record: StepRecord) -> None:
        """Updates every unit of the record.

        After an error either nothing has changed and nothing is pending, or parameters are torn.
        """

    def defer(self, record: StepRecord) -> None:
        """Makes every unit with a parameter in the record pending, but for those that were updated
        in the backward. Nothing is pending before. Waits for no state."""

    def is_pending(self, unit: int) -> bool:
        """Whether the unit waits for its update. Over ranks no unit of the model does."""
        del unit
        return False

    def bring_up_to_date(self, unit: int, *, is_needed: bool = False) -> None:
        """Applies the unit's pending update, if it has one. Nobody may hold the unit. An early
        update, which no step has decided, is taken back.

        Its new moments are on their way to where they rest, and so are its weights, unless
        `is_needed` says that they will be used at once and written when nobody holds them. After a
        failed read the unit is as it was and still pending.
        """

    def note_gradient(self, unit: int) -> None:
        """Tells that a gradient of a parameter of the unit has been added to its sum. Does what
        `advance` does."""

    def note_dropped(self, units: Collection[int]) -> None:
        """Tells that gradients of the units have been dropped. Of those that had any the step is
        left out, and early updates are taken back."""

    def note_left(self, unit: int) -> bool:
        """Tells that a backward has left the unit. Its gradients are complete if no other backward
        comes. Returns whether `begin_early` is to follow, with the step that is expected."""

    def begin_early(self, unit: int, record: StepRecord) -> None:
        """Makes `advance` update the unit before the step has decided, by the expected record."""

    def advance(self) -> None:
        """Updates what can be updated before the step has decided, and starts reads of the chunks
        that are needed next, into free staging slots. Never waits."""

    def withdraw(self, unit: int) -> None:
        """Makes the unit's state safe to change: an update that no step has decided is undone,
        reads ahead are dropped, and writes of updated state are over."""

    def apply_pending(self) -> None:
        """Applies everything pending."""

    def settle(self) -> None:
        """Applies everything pending, and waits until every moment and master is where it rests.
        Early updates are taken back; nothing is updated or read early any more before the next
        step. Spare memory is free."""

    def finish_writes(self) -> None:
        """Waits until the updated state is where it rests."""

    def abandon(self) -> None:
        """Drops what is pending, and waits for transfers in flight: the engine closes."""
