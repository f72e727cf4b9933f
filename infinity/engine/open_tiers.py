"""Opens the tiers: the arena, the storage engine, the volume, the read-only shards, the device."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from infinity.config.machine import threads_here
from infinity.config.schema.engine import Io
from infinity.config.schema.tiers import NvmeTier
from infinity.distributed.group import path_of_job
from infinity.engine.lay_out import RunPlan
from infinity.observe import Counters
from infinity.state.spare_generations import nearest
from infinity.storage.arena import Arena, can_share
from infinity.storage.native_engine import open_configured
from infinity.storage.protocol import StorageEngine
from infinity.storage.shards import ShardFiles, ShardIdentity
from infinity.storage.volume import Adopted, Volume, VolumePath
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostPool

_log = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The tiers of one engine, and the counters that they add to.

    `volume` is None if nothing rests on NVMe, `shards` if nothing rests in files of a checkpoint.
    """

    counters: Counters
    host: HostPool
    volume: Volume | None
    shards: ShardFiles | None
    device: DeviceAdapter


def open_tiers(
    plan: RunPlan,
    wrap_storage: Callable[[StorageEngine], StorageEngine] | None,
    adopted: Adopted | None,
    identities: Sequence[ShardIdentity],
    resources: ExitStack,
) -> OpenTiers:
    """Opens what the budgets need; `resources` closes it, in the opposite order.

    `identities`: the files of a checkpoint; those that units rest in are opened. Ranks of a machine
    have a directory each in a swap directory, and read each other's arenas. Raises StorageError,
    CapacityError.
    """
    counters, huge_pages = Counters(), plan.config.tiers.host.huge_pages
    has_neighbours = plan.sharding is not None and plan.sharding.group.has_neighbours
    arena = Arena(
        plan.budgets.host_nbytes,
        huge_pages=huge_pages,
        numa_node=plan.device.numa_node(),
        is_shared=has_neighbours and can_share(huge_pages=huge_pages),
    )
    resources.callback(arena.close)
    read = {run.path for unit in plan.units if unit.stored is not None for run in unit.stored.runs}
    uses_volume = _uses_volume(plan)
    storage = volume = shards = None
    if uses_volume or read:
        storage = _open_storage(plan.config.io, arena, wrap_storage, resources)
    if uses_volume and storage is not None:
        volume = _open_volume(plan, storage, adopted)
        resources.callback(volume.close)
    if read and storage is not None:
        in_use = [identity for identity in identities if identity.path in read]
        shards = ShardFiles(storage, in_use, verify=plan.config.io.verify)
        resources.callback(shards.close)
    host = HostPool(arena, counters, is_tight=plan.budgets.is_tight)
    resources.callback(host.close)
    device = plan.device.open(host, counters)
    resources.callback(device.close)
    return OpenTiers(counters, host, volume, shards, device)


def _open_storage(
    io: Io,
    arena: Arena,
    wrap: Callable[[StorageEngine], StorageEngine] | None,
    resources: ExitStack,
) -> StorageEngine:
    storage = open_configured(io, arena)
    if wrap is not None:
        storage = wrap(storage)
    resources.callback(storage.close)
    if not io.verify:
        _log.warning(
            "io.verify = false: what is read from the drives is not compared with what was "
            "written. A page that a drive, a cable or another program changes is trained on, and "
            "saved, without a word. io.verify = true, the default, ends training with its place"
        )
    return storage


def _uses_volume(plan: RunPlan) -> bool:
    placement = plan.config.placement
    waiting = (*placement.activations, *placement.experts)
    placed = {*plan.budgets.placement.tiers.values(), *waiting}
    return "nvme" in placed or plan.budgets.reduce_buffer_spills


def _open_volume(plan: RunPlan, storage: StorageEngine, adopted: Adopted | None) -> Volume:
    paths = [
        VolumePath(
            path=str(tier.path),
            capacity_nbytes=_nvme_nbytes(tier),
            direct=tier.direct,
            weight=None if tier.weight == "auto" else tier.weight,
            shared_with=str(path_of_job(tier.path)) if plan.num_sharing > 1 else None,
        )
        for tier in plan.config.tiers.nvme
    ]
    return Volume(
        storage,
        paths,
        stripe_nbytes=plan.config.io.stripe,
        verify=plan.config.io.verify,
        num_threads=threads_here(torch.get_num_threads()),
        num_spares=max(plan.spares.count, 0 if adopted is None else adopted.num_spares),
        num_private=plan.spares.num_private,
        adopted=adopted,
    )


def _nvme_nbytes(tier: NvmeTier) -> int | None:
    """Returns the limit of one path; None means the free space less a reserve."""
    if tier.capacity.is_auto:
        return None
    return tier.capacity.resolve(shutil.disk_usage(nearest(tier.path)).free)
