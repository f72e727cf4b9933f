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
from infinity.engine.process import OwnProcess
from infinity.engine.slot import Slot
from infinity.errors import UnsupportedError
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
        self._process = OwnProcess()
        # Those whose `.grad` is the sum so far, and its version while it is.
        self._shown: dict[Slot, tuple[torch.Tensor, int]] = {}
        self._frozen: list[Slot] = []  # When the model was offloaded.

    def install(self, slots: Iterable[Slot]) -> None:
        """From now on the gradients of these parameters are taken as they are complete."""
        grads = weakref.ref(self)  # A hook on a tensor is out of the garbage collector's sight.

        def take(parameter: torch.Tensor) -> None:
            here = grads()
            if here is not None:
                here._take(parameter)

        def refuse(parameter: torch.Tensor) -> None:
            parameter.grad = None
            here = grads()
            frozen = [] if here is None else here._frozen
            raise _frozen(*(slot.name for slot in frozen if slot.compute.requires_grad))

        for slot in slots:
            if slot.spec.state_offset >= 0:
                slot.compute.register_post_accumulate_grad_hook(take)
            elif slot.compute.is_floating_point():
                self._frozen.append(slot)
                slot.compute.requires_grad_(True)  # Or it takes no hook.
                slot.compute.register_post_accumulate_grad_hook(refuse)
                slot.compute.requires_grad_(False)

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
            if slot in self._shown:
                self._shown[slot] = gradient, gradient._version

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
        self._process.refuse_others()
        with self._lock:
            if not self._gradients.has(slot.spec):
                return None
            self._bring_up_to_date(slot)
            return self._gradients.read(slot.unit, slot.spec)

    def stamp(self, slot: Slot) -> tuple[int, int] | None:
        return self._gradients.stamp(slot.spec)

    @contextmanager
    def shown(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Within, compute parameters that have a gradient show a copy of it; what is done to it is
        taken over at the end."""
        mine = [slot for slot in slots if slot.compute.grad is None]
        try:
            for slot in mine:
                gradient = self.read(slot)
                if gradient is not None:
                    shown = gradient.to(slot.compute.device, slot.compute.dtype)
                    slot.compute.grad = shown
                    self._shown[slot] = shown, shown._version
            yield
        finally:
            for slot in mine:
                self._hide(slot)

    def _hide(self, slot: Slot) -> None:
        before = self._shown.pop(slot, None)
        now, slot.compute.grad = slot.compute.grad, None
        if now is None:
            if before is not None:
                self.forget(slot)
        elif before is None or now is not before[0] or now._version != before[1]:
            self.put(slot, now, is_other=before is not None and now is not before[0])

    # -- Changing --------------------------------------------------------------------------------

    def forget(self, slot: Slot) -> None:
        with self._lock:
            self._gradients.forget(slot.spec)

    def put(self, slot: Slot, value: torch.Tensor, *, is_other: bool = False) -> None:
        """`value`, of the parameter's shape, is the sum from now on; see `Gradients.put`."""
        if slot.spec.state_offset < 0:
            raise _frozen(slot.name)
        self._process.refuse_others()
        with uninterrupted(), self._lock:
            self._bring_up_to_date(slot)
            self._gradients.put(slot.unit, slot.spec, value, is_other=is_other)

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


def _frozen(*names: str) -> UnsupportedError:
    more = f" and {len(names) - 4} others" if len(names) > 4 else ""
    return UnsupportedError(
        f"{', '.join(map(repr, names[:4]))}{more} had no requires_grad when the model was "
        "offloaded, so there is no place for a gradient and no optimizer state; set requires_grad "
        "before infinity.offload, of all adapters that are to be trained"
    )
