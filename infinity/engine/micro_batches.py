"""Several micro-batches of an offloaded model at once: `infinity.forward_backward`, `beside`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from infinity.distributed.shared_inputs import SharedActivationStore
from infinity.errors import InfinityError
from infinity.modules.accumulate.layer_major import LayerMajorSchedule
from infinity.modules.hooks import HookedModule, ModuleHooks
from infinity.modules.interrupts import uninterrupted
from infinity.modules.uses import UnitUses
from infinity.streaming.activations import InputStore
from infinity.streaming.passes import OUTSIDE_BACKWARD, current_backward

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

T = TypeVar("T")


class MicroBatchLoop:
    """Runs layer-major schedules over the model of one engine. Training thread and its fibers."""

    def __init__(
        self, engine: Engine, uses: UnitUses, hooks: Sequence[tuple[HookedModule, ModuleHooks]]
    ) -> None:
        self._engine = engine
        self._uses = uses
        self._blocks = [(hooked, each) for hooked, each in hooks if hooked.is_block]
        self._inputs: InputStore = engine.activations
        self._schedule: LayerMajorSchedule | None = None  # That is running.

    def share_activations(self, group: Any) -> None:
        """Divides saved layer inputs over the ranks of a model-parallel group from now on."""
        self._inputs = SharedActivationStore(self._engine.activations, group)

    def forward_backward(
        self, forwards: Sequence[Callable[[], torch.Tensor]]
    ) -> list[torch.Tensor]:
        """See `infinity.forward_backward`. Each forward returns the loss of one micro-batch."""
        self._refuse()
        engine = self._engine
        schedule = LayerMajorSchedule(
            engine.model, self._uses, self._blocks, self._inputs, engine.activations,
            engine.device.torch_device,
            tile_micro_batches=engine.config.schedule.tile_micro_batches,
        )  # fmt: skip
        with uninterrupted(), engine.lock:
            engine.reset()
            engine.gradients.begin_accumulating()
        engine.begin_pass("train")
        self._schedule = schedule
        try:
            with engine.passes.layer_major():
                return schedule.run(forwards, self._turn_back)
        finally:
            self._schedule = None
            engine.passes.end_forward()  # If an error has ended the schedule.
            engine.reset()
            self._uses.backward_ended()
            with uninterrupted(), engine.lock:
                engine.gradients.end_accumulating()

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

    def _refuse(self) -> None:
        engine = self._engine
        if engine.is_closed:
            raise InfinityError("the engine of this model is closed; its parameters are gone")
        if engine.passes.is_layer_major or current_backward() != OUTSIDE_BACKWARD:
            raise InfinityError(
                "infinity.forward_backward inside another one, or inside a backward"
            )
        if not torch.is_grad_enabled():
            raise InfinityError(
                "infinity.forward_backward under torch.no_grad(): it runs the backward, too"
            )

    def _turn_back(self) -> None:
        """Runs between the forwards and the backwards of `forward_backward`."""
        self._engine.passes.end_forward()
        self._engine.passes.begin_backward()
