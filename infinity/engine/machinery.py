"""The parts an engine is made of, already wired to each other."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from infinity.engine.activations import Activations
from infinity.engine.gradients import Gradients
from infinity.engine.master import Masters
from infinity.engine.passes import Passes
from infinity.engine.rank_group import RankGroup
from infinity.engine.update import Updater
from infinity.observe import Counters
from infinity.schedule.executor import Executor
from infinity.schedule.update_place import UpdatePlace
from infinity.state.store import StateStore
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.pool import HostPool


@dataclass(frozen=True, slots=True)
class Machinery:
    """Everything below the model. Called under the engine's lock."""

    store: StateStore
    pool: HostPool
    device: DeviceAdapter
    executor: Executor
    gradients: Gradients
    updater: Updater
    masters: Masters
    activations: Activations
    passes: Passes
    counters: Counters
    resources: ExitStack  # Closes device, volume, storage engine and arena, in that order.
    update_place: UpdatePlace  # Of this rank.
    ranks: RankGroup | None = None
