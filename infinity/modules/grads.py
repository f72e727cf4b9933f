"""The `.grad` of parameters: taken away as soon as autograd has set it, shown again on demand."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from infinity.errors import UnsupportedError
from infinity.modules.hooks import BackwardCalls
from infinity.modules.interrupts import uninterrupted
from infinity.modules.param import OffloadedParam
from infinity.modules.param_table import ParamTable
from infinity.modules.process import OwnProcess
from infinity.observe import Tracer, Track
from infinity.streaming.gradients import GradientSink
from infinity.streaming.optimizer_step import StepRunner
from infinity.streaming.parameters import WeightCache


class ParamGrads:
    """Gradients on their way from autograd to where they are summed, and back to who looks at
    them. Any thread."""

    def __init__(
        self,
        gradients: GradientSink,
        updater: StepRunner,
        weight_cache: WeightCache,
        tracer: Tracer,
        param_table: ParamTable,
        backwards: BackwardCalls,
        lock: threading.RLock,
    ) -> None:
        self._gradients = gradients
        self._updater = updater
        self._weight_cache = weight_cache
        self._tracer = tracer
        self._param_table = param_table
        self._backwards = backwards
        self._lock = lock
        self._process = OwnProcess()
        # Those whose `.grad` is the sum so far, and its version while it is.
        self._shown: dict[OffloadedParam, tuple[torch.Tensor, int]] = {}
        self._frozen: list[OffloadedParam] = []  # When the model was offloaded.

    def install(self, params: Iterable[OffloadedParam]) -> None:
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
            raise _frozen(*(param.name for param in frozen if param.compute.requires_grad))

        for param in params:
            if param.spec.state_offset >= 0:
                param.compute.register_post_accumulate_grad_hook(take)
            elif param.compute.is_floating_point():
                self._frozen.append(param)
                param.compute.requires_grad_(True)  # Or it takes no hook.
                param.compute.register_post_accumulate_grad_hook(refuse)
                param.compute.requires_grad_(False)

    def _take(self, parameter: torch.Tensor) -> None:
        param = self._param_table.find(parameter)
        gradient = parameter.grad
        assert param is not None and gradient is not None
        if param in self._shown:
            self._add(param, gradient, is_sum=True)  # Autograd has added to what was there.
        else:
            # First: what follows may raise, and the next backward must not add.
            parameter.grad = None
            self._add(param, gradient)

    def take(self, param: OffloadedParam, gradient: torch.Tensor) -> None:
        """A gradient that has come another way than to the compute parameter."""
        with uninterrupted(), self._lock:
            self._bring_up_to_date(param)  # Nobody has held the unit since the step.
            shown = param.compute.grad if param in self._shown else None
            if shown is not None:
                param.compute.grad = gradient = shown + gradient
            self._add(param, gradient, is_sum=shown is not None)

    def _add(self, param: OffloadedParam, gradient: torch.Tensor, *, is_sum: bool = False) -> None:
        """`is_sum`: together with all that came before."""
        with (
            uninterrupted(),
            self._lock,
            self._tracer.during(Track.ENGINE, "take gradient"),
        ):
            self._backwards.ensure_armed()
            if is_sum:
                self._gradients.forget(param.spec)
            self._gradients.add(param.unit, param.spec, gradient)
            if param in self._shown:
                self._shown[param] = gradient, gradient._version

    def drop(self, params: Iterable[OffloadedParam]) -> None:
        """A backward was broken off while gradients were on their way to the engine."""
        for param in params:
            if param not in self._shown:
                param.compute.grad = None

    # -- Looking ---------------------------------------------------------------------------------

    def has(self, param: OffloadedParam) -> bool:
        return self._gradients.has(param.spec)

    def read(self, param: OffloadedParam) -> torch.Tensor | None:
        """A copy of the gradient summed so far: fp32, on the host; None if there is none."""
        self._process.refuse_others()
        with self._lock:
            if not self._gradients.has(param.spec):
                return None
            self._bring_up_to_date(param)
            return self._gradients.read(param.unit, param.spec)

    def stamp(self, param: OffloadedParam) -> tuple[int, int] | None:
        return self._gradients.stamp(param.spec)

    @contextmanager
    def shown(self, params: Iterable[OffloadedParam]) -> Iterator[None]:
        """Within, compute parameters that have a gradient show a copy of it; what is done to it is
        taken over at the end."""
        mine = [param for param in params if param.compute.grad is None]
        try:
            for param in mine:
                gradient = self.read(param)
                if gradient is not None:
                    shown = gradient.to(param.compute.device, param.compute.dtype)
                    param.compute.grad = shown
                    self._shown[param] = shown, shown._version
            yield
        finally:
            for param in mine:
                self._hide(param)

    def _hide(self, param: OffloadedParam) -> None:
        before = self._shown.pop(param, None)
        now, param.compute.grad = param.compute.grad, None
        if now is None:
            if before is not None:
                self.forget(param)
        elif before is None or now is not before[0] or now._version != before[1]:
            self.put(param, now, is_other=before is not None and now is not before[0])

    # -- Changing --------------------------------------------------------------------------------

    def forget(self, param: OffloadedParam) -> None:
        with self._lock:
            self._gradients.forget(param.spec)

    def put(self, param: OffloadedParam, value: torch.Tensor, *, is_other: bool = False) -> None:
        """`value`, of the parameter's shape, is the sum from now on; see `GradientStore.put`."""
        if param.spec.state_offset < 0:
            raise _frozen(param.name)
        self._process.refuse_others()
        with uninterrupted(), self._lock:
            self._bring_up_to_date(param)
            self._gradients.put(param.unit, param.spec, value, is_other=is_other)

    def zero(self, param: OffloadedParam) -> None:
        """The gradient, if there is one, becomes zeros."""
        with uninterrupted(), self._lock:
            self._bring_up_to_date(param)
            self._gradients.zero(param.unit, param.spec)

    def _bring_up_to_date(self, param: OffloadedParam) -> None:
        """The gradients of a unit whose update is pending are still to be used."""
        if self._updater.is_pending(param.unit.index):
            assert not self._weight_cache.is_in_use(param.unit.index)
            self._updater.bring_up_to_date(param.unit.index)


def _frozen(*names: str) -> UnsupportedError:
    more = f" and {len(names) - 4} others" if len(names) > 4 else ""
    return UnsupportedError(
        f"{', '.join(map(repr, names[:4]))}{more} had no requires_grad when the model was "
        "offloaded, so there is no place for a gradient and no optimizer state; set requires_grad "
        "before infinity.offload, of all adapters that are to be trained"
    )
