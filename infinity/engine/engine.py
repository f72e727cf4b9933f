"""The engine of one model: what training and users ask of it, put together from its parts.

  faces.py              which face every parameter shows
  holds.py              units in use: what hooks call
  changes.py            weights changed otherwise than by a step
  parameter_grads.py    `.grad`, taken away and shown
  handle_operations.py  operations on handles outside their module
  passes.py             what of the model is running
  machinery.py          everything below: tiers, executor, gradients, update

One lock orders the training thread and autograd's device threads.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from infinity.config import SwapConfig
from infinity.engine import functions, registry
from infinity.engine.activations import Activations
from infinity.engine.changes import Changes
from infinity.engine.faces import Faces
from infinity.engine.gradients import in_memory_order
from infinity.engine.handle_operations import HandleOperations
from infinity.engine.handles import Handle
from infinity.engine.holds import Holds
from infinity.engine.hooks import OUTSIDE_BACKWARD, Backwards, Site, SiteHooks, current_backward
from infinity.engine.interrupts import uninterrupted
from infinity.engine.layer_major import Conductor
from infinity.engine.machinery import Machinery
from infinity.engine.parameter_grads import ParameterGrads
from infinity.engine.rank_group import Together
from infinity.engine.shared_activations import SharedActivations
from infinity.engine.slot import Slot
from infinity.engine.state_access import StateAccess
from infinity.engine.tiling import tiles_of
from infinity.engine.update import StepRecord
from infinity.engine.whole import Whole
from infinity.errors import InfinityError, UnsupportedError
from infinity.observe import Lane
from infinity.ranks.rendezvous import path_of_job
from infinity.state.units import Piece, TensorSpec, Unit

_log = logging.getLogger("infinity")


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
        parts = self.parts
        self.counters = parts.counters
        self._tracer = parts.counters.tracer
        self._executor = parts.executor
        self._gradients = parts.gradients
        self._updater = parts.updater
        self._passes = parts.passes
        self._lock = threading.RLock()
        self._faces = Faces(self.model, self.slots)
        self._changes = Changes(parts, self._faces)
        self._holds = Holds(parts, self._faces, self._changes, self._lock)
        self._backwards = Backwards(self._holds)
        self._grads = ParameterGrads(parts, self._faces, self._backwards, self._lock)
        self.handle_operations = HandleOperations(
            self, parts, self._faces, self._holds, self._changes, self._backwards, self._grads
        )
        self._site_hooks = [SiteHooks(site, self._holds, self._backwards) for site in self.sites]
        self._removable: list[Any] = []
        self._layer_inputs: Activations | SharedActivations = parts.activations
        # A model that is dropped without close() gives its memory and its swap files back too.
        self._finalizer = weakref.finalize(self, _close_in, os.getpid(), parts.resources)
        for slot in self.slots:
            slot.handle.owner = self.handle_operations
            registry.mark(slot, self)

    # -- Attaching to the model ------------------------------------------------------------------

    def install(self) -> None:
        """Puts handles in the place of parameters and hooks on sites."""
        functions.install()
        self._faces.install()
        self._holds.begin_use = self._site_begins
        self._grads.install(self.slots)
        for hooks in self._site_hooks:
            self._removable.extend(hooks.install())
        self._removable += [
            self.model.register_forward_pre_hook(self._pass_begins, prepend=True),
            self.model.register_forward_hook(self._pass_ends, always_call=True),
        ]
        owners = {alias.module for slot in self.slots for alias in slot.aliases}
        self._removable += [m.register_load_state_dict_pre_hook(self._take_loaded) for m in owners]
        registry.register(self)

    def uninstall(self) -> None:
        """Puts the original parameters back, for a set-up that failed."""
        self._remove_hooks()
        self._faces.restore()
        registry.forget(self)

    def forget_originals(self) -> None:
        """Weights have their values: lets the memory of the model's own parameters go."""
        for slot in self.slots:
            slot.original = None

    def _remove_hooks(self) -> None:
        for removable in self._removable:
            removable.remove()
        self._removable.clear()

    # -- Passes ------------------------------------------------------------------------------------

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _pass_begins(self, module: nn.Module, args: Any) -> None:
        is_own = current_backward() == OUTSIDE_BACKWARD and not self._passes.is_layer_major
        if is_own and not self.is_closed:
            self._begin_pass("train" if torch.is_grad_enabled() else "eval")

    def _begin_pass(self, kind: str) -> None:
        with uninterrupted(), self._lock:
            self.reset()
            self._executor.begin_pass(kind, is_new=self._passes.beginnings.ask_model(kind))
            self._passes.begin_forward(kind)

    def _site_begins(self, site: Site) -> None:
        """A site is entered: in a loop that calls parts of the model, a pass may begin with it."""
        passes = self._passes
        is_inside = passes.is_in_forward or passes.is_layer_major
        if is_inside or self.is_closed or current_backward() != OUTSIDE_BACKWARD:
            return
        kind = "train" if torch.is_grad_enabled() else "eval"
        with uninterrupted(), self._lock:
            is_new = passes.beginnings.ask_site(kind, site.name)
            if is_new and not any(hooks.is_running for hooks in self._site_hooks):
                self.reset()
            self._executor.begin_pass(kind, is_new=is_new)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _pass_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._passes.is_layer_major:
            self._passes.end_forward()

    def accumulate(self, forwards: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """See `infinity.accumulate`; a forward returns one micro-batch's loss."""
        self._refuse_accumulating()
        blocks = [
            (site, hooks)
            for site, hooks in zip(self.sites, self._site_hooks, strict=True)
            if site.is_block
        ]
        device = self.parts.device.torch_device
        conductor = Conductor(
            self.model, self._holds, blocks, self._layer_inputs, device,
            num_inside=self.config.schedule.tile_strands,
        )  # fmt: skip
        with uninterrupted(), self._lock:
            self.reset()
            self._gradients.begin_accumulating()
        self._begin_pass("train")
        try:
            with self._passes.layer_major():
                return conductor.run(forwards, self._turn_back)
        finally:
            self._passes.end_forward()  # If it was broken off.
            self.reset()
            self._holds.backward_ended()
            with uninterrupted(), self._lock:
                self._gradients.end_accumulating()

    def _refuse_accumulating(self) -> None:
        if self.is_closed:
            raise InfinityError("the engine of this model is closed; its parameters are gone")
        if self._passes.is_layer_major or current_backward() != OUTSIDE_BACKWARD:
            raise InfinityError("infinity.accumulate inside another one, or inside a backward")
        if not torch.is_grad_enabled():
            raise InfinityError(
                "infinity.accumulate under torch.no_grad(): it runs the backward, too"
            )

    def _turn_back(self) -> None:
        """Between the forwards and the backwards of `accumulate`."""
        self._passes.end_forward()
        self._passes.begin_backward()

    def share_activations(self, group: Any) -> None:
        """From now on layer inputs wait in parts, over a model-parallel group."""
        self._layer_inputs = SharedActivations(self.parts.activations, group)

    def reset(self) -> None:
        """Lets go of what a forward or backward left behind when it was broken off.

        Called by itself when the next forward begins. Gradients of backward passes that were
        completed are kept.
        """
        with self._lock:
            if self._backwards.abandon():
                self._gradients.write_out_all()
                self._grads.drop(self.slots)
            for hooks in self._site_hooks:
                hooks.reset()
            self._passes.break_off()

    def resident_units(self) -> list[str]:
        """Names of the units in use at this moment; empty between a backward and the next
        forward."""
        with self._lock:
            self._backwards.abandon()
            return self._executor.held()

    # -- Names -------------------------------------------------------------------------------------

    def parameter_names(self) -> list[str]:
        """Names in the order of `model.named_parameters()`; a tied parameter once. Of a parameter
        that stands as tiles, those of its tiles; what takes a name here takes the whole's too."""
        return [slot.name for slot in self.slots]

    def tile_rows(self, name: str) -> list[tuple[str, int, int]]:
        """(name, first row, end) of every tile of a parameter; itself where it stands whole."""
        whole = self.wholes.get(name)
        if whole is None:
            shape = self.spec(name).facts.shape
            return [(name, 0, shape[0] if shape else 1)]
        names = [handle.name_in_model for handle in whole.handles]
        return list(zip(names, whole.starts, whole.starts[1:], strict=False))

    def handle(self, name: str) -> Handle:
        """What stands for a parameter under the name that it has in the user's model."""
        whole = self.wholes.get(name)
        face = self._faces.named(name).handle if whole is None else whole.face
        assert isinstance(face, Handle)
        return face

    def spec(self, name: str) -> TensorSpec:
        """Shape, stride, dtype and place of a parameter that stands whole, or of a tile."""
        return self._faces.named(name).spec

    def slots_of(self, what: nn.Module | Iterable[torch.Tensor]) -> list[Slot]:
        """The slots of a module's parameters, or of given parameters (either face)."""
        tensors = what.parameters() if isinstance(what, nn.Module) else what
        found = [self._faces.find(tile) for tensor in tensors for tile in tiles_of(tensor)]
        return [slot for slot in found if slot is not None]

    # -- Reading and writing from outside ----------------------------------------------------------

    def read_gradient(self, name: str) -> torch.Tensor | None:
        """A copy of the gradient summed so far: fp32, on the host; None if there is none."""
        if name in self.wholes:
            parts = [self.read_gradient(tile) for tile, _, _ in self.tile_rows(name)]
            there = [part for part in parts if part is not None]
            return torch.cat(there) if len(there) == len(parts) else None
        return self._grads.read(self._faces.named(name))

    def read_parameter(self, name: str, *, master: bool = False) -> torch.Tensor:
        """A copy on the host: the compute dtype, or with `master` the fp32 value it is rounded
        from."""
        if name in self.wholes:
            tiles = self.tile_rows(name)
            return torch.cat([self.read_parameter(tile, master=master) for tile, _, _ in tiles])
        slot = self._faces.named(name)
        spec = slot.spec
        with self._lock:
            with self._holds.holding([slot.unit.index]):
                copy = slot.compute.detach().to("cpu", copy=True)
            if not master or not copy.is_floating_point():
                return copy
            if self.parts.masters.has(slot.unit, spec):
                self._updater.finish_writes()
                narrow = in_memory_order(copy, spec)
                wide = self.parts.masters.read(slot.unit, spec, narrow)
                return wide.as_strided(spec.facts.shape, spec.facts.stride)
            return copy.float()

    def write_parameter(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces a parameter's value, master copy included. Any dtype; the parameter's shape."""
        whole = self.wholes.get(name)
        shape = tuple(self.spec(name).facts.shape if whole is None else whole.face.shape)
        if tuple(tensor.shape) != shape:
            raise InfinityError(f"{name!r} has shape {shape}, got {tuple(tensor.shape)}")
        if whole is not None:
            for tile, start, stop in self.tile_rows(name):
                self.write_parameter(tile, tensor[start:stop])
            return
        slot = self._faces.named(name)
        with uninterrupted(), self._lock, torch.no_grad(), self._setting([slot.unit.index]):
            self.reset()
            if self._executor.is_held(slot.unit.index):
                raise InfinityError(
                    f"write_parameter({name!r}) while {slot.unit.name!r} is in use; leave "
                    "infinity.gather() first"
                )
            self._updater.settle()
            self._changes.write(slot.unit, {slot.spec: tensor})

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

    def fill(self, unit: Unit) -> None:
        """Writes one unit's original parameters, those that have memory, to its tiers."""
        self._changes.fill(unit)

    @contextmanager
    def gather(self, slots: Sequence[Slot], *, modify: bool) -> Iterator[None]:
        """Holds the units of `slots`; gradients appear as `.grad`. See `infinity.gather`."""
        units = list(dict.fromkeys(slot.unit.index for slot in slots))
        shown = slots if self.parts.ranks is None else ()
        with self._setting(units) if modify else nullcontext(), self._holds.holding(units):
            if modify:
                self._changes.lend(units)
            with self._grads.shown(shown):
                yield
        if self.parts.ranks is not None:
            self.parts.ranks.agree()

    def _setting(self, units: Sequence[int]) -> AbstractContextManager[None]:
        """Around a change of units' weights from outside, which all ranks make alike."""
        ranks = self.parts.ranks
        return nullcontext() if ranks is None else ranks.setting(units)

    # -- All state ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Waits until all state is where it rests."""
        with uninterrupted(), self._lock:
            self._gradients.settle()
            self._updater.settle()
            self._executor.finish_writes()

    @contextmanager
    def at_rest(self, what: str) -> Iterator[StateAccess]:
        """All state where it rests, and nobody moves it within. `what` names the caller in the
        error that is raised while parameters are in use. With several ranks this is one rank's part
        of the state, and all ranks do the same.
        """
        parts = self.parts
        with self._lock, torch.no_grad():
            if self.is_closed:
                raise InfinityError(f"{what}: the engine of this model is closed")
            self.reset()
            self._holds.refuse_held(what)
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

    def placed_nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes by kind and tier, as they rest."""
        table: dict[str, dict[str, int]] = {}
        for (index, piece), home in self.parts.store.placed().items():
            tier = type(home).__name__.removesuffix("Home").lower()
            row = table.setdefault(Piece(piece).kind, {})
            row[tier] = row.get(tier, 0) + self.parts.store.units[index].nbytes(piece)
        return table

    # -- Ranks -------------------------------------------------------------------------------------

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

    # -- The step ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """All ranks enter the optimizer's step; from here on gradients are those of all of them."""
        if self.parts.ranks is not None:
            with self._lock, self._tracer.during(Lane.PHASES, "all ranks enter the step"):
                self.reset()
                self._holds.refuse_held("optimizer.step()")
                self.parts.ranks.begin_step()

    def step(self, record: StepRecord) -> None:
        """Decides an optimizer step; each unit is updated before anybody sees it again."""
        with uninterrupted(), self._lock, self._tracer.during(Lane.PHASES, "optimizer step"):
            self.reset()
            self._holds.refuse_held("optimizer.step()")
            changed = [slot for slot in self.slots if slot.spec in record.settings]
            for unit in dict.fromkeys(slot.unit for slot in changed):
                self._gradients.apply_scales(unit)
            self._gradients.settle()
            self._passes.beginnings.end_backward()
            if self.config.schedule.updates == "at_step":
                self._updater.apply(record)
            else:
                self._updater.defer(record)
                self._updater.read_ahead()
            # A graph that saved the old weights must find out, as it would in plain PyTorch.
            torch.autograd.graph.increment_version([slot.compute for slot in changed])

    def gradient_norms(self, slots: Iterable[Slot]) -> dict[str, torch.Tensor]:
        """2-norm of each gradient that is there, fp32 scalars on the host, in the given order."""
        with uninterrupted(), self._lock, self._tracer.during(Lane.PHASES, "gradient norms"):
            self.reset()
            self._updater.settle()  # What no forward has touched since the last step.
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
                    self._grads.forget(slot)
                else:
                    self._grads.zero(slot)

    # -- The end -----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._holds.is_closed

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
            self._holds.close()
            self._remove_hooks()
            try:
                self._gradients.settle()
                self._updater.abandon()
            except Exception:
                _log.debug("while closing", exc_info=True)
            self._executor.close()
            self._finalizer()
            registry.forget(self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def _close_in(process: int, resources: ExitStack) -> None:
    """Not in a forked child: it has no threads of ours, and the swap files are the parent's."""
    if os.getpid() == process:
        resources.close()
