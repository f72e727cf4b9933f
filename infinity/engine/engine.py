"""The engine of one model: faces of parameters, holds of units, and what users may ask for.

Every parameter has two faces. While its unit is held the module has the *compute parameter*, a
plain persistent `nn.Parameter` over the unit's region; otherwise it has the *handle*. Both live as
long as the engine, so that autograd, optimizers and hooks may keep them.

One lock orders the training thread and autograd's device threads.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from infinity.config import SwapConfig
from infinity.engine.activations import Activations
from infinity.engine.gradients import Gradients, in_memory_order
from infinity.engine.handles import Handle, find_handles, replace_handles
from infinity.engine.hooks import (
    OUTSIDE_BACKWARD,
    Backwards,
    Site,
    SiteHooks,
    Stay,
    current_backward,
    detach_from_parameters,
    nodes_since,
)
from infinity.engine.interrupts import uninterrupted
from infinity.engine.layer_major import Conductor
from infinity.engine.master import Masters
from infinity.engine.ranked import RankGroup, Together
from infinity.engine.shared_activations import SharedActivations
from infinity.engine.slot import Slot
from infinity.engine.state_access import StateAccess
from infinity.engine.tiling import tiles_of
from infinity.engine.update import StepRecord, Updater
from infinity.engine.whole import Whole
from infinity.errors import InfinityError, ParameterNotResident, UnsupportedError
from infinity.observe import Counters, Lane
from infinity.ranks.rendezvous import path_of_job
from infinity.schedule.executor import Executor
from infinity.state.store import StateStore
from infinity.state.units import Piece, TensorSpec, Unit, weight_of
from infinity.storage.engine import Priority
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.pool import HostPool

_log = logging.getLogger("infinity")

# Weak on both sides: a model keeps its engine by the hooks it carries, nothing else keeps either.
_ENGINES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()

_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _abandon_engines_in_child() -> None:
    """A forked child has no threads of ours, and the swap files are the parent's: it ends without
    closing either."""
    for engine in list(_open_engines):
        engine._finalizer.detach()


os.register_at_fork(after_in_child=_abandon_engines_in_child)

# Units that initialisation keeps attached at once, so that views it takes stay valid a while.
_INITIALISING_UNITS = 2


def engine_of(model: nn.Module) -> Engine:
    """The engine that `infinity.offload` gave to this model, or to a model around or inside it."""
    for module, found in list(_ENGINES.items()):
        is_same = module is model or any(child is module for child in model.modules())
        if is_same or any(child is model for child in module.modules()):
            engine = found()
            if engine is not None:
                return engine
    raise InfinityError(
        f"{type(model).__name__} is not offloaded; call infinity.offload(model, config) first"
    )


def owner_of(tensor: Any) -> Engine | None:
    """The engine of a parameter, whichever face of it this is; None if it is not offloaded."""
    if isinstance(tensor, Handle):
        tensor = tiles_of(tensor)[0]
        return None if tensor.is_gradient else tensor.owner  # type: ignore[no-any-return]
    owner = getattr(tensor, "_offloaded_by", None)
    return None if owner is None else owner()


@dataclass(frozen=True, slots=True)
class Machinery:
    """The parts an engine is made of, already wired to each other."""

    store: StateStore
    pool: HostPool
    device: DeviceAdapter
    executor: Executor
    gradients: Gradients
    updater: Updater
    masters: Masters
    activations: Activations
    counters: Counters
    resources: ExitStack  # Closes device, volume, storage engine and arena, in that order.
    ranks: RankGroup | None = None


class Background(Protocol):
    """Work beside training that uses the tiers."""

    def close(self) -> None:
        """Waits for its end, well or badly; an interrupt of the wait ends it at once."""


@dataclass(eq=False, repr=False)
class Engine:
    """What stands behind an offloaded model. Made by `infinity.offload`, found by `engine_of`."""

    model: nn.Module
    config: SwapConfig
    parts: Machinery
    slots: list[Slot]
    sites: list[Site]
    wholes: Mapping[str, Whole] = field(default_factory=dict)  # Parameters that stand as tiles.
    is_closed: bool = field(default=False, init=False)
    background: Background | None = field(default=None, init=False)  # Ends before the tiers go.

    def __repr__(self) -> str:
        units = len(self.parts.store.units)
        return (
            f"<Engine of {type(self.model).__name__}: {len(self.slots)} parameters, {units} units>"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UnsupportedError(
            "an offloaded model cannot be pickled or copied: its state is on the tiers. Save with "
            "infinity.checkpoint.export_safetensors(model, directory), or read parameters inside "
            "`with infinity.gather(model):`"
        )

    def __post_init__(self) -> None:
        self.counters = self.parts.counters
        self._tracer = self.counters.tracer
        self._executor = self.parts.executor
        self._gradients = self.parts.gradients
        self._lock = threading.RLock()
        self._backwards = Backwards(self)
        self._site_hooks = [SiteHooks(site, self, self._backwards) for site in self.sites]
        self._removable: list[Any] = []
        self._by_face: dict[int, Slot] = {}
        self._by_name = {slot.name: slot for slot in self.slots}
        self._by_unit: dict[int, list[Slot]] = {}
        self._regions: set[int] = set()
        self._dirty: set[int] = set()  # Units changed on the device and not absorbed yet.
        self._lent: set[Slot] = set()  # Those whose gradient `gather` shows.
        self._before: dict[Slot, torch.Tensor] = {}  # Weights as they were lent for changing.
        self._finished: set[int] = set()  # Units the running backward has left.
        self._warned: set[str] = set()
        self._is_in_pass = False  # The model's forward is running: its own code may change weights.
        self._is_layer_major = False  # `accumulate` is running: it says when passes begin and end.
        self._layer_inputs: Activations | SharedActivations = self.parts.activations
        self._initialising: list[int] | None = None  # Units held by initialisation, oldest first.
        self._unagreed: set[int] = set()  # Units that were set and that other ranks do not see yet.
        self._is_filling = True  # Until weights have their first values.
        # A model that is dropped without close() gives its memory and its swap files back too.
        self._finalizer = weakref.finalize(self, self.parts.resources.close)
        _open_engines.add(self)
        for slot in self.slots:
            self._by_unit.setdefault(slot.unit.index, []).append(slot)
            self._by_face[id(slot.handle)] = self._by_face[id(slot.compute)] = slot
            slot.compute._offloaded_by = weakref.ref(self)  # type: ignore[attr-defined]
            self._regions.add(slot.compute.untyped_storage()._cdata)

    # -- Attaching to the model ------------------------------------------------------------------

    def install(self) -> None:
        """Puts handles in the place of parameters and hooks on sites."""
        engine = weakref.ref(self)  # A hook on a tensor is out of the garbage collector's sight.

        def take_gradient(parameter: torch.Tensor) -> None:
            owner = engine()
            if owner is not None:
                owner._take_gradient(parameter)

        for slot in self.slots:
            assert slot.original is not None
            slot.show(slot.handle, slot.original)
            if slot.spec.state_offset >= 0:
                slot.compute.register_post_accumulate_grad_hook(take_gradient)
        for hooks in self._site_hooks:
            self._removable.extend(hooks.install())
        self._removable += [
            self.model.register_forward_pre_hook(self._pass_begins, prepend=True),
            self.model.register_forward_hook(self._pass_ends, always_call=True),
        ]
        owners = {alias.module for slot in self.slots for alias in slot.aliases}
        self._removable += [m.register_load_state_dict_pre_hook(self._take_loaded) for m in owners]
        self._refresh_caches(self.model.modules())
        _ENGINES[self.model] = engine

    def uninstall(self) -> None:
        """Puts the original parameters back, for a set-up that failed."""
        self._remove_hooks()
        for slot in self.slots:
            if slot.original is not None:
                slot.show(slot.original, slot.handle)
        self._refresh_caches(self.model.modules())
        _ENGINES.pop(self.model, None)

    def forget_originals(self) -> None:
        """Weights have their values: lets the memory of the model's own parameters go."""
        self._is_filling = False
        for slot in self.slots:
            slot.original = None

    def _remove_hooks(self) -> None:
        for removable in self._removable:
            removable.remove()
        self._removable.clear()

    def _refresh_caches(self, modules: Iterable[nn.Module]) -> None:
        """nn.RNN keeps its parameters a second time, in a list of its own."""
        for module in modules:
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [
                    getattr(module, name, None) for name in module._flat_weights_names
                ]

    # -- Holding units: what hooks call ------------------------------------------------------------

    def enter(self, units: list[int]) -> None:
        """Makes units usable. All or none: a failure lets go of those already held."""
        done: list[int] = []
        priority = Priority.FORWARD if current_backward() == OUTSIDE_BACKWARD else Priority.BACKWARD
        try:
            with uninterrupted(), self._lock, self._tracer.during(Lane.ENGINE, "enter"):
                self._gradients.take_in()
                if priority is Priority.BACKWARD and not self._is_layer_major:
                    self._write_out_finished(entering=units)
                for unit in units:
                    self._hold(unit, priority)
                    done.append(unit)
                self.parts.updater.read_ahead()
        except BaseException:
            self.leave(done)
            raise
        if self._tracer.is_on and units:
            names = [self.parts.store.units[unit].name for unit in units]
            self._tracer.begin(tuple(units), Lane.SITES, ", ".join(names))

    def _write_out_finished(self, entering: list[int]) -> None:
        """Gradients of units that the backward has left go to where they rest.

        Not when it leaves them: the last gradients arrive right after the unit's last node has run.
        """
        for unit in self._finished - set(entering):
            self._gradients.write_out(self.parts.store.units[unit])
        self._finished.clear()

    def _hold(self, unit: int, priority: Priority) -> None:
        if self.is_closed:
            raise InfinityError("the engine of this model is closed; its parameters are gone")
        if not self._executor.is_held(unit):
            self.parts.updater.bring_up_to_date(unit, is_needed=True)
        if self._executor.hold(unit, priority):
            for slot in self._by_unit[unit]:
                slot.show(slot.compute, slot.handle)
                slot.version = slot.compute._version
            self._refresh_units_caches(unit)

    def leave(self, units: list[int]) -> None:
        """Ends one use of each unit."""
        self._tracer.end(tuple(units))
        with uninterrupted(), self._lock, self._tracer.during(Lane.ENGINE, "leave"):
            for unit in units:
                if self._executor.release(unit):
                    self._let_go(unit)
                    self._executor.write_behind(unit)
            self.parts.updater.read_ahead()

    def _let_go(self, unit: int) -> None:
        for slot in self._by_unit[unit]:
            slot.show(slot.handle, slot.compute)
            if slot.compute._version != slot.version:
                self._dirty.add(unit)  # The module's own code changed it in place.
        self._refresh_units_caches(unit)
        if unit in self._dirty:
            self._absorb(unit)
        if current_backward() != OUTSIDE_BACKWARD:
            self._finished.add(unit)

    def _refresh_units_caches(self, unit: int) -> None:
        owners = {id(a.module): a.module for s in self._by_unit[unit] for a in s.aliases}
        self._refresh_caches(owners.values())

    def is_parameter_memory(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is, or is a view of, a compute parameter."""
        if tensor.layout is not torch.strided or isinstance(tensor, Handle):
            return False
        try:
            return tensor.untyped_storage()._cdata in self._regions
        except (NotImplementedError, RuntimeError):
            return False  # A wrapper subclass without storage is not our memory.

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _pass_begins(self, module: nn.Module, args: Any) -> None:
        if current_backward() != OUTSIDE_BACKWARD or self.is_closed or self._is_layer_major:
            return
        self._begin_pass("train" if torch.is_grad_enabled() else "eval")

    def _begin_pass(self, kind: str) -> None:
        with uninterrupted(), self._lock:
            self.reset()
            self._is_in_pass = True
            self._executor.begin_pass(kind)
            self._tracer.begin("forward", Lane.PHASES, f"forward ({kind})")

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _pass_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_layer_major:
            return
        self._is_in_pass = False
        if current_backward() == OUTSIDE_BACKWARD:
            self._tracer.end("forward")

    def backward_started(self) -> None:
        """A backward has reached the first site."""
        if not self._is_layer_major:
            self._tracer.begin("backward", Lane.PHASES, "backward")

    def backward_ended(self) -> None:
        if self._is_layer_major:
            return  # One of many small ones.
        with self._lock, self._tracer.during(Lane.ENGINE, "end of backward"):
            self._finished.clear()
            self._gradients.write_out_all()
        self._tracer.end("backward")

    def accumulate(self, forwards: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """See `infinity.accumulate`; a forward returns one micro-batch's loss."""
        self._refuse_accumulating()
        blocks = [
            (site, hooks)
            for site, hooks in zip(self.sites, self._site_hooks, strict=True)
            if site.is_block
        ]
        conductor = Conductor(self, blocks, self._layer_inputs, self.parts.device.torch_device)
        self._begin_pass("train")
        self._is_layer_major = self._gradients.is_layer_major = True
        try:
            return conductor.run(forwards, self._turn_back)
        finally:
            self._is_layer_major = self._gradients.is_layer_major = False
            self._tracer.end("forward")
            self.reset()
            self.backward_ended()

    def share_activations(self, group: Any) -> None:
        """From now on layer inputs wait in parts, over a model-parallel group."""
        self._layer_inputs = SharedActivations(self.parts.activations, group)

    def _refuse_accumulating(self) -> None:
        if self.is_closed:
            raise InfinityError("the engine of this model is closed; its parameters are gone")
        if self._is_layer_major or current_backward() != OUTSIDE_BACKWARD:
            raise InfinityError("infinity.accumulate inside another one, or inside a backward")
        if not torch.is_grad_enabled():
            raise InfinityError(
                "infinity.accumulate under torch.no_grad(): it runs the backward, too"
            )

    def _turn_back(self) -> None:
        """Between the forwards and the backwards of `accumulate`."""
        self._is_in_pass = False
        self._tracer.end("forward")
        self._tracer.begin("backward", Lane.PHASES, "backward")

    def begin_block_backward(self, units: list[int]) -> None:
        """Several gradients will come to each parameter of these units."""
        with self._lock:
            self._gradients.sum_on_device(self.parts.store.units[unit] for unit in units)

    def end_of_block(self, units: list[int]) -> None:
        """The gradients of these units are complete: they go to where they rest."""
        with uninterrupted(), self._lock:
            for unit in {*units, *self._finished}:  # Tiles have units of their own.
                self._gradients.write_out(self.parts.store.units[unit])
            self._finished.clear()

    def reset(self) -> None:
        """Lets go of what a forward or backward left behind when it was broken off.

        Called by itself when the next forward begins. Gradients of backward passes that were
        completed are kept.
        """
        with self._lock:
            if self._backwards.abandon():
                self._gradients.write_out_all()
                for slot in self.slots:
                    if slot not in self._lent:
                        slot.compute.grad = None  # It was on its way to the engine.
            for hooks in self._site_hooks:
                hooks.reset()
            self._is_in_pass = False

    def resident_units(self) -> list[str]:
        """Names of the units in use at this moment; empty between a backward and the next
        forward."""
        with self._lock:
            self._backwards.abandon()
            return self._executor.held()

    # -- Gradients ---------------------------------------------------------------------------------

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        slot = self._by_face[id(parameter)]
        gradient = parameter.grad
        assert gradient is not None
        is_lent = slot in self._lent  # By `gather`: autograd has added to what was there.
        if not is_lent:
            # First: what follows may raise, and the next backward must not add.
            parameter.grad = None
        with (
            uninterrupted(),
            self._lock,
            self._tracer.during(Lane.ENGINE, "take gradient"),
        ):
            self._backwards.ensure_armed()
            if is_lent:
                self._gradients.forget(slot.spec)
            self._gradients.add(slot.unit, slot.spec, gradient)

    def gradient_of(self, handle: Handle) -> torch.Tensor | None:
        slot = self._by_face[id(handle)]
        if not self._gradients.has(slot.spec):
            return None
        return Handle.make(self, slot.name, handle, is_gradient=True)

    def forget_gradient(self, handle: Handle) -> None:
        with self._lock:
            self._gradients.forget(self._by_face[id(handle)].spec)

    def zero_gradient(self, gradient: Handle) -> None:
        self.zero_gradients([self._slot(gradient.name_in_model)], set_to_none=False)

    def read_gradient(self, name: str) -> torch.Tensor | None:
        """A copy of the gradient summed so far: fp32, on the host; None if there is none."""
        if name in self.wholes:
            parts = [self.read_gradient(tile) for tile, _, _ in self.tile_rows(name)]
            there = [part for part in parts if part is not None]
            return torch.cat(there) if len(there) == len(parts) else None
        slot = self._slot(name)
        with self._lock:
            if not self._gradients.has(slot.spec):
                return None
            self._bring_up_to_date(slot.unit)
            return self._gradients.read(slot.unit, slot.spec)

    # -- Handles -----------------------------------------------------------------------------------

    def set_trainable(self, handle: Handle, is_trainable: bool) -> None:
        slot = self._by_face[id(handle)]
        if is_trainable and slot.spec.state_offset < 0:
            raise UnsupportedError(
                f"{slot.name!r} was frozen when the model was offloaded and has no optimizer "
                "state; set requires_grad before infinity.offload"
            )
        slot.compute.requires_grad_(is_trainable)
        with torch._C.DisableTorchFunctionSubclass():
            handle.requires_grad_(is_trainable)

    def compute_with(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        changes: Handle | None,
    ) -> Any:
        """An operation on handles outside their module: fetch, compute, let go."""
        handles = find_handles((args, kwargs))
        for handle in handles:
            if isinstance(handle.owner, Whole):
                return handle.owner.compute_with(function, args, kwargs, changes=changes)
        slots = {id(h): self.slot_of(h) for h in handles if not h.is_gradient}
        if changes is not None:
            self._may_change(changes, function)
        units = list(dict.fromkeys(slot.unit.index for slot in slots.values()))
        self._note_fault([slot.name for slot in slots.values()], function)

        def real(handle: Handle) -> torch.Tensor:
            if not handle.is_gradient:
                return slots[id(handle)].compute
            gradient = self.read_gradient(handle.name_in_model)
            if gradient is None:
                raise InfinityError(
                    f"the gradient of {handle.name_in_model!r} is not there any more: it was "
                    "forgotten (zero_grad) after `.grad` was taken. Clone a gradient that is to "
                    "be kept"
                )
            return gradient.to(handle.device)

        first = torch.autograd._get_sequence_nr()
        self.enter(units)
        try:
            answer = function(*replace_handles(args, real), **replace_handles(dict(kwargs), real))
            if changes is not None and self._initialising is None:
                self._dirty.update(units)
                return changes
            if self._initialising is not None:
                return self._keep_initialised(units, answer, slots)
            return self._watch_fault(units, answer, first)
        finally:
            self.leave(units)

    def slot_of(self, face: torch.Tensor) -> Slot:
        """The slot of a parameter, given either of its faces."""
        slot = self._by_face.get(id(face))
        if slot is None or self.is_closed:
            raise ParameterNotResident(
                getattr(face, "name_in_model", "a parameter"),
                "its engine is closed, or the handle is of another model",
            )
        return slot

    def _may_change(self, handle: Handle, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", str(function))
        if handle.is_gradient:
            raise UnsupportedError(
                f"{name} would change a fetched copy of the gradient of {handle.name_in_model!r} "
                "and be lost; to clip, give infinity.AdamW(..., max_grad_norm=...), or call its "
                "clip_grad_norm_"
            )
        if self._initialising is None and not self._is_in_pass:
            raise ParameterNotResident(
                handle.name_in_model,
                f"{name} changes it in place; do that inside "
                "`with infinity.gather(module, modify=True):`, and train with infinity.AdamW",
            )

    def _note_fault(self, names: list[str], function: Callable[..., Any]) -> None:
        if self._initialising is not None:
            return
        self.counters.add("faults", len(names))
        fresh = [name for name in names if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            _log.info(
                "%s used outside the module that owns it, by %s; fetched for this operation",
                ", ".join(fresh),
                getattr(function, "__name__", function),
            )

    def _watch_fault(self, units: list[int], answer: Any, first: int) -> Any:
        """The result keeps no view of memory that goes away, and its backward fetches again."""
        answer = detach_from_parameters(answer, self.is_parameter_memory)
        self._backwards.watch(Stay(units), *nodes_since(first, answer))
        return answer

    def _slot(self, name: str) -> Slot:
        slot = self._by_name.get(name)
        if slot is None:
            raise InfinityError(f"no parameter {name!r}; see engine.parameter_names()")
        return slot

    # -- Reading and writing from outside ----------------------------------------------------------

    def parameter_names(self) -> list[str]:
        """Names in the order of `model.named_parameters()`; a tied parameter once. Of a parameter
        that stands as tiles, those of its tiles; what takes a name here takes the whole's too."""
        return [slot.name for slot in self.slots]

    def tile_rows(self, name: str) -> list[tuple[str, int, int]]:
        """(name, first row, end) of every tile of a parameter; itself where it stands whole."""
        whole = self.wholes.get(name)
        if whole is None:
            shape = self._slot(name).spec.facts.shape
            return [(name, 0, shape[0] if shape else 1)]
        names = [handle.name_in_model for handle in whole.handles]
        return list(zip(names, whole.starts, whole.starts[1:], strict=False))

    def spec(self, name: str) -> TensorSpec:
        """Shape, stride, dtype and place of a parameter that stands whole, or of a tile."""
        return self._slot(name).spec

    def read_parameter(self, name: str, *, master: bool = False) -> torch.Tensor:
        """A copy on the host: the compute dtype, or with `master` the fp32 value it is rounded
        from."""
        if name in self.wholes:
            tiles = self.tile_rows(name)
            return torch.cat([self.read_parameter(tile, master=master) for tile, _, _ in tiles])
        slot = self._slot(name)
        spec = slot.spec
        with self._lock:
            with self._holding([slot.unit.index]):
                copy = slot.compute.detach().to("cpu", copy=True)
            if not master or not copy.is_floating_point():
                return copy
            if self.parts.masters.has(slot.unit, spec):
                self.parts.updater.finish_writes()
                narrow = in_memory_order(copy, spec)
                wide = self.parts.masters.read(slot.unit, spec, narrow)
                return wide.as_strided(spec.facts.shape, spec.facts.stride)
            return copy.float()

    def _take_loaded(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any
    ) -> None:
        """Before `load_state_dict` comes to a module: values go to their tiers, and what it then
        finds to copy is the handle itself."""
        for attribute, face in module._parameters.items():
            value = state_dict.get(prefix + attribute)
            if not isinstance(face, Handle) or not isinstance(value, torch.Tensor):
                continue
            if value is not face and value.shape == face.shape:
                self.write_parameter(face.name_in_model, value)
                state_dict[prefix + attribute] = face

    def write_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces a parameter's value, master copy included. Any dtype; the parameter's shape."""
        if name in self.wholes:
            shape = tuple(self.wholes[name].face.shape)
            if tuple(tensor.shape) != shape:
                raise InfinityError(f"{name!r} has shape {shape}, got {tuple(tensor.shape)}")
            for tile, start, stop in self.tile_rows(name):
                self.write_parameter(tile, tensor[start:stop])
            return
        slot = self._slot(name)
        if tuple(tensor.shape) != slot.spec.facts.shape:
            raise InfinityError(
                f"{name!r} has shape {slot.spec.facts.shape}, got {tuple(tensor.shape)}"
            )
        with uninterrupted(), self._lock, torch.no_grad(), self._setting([slot.unit.index]):
            self.reset()
            if self._executor.is_held(slot.unit.index):
                raise InfinityError(
                    f"write_parameter({name!r}) while {slot.unit.name!r} is in use; leave "
                    "infinity.gather() first"
                )
            self._quiesce()
            self._write(slot.unit, {slot.spec: tensor})

    @contextmanager
    def _setting(self, units: Sequence[int]) -> Iterator[None]:
        """Around a change of units' weights from outside, which all ranks make alike."""
        ranks = self.parts.ranks
        if ranks is None or self._is_filling:
            yield
            return
        ranks.barrier("weights are about to be set")
        yield
        self._unagreed.update(units)
        self._agree()

    def _agree(self) -> None:
        """What was set becomes what all ranks see, but for units that an outer gather holds."""
        if self.parts.ranks is not None and self._unagreed:
            idle = [unit for unit in sorted(self._unagreed) if not self._executor.is_held(unit)]
            self._unagreed.difference_update(idle)
            if idle:
                self.parts.ranks.agree_on_weights(idle)

    def _write(self, unit: Unit, values: Mapping[TensorSpec, torch.Tensor]) -> None:
        """Writes weights (and masters) of one unit; the write to NVMe is left for later."""
        whole = len(values) == len(unit.tensors)
        weights = self._executor.check_out(unit.index, read=not whole)
        for spec, value in values.items():
            flat = in_memory_order(value.detach().cpu(), spec)
            if self.parts.masters.has(unit, spec):
                self.parts.masters.write(unit, spec, weight_of(weights, spec), flat)
            else:
                weight_of(weights, spec).copy_(flat)
        self._executor.check_in(unit.index, dirty_nbytes=unit.weight_nbytes, write_now=False)

    def fill(self, unit: Unit) -> None:
        """Writes one unit's original parameters, those that have memory, to its tiers."""
        values = {
            slot.spec: slot.original.detach()
            for slot in self._by_unit.get(unit.index, ())
            if slot.original is not None and not slot.original.is_meta
        }
        if values:
            with torch.no_grad():
                self._write(unit, values)

    def _absorb(self, unit: int) -> None:
        """Weights that were changed on the device become the unit's state."""
        self._dirty.discard(unit)
        self._executor.absorb(unit)
        facts, masters = self.parts.store.units[unit], self.parts.masters
        with_master = [s for s in self._by_unit[unit] if masters.has(facts, s.spec)]
        if not with_master:
            return
        self.parts.updater.finish_writes()
        weights = self._executor.check_out(unit, read=True)
        for slot in with_master:
            before = self._before.pop(slot, None)
            if before is not None or slot.compute._version != slot.version:
                masters.follow(facts, slot.spec, weight_of(weights, slot.spec), before)
        self._executor.check_in(unit, dirty_nbytes=facts.weight_nbytes, write_now=False)

    def flush(self) -> None:
        """Waits until all state is where it rests."""
        with uninterrupted(), self._lock:
            self._gradients.settle()
            self.parts.updater.settle()
            self._executor.finish_writes()

    @contextmanager
    def at_rest(self, what: str, *, over_ranks: bool = False) -> Iterator[StateAccess]:
        """All state where it rests, and nobody moves it within. `what` names the caller in the
        error that is raised while parameters are in use.

        `over_ranks`: the caller knows that it sees one rank's part of the state, and does the same
        on all ranks.
        """
        parts = self.parts
        with self._lock, torch.no_grad():
            if self.is_closed:
                raise InfinityError(f"{what}: the engine of this model is closed")
            if not over_ranks:
                self.refuse_ranks(what)
            self.reset()
            self._refuse_held(what)
            self.flush()
            if parts.ranks is not None:
                parts.ranks.forget_outdated()
            yield StateAccess(
                parts.store,
                parts.pool,
                parts.executor,
                parts.gradients,
                parts.updater.chunk_nbytes,
                None if parts.ranks is None else parts.ranks.partition,
            )

    def refuse_ranks(self, what: str) -> None:
        """Raises UnsupportedError where state is divided over ranks."""
        if self.parts.ranks is not None:
            raise UnsupportedError(
                f"{what} does not know state that is divided over ranks; "
                "infinity.checkpoint.save does, and what it writes can be exported in other formats"
            )

    @property
    def rank(self) -> int:
        """Of this process among those that state is divided over."""
        return 0 if self.parts.ranks is None else self.parts.ranks.partition.rank

    @property
    def num_ranks(self) -> int:
        return 1 if self.parts.ranks is None else self.parts.ranks.partition.count

    @contextmanager
    def together(self, what: str) -> Iterator[Together]:
        """The block on all ranks: see `RankGroup.together`. With one rank, the block."""
        if self.parts.ranks is not None:
            with self.parts.ranks.together(what) as shared:
                yield shared
        else:
            shared = Together()
            yield shared
            shared.of_all = [shared.mine]

    @property
    def commit_directory(self) -> Path | None:
        """Where steps of this job are committed: one place for all ranks."""
        directory = self.config.commit_directory
        if directory is None or self.parts.ranks is None:
            return directory
        return path_of_job(directory.parent) / directory.name

    def gather_numbers(self, what: str, number: float) -> list[float]:
        """The `number` of every rank, in rank order; all ranks call it. `what` is for messages."""
        ranks = self.parts.ranks
        return [number] if ranks is None else ranks.gather_numbers(what, number)

    def _refuse_held(self, what: str) -> None:
        held = self._executor.held()
        if held:
            raise InfinityError(
                f"{what} while {', '.join(held[:4])} is in use; "
                "leave infinity.gather() and finish the backward first"
            )

    def _quiesce(self) -> None:
        """Moments and masters of the last step are where they rest."""
        self.parts.updater.settle()

    def _bring_up_to_date(self, unit: Unit) -> None:
        """The gradients of a unit whose update is pending are still to be used."""
        if self.parts.updater.is_pending(unit.index):
            assert not self._executor.is_held(unit.index)
            self.parts.updater.bring_up_to_date(unit.index)

    @contextmanager
    def _holding(self, units: list[int]) -> Iterator[None]:
        self.enter(units)
        try:
            yield
        finally:
            self.leave(units)

    @contextmanager
    def gather(self, slots: Sequence[Slot], *, modify: bool) -> Iterator[None]:
        """Holds the units of `slots`; gradients appear as `.grad`. See `infinity.gather`."""
        units = list(dict.fromkeys(slot.unit.index for slot in slots))
        with self._setting(units) if modify else nullcontext():
            yield from self._gather(slots, units, modify=modify)
        self._agree()

    def _gather(self, slots: Sequence[Slot], units: list[int], *, modify: bool) -> Iterator[None]:
        self.enter(units)
        lent: list[Slot] = []
        try:
            if modify:
                self._lend_for_changing(units)
            for slot in slots:
                is_whole = self.parts.ranks is None
                if is_whole and slot.compute.grad is None and self._gradients.has(slot.spec):
                    gradient = self.read_gradient(slot.name)
                    assert gradient is not None
                    slot.compute.grad = gradient.to(slot.compute.device, slot.compute.dtype)
                    lent.append(slot)
                    self._lent.add(slot)
            yield
        finally:
            self._lent.difference_update(lent)
            for slot in lent:
                slot.compute.grad = None
            self.leave(units)

    def _lend_for_changing(self, units: list[int]) -> None:
        self._dirty.update(units)
        for unit in units:
            for slot in self._by_unit[unit]:
                if self.parts.masters.has(slot.unit, slot.spec) and slot not in self._before:
                    copy = slot.compute.detach().to("cpu", copy=True)
                    self._before[slot] = in_memory_order(copy, slot.spec)

    def slots_of(self, what: nn.Module | Iterable[torch.Tensor]) -> list[Slot]:
        """The slots of a module's parameters, or of given parameters (either face)."""
        tensors = what.parameters() if isinstance(what, nn.Module) else what
        found = [self._by_face.get(id(tile)) for tensor in tensors for tile in tiles_of(tensor)]
        return [slot for slot in found if slot is not None]

    # -- Initialisation ----------------------------------------------------------------------------

    @contextmanager
    def initialising(self) -> Iterator[None]:
        """Within, operations on handles may change them in place, and views of them stay valid
        until the next but one unit is touched. What was touched is written to its tiers."""
        assert self._initialising is None
        self._initialising = []
        try:
            yield
        finally:
            kept, self._initialising = self._initialising, None
            for unit in kept:
                self._dirty.add(unit)
                self.leave([unit])

    def _keep_initialised(self, units: list[int], answer: Any, slots: Mapping[int, Slot]) -> Any:
        kept = self._initialising
        assert kept is not None
        for unit in units:
            if unit not in kept:
                self.enter([unit])
                kept.append(unit)
            while len(kept) > max(_INITIALISING_UNITS, len(units)):
                oldest = kept.pop(0)
                self._dirty.add(oldest)
                self.leave([oldest])
        by_compute = {id(slot.compute): slot.handle for slot in slots.values()}
        return by_compute.get(id(answer), answer)

    # -- The step ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """All ranks enter the optimizer's step; from here on gradients are those of all of them."""
        if self.parts.ranks is not None:
            with self._lock, self._tracer.during(Lane.PHASES, "all ranks enter the step"):
                self.reset()
                self._refuse_held("optimizer.step()")
                self.parts.ranks.begin_step()

    def step(self, record: StepRecord) -> None:
        """Decides an optimizer step; each unit is updated before anybody sees it again."""
        with uninterrupted(), self._lock, self._tracer.during(Lane.PHASES, "optimizer step"):
            self.reset()
            self._refuse_held("optimizer.step()")
            for unit in dict.fromkeys(self._units_of(record)):
                self._gradients.apply_scales(unit)
            self._gradients.settle()
            if self.config.schedule.updates == "at_step":
                self.parts.updater.apply(record)
            else:
                self.parts.updater.defer(record)
                self.parts.updater.read_ahead()
            # A graph that saved the old weights must find out, as it would in plain PyTorch.
            changed = [slot.compute for slot in self.slots if slot.spec in record.settings]
            torch.autograd.graph.increment_version(changed)

    def _units_of(self, record: StepRecord) -> Iterator[Unit]:
        return (slot.unit for slot in self.slots if slot.spec in record.settings)

    def gradient_norms(self, slots: Iterable[Slot]) -> dict[str, torch.Tensor]:
        """2-norm of each gradient that is there, fp32 scalars on the host, in the given order."""
        with uninterrupted(), self._lock, self._tracer.during(Lane.PHASES, "gradient norms"):
            self.reset()
            self._quiesce()  # What no forward has touched since the last step.
            return {
                slot.name: self._gradients.norm(slot.unit, slot.spec)
                for slot in slots
                if self._gradients.has(slot.spec)
            }

    def has_gradient(self, slot: Slot) -> bool:
        return self._gradients.has(slot.spec)

    def zero_gradients(self, slots: Iterable[Slot], *, set_to_none: bool) -> None:
        with uninterrupted(), self._lock:
            for slot in slots:
                if set_to_none:
                    self._gradients.forget(slot.spec)
                else:
                    self._bring_up_to_date(slot.unit)
                    self._gradients.zero(slot.unit, slot.spec)

    def placed_nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes by kind and tier, as they rest."""
        table: dict[str, dict[str, int]] = {}
        for (index, piece), home in self.parts.store.placed().items():
            tier = type(home).__name__.removesuffix("Home").lower()
            row = table.setdefault(Piece(piece).kind, {})
            row[tier] = row.get(tier, 0) + self.parts.store.units[index].nbytes(piece)
        return table

    # -- The end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for what is in flight and releases tiers and swap directory. Idempotent.

        The model's parameters are gone afterwards: export first what is to be kept.
        """
        try:
            if self.background is not None:
                self.background.close()
        finally:
            self._close()

    def _close(self) -> None:
        with uninterrupted(), self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            self._remove_hooks()
            try:
                self._gradients.settle()
                self.parts.updater.abandon()
            except Exception:
                _log.debug("while closing", exc_info=True)
            for unit, slots in self._by_unit.items():
                if self._executor.is_held(unit):
                    for slot in slots:
                        slot.show(slot.handle, slot.compute)
            self._executor.close()
            self._finalizer()
            _ENGINES.pop(self.model, None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
