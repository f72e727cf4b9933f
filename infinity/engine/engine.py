"""The engine of one model: the object behind `infinity.offload`, composed of its parts.

  modules/autograd/param.py         handle and compute parameter of every parameter
  modules/autograd/uses.py          units in use, for hooks
  modules/handles/edits.py          changes of weights other than the optimizer's step
  modules/autograd/grads.py         `.grad`, taken from autograd and shown on demand
  modules/handles/handle_ops.py     operations on handles, and parameters by name, outside modules
  modules/autograd/model_passes.py  the hooks of a pass; calls that pass blocks together

One lock orders the training thread and autograd's device threads.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.config import SwapConfig
from infinity.distributed.group import find_group, path_of_job
from infinity.distributed.shared_inputs import SharedActivationStore
from infinity.distributed.sync import Ranks
from infinity.engine.state_access import StateAccess
from infinity.engine.together import loop_of, run_together
from infinity.errors import InfinityError, UnsupportedError
from infinity.modules.accumulate.layer_major import Passenger, ScheduleParts
from infinity.modules.autograd.grads import ParamGrads
from infinity.modules.autograd.hooks import BackwardCalls, OwnHook, Unscriptable
from infinity.modules.autograd.model_passes import ModelPasses
from infinity.modules.autograd.param import OffloadedParam, ParamTable, increment_versions
from infinity.modules.autograd.threads import OwnProcess
from infinity.modules.autograd.uses import UnitUses
from infinity.modules.handles import patches
from infinity.modules.handles.edits import WeightEdits
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.handle_ops import HandleOps
from infinity.modules.handles.originals import Originals
from infinity.modules.handles.unmanaged_params import UnmanagedParams
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.modules.reading.discover import HookedModule
from infinity.modules.reading.empty_weights import as_built
from infinity.modules.tiling.layers import TiledParam
from infinity.modules.tiling.split import tiles_of
from infinity.observe import Counters, Track
from infinity.ops.rules import Settings
from infinity.simulate.job import most_tokens
from infinity.simulate.update_device import UpdateDevice
from infinity.state.store import StateStore
from infinity.state.units import StateKind, TensorSpec, Unit
from infinity.storage.closing import Closing
from infinity.streaming.gradients.sink import GradientSink
from infinity.streaming.inputs.activations import ActivationStore, WaitingMemory
from infinity.streaming.passes import Passes
from infinity.streaming.updates.masters import MasterWeights
from infinity.streaming.updates.record import StepRecord, StepRunner
from infinity.streaming.weights.cache import WeightCache
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.host import HostPool

_log = logging.getLogger("infinity")

T = TypeVar("T")

# The open engines, for `registry`. Weak on both sides: only a model's hooks keep its engine alive.
ENGINES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


@dataclass(eq=False, repr=False)
class Engine(Closing):
    """The engine of an offloaded model. `infinity.offload` makes it, `engine_of` finds it."""

    model: nn.Module
    config: SwapConfig
    params: list[OffloadedParam]
    hooked_modules: list[HookedModule]
    tiled_params: Mapping[str, TiledParam]
    store: StateStore
    pool: HostPool
    device: DeviceAdapter
    weight_cache: WeightCache
    gradients: GradientSink
    updater: StepRunner
    masters: MasterWeights
    activations: ActivationStore
    waiting: WaitingMemory
    passes: Passes
    outside_blocks: Sequence[int]  # The units that several blocks, or modules outside, use.
    counters: Counters
    ranks: Ranks
    update_device: UpdateDevice  # The device that computes this rank's updates.
    resources: ExitStack  # Closes device, volume, storage engine and arena, in that order.
    # A thread that uses the tiers, and is closed before they are.
    background: Closing | None = field(default=None, init=False)

    def __repr__(self) -> str:
        kind, units = type(self.model).__name__, len(self.store.units)
        return f"<Engine of {kind}: {len(self.params)} parameters, {units} units>"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UnsupportedError(
            "an offloaded model cannot be pickled or copied: its state is on the tiers. Save with "
            "infinity.checkpoint.export_safetensors(model, directory), or read parameters inside "
            "`with infinity.gather(model):`"
        )

    def __post_init__(self) -> None:
        self._tracer = self.counters.tracer
        self._process = OwnProcess()
        self._unmanaged_params = UnmanagedParams(self.model)
        self._lock = threading.RLock()
        self._param_table = ParamTable(self.model, self.params, self.tiled_params)
        self._changes = WeightEdits(
            self.store, self.weight_cache, self.updater, self.masters, self._param_table,
            self._lock, is_sharded=self.ranks.partition is not None,
        )  # fmt: skip
        self._uses = UnitUses(
            self.store.units, self.weight_cache, self.gradients, self.updater, self.passes,
            self._param_table, self._changes, self._lock,
        )  # fmt: skip
        self._backwards = BackwardCalls(self._uses)
        self._grads = ParamGrads(
            self.gradients, self.updater, self.weight_cache, self._tracer, self._param_table,
            self._backwards, self._lock,
        )  # fmt: skip
        self._removable: list[Any] = []
        self._model_passes = ModelPasses(
            self.model, self.hooked_modules, self._uses, self._backwards, self._grads,
            self.gradients, self.weight_cache,
            ScheduleParts(
                inputs=self.activations, results=self.activations, waiting=self.waiting,
                device=self.device.torch_device, outside_blocks=self.outside_blocks,
                tile_micro_batches=self.config.schedule.tile_micro_batches,
            ),
        )  # fmt: skip
        self.handle_ops = HandleOps(
            self, self.pool, self.counters, self._uses, self._changes, self._backwards,
            self._grads, self._model_passes.reset, self.ranks.setting,
        )  # fmt: skip
        # A model that is dropped without close() releases its memory and its swap files, too.
        self.ranks.note_owner(self)
        self._finalizer = weakref.finalize(self, _close_in, os.getpid(), self.resources, self.ranks)
        if not self.device.shares_host_memory:
            self.gradients.norms.measure_beside(self.device.begin_thread)
            self.updater.start_worker(self._lock, self.device.begin_thread, self.resources)
        for param in self.params:
            param.mark(self)

    # -- Attaching to the model ------------------------------------------------------------------

    def install(self) -> None:
        """Replaces parameters with handles and registers hooks on the hooked modules."""
        patches.install()
        patches.observe_memory(self._param_table.storages(), self._changes)
        self._param_table.install()
        self._grads.install(self.params)
        self._removable += self._model_passes.install()
        for module in {self.model, *(hooked.module for hooked in self.hooked_modules)}:
            self._removable.append(Unscriptable(module))
        take_loaded = OwnHook(self.handle_ops.take_loaded)
        owners = {place.module for param in self.params for place in param.registrations}
        self._removable += [m.register_load_state_dict_pre_hook(take_loaded) for m in owners]
        give_state = OwnHook(self.handle_ops.give_state, self._model_passes.is_here)
        self._removable += [m.register_state_dict_post_hook(give_state) for m in owners]
        ENGINES[self.model] = weakref.ref(self)

    def uninstall(self) -> None:
        """Restores the original parameters after a failed set-up."""
        self._leave_model()
        self._param_table.restore()

    def forget_originals(self, originals: Originals) -> None:
        """Drops the model's own parameters. The tiers have their values."""
        for param in self.params:
            param.original = None
        self._first_versions = self._versions()
        originals.follow(self._param_table)
        patches.refuse_swaps(self._param_table.tensors())

    def leave_empty(self) -> bool:
        """Closes the engine and leaves the model as `infinity.init_empty_weights` builds it, to be
        offloaded again from the same files. Returns False, and does nothing, where weights have
        changed since `offload`, are divided over ranks, or run as tiles."""
        if self._versions() != self._first_versions or self.num_ranks > 1 or self.tiled_params:
            return False
        for param in self.params:
            facts, read = param.spec.facts, partial(self.read_parameter, param.name)
            empty = torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device="meta")
            param.original = as_built(empty, param.handle.requires_grad, read)
        self.uninstall()
        self.close()
        return True

    def _versions(self) -> list[tuple[int, int]]:
        return [(param.compute._version, param.changes) for param in self.params]

    def _leave_model(self) -> None:
        for removable in self._removable:
            removable.remove()
        self._removable.clear()
        patches.forget_memory(self._param_table.storages())
        ENGINES.pop(self.model, None)

    # -- Passes ------------------------------------------------------------------------------------

    def sweep(
        self, losses: Sequence[Callable[[], torch.Tensor]], calls: Sequence[Callable[[], Any]] = ()
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Runs calls of the model, block by block. Returns the detached losses, whose gradients are
        added to those before, and the results of `calls`, which run without gradients: see
        `infinity.forward_backward` and `infinity.forward`."""
        graded = [Passenger(call, is_graded=True) for call in losses]
        sweep = loop.sweep if (loop := loop_of(self.model)) else self._model_passes.sweep
        found = sweep([*graded, *(Passenger(call, is_graded=False) for call in calls)])
        return found[: len(graded)], found[len(graded) :]

    def together(self, loops: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """See `infinity.together`."""
        device = self.device.torch_device
        return run_together(self.model, device, loops, self._model_passes.sweep)

    @property
    def sweep_tokens(self) -> int:
        """The tokens whose hidden states a sweep without gradients may keep in the memory of the
        device, where a program does not say."""
        return most_tokens(on_host=self.device.shares_host_memory)

    def beside(self, call: Callable[[], T]) -> Callable[[], T]:
        """See `infinity.beside`."""
        return self._model_passes.beside(call)

    def share_activations(self, group: Any) -> None:
        """Divides saved layer inputs over the ranks of a model-parallel group from now on."""
        ranks = find_group(group, timeout_s=self.config.distributed.timeout_s)
        if ranks is not None:
            self.resources.callback(ranks.links.close)
            self._model_passes.save_inputs_in(SharedActivationStore(self.activations, ranks))

    def alone(self) -> AbstractContextManager[None]:
        """See `ModelPasses.alone`."""
        return self._model_passes.alone()

    def reset(self) -> None:
        """Releases what an interrupted forward or backward has left in use.

        The next forward calls it. Gradients of completed backward passes are kept.
        """
        self._model_passes.reset()

    def shrink(self) -> int | None:
        """See `infinity.shrink`."""
        self.refuse_closed("shrink")
        self.reset()
        with UNINTERRUPTED, self._lock:
            return self.weight_cache.space.shrink()

    # -- Names -------------------------------------------------------------------------------------

    def parameter_names(self) -> list[str]:
        """Returns the names of the parameters in the order of `model.named_parameters()`.

        A tied parameter appears once. A tiled parameter appears as its tiles. Methods that take a
        name also accept the name of a tiled parameter.
        """
        return [param.name for param in self.params]

    def tile_rows(self, name: str) -> list[tuple[str, int, int]]:
        """Returns (name, first row, end) of every tile of a parameter; one entry if it is not
        tiled."""
        return self._param_table.tile_rows(name)

    def handle(self, name: str) -> Handle:
        """Returns the handle of a parameter by its name in the user's model."""
        return self._param_table.handle(name)

    def spec(self, name: str) -> TensorSpec:
        """Returns shape, stride, dtype and offset of an untiled parameter or of a tile."""
        return self._param_table.named(name).spec

    def params_of(self, what: nn.Module | Iterable[torch.Tensor]) -> list[OffloadedParam]:
        """Returns the parameters of a module, or those of given handles or compute parameters."""
        tensors = what.parameters() if isinstance(what, nn.Module) else what
        found = [self._param_table.find(tile) for tensor in tensors for tile in tiles_of(tensor)]
        return [param for param in found if param is not None]

    # -- Reading and writing from outside ----------------------------------------------------------

    def read_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a copy of the gradient summed so far (fp32, on the host), or None."""
        return self.handle_ops.read_gradient(name)

    def read_parameter(self, name: str, *, master: bool = False) -> torch.Tensor:
        """Returns a copy on the host: in the compute dtype, or (`master`) the fp32 master value."""
        return self.handle_ops.read(name, master=master)

    def write_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces the value of a parameter and its master. Any dtype; the shape of the
        parameter."""
        self.handle_ops.write(name, tensor)

    def fill(self, unit: Unit) -> None:
        """As `WeightEdits.fill`."""
        self._changes.fill(unit)

    @contextmanager
    def gather(self, params: Sequence[OffloadedParam], *, modify: bool) -> Iterator[None]:
        """Keeps units of `params` in use and shows gradients as `.grad`: see `infinity.gather`."""
        units = list(dict.fromkeys(param.unit.index for param in params))
        uses = self._uses.using(units)
        with self.ranks.setting(units, uses) if modify else uses:
            if modify:
                self._changes.lend(units)
            with (
                nullcontext() if modify else self._changes.watching(params),
                self._backwards.showing() if self.num_ranks == 1 else nullcontext(),
                self._grads.shown(params if self.num_ranks == 1 else ()),
            ):
                yield
        self.ranks.sync_weights()

    # -- All state ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Waits until all state is on the tier where it rests."""
        with UNINTERRUPTED, self._lock:
            self.updater.settle()  # First: it reads sums of gradients where they are.
            self.gradients.settle()
            self._changes.write_first_values()
            self.weight_cache.finish_writes()

    @contextmanager
    def at_rest(self, what: str, chosen: Collection[int] | None = None) -> Iterator[StateAccess]:
        """Gives access to all state at rest, or to that of the `chosen` units; nothing else moves
        state inside the `with` block.

        `what` names the caller in the error that is raised while parameters are in use. With
        several ranks, all of them make the call, and each gets access to its own state.
        """
        with self._model_passes.alone(at_rest=True), torch.no_grad():
            if self.is_closed:
                raise InfinityError(f"{what}: the engine of this model is closed")
            self.reset()
            self._uses.refuse_in_use(what)
            self.flush()
            self.ranks.forget_outdated()
            try:
                yield StateAccess(
                    self.store,
                    self.pool,
                    self.weight_cache,
                    self.gradients,
                    self.updater.chunk_nbytes,
                    self.ranks.partition,
                    chosen,
                )
            finally:
                for param in self.params:
                    param.changes += 1  # The block may have loaded a checkpoint.

    def placed_nbytes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes at rest by state kind and tier."""
        table: dict[str, dict[str, int]] = {}
        for (index, kind), location in self.store.placed().items():
            tier = type(location).__name__.removesuffix("Location").lower()
            row = table.setdefault(StateKind(kind).kind, {})
            row[tier] = row.get(tier, 0) + self.store.units[index].nbytes(kind)
        return table

    # -- Ranks -------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this process among the ranks that share the state."""
        return self.ranks.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the model; 1 without torch.distributed."""
        return self.ranks.num_ranks

    @property
    def commit_directory(self) -> Path | None:
        """The directory for the commits of this job, the same for all ranks."""
        directory = self.config.commit_directory
        if directory is None or self.ranks.partition is None:
            return directory
        return path_of_job(directory.parent) / directory.name

    # -- The step ----------------------------------------------------------------------------------

    def begin_step(self, *, makes_step: bool = True) -> None:
        """Enters the optimizer's step with all ranks. Afterwards gradients are sums over all
        ranks. `makes_step`: see `RankSync.begin_step`."""
        self.refuse_closed("optimizer.step()")
        with self._model_passes.alone(at_rest=True):
            self.reset()
            self._uses.refuse_in_use("optimizer.step()")  # Parameters in use look like new ones.
            self._unmanaged_params.refuse_untrained(num_ranks=self.num_ranks)
        if self.num_ranks == 1:
            return
        with self._lock, self._tracer.during(Track.PHASES, "all ranks enter the step"):
            self.ranks.begin_step(makes_step=makes_step)

    def refuse_closed(self, what: str) -> None:
        """Raises InfinityError, which names the caller, if the engine is closed or belongs to
        another process."""
        self._process.refuse_others()
        if self.is_closed:
            raise InfinityError(
                f"{what}: the engine of this model is closed and its parameters are gone; offload "
                "a model anew"
            )

    def step(self, settings: Mapping[TensorSpec, Settings]) -> None:
        """Records an optimizer step. Each unit is updated before its next use."""
        phase = self._tracer.during(Track.PHASES, "optimizer step")
        with self._model_passes.alone(at_rest=True), UNINTERRUPTED, phase:
            self.reset()
            self._uses.refuse_in_use("optimizer.step()")
            with self.ranks.making_step():
                self._make_step(settings)

    def _make_step(self, settings: Mapping[TensorSpec, Settings]) -> None:
        self.updater.apply_pending()
        self.gradients.prepare_step()
        record = StepRecord(settings, self.gradients.factors(settings))
        self.passes.beginnings.end_backward()
        if self.config.schedule.updates == "at_step":
            self.updater.apply(record)
        else:
            self.updater.defer(record)
            self.updater.advance()
        increment_versions([param for param in self.params if param.spec in settings])

    def gradient_norms(self, params: Iterable[OffloadedParam]) -> dict[str, torch.Tensor]:
        """Returns the 2-norm of every existing gradient, as fp32 scalars on the host, in order."""
        with UNINTERRUPTED, self._lock, self._tracer.during(Track.PHASES, "gradient norms"):
            self.reset()
            self.updater.apply_pending()  # Updates that no forward has applied since the last step.
            found = [param for param in params if self.gradients.has(param.spec)]
            self._grads.apply_scales(param.unit for param in found)
            self.gradients.expect_norms((param.unit, param.spec) for param in found)
            return {param.name: self.gradients.norm(param.unit, param.spec) for param in found}

    def scale_gradients(self, params: Iterable[OffloadedParam], factor: float) -> None:
        """Multiplies these gradients by an fp32 value. Their norms were asked for last."""
        if factor != 1:
            self._grads.scale(params, factor)

    def zero_gradients(self, params: Iterable[OffloadedParam], *, set_to_none: bool) -> None:
        """Drops the gradients of `params`, or fills them with zeros if not `set_to_none`. Raises
        StorageError if an early update cannot be taken back; the gradients are there then."""
        with UNINTERRUPTED, self._lock:
            params = list(params)
            self.updater.note_dropped({param.unit.index for param in params})
            for param in params:
                if set_to_none:
                    self.gradients.forget(param.spec)
                else:
                    self._grads.zero(param)

    # -- The end -----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called. A closed engine refuses every further use."""
        return self._uses.is_closed

    def close(self) -> None:
        """Waits for transfers in flight and releases the tiers and the swap directory. Idempotent.

        The values of the parameters are gone afterwards; export first what is needed. In a forked
        child the method does nothing. Raises InfinityError in a hook, and inside `gather`.
        """
        if not self._process.is_here:
            return
        self._model_passes.refuse_inside("close()")
        try:
            if self.background is not None:
                self.background.close()
        finally:
            self._close()

    def _close(self) -> None:
        with self._model_passes.alone(), UNINTERRUPTED:
            if self.is_closed:
                return
            self._uses.close()
            self._leave_model()
            for end in (self.updater.abandon, self.gradients.settle):
                try:
                    end()
                except Exception:
                    _log.debug("while closing", exc_info=True)
            try:
                self.weight_cache.close()  # A device that has failed fails here, too.
            finally:
                self._finalizer()


def _close_in(process: int, resources: ExitStack, ranks: Ranks) -> None:
    """Does nothing in a forked child, which does not own the threads and the swap files."""
    if os.getpid() == process:
        ranks.end(resources.close)
