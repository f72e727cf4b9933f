"""Opens the tiers: the arena, the storage engine, the volume, the read-only shards, the device."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.config import SwapConfig
from infinity.config.cores import threads_here
from infinity.config.schema import NvmeTier
from infinity.distributed.group import path_of_job
from infinity.observe import Counters
from infinity.state.budgets import Budgets
from infinity.state.units import Unit
from infinity.storage.arena import Arena, can_share
from infinity.storage.open import open_configured
from infinity.storage.protocol import StorageEngine
from infinity.storage.shards import ShardFiles, ShardIdentity
from infinity.storage.volume import Adopted, Volume, VolumePath
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostBlocks
from infinity.tiers.open_device import OwnDevice, device_node, open_device

_log = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The tiers of one engine, and the counters that they add to.

    `volume` is None if nothing rests on NVMe, `shards` if nothing rests in files of a checkpoint.
    """

    counters: Counters
    host: HostBlocks
    volume: Volume | None
    shards: ShardFiles | None
    device: DeviceAdapter


def open_tiers(
    config: SwapConfig,
    units: Sequence[Unit],
    budgets: Budgets,
    own_device: OwnDevice | None,
    wrap_storage: Callable[[StorageEngine], StorageEngine] | None,
    adopted: Adopted | None,
    identities: Sequence[ShardIdentity],
    resources: ExitStack,
    *,
    num_spares: int,
    num_private: int,
    num_sharing: int,
    has_neighbours: bool,
) -> OpenTiers:
    """Opens what the budgets need; `resources` closes it, in the opposite order.

    `identities`: the files of a checkpoint; those that `units` rest in are opened. `num_spares`:
    generations of the volume beside the current one, `num_private` of them for early updates.
    `num_sharing`: ranks of the machine, with a directory each in a swap directory.
    `has_neighbours`: other ranks of the machine read the arena. Raises StorageError, CapacityError.
    """
    counters, huge_pages = Counters(), config.tiers.host.huge_pages
    arena = Arena(
        budgets.host_nbytes,
        huge_pages=huge_pages,
        numa_node=device_node(config, own_device),
        is_shared=has_neighbours and can_share(huge_pages=huge_pages),
    )
    resources.callback(arena.close)
    read = {run.path for unit in units if unit.stored is not None for run in unit.stored.runs}
    storage = _open_storage(config, arena, budgets, wrap_storage, resources, is_needed=bool(read))
    volume = _open_volume(
        config, storage, budgets, adopted, resources,
        num_spares=num_spares, num_private=num_private, num_sharing=num_sharing,
    )  # fmt: skip
    shards = None
    if read:
        assert storage is not None
        in_use = [identity for identity in identities if identity.path in read]
        shards = ShardFiles(storage, in_use, verify=config.io.verify)
        resources.callback(shards.close)
    host = HostBlocks(arena, counters)
    resources.callback(host.close)
    device = open_device(config, host, counters, own_device)
    resources.callback(device.close)
    return OpenTiers(counters, host, volume, shards, device)


def _open_storage(
    config: SwapConfig,
    arena: Arena,
    budgets: Budgets,
    wrap: Callable[[StorageEngine], StorageEngine] | None,
    resources: ExitStack,
    *,
    is_needed: bool,
) -> StorageEngine | None:
    if not is_needed and not _uses_volume(config, budgets):
        return None
    storage = open_configured(config.io, arena)
    if wrap is not None:
        storage = wrap(storage)
    resources.callback(storage.close)
    if not config.io.verify:
        _log.warning(
            "io.verify = false: what is read from the drives is not compared with what was "
            "written. A page that a drive, a cable or another program changes is trained on, and "
            "saved, without a word. io.verify = true, the default, ends training with its place"
        )
    return storage


def _uses_volume(config: SwapConfig, budgets: Budgets) -> bool:
    waiting = (*config.placement.activations, *config.placement.experts)
    placed = {*budgets.placement.tiers.values(), *waiting}
    return "nvme" in placed or budgets.reduce_buffer_spills


def _open_volume(
    config: SwapConfig,
    storage: StorageEngine | None,
    budgets: Budgets,
    adopted: Adopted | None,
    resources: ExitStack,
    *,
    num_spares: int,
    num_private: int,
    num_sharing: int,
) -> Volume | None:
    if storage is None or not _uses_volume(config, budgets):
        return None
    paths = [
        VolumePath(
            path=str(tier.path),
            capacity_nbytes=_nvme_nbytes(tier),
            direct=tier.direct,
            weight=None if tier.weight == "auto" else tier.weight,
            shared_with=str(path_of_job(tier.path)) if num_sharing > 1 else None,
        )
        for tier in config.tiers.nvme
    ]
    volume = Volume(
        storage,
        paths,
        stripe_nbytes=config.io.stripe,
        verify=config.io.verify,
        num_threads=threads_here(torch.get_num_threads()),
        num_spares=num_spares,
        num_private=num_private,
        adopted=adopted,
    )
    resources.callback(volume.close)
    return volume


def _nvme_nbytes(tier: NvmeTier) -> int | None:
    """Returns the limit of one path; None means the free space less a reserve."""
    if tier.capacity.is_auto:
        return None
    there = Path(tier.path)
    while not there.exists() and there != there.parent:
        there = there.parent
    return tier.capacity.resolve(shutil.disk_usage(there).free)
