"""The passes of a model: begins and ends forwards, and runs calls of the model block by block.

A hook of the model begins a pass. A training loop that calls parts of the model has no such hook;
there, the first hooked module that runs begins the pass.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.modules.accumulate.layer_major import LayerMajorSchedule, Passenger, ScheduleParts
from infinity.modules.autograd.grads import ParamGrads
from infinity.modules.autograd.hooks import (
    BackwardCalls,
    ModuleHooks,
    OwnHook,
    between_graphs,
    is_in_sweep,
)
from infinity.modules.autograd.threads import Turns
from infinity.modules.autograd.uses import UnitUses
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.modules.reading.discover import HookedModule
from infinity.sizes import format_nbytes
from infinity.streaming.gradients.sink import GradientSink
from infinity.streaming.inputs.activations import InputStore
from infinity.streaming.passes import OUTSIDE_BACKWARD, current_backward
from infinity.streaming.weights.cache import WeightCache

_log = logging.getLogger("infinity")

T = TypeVar("T")


class ModelPasses:
    """Begins and ends the passes of one model. Takes the engine's lock where state changes."""

    def __init__(
        self,
        model: nn.Module,
        hooked_modules: Sequence[HookedModule],
        uses: UnitUses,
        backwards: BackwardCalls,
        grads: ParamGrads,
        gradients: GradientSink,
        weight_cache: WeightCache,
        schedule_parts: ScheduleParts,
    ) -> None:
        self._model = model
        self._hooks = [
            ModuleHooks(hooked, uses, backwards, self._hooked_begins) for hooked in hooked_modules
        ]
        self._passes = uses.passes
        self._uses = uses
        self._backwards = backwards
        self._grads = grads
        self._gradients = gradients
        self._weight_cache = weight_cache
        self._lock = uses.lock
        self._schedule_parts = schedule_parts
        self._is_refusal_logged = False
        self._schedule: LayerMajorSchedule | None = None  # That is running.
        self._turns = Turns(uses.lock)

    # -- Hooks -------------------------------------------------------------------------------------

    def install(self) -> list[Any]:
        """Registers hooks on the hooked modules and on the model. Returns the removable hooks."""
        return [
            *(hook for hooks in self._hooks for hook in hooks.install()),
            self._model.register_forward_pre_hook(OwnHook(self._pass_begins), prepend=True),
            self._model.register_forward_hook(OwnHook(self._pass_ends), always_call=True),
        ]

    @between_graphs
    def _pass_begins(self, module: nn.Module, args: Any) -> None:
        if current_backward() != OUTSIDE_BACKWARD or is_in_sweep.get():
            return
        with self.alone():
            if not self._uses.is_closed:
                self._turns.take()
                self._begin_pass("train" if torch.is_grad_enabled() else "eval")

    def is_here(self) -> bool:
        """Whether this thread uses units, or runs a hooked module or a backward."""
        thread = get_ident()
        return (
            thread in self._uses.users
            or thread in list(self._backwards.armed.values())
            or any(thread in hooks.threads for hooks in self._hooks)
        )

    def alone(self, *, at_rest: bool = False) -> AbstractContextManager[None]:
        """Holds the engine's lock while no other thread runs a pass; waits for its end. `at_rest`:
        while none uses units outside of passes, either. Raises InfinityError in the loss of a
        sweep."""
        # The thread that has the turn waits for the thread of this micro-batch.
        if is_in_sweep.get() and self._passes.is_layer_major and self._turns.is_elsewhere:
            raise InfinityError(
                "a step, a checkpoint or an export inside infinity.forward_backward or "
                "infinity.forward; make it after that call"
            )
        return self._turns.alone(self._others, self._is_read_elsewhere if at_rest else None)

    def _others(self) -> list[int]:
        """Returns the threads of the backwards, but not of that which calls this."""
        running = current_backward()
        return [thread for n, thread in [*self._backwards.armed.items()] if n != running]

    def _is_read_elsewhere(self) -> bool:
        self.reset()
        return not self._is_read_here and bool(self._weight_cache.in_use())

    @property
    def _is_read_here(self) -> bool:
        return get_ident() in self._uses.users or current_backward() != OUTSIDE_BACKWARD

    def refuse_inside(self, what: str) -> None:
        """Raises InfinityError, which names the caller, where this thread runs a pass or reads."""
        if self._is_read_here or (self._turns.is_taken and not self._turns.is_elsewhere):
            raise InfinityError(
                f"{what} inside a forward, a backward or infinity.gather() of the model, which "
                "need its weights to their end; call it afterwards"
            )

    def _begin_pass(self, kind: str) -> None:
        with UNINTERRUPTED, self._lock:
            self.reset()
            self._weight_cache.begin_pass(kind, is_new=self._passes.beginnings.ask_model(kind))
            self._passes.begin_forward(kind)

    def _hooked_begins(self, hooked: HookedModule) -> None:
        """Begins a pass with the first hooked module of a loop that calls parts of the model."""
        passes = self._passes
        is_inside = passes.is_in_forward or passes.is_layer_major
        if is_inside or self._uses.is_closed or current_backward() != OUTSIDE_BACKWARD:
            return
        kind = "train" if torch.is_grad_enabled() else "eval"
        passes.is_graded = passes.is_graded or kind == "train"
        with UNINTERRUPTED, self._lock:
            is_new = passes.beginnings.ask_hooked(kind, hooked.name)
            is_new = is_new or bool(self._backwards.armed)  # Of a backward that has failed.
            if is_new and not any(hooks.threads for hooks in self._hooks):
                self.reset()
            self._weight_cache.begin_pass(kind, is_new=is_new)

    @between_graphs
    def _pass_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._passes.is_layer_major:
            self._passes.end_forward()
            self._turns.end()

    # -- Layer-major -------------------------------------------------------------------------------

    def sweep(self, passengers: Sequence[Passenger]) -> list[Any]:
        """Runs calls of the model, block by block: see `infinity.forward_backward` and
        `infinity.forward`. Those that are graded come first. Returns their detached losses, then
        the results of the others."""
        is_training = any(passenger.is_graded for passenger in passengers)
        if is_in_sweep.get():
            self._refuse_sweep(is_training=is_training)
        with self.alone():
            self._refuse_sweep(is_training=is_training)
            self._turns.take(ModelPasses.sweep.__code__)
        token = is_in_sweep.set(True)
        run = self._accumulate if is_training else self._go_forward
        try:
            with UNINTERRUPTED.but_at_checks():
                return run(passengers)
        finally:
            is_in_sweep.reset(token)
            self._turns.end(ModelPasses.sweep.__code__)

    def _accumulate(self, passengers: Sequence[Passenger]) -> list[Any]:
        try:
            with self._lock:
                self.reset()
                self._gradients.begin_accumulating()
            self._begin_pass("train")
            if sum(passenger.is_graded for passenger in passengers) > 1:
                self._sum_outside_blocks()
            return self._pass_blocks(passengers)
        finally:
            self._passes.end_forward()  # If an error has ended the schedule.
            self.reset()
            self._uses.backward_ended()
            with self._lock:
                self._weight_cache.space.end_device_loans()
                self._gradients.end_accumulating()

    def _go_forward(self, passengers: Sequence[Passenger]) -> list[Any]:
        try:
            self._begin_pass("eval")
            return self._pass_blocks(passengers)
        finally:
            self._passes.end_forward()
            self.reset()  # If an error has ended the schedule.

    def _pass_blocks(self, passengers: Sequence[Passenger]) -> list[Any]:
        blocks = [hooks for hooks in self._hooks if hooks.hooked.is_block]
        self._schedule = LayerMajorSchedule(self._model, self._uses, blocks, self._schedule_parts)
        try:
            with self._passes.layer_major():
                return self._schedule.run(passengers, self._turn_back)
        finally:
            self._schedule = None

    def _sum_outside_blocks(self) -> None:
        """Lets gradients outside of blocks be summed on the device, as far as it has memory beside
        the weights."""
        with UNINTERRUPTED, self._lock:
            refused_nbytes = self._uses.sum_outside_blocks(self._schedule_parts.outside_blocks)
        if refused_nbytes and not self._is_refusal_logged:
            self._is_refusal_logged = True
            _log.info(
                "infinity.forward_backward: gradients outside of blocks leave the device once for "
                "each micro-batch: tiers.device.capacity has no space for sums of %s",
                format_nbytes(refused_nbytes),
            )

    def beside(self, call: Callable[[], T]) -> Callable[[], T]:
        """See `infinity.beside`."""
        if self._schedule is None:
            value = call()
            return lambda: value
        if not self._schedule.is_in_loss:
            raise InfinityError(
                "infinity.beside inside a block of the model; call it in the loss function, before "
                "the call of the model that shares the fetches"
            )
        return self._schedule.beside(call)

    def _refuse_sweep(self, *, is_training: bool) -> None:
        if self._uses.is_closed:
            raise InfinityError("the engine of this model is closed; its parameters are gone")
        if self._passes.is_layer_major or current_backward() != OUTSIDE_BACKWARD:
            name = "forward_backward" if is_training else "forward"
            raise InfinityError(f"infinity.{name} inside another one or a backward; call it later")
        if is_training and not torch.is_grad_enabled():
            raise InfinityError(
                "infinity.forward_backward under torch.no_grad() has no backward; call it outside"
            )

    def _turn_back(self) -> None:
        """Runs between the forwards and the backwards of `forward_backward`."""
        self._passes.end_forward()
        self._passes.begin_backward()

    def save_inputs_in(self, store: InputStore) -> None:
        """Saves layer inputs in this store from now on."""
        self._schedule_parts = dataclasses.replace(self._schedule_parts, inputs=store)

    # -- Interrupted passes ------------------------------------------------------------------------

    def reset(self) -> None:
        """Releases what an interrupted forward or backward has left in use, but for what other
        threads use. Gradients of completed backward passes are kept."""
        with self._lock:
            if self._backwards.abandon():
                self._gradients.write_out_all()
                self._grads.drop()
            for hooks in self._hooks:
                hooks.reset()
            if not self._turns.is_elsewhere:
                self._passes.break_off()
