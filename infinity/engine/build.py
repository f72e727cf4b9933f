"""Builds an engine from a model and a configuration; refuses bad input before anything changes.

The steps: `refuse_model` looks at the model, `lay_out` makes units and budgets, `open_tiers` opens
the tiers, `first_values` fills them. This file connects the parts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from infinity.config import SwapConfig
from infinity.config.machine import bind_rank
from infinity.distributed.collective.buckets import GradientBuckets
from infinity.distributed.collective.collectives import Collectives
from infinity.distributed.collective.unshard import DeviceUnshard
from infinity.distributed.group import RankTopology, find_group
from infinity.distributed.setup import (
    ShardingPlan,
    config_of_rank,
    refuse_different_weights,
    remove_directories,
)
from infinity.distributed.shard_updates import can_defer
from infinity.distributed.step import DistributedMasters, DistributedUpdater
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.grad_memory import SumsMemory
from infinity.distributed.sums.over_ranks import SumsOverRanks
from infinity.distributed.sums.reduce import DistributedGradients
from infinity.distributed.sync import OneRank, Ranks, RankSync
from infinity.engine.engine import Engine
from infinity.engine.first_values import fill, move_buffers, values_to_come
from infinity.engine.lay_out import RunPlan, lay_out
from infinity.engine.open_tiers import OpenTiers, open_tiers
from infinity.engine.registry import is_offloaded
from infinity.engine.update_rates import place_updates
from infinity.errors import CapacityError, ConfigError, InfinityError, UnsupportedError
from infinity.modules.autograd.param import OffloadedParam
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.originals import Follower, Originals
from infinity.modules.reading.adapters import (
    derived_buffers,
    refuse_other_base,
    refuse_without_values,
)
from infinity.modules.reading.discover import ModelLayout, UnitRule
from infinity.modules.reading.dtypes import Dtypes
from infinity.modules.reading.empty_weights import Awaited
from infinity.modules.reading.load_plan import LoadPlan, StoredParams
from infinity.modules.tiling.layers import TiledParam
from infinity.modules.tiling.split import Tiling
from infinity.state.budgets import Budgets
from infinity.state.store import LocalStore, RestingState
from infinity.state.units import Unit
from infinity.storage.protocol import StorageEngine
from infinity.storage.volume import Adopted
from infinity.streaming.gradients.blocks import PooledSumBlocks, SumsStay
from infinity.streaming.gradients.sink import GradientSink
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.inputs.activations import ActivationStore, InputMemory, WaitingMemory
from infinity.streaming.passes import Passes
from infinity.streaming.updates.masters import Masters, MasterWeights
from infinity.streaming.updates.record import StepRunner, UpdateSettings
from infinity.streaming.updates.updater import Updater
from infinity.streaming.weights.cache import WeightCache
from infinity.streaming.weights.state import WeightProvider
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.open_device import ChosenDevice, choose_device
from infinity.tiers.spare import Giver

_log = logging.getLogger("infinity")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.inference_mode(False)  # A tensor that is made in it cannot be trained.
def build(
    model: nn.Module,
    config: SwapConfig,
    *,
    weights: LoadPlan | None,
    seed: int,
    units: UnitRule,
    device: DeviceAdapter | None,
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
    ranks, resources = find_group(group, timeout_s=config.distributed.timeout_s), ExitStack()
    with _closing_on_failure(resources, ranks):
        if ranks is not None:
            resources.callback(ranks.links.close)
        refuse_model(model, has_weights=weights is not None)
        originals = Originals(model)
        chosen = choose_device(config.tiers.device, device)
        if ranks is not None:
            config = _settle_rank(config, ranks, chosen)
            resources.callback(remove_directories, config.tiers.nvme)
        tiling, dtypes, stored = _read(model, config, weights)
        try:
            plan = lay_out(model, config, units, chosen, ranks, tiling, dtypes, stored)
            tiers = open_tiers(plan, wrap_storage, adopted, stored.identities, resources)
            engine = _assemble(model, plan, tiling.tiled_params, tiers, resources)
            if model_parallel_group is not None:
                engine.share_activations(model_parallel_group)
        except BaseException:
            tiling.undo()
            raise
    try:
        engine.ranks.open()
        replaced = (
            {param.name for param, _ in values_to_come(engine)} if weights is not None else set()
        )
        refuse_different_weights(engine.ranks, engine.params, replaced, stored.identities)
        handles = {id(param.original): param.handle for param in engine.params}
        tiling.hand_over(lambda parameter: handles[id(parameter)])
        fill(engine, weights, seed)
    except BaseException:
        engine.uninstall()
        engine.close()
        tiling.undo()
        raise
    tiling.forget()
    del plan  # It refers to the parameters, too.
    engine.forget_originals(originals)
    if engine.tiled_params:
        _log.info(
            "%d parameters run as tiles, the first of them %r",
            len(engine.tiled_params),
            next(iter(engine.tiled_params)),
        )
    dtypes.narrow_buffers()
    move_buffers(model, engine.device)
    return engine


def fits(model: nn.Module, config: SwapConfig, weights: LoadPlan | None) -> bool:
    """Whether the budgets of one rank can hold the state of a model. Changes nothing."""
    device = choose_device(config.tiers.device, None)
    tiling, dtypes, stored = _read(model, config, weights)
    try:
        lay_out(model, config, "auto", device, None, tiling, dtypes, stored)
    except CapacityError:
        return False
    finally:
        tiling.undo()
    return True


def _read(
    model: nn.Module, config: SwapConfig, weights: LoadPlan | None
) -> tuple[Tiling, Dtypes, StoredParams]:
    """Returns what `lay_out` asks about the parameters of a model."""
    stored = StoredParams(model, weights if config.placement.reads_in_place else None)
    dtypes = Dtypes(model, config.precision)
    tiling = Tiling(model, lambda p: dtypes.of(p).itemsize, config.schedule.experts)
    return tiling, dtypes, stored


@contextmanager
def _closing_on_failure(resources: ExitStack, ranks: RankTopology | None) -> Iterator[None]:
    """Closes what was made in the block, if that fails. Other ranks learn why; those that refuse
    the same raise their own error."""
    try:
        yield
    except BaseException as error:
        if ranks is not None and isinstance(error, InfinityError):
            ranks.links.refuse(error)
        resources.close()
        raise


def _settle_rank(config: SwapConfig, ranks: RankTopology, device: ChosenDevice) -> SwapConfig:
    """Returns the configuration of this rank. Binds its threads, before memory is touched."""
    config = config_of_rank(config, ranks)
    rank = int(os.environ.get("LOCAL_RANK", ranks.node_rank))
    nodes = bind_rank(rank=rank, num_ranks=ranks.node_count, device_node=device.numa_node())
    if nodes:
        _log.info("rank %d runs on NUMA node %s", ranks.rank, ", ".join(map(str, nodes)))
    return config


# What devices exchange with each other; None for each: hosts do.
_Exchange: TypeAlias = tuple[Collectives | None, GradientBuckets | None, DeviceUnshard | None]


def _assemble(
    model: nn.Module,
    plan: RunPlan,
    tiled_params: Sequence[TiledParam],
    tiers: OpenTiers,
    resources: ExitStack,
) -> Engine:
    sharding, budgets = plan.sharding, plan.budgets
    device, counters = tiers.device, tiers.counters
    update_device = place_updates(plan, device, tiers.host)
    if not device.shares_host_memory:
        _log.info("updates %s", update_device)
    resting = RestingState(
        plan.own_units, budgets.placement, host=tiers.host, volume=tiers.volume, device=device,
        shards=tiers.shards,
    )  # fmt: skip
    local = LocalStore(resting, tiers.host, device, counters)
    source = WeightProvider()
    store: LocalStore | DistributedStore = local
    exchange: _Exchange = (None, None, None)
    if sharding is not None:
        store, exchange = _share(sharding, local, tiers, budgets, resources)
        is_outdated = sharding.partition.shards_parameters
        source = exchange[2] or WeightProvider(is_outdated_by_step=is_outdated)
    inputs = InputMemory(budgets.inputs_nbytes, budgets.working_nbytes - budgets.inputs_nbytes)
    weight_cache = WeightCache(
        store, pool=tiers.host, device=device, counters=counters, inputs=inputs, source=source,
        budgets=budgets,
    )  # fmt: skip
    passes = Passes(counters.tracer)
    updates = UpdateSettings(
        chunk_nbytes=budgets.chunk_nbytes, num_staging_slots=budgets.num_staging_slots,
        reads_ahead=plan.config.schedule.prefetch and not budgets.is_tight,
        on_device=device if update_device.is_on_device else None,
        in_backward=plan.spares.in_backward, is_beside=not device.shares_host_memory,
        rides_along=plan.config.schedule.updates != "at_step" and sharding is None,
    )  # fmt: skip
    gradients, updater, masters, ranks = _step_parts(
        plan, tiers, store, exchange, weight_cache, updates, passes, resources
    )
    activations, waiting = _activation_stores(plan, tiers, inputs, weight_cache)
    return Engine(
        model, plan.config, _params(weight_cache, plan.layout, plan.units),
        plan.layout.hooked_modules, {tiled.name: tiled for tiled in tiled_params},
        store=store, pool=tiers.host, device=device, weight_cache=weight_cache,
        gradients=gradients, updater=updater, masters=masters, ranks=ranks,
        activations=activations, waiting=WaitingMemory(waiting), passes=passes,
        outside_blocks=plan.layout.nesting.units_by_block()[0], counters=counters,
        update_device=update_device, resources=resources,
    )  # fmt: skip


def _activation_stores(
    plan: RunPlan, tiers: OpenTiers, inputs: InputMemory, weight_cache: WeightCache
) -> tuple[ActivationStore, ActivationStore]:
    """Returns the stores of layer inputs, and of what waits while experts run."""

    def store(order: Sequence[str], memory: InputMemory) -> ActivationStore:
        return ActivationStore(
            order, pool=tiers.host, device=tiers.device, volume=tiers.volume,
            counters=tiers.counters, inputs=memory, free_kept=weight_cache.space.free_kept,
        )  # fmt: skip

    placement = plan.config.placement
    return store(placement.activations, inputs), store(placement.experts, InputMemory(0, 0))


def _share(
    plan: ShardingPlan, local: LocalStore, tiers: OpenTiers, budgets: Budgets, resources: ExitStack
) -> tuple[DistributedStore, _Exchange]:
    groups = plan.join_devices(tiers.device, resources)
    store = plan.store(
        local, tiers.host, tiers.counters, resources,
        reduce_buffer_nbytes=budgets.reduce_buffer_nbytes, begin_thread=tiers.device.begin_thread,
    )  # fmt: skip
    return store, plan.exchange(store, tiers.device, groups, tiers.counters, resources)


def _step_parts(
    plan: RunPlan,
    tiers: OpenTiers,
    store: LocalStore | DistributedStore,
    exchange: _Exchange,
    weight_cache: WeightCache,
    updates: UpdateSettings,
    passes: Passes,
    resources: ExitStack,
) -> tuple[GradientSink, StepRunner, MasterWeights, Ranks]:
    """Returns the parts of a step that differ with ranks."""
    pool, device, counters = tiers.host, tiers.device, tiers.counters
    collectives, buckets, unshard = exchange
    resources.callback(store.resting.close)
    takes_bf16 = updates.is_beside and updates.on_device is None
    if isinstance(store, LocalStore):
        gradients = GradientStore(
            store, pool=pool, device=device, counters=counters,
            blocks=PooledSumBlocks(pool, SumsStay.WHILE_FREE),
            takes_bf16=takes_bf16, has_worker=updates.is_beside,
        )  # fmt: skip
        pool.add_giver(Giver.FORGOTTEN_SUMS, lambda _: gradients.reclaim(waits=False))
        pool.add_giver(Giver.SUMS, lambda _: gradients.reclaim())
        resources.callback(gradients.close)
        in_order = weight_cache.by_next_use()
        updater = Updater(store, pool, weight_cache, gradients, counters, updates, in_order)
        return gradients, updater, Masters(store, pool), OneRank()
    assert plan.sharding is not None
    memory = SumsMemory(pool, plan.sharding.sums, plan.budgets)
    local = GradientStore(store, pool=pool, device=device, counters=counters, blocks=memory)
    stay = SumsStay.BESIDE_OTHERS if can_defer(store, updates) else SumsStay.NEVER
    over_ranks = SumsOverRanks(store, pool, device, counters, stay=stay, takes_bf16=takes_bf16)
    # Sums that will be sent wait for all their parts, also when memory is short.
    if not store.partition.shards_gradients:
        pool.add_giver(Giver.SUMS, lambda _: local.reclaim())
    pool.add_giver(Giver.SUMS, lambda _: over_ranks.store.reclaim())
    reduced = DistributedGradients(
        store, local=local, sums=over_ranks, sums_memory=memory, device=device,
        reduce_dtype=_DTYPES.get(plan.config.distributed.reduce_dtype),
        passes=passes, buckets=buckets,
    )  # fmt: skip
    resources.callback(reduced.local.close)
    resources.callback(reduced.owned.close)
    distributed = DistributedUpdater(store, pool, weight_cache, reduced, counters, updates, unshard)
    resources.callback(distributed.abandon)  # Ends the thread that uses the tiers.
    masters = DistributedMasters(store, pool)
    sync = RankSync(store, weight_cache, reduced, collectives)
    return reduced, distributed, masters, sync


def _params(
    weight_cache: WeightCache, layout: ModelLayout, units: Sequence[Unit]
) -> list[OffloadedParam]:
    """Returns the parameters in the order of `model.named_parameters()`."""
    by_parameter: dict[int, OffloadedParam] = {}
    for unit, (_, members) in zip(units, layout.units, strict=True):
        region = weight_cache.weights[unit.index].region
        by_name = {spec.name: spec for spec in unit.tensors}
        for found in members:
            spec = by_name[found.name]
            facts = spec.facts
            compute = nn.Parameter(
                region.tensor(spec.weight_offset_nbytes, facts.shape, facts.stride, facts.dtype),
                requires_grad=facts.is_trainable,
            )
            handle = Handle.make(None, found.name, compute)
            for tensor in (handle, compute):
                tensor.__dict__.update(
                    {k: v for k, v in vars(found.parameter).items() if k != "_is_hf_initialized"}
                )
            # The table itself: a handle of before offload removes its hook from there.
            compute._backward_hooks = found.parameter._backward_hooks
            by_parameter[id(found.parameter)] = OffloadedParam(
                found.name, unit, spec, handle, compute, found.registrations, found.parameter
            )
    return [by_parameter[id(parameter)] for parameter in layout.root.parameters()]


# -- Models that cannot be offloaded ---------------------------------------------------------------


def refuse_model(model: nn.Module, *, has_weights: bool) -> None:
    """Raises ConfigError or UnsupportedError, and changes nothing (INV-10).

    `has_weights`: values of parameters and of persistent buffers come from files.
    """
    if is_offloaded(model):
        raise ConfigError(f"{type(model).__name__} is offloaded already; use it as it is")
    _refuse_compiled(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (Handle, Follower)):
            raise ConfigError(f"{name!r} belongs to an offloaded model already; clone its value")
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
                f"{name!r} has a hook after the accumulation of its gradient, but the gradient "
                "leaves for its tier before that; remove the hook, or use register_hook"
            )
    refuse_without_values(model)
    refuse_other_base(model, has_files=has_weights)
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
                    "keeps buffers real; one that is computed from a weight, as spectral_norm "
                    "does, needs offload(weights=...), or a module that is built outside of it"
                )


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise UnsupportedError(
                f"{name or type(module).__name__!r} was compiled by torch.jit, which keeps its "
                "parameters out of reach; expected the module that torch.jit.script or "
                "torch.jit.trace was given. Compiled functions may take weights as arguments"
            )
