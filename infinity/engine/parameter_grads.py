"""The `.grad` of parameters: taken away as soon as autograd has set it, shown again on demand."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from infinity.engine.faces import Faces
from infinity.engine.hooks import Backwards
from infinity.engine.interrupts import uninterrupted
from infinity.engine.machinery import Machinery
from infinity.engine.slot import Slot
from infinity.observe import Lane


class ParameterGrads:
    """Gradients on their way from autograd to where they are summed, and back to who looks at
    them. Any thread."""

    def __init__(
        self, parts: Machinery, faces: Faces, backwards: Backwards, lock: threading.RLock
    ) -> None:
        self._gradients = parts.gradients
        self._updater = parts.updater
        self._executor = parts.executor
        self._tracer = parts.counters.tracer
        self._faces = faces
        self._backwards = backwards
        self._lock = lock
        self._shown: set[Slot] = set()  # Those whose `.grad` is the sum so far.

    def install(self, slots: Iterable[Slot]) -> None:
        """From now on the gradients of these parameters are taken as they are complete."""
        grads = weakref.ref(self)  # A hook on a tensor is out of the garbage collector's sight.

        def take(parameter: torch.Tensor) -> None:
            here = grads()
            if here is not None:
                here._take(parameter)

        for slot in slots:
            if slot.spec.state_offset >= 0:
                slot.compute.register_post_accumulate_grad_hook(take)

    def _take(self, parameter: torch.Tensor) -> None:
        slot = self._faces.find(parameter)
        gradient = parameter.grad
        assert slot is not None and gradient is not None
        if slot in self._shown:
            self._add(slot, gradient, is_sum=True)  # Autograd has added to what was there.
        else:
            # First: what follows may raise, and the next backward must not add.
            parameter.grad = None
            self._add(slot, gradient)

    def take(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A gradient that has come another way than to the compute parameter."""
        with uninterrupted(), self._lock:
            self._bring_up_to_date(slot)  # Nobody has held the unit since the step.
            shown = slot.compute.grad if slot in self._shown else None
            if shown is not None:
                slot.compute.grad = gradient = shown + gradient
            self._add(slot, gradient, is_sum=shown is not None)

    def _add(self, slot: Slot, gradient: torch.Tensor, *, is_sum: bool = False) -> None:
        """`is_sum`: together with all that came before."""
        with (
            uninterrupted(),
            self._lock,
            self._tracer.during(Lane.ENGINE, "take gradient"),
        ):
            self._backwards.ensure_armed()
            if is_sum:
                self._gradients.forget(slot.spec)
            self._gradients.add(slot.unit, slot.spec, gradient)

    def drop(self, slots: Iterable[Slot]) -> None:
        """A backward was broken off while gradients were on their way to the engine."""
        for slot in slots:
            if slot not in self._shown:
                slot.compute.grad = None

    # -- Looking ---------------------------------------------------------------------------------

    def has(self, slot: Slot) -> bool:
        return self._gradients.has(slot.spec)

    def read(self, slot: Slot) -> torch.Tensor | None:
        """A copy of the gradient summed so far: fp32, on the host; None if there is none."""
        with self._lock:
            if not self._gradients.has(slot.spec):
                return None
            self._bring_up_to_date(slot)
            return self._gradients.read(slot.unit, slot.spec)

    @contextmanager
    def shown(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Within, compute parameters that have a gradient show a copy of it."""
        mine: list[Slot] = []
        try:
            for slot in slots:
                gradient = self.read(slot) if slot.compute.grad is None else None
                if gradient is not None:
                    slot.compute.grad = gradient.to(slot.compute.device, slot.compute.dtype)
                    mine.append(slot)
                    self._shown.add(slot)
            yield
        finally:
            self._shown.difference_update(mine)
            for slot in mine:
                slot.compute.grad = None

    # -- Changing --------------------------------------------------------------------------------

    def forget(self, slot: Slot) -> None:
        with self._lock:
            self._gradients.forget(slot.spec)

    def zero(self, slot: Slot) -> None:
        """The gradient, if there is one, becomes zeros."""
        with uninterrupted(), self._lock:
            self._bring_up_to_date(slot)
            self._gradients.zero(slot.unit, slot.spec)

    def _bring_up_to_date(self, slot: Slot) -> None:
        """The gradients of a unit whose update is pending are still to be used."""
        if self._updater.is_pending(slot.unit.index):
            assert not self._executor.is_held(slot.unit.index)
            self._updater.bring_up_to_date(slot.unit.index)
