"""The decision of one optimizer step, and the interfaces of those who carry it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.ops.optimizers import Settings
from infinity.state.units import TensorSpec, Unit
from infinity.tiers.device import DeviceAdapter


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything one optimizer step decided: what each parameter's update needs to know."""

    settings: Mapping[TensorSpec, Settings]  # Only parameters that have a gradient.
    clip_factor: torch.Tensor | None  # fp32 scalar that gradients are multiplied by.


# The step that is expected of a unit's parameters as they are; None where none can be told.
StepForecast = Callable[[Unit], StepRecord | None]


def no_forecast(_: Unit) -> StepRecord | None:
    """A forecast where there is no optimizer yet."""
    return None


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """`num_staging_slots` chunks of `chunk_nbytes` of fp32 are in memory at once; at least one.
    With `reads_ahead` chunks of units that are needed later are read into slots that are free.
    `on_device`: the device that computes updates; None: the host does. `in_backward`: units may be
    updated before the step has decided."""

    chunk_nbytes: int
    num_staging_slots: int
    reads_ahead: bool
    on_device: DeviceAdapter | None
    in_backward: bool = False


class UpdatedWeights(Protocol):
    """Weights, as an update sees them: a `WeightCache`, or the shards of one."""

    def expected(self) -> Iterator[int]:
        """Units in the order in which they will probably be used next."""

    def await_update(self, unit: int, is_awaited: bool) -> None: ...
    def check_out(self, unit: int, *, read: bool) -> torch.Tensor: ...
    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None: ...


class StepRunner(Protocol):
    """Runs optimizer steps over the model's units.

    Local: `Updater`, which says what the methods do. Over ranks:
    `distributed.step.DistributedUpdater`. Called under the engine's lock.
    """

    forecast: StepForecast

    @property
    def chunk_nbytes(self) -> int: ...

    def apply(self, record: StepRecord) -> None: ...
    def defer(self, record: StepRecord) -> None: ...
    def is_pending(self, unit: int) -> bool: ...
    def bring_up_to_date(self, unit: int, *, is_needed: bool = False) -> None: ...
    def note_gradient(self, unit: int) -> None: ...
    def note_left(self, unit: int) -> None: ...
    def advance(self) -> None: ...
    def withdraw(self, unit: int) -> None: ...
    def apply_pending(self) -> None: ...
    def settle(self) -> None: ...
    def finish_writes(self) -> None: ...
    def abandon(self) -> None: ...
    def reclaim_idle(self) -> bool: ...
    def reclaim(self) -> bool: ...
