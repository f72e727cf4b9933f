"""Where a unit's weights come from, beside the place where they rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from typing_extensions import override

from infinity.state.store import Transfer
from infinity.tiers.device import Copy, Region


class Arrival(Protocol):
    """One unit's weights on their way into its device region."""

    @property
    def arrival(self) -> Copy:
        """Into the region, once settled."""

    @property
    def departure(self) -> Copy:
        """Over when the feeder's bytes are not read any more, once settled."""

    def settle(self, *, is_patient: bool) -> bool:
        """Waits until the weights are on their way for sure, a while or not at all. False: they
        do not come, and the region holds nothing."""


class WeightProvider(Protocol):
    """Fills a unit's device region from another unit, its *feeder*, without a host block.

    Local: `TierWeights`, which has no feeders. Between devices:
    `distributed.unshard.UnshardedWeights`. Called under the engine's lock.
    """

    is_outdated_by_step: bool  # What was fetched is no use after the step.

    def feeders(self) -> Mapping[int, int]:
        """Units that are never used themselves, and the one that each is needed for."""

    def note_pass(self, *, is_training: bool) -> None:
        """A pass begins, or goes on. Without `is_training` nothing may begin."""

    def feeder_of(self, unit: int) -> int | None:
        """The unit that feeds this one; None: these weights come through their host block now."""

    def take_outdated(self, unit: int) -> bool:
        """Whether the feeder was written past the cache since this was asked last."""

    def begin(
        self, unit: int, region: Region, local: torch.Tensor, reading: Transfer | None
    ) -> Arrival:
        """Gives the region its memory, and begins to fill it. `local`: the feeder's bytes, which
        are being read until `reading` is over."""


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
        self, unit: int, region: Region, local: torch.Tensor, reading: Transfer | None
    ) -> Arrival:
        raise AssertionError("no unit has a feeder")
