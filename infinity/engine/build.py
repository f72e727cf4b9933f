"""Builds an engine from a model and a configuration; refuses bad input before anything changes."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from infinity.config import SwapConfig
from infinity.config.schema import NvmeTier
from infinity.distributed.grad_memory import SumsMemory
from infinity.distributed.group import RankTopology, find_group, process_group
from infinity.distributed.reduce import DistributedGradients
from infinity.distributed.setup import (
    ShardingPlan,
    config_of_rank,
    is_collective,
    plan_sharding,
    refuse_different_weights,
    remove_directories,
)
from infinity.distributed.step import DistributedMasters, DistributedUpdater
from infinity.distributed.sync import OneRank, Ranks, RankSync
from infinity.engine.adapters import (
    copied_parameters,
    derive,
    derived_buffers,
    derived_parameters,
    refuse_without_values,
    values_of_adapters,
)
from infinity.engine.dtypes import Dtypes
from infinity.engine.durability import count_spares
from infinity.engine.engine import Engine
from infinity.engine.load_plan import LoadPlan, StoredParams
from infinity.engine.meta_init import initialise
from infinity.engine.registry import is_offloaded
from infinity.engine.update_rates import place_updates
from infinity.errors import CapacityError, ConfigError, UnsupportedError
from infinity.modules.awaited import Awaited, is_to_come
from infinity.modules.discover import (
    FoundParam,
    ModelLayout,
    UnitRule,
    discover_units,
    storage_strides,
)
from infinity.modules.handle import Handle
from infinity.modules.hooks import HookedModule
from infinity.modules.originals import Follower, Originals
from infinity.modules.param import OffloadedParam
from infinity.modules.tiling.split import Tiling
from infinity.observe import Counters
from infinity.simulate.update_device import UpdateDevice
from infinity.state.budgets import Budgets, compute_budgets
from infinity.state.moments import moments_of
from infinity.state.placement import resting_nbytes
from infinity.state.store import LocalStore, StateStore
from infinity.state.stored import lay_out_stored
from infinity.state.tiles import fit
from infinity.state.units import StateKind, TensorFacts, Unit, layout_unit
from infinity.storage.arena import Arena, available_host_nbytes
from infinity.storage.open import open_configured
from infinity.storage.protocol import StorageEngine
from infinity.storage.shards import ShardFiles, ShardIdentity
from infinity.storage.volume import Adopted, Volume, VolumePath
from infinity.streaming.activations import ActivationStore
from infinity.streaming.gradient_sink import GradientSink
from infinity.streaming.gradients import GradientStore
from infinity.streaming.masters import Masters, MasterWeights
from infinity.streaming.optimizer_step import Updater
from infinity.streaming.parameters import WeightCache
from infinity.streaming.passes import Passes
from infinity.streaming.step_record import StepRunner, UpdateSettings
from infinity.streaming.weight_provider import TierWeights, WeightProvider
from infinity.tiers.cpu import CpuDevice
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostBlocks
from infinity.tiers.pool import HostPool
from infinity.tiers.ranges import rounded_nbytes

_log = logging.getLogger("infinity")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OwnDevice(DeviceAdapter, Protocol):
    """A device adapter of the caller, which is given the host tier when it exists."""

    def open(self, host: HostBlocks, counters: Counters) -> None: ...


def build(
    model: nn.Module,
    config: SwapConfig,
    *,
    weights: LoadPlan | None,
    seed: int,
    units: UnitRule,
    device: OwnDevice | None,
    group: Any = None,
    model_parallel_group: Any = None,
    wrap_storage: Callable[[StorageEngine], StorageEngine] | None = None,
    adopted: Adopted | None = None,
) -> Engine:
    """Moves a model's parameters to their tiers and replaces them with handles.

    A failure leaves the model as it was and no swap file behind. `wrap_storage` decorates the
    storage engine (fault injection in tests). The engine continues in `adopted` swap files. `group`
    and `model_parallel_group`: see `infinity.offload`.
    """
    # INV-10: refusals come before the first change; a failure undoes the rest.
    _refuse(model, has_weights=weights is not None)
    originals = Originals(model)
    ranks = find_group(group)
    if ranks is not None:
        config = config_of_rank(config, ranks)
    in_place = weights if config.placement.reads_in_place and ranks is None else None
    stored = StoredParams(model, in_place)
    dtypes = Dtypes(model, config)
    tiling = Tiling(model, lambda parameter: dtypes.of(parameter).itemsize)
    resources = ExitStack()
    try:
        anatomy, laid_out, sharding, budgets = _lay_out(
            model, config, units, device, ranks, tiling, dtypes, stored
        )
        parts = _assemble(
            config, laid_out, budgets, device, wrap_storage, adopted, resources, sharding,
            stored.identities,
        )  # fmt: skip
        params = _params(parts.weight_cache, anatomy, laid_out)
        tiled_params = {tiled.name: tiled for tiled in tiling.tiled_params}
        engine = Engine(
            model,
            config,
            params,
            _hooked_modules(anatomy),
            tiled_params,
            store=parts.store,
            pool=parts.pool,
            device=parts.device,
            weight_cache=parts.weight_cache,
            gradients=parts.gradients,
            updater=parts.updater,
            masters=parts.masters,
            activations=parts.activations,
            passes=parts.passes,
            counters=parts.counters,
            ranks=parts.ranks,
            update_device=parts.update_device,
            resources=parts.resources,
        )
        if model_parallel_group is not None:
            engine.share_activations(process_group(model_parallel_group))
    except BaseException:
        resources.close()
        tiling.undo()
        raise
    try:
        engine.ranks.open()
        refuse_different_weights(engine)
        handles = {id(param.original): param.handle for param in params}
        tiling.hand_over(lambda parameter: handles[id(parameter)])
        _fill(engine, weights, seed)
        engine.ranks.sync_first_weights()
    except BaseException:
        engine.uninstall()
        engine.close()
        tiling.undo()
        raise
    engine.forget_originals()
    tiling.forget()
    del anatomy  # It refers to the parameters, too.
    originals.follow(engine.handle)
    if tiled_params:
        _log.info(
            "%d parameters run as tiles, the first of them %r",
            len(tiled_params),
            next(iter(tiled_params)),
        )
    dtypes.narrow_buffers()
    _move_buffers(model, engine.device)
    return engine


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Everything below the model, connected; `build` passes each part to the engine."""

    store: StateStore
    pool: HostPool
    device: DeviceAdapter
    weight_cache: WeightCache
    gradients: GradientSink
    updater: StepRunner
    masters: MasterWeights
    activations: ActivationStore
    passes: Passes
    counters: Counters
    ranks: Ranks
    update_device: UpdateDevice
    resources: ExitStack


_LaidOut = tuple[ModelLayout, list[Unit], ShardingPlan | None, Budgets]


def _lay_out(
    model: nn.Module,
    config: SwapConfig,
    rule: UnitRule,
    device: OwnDevice | None,
    ranks: RankTopology | None,
    tiling: Tiling,
    dtypes: Dtypes,
    stored: StoredParams,
) -> _LaidOut:
    """Returns units that the budgets can hold; splits modules into tiles where necessary."""
    on_devices = ranks is not None and is_collective(
        config,
        ranks,
        has_own_memory=not _shares_host_memory(config, device),
        is_cuda=device is None and _kind(config) == "cuda",
    )

    def attempt(limit_nbytes: int | None) -> _LaidOut:
        tiling.cut(limit_nbytes)
        in_files = stored.by_parameter(tiling.tiled_params)
        anatomy = discover_units(model, rule, stored=in_files)
        if not anatomy.units:
            raise ConfigError(f"{type(model).__name__} has no parameters; nothing to offload")
        moments = moments_of(config)
        laid_out = [
            layout_unit(index, name, [facts_of(each, dtypes) for each in members], moments)
            for index, (name, members) in enumerate(anatomy.units)
        ]
        for index, (_, members) in enumerate(anatomy.units):
            if id(members[0].parameter) in in_files:
                tensors = {each.name: in_files[id(each.parameter)] for each in members}
                laid_out[index] = replace(laid_out[index], stored=lay_out_stored(tensors))
        sharding = None
        if ranks is not None:
            sharding = plan_sharding(
                laid_out, anatomy.units_by_block(), ranks, config, is_collective=on_devices
            )
            laid_out = list(sharding.partition.full_units)
        budgets = _budgets(config, laid_out, anatomy, device, sharding)
        return anatomy, laid_out, sharding, budgets

    def has_room_ahead(found: _LaidOut) -> bool:
        _, units, _, budgets = found
        return budgets.has_room_ahead(max(unit.weight_nbytes for unit in units))

    try:
        return fit(config.schedule.tile, attempt, has_room_ahead, tiling.largest_nbytes)
    except CapacityError as error:
        reasons = tiling.why_not()
        if config.schedule.tile is not None and reasons:
            error.args = (f"{error}; tiles do not help: {reasons}",)
        raise


def _refuse(model: nn.Module, *, has_weights: bool) -> None:
    if is_offloaded(model):
        raise ConfigError(f"{type(model).__name__} is offloaded already")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (Handle, Follower)):
            raise ConfigError(f"{name!r} belongs to a model that is offloaded already")
        if is_lazy(parameter):
            raise UnsupportedError(
                f"{name!r} has no shape yet: its module is lazy and was never run. Run a forward, "
                "or give the module its sizes, before infinity.offload"
            )
        if type(parameter.data) not in (torch.Tensor, Awaited):
            raise UnsupportedError(
                f"{name!r} is a {type(parameter.data).__name__}; expected a plain tensor. "
                "Offload the model before it is sharded or quantized by other means"
            )
        if parameter.grad is not None:
            raise ConfigError(
                f"{name!r} has a gradient, which would be lost; finish the step, or "
                "model.zero_grad(), before infinity.offload"
            )
        if parameter._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"{name!r} has a hook after the accumulation of its gradient, which has left for "
                "its tier by then; remove the hook, or use register_hook"
            )
    refuse_without_values(model)
    derived = derived_buffers(model)
    for module_name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
            module.sparse and module.weight.requires_grad
        ):
            raise UnsupportedError(
                f"the gradient of {module_name or type(module).__name__!r} would be sparse; "
                "expected a dense one. Build the embedding with sparse=False"
            )
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta or id(buffer) in derived:
                continue
            if not has_weights or name in module._non_persistent_buffers_set:
                raise ConfigError(
                    f"buffer {module_name}.{name} is on the meta device and no file has its value; "
                    "build the model under `with infinity.init_empty_weights(config):`, which "
                    "keeps buffers real"
                )


def facts_of(found: FoundParam, dtypes: Dtypes) -> TensorFacts:
    """Returns the facts of a parameter as the engine keeps it."""
    parameter = found.parameter
    return TensorFacts(
        name=found.name,
        shape=tuple(parameter.shape),
        stride=storage_strides(parameter),
        dtype=dtypes.of(parameter, found.name),
        is_trainable=parameter.requires_grad,
    )


# -- Budgets ---------------------------------------------------------------------------------------


def _budgets(
    config: SwapConfig,
    units: Sequence[Unit],
    anatomy: ModelLayout,
    device: OwnDevice | None,
    sharding: ShardingPlan | None,
) -> Budgets:
    """Computes the budgets from the sizes of this machine."""
    is_cpu = _shares_host_memory(config, device)
    held_nbytes = anatomy.held_nbytes([rounded_nbytes(unit.weight_nbytes) for unit in units])
    stored = [resting_nbytes(u, StateKind.PARAMETERS) for u in units if u.stored is not None]
    host_held_nbytes = held_nbytes + max(stored, default=0)  # Decoded, and what it is made of.
    if not is_cpu and stored:
        resting = [resting_nbytes(unit, StateKind.PARAMETERS) for unit in units]
        host_held_nbytes = anatomy.held_nbytes(resting)
    sizes: dict[str, Any] = {
        "held_nbytes": held_nbytes,
        "host_held_nbytes": host_held_nbytes,
        "shares_host_memory": is_cpu,
        "device_nbytes": _device_nbytes(config, is_given=is_cpu or device is not None),
        "available_host_nbytes": available_host_nbytes(),
    }
    if sharding is None:
        return compute_budgets(config, units, **sizes)
    del sizes["host_held_nbytes"]  # Ranks keep frozen weights as they keep others.
    sizes["available_host_nbytes"] //= sharding.sharing
    return sharding.budgets(config, **sizes)


def _shares_host_memory(config: SwapConfig, device: OwnDevice | None) -> bool:
    return device.shares_host_memory if device is not None else _kind(config) == "cpu"


def _device_nbytes(config: SwapConfig, *, is_given: bool) -> int | None:
    if is_given:
        # A share of "device memory" means nothing here: unlimited.
        return config.tiers.device.capacity.nbytes
    free_nbytes, _ = torch.cuda.mem_get_info()
    return config.tiers.device.budget_nbytes(free_nbytes)


def _kind(config: SwapConfig) -> str:
    kind = config.tiers.device.kind
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "tiers.device.kind: expected a CUDA device for 'cuda', and PyTorch sees none; install "
            "a CUDA build of torch and a driver, or set it to 'cpu' or 'auto'"
        )
    return kind


# -- Parts -----------------------------------------------------------------------------------------


def _assemble(
    config: SwapConfig,
    units: Sequence[Unit],
    budgets: Budgets,
    own_device: OwnDevice | None,
    wrap_storage: Callable[[StorageEngine], StorageEngine] | None,
    adopted: Adopted | None,
    resources: ExitStack,
    sharding: ShardingPlan | None,
    identities: Sequence[ShardIdentity],
) -> _Assembly:
    counters = Counters()
    if sharding is not None:
        resources.callback(remove_directories, config)
    arena = Arena(budgets.host_nbytes, huge_pages=config.tiers.host.huge_pages)
    resources.callback(arena.close)
    num_spares = count_spares(config, num_ranks=1 if sharding is None else sharding.partition.count)
    read = {run.path for unit in units if unit.stored is not None for run in unit.stored.runs}
    storage = _open_storage(config, arena, budgets, wrap_storage, resources, is_needed=bool(read))
    volume = _open_volume(config, storage, budgets, num_spares, adopted, resources)
    shards = None
    if read:
        assert storage is not None
        in_use = [each for each in identities if each.path in read]
        shards = ShardFiles(storage, in_use, verify=config.io.verify)
        resources.callback(shards.close)
    host = HostBlocks(arena, counters)
    device = _open_device(config, host, counters, own_device)
    resources.callback(device.close)
    sharing = 1 if sharding is None else sharding.group.node_count
    own_units = units if sharding is None else sharding.partition.units
    update_device = place_updates(config, budgets, own_units, device, host, num_sharing=sharing)
    if not device.shares_host_memory:
        _log.info("updates %s", update_device)
    placement = budgets.placement
    collectives = buckets = unshard = None
    source: WeightProvider = TierWeights()
    store: StateStore
    store = local = LocalStore(
        own_units, placement=placement, host=host, volume=volume, device=device, counters=counters,
        shards=shards if sharding is None else None,
    )  # fmt: skip
    if sharding is not None:
        store = sharded = sharding.store(
            local, host, counters, resources, reduce_buffer_nbytes=budgets.reduce_buffer_nbytes
        )
        collectives, buckets, unshard = sharding.exchange(sharded, device, counters, resources)
        source = sharding.weight_provider(unshard)
    pool = HostPool(host, is_tight=budgets.is_tight)
    weight_cache = WeightCache(
        store,
        pool=pool,
        device=device,
        counters=counters,
        window_nbytes=budgets.window_nbytes,
        device_window_nbytes=budgets.device_window_nbytes,
        source=source,
    )
    passes = Passes(counters.tracer)
    updates = UpdateSettings(
        chunk_nbytes=budgets.chunk_nbytes,
        num_staging_slots=budgets.num_staging_slots,
        reads_ahead=config.schedule.prefetch and not budgets.is_tight,
        on_device=device if update_device.is_on_device else None,
    )
    gradients: GradientSink
    updater: StepRunner
    masters: MasterWeights
    ranks: Ranks
    if sharding is None:
        gradients = GradientStore(store, pool=pool, device=device, counters=counters)
        updater = Updater(store, pool, weight_cache, gradients, counters, updates)
        masters, ranks = Masters(store, pool), OneRank()
    else:
        gradients = reduced = DistributedGradients(
            sharded,
            pool=pool,
            device=device,
            counters=counters,
            reduce_dtype=_DTYPES.get(config.distributed.reduce_dtype),
            passes=passes,
            buckets=buckets,
            sums=SumsMemory(pool, sharding.sums, budgets),
        )
        updater = DistributedUpdater(
            sharded, pool, weight_cache, reduced, counters, updates, unshard
        )
        masters = DistributedMasters(sharded, pool)
        ranks = RankSync(sharded, weight_cache, reduced, collectives)
    activations = ActivationStore(
        config.placement.activations, pool=pool, device=device, volume=volume, counters=counters
    )
    if config.schedule.updates == "at_step":
        pool.add_reclaimer(lambda _: updater.reclaim_idle())
    # Cheapest first: gradients on their way to the drive, weights that would be read again, and the
    # optimizer's ring. Deferred updates need the ring in every forward. To allocate it again would
    # cost more weights than it holds, because they are not adjacent.
    pool.add_reclaimer(lambda _: gradients.reclaim())
    pool.add_reclaimer(lambda _: activations.reclaim())
    pool.add_reclaimer(weight_cache.reclaim)
    pool.add_reclaimer(lambda _: updater.reclaim())
    return _Assembly(
        store=store,
        pool=pool,
        device=device,
        weight_cache=weight_cache,
        gradients=gradients,
        updater=updater,
        masters=masters,
        activations=activations,
        passes=passes,
        counters=counters,
        ranks=ranks,
        update_device=update_device,
        resources=resources,
    )


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
    placed = {*budgets.placement.tiers.values(), *config.placement.activations}
    return "nvme" in placed or budgets.reduce_buffer_spills


def _open_volume(
    config: SwapConfig,
    storage: StorageEngine | None,
    budgets: Budgets,
    num_spares: int,
    adopted: Adopted | None,
    resources: ExitStack,
) -> Volume | None:
    if storage is None or not _uses_volume(config, budgets):
        return None
    paths = [
        VolumePath(
            path=str(tier.path),
            capacity_nbytes=_nvme_nbytes(tier),
            direct=tier.direct,
            weight=None if tier.weight == "auto" else tier.weight,
        )
        for tier in config.tiers.nvme
    ]
    volume = Volume(
        storage,
        paths,
        stripe_nbytes=config.io.stripe,
        verify=config.io.verify,
        num_spares=num_spares,
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


def _open_device(
    config: SwapConfig, host: HostBlocks, counters: Counters, own: OwnDevice | None
) -> DeviceAdapter:
    if own is not None:
        own.open(host, counters)
        return own
    if _kind(config) == "cuda":
        from infinity.tiers.cuda import CudaDevice

        return CudaDevice(host, counters)
    return CpuDevice(host, counters)


def _params(
    weight_cache: WeightCache, anatomy: ModelLayout, units: Sequence[Unit]
) -> list[OffloadedParam]:
    """Returns the parameters in the order of `model.named_parameters()`."""
    by_parameter: dict[int, OffloadedParam] = {}
    for unit, (_, members) in zip(units, anatomy.units, strict=True):
        region = weight_cache.weights[unit.index].region
        by_name = {spec.name: spec for spec in unit.tensors}
        for found in members:
            spec = by_name[found.name]
            facts = spec.facts
            compute = nn.Parameter(
                region.tensor(spec.weight_offset_nbytes, facts.shape, facts.stride, facts.dtype),
                requires_grad=facts.is_trainable,
            )
            handle = Handle.make(None, found.name, compute)  # type: ignore[arg-type]
            for tensor in (handle, compute):
                tensor.__dict__.update(
                    {k: v for k, v in vars(found.parameter).items() if k != "_is_hf_initialized"}
                )
            for hook in (found.parameter._backward_hooks or {}).values():
                compute.register_hook(hook)
            by_parameter[id(found.parameter)] = OffloadedParam(
                found.name, unit, spec, handle, compute, found.registrations, found.parameter
            )
    return [by_parameter[id(parameter)] for parameter in anatomy.root.parameters()]


def _hooked_modules(anatomy: ModelLayout) -> list[HookedModule]:
    needed = anatomy.module_units()
    return [
        HookedModule(found.name, found.module, units, found.is_block)
        for found, units in zip(anatomy.hooked_modules, needed, strict=True)
    ]


# -- Values ----------------------------------------------------------------------------------------


def _fill(engine: Engine, weights: LoadPlan | None, seed: int) -> None:
    """Fills the tiers: first values that are in memory, then values that are read or
    initialised."""
    names = {id(param.original): param.name for param in engine.params}
    wanted = {names[each]: place for each, place in derived_parameters(engine.model).items()}
    kept, without, to_come = values_of_adapters(engine.model), set[str](), set(wanted)
    for param in engine.params:
        original = param.original
        if original is not None and is_to_come(original) and id(original) not in kept:
            to_come.add(param.name)
            if original.is_meta:
                without.add(param.name)
    copies = [(names[id(copy)], names[id(own)]) for copy, own in copied_parameters(engine.model)]
    in_place = {spec.name for unit in engine.store.units if unit.stored for spec in unit.tensors}
    to_come -= in_place
    without -= in_place
    for unit in engine.store.units:
        if unit.stored is None:
            engine.fill(unit)
    engine.install()
    if weights is not None:

        def write(name: str, tensor: torch.Tensor) -> None:
            engine.write_parameter(name, tensor)
            written = {tile for tile, _, _ in engine.tile_rows(name)}
            to_come.difference_update(written)
            without.difference_update(written)

        weights.load(write, engine.tile_rows, _with_tiled(in_place, engine))
    if (without if weights is None else to_come) - wanted.keys():
        initialise(engine, to_come - wanted.keys(), without, seed)
    for copy, own in copies:
        if copy in to_come:
            engine.write_parameter(copy, engine.read_parameter(own))
    derive(engine, {name: place for name, place in wanted.items() if name in to_come})
    engine.flush()


def _with_tiled(names: set[str], engine: Engine) -> set[str]:
    """Returns the names, and those of tiled parameters with all tiles among them."""
    tiled = {
        name
        for name in engine.tiled_params
        if all(tile in names for tile, _, _ in engine.tile_rows(name))
    }
    return names | tiled


def _move_buffers(model: nn.Module, device: DeviceAdapter) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.torch_device)
