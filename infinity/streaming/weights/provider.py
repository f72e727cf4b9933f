"""The sources of a unit's weights beside the place where they rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from typing_extensions import override

from infinity.state.store import Transfer
from infinity.tiers.device import Copy, Decoding, Region


class Arrival(Protocol):
    """One unit's weights on their way into its device region."""

    @property
    def arrival(self) -> Copy:
        """Into the region, once settled."""

    @property
    def departure(self) -> Copy:
        """Over when the feeder's bytes are not read any more, once settled."""

    def settle(self, *, is_patient: bool) -> bool:
        """Returns whether the weights will arrive. If not, the region holds nothing.

        Waits for the decision of all ranks, up to a limit; without `is_patient` it does not.
        """


class WeightProvider(Protocol):
    """Fills a unit's device region from another unit, its *feeder*, without a host block.

    Local: `TierWeights`, which has no feeders. Between devices:
    `distributed.unshard.UnshardedWeights`. Called under the engine's lock.
    """

    is_outdated_by_step: bool  # Fetched weights are outdated after the step.

    def feeders(self) -> Mapping[int, int]:
        """Returns units that are never used themselves, and the unit that each one feeds."""

    def note_pass(self, *, is_training: bool) -> None:
        """Announces a pass. Without `is_training` nothing may begin."""

    def feeder_of(self, unit: int) -> int | None:
        """The unit that feeds this one; None: these weights come through their host block now."""

    def take_outdated(self, unit: int) -> bool:
        """Whether the feeder was written past the cache since the last call."""

    def begin(
        self,
        unit: int,
        region: Region | None,
        local: torch.Tensor,
        reading: Transfer | None,
        decoding: Decoding | None,
    ) -> Arrival:
        """Gives the region its memory, and begins to fill it. `local`: the feeder's bytes, which
        are being read until `reading` is over. `decoding`: of the unit's stored bytes, if it has
        any. Without a region, they go to its memory (`DeviceAdapter.stage`), which nobody else
        uses."""


class TierWeights(WeightProvider):
    """A `WeightProvider` where every unit comes from where it rests, through its host block."""

    def __init__(self, *, is_outdated_by_step: bool = False) -> None:
        self.is_outdated_by_step = is_outdated_by_step

    @override
    def feeders(self) -> Mapping[int, int]:
        return {}

    @override
    def note_pass(self, *, is_training: bool) -> None: ...

    @override
    def feeder_of(self, unit: int) -> int | None:
        return None

    @override
    def take_outdated(self, unit: int) -> bool:
        return False

    @override
    def begin(
        self,
        unit: int,
        region: Region | None,
        local: torch.Tensor,
        reading: Transfer | None,
        decoding: Decoding | None,
    ) -> Arrival:
        raise AssertionError("no unit has a feeder")
