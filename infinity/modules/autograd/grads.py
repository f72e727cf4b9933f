"""The `.grad` of parameters: taken as soon as autograd has completed it, and shown on demand."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from infinity.errors import UnsupportedError, listed
from infinity.modules.autograd.hooks import BackwardCalls
from infinity.modules.autograd.param import OffloadedParam, ParamTable
from infinity.modules.autograd.threads import OwnProcess
from infinity.modules.handles.torch_functions import TENSOR
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.observe import Tracer, Track
from infinity.state.units import Unit
from infinity.streaming.gradients.sink import GradientSink
from infinity.streaming.passes import current_backward
from infinity.streaming.updates.record import StepRunner
from infinity.streaming.weights.cache import WeightCache

# The `.grad` of the compute parameter itself, which callers see through `patches.py`.
_own, _set_own = TENSOR.grad.__get__, TENSOR.grad.__set__


class ParamGrads:
    """Moves gradients from autograd to the gradient store, and shows stored gradients to callers.
    Methods may run in any thread."""

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
        self._trained: dict[int, OffloadedParam] = {}  # By the id of the compute parameter.
        self._frozen: list[OffloadedParam] = []  # Frozen at the time of offload.

    def install(self, params: Iterable[OffloadedParam]) -> None:
        """Registers the hooks that take each gradient of these parameters when it is complete."""
        grads = weakref.ref(self)  # The garbage collector does not see a tensor's hooks.

        def take(parameter: torch.Tensor) -> None:
            here = grads()
            if here is not None:
                here._take(parameter)

        def refuse(parameter: torch.Tensor) -> None:
            if _own(parameter) is None:
                return  # As below.
            _set_own(parameter, None)
            here = grads()
            frozen = [] if here is None else here._frozen
            raise _frozen(*(param.name for param in frozen if param.compute.requires_grad))

        for param in params:
            if param.spec.state_offset >= 0:
                self._trained[id(param.compute)] = param
                param.compute.register_post_accumulate_grad_hook(take)
            elif param.compute.is_floating_point():
                self._frozen.append(param)
                param.compute.requires_grad_(True)  # A frozen tensor accepts no hook.
                param.compute.register_post_accumulate_grad_hook(refuse)
                param.compute.requires_grad_(False)

    def _take(self, parameter: torch.Tensor) -> None:
        param, gradient = self._trained[id(parameter)], _own(parameter)
        if gradient is None or not parameter.requires_grad:
            return  # It was frozen after the forward, so autograd has added nothing.
        if param.shown is not None:
            self._add(param, gradient, is_sum=True)  # Autograd has added to the shown sum.
        else:
            # First of all: the code below may raise, and the next backward must not add to it.
            _set_own(parameter, None)
            self._add(param, gradient)

    def take(self, param: OffloadedParam, gradient: torch.Tensor) -> None:
        """Adds a gradient that did not arrive at the compute parameter."""
        with UNINTERRUPTED, self._lock:
            self._bring_up_to_date(param)  # The unit was not used since the step.
            shown = _own(param.compute) if param.shown is not None else None
            if shown is not None:
                gradient = shown + gradient
                _set_own(param.compute, gradient)
            self._add(param, gradient, is_sum=shown is not None)

    def _add(self, param: OffloadedParam, gradient: torch.Tensor, *, is_sum: bool = False) -> None:
        """`is_sum`: the gradient includes everything that was added before."""
        with UNINTERRUPTED, self._lock:
            begun_ns = time.monotonic_ns()
            if current_backward() not in self._backwards.armed:
                self._backwards.ensure_armed()
            if self._weight_cache.weights[param.unit.index].awaits_update:
                # No use of the unit came before: a graph over weights that were gathered.
                self._bring_up_to_date(param)
            if is_sum:
                self._gradients.forget(param.spec)
            is_narrow = param.unit.index in self._gradients.narrow_units
            if is_narrow and self._gradients.has(param.spec):  # The unit's sums become wide.
                self._updater.withdraw(param.unit.index)
            self._gradients.add(param.unit, param.spec, gradient)
            if self._updater.follows_gradients:
                self._updater.note_gradient(param.unit.index)
            if param.shown is not None:
                param.shown = gradient, gradient._version
            if self._tracer.is_on:
                self._tracer.span(Track.ENGINE, "take gradient", begun_ns, time.monotonic_ns())

    def drop(self) -> None:
        """Drops incomplete gradients of a backward that was interrupted."""
        for param in self._param_table.params:
            if param.shown is None:
                _set_own(param.compute, None)

    # -- Looking ---------------------------------------------------------------------------------

    def has(self, param: OffloadedParam) -> bool:
        """Whether the parameter has a gradient."""
        return self._gradients.has(param.spec)

    def read(self, param: OffloadedParam) -> torch.Tensor | None:
        """Returns a copy of the gradient summed so far (fp32, on the host), or None."""
        self._process.refuse_others()
        with self._lock:
            if not self._gradients.has(param.spec):
                return None
            self._bring_up_to_date(param)
            self.apply_scales([param.unit])
            return self._gradients.read(param.unit, param.spec)

    def stamp(self, param: OffloadedParam) -> tuple[int, int] | None:
        """See `GradientSink.stamp`."""
        return self._gradients.stamp(param.spec)

    @contextmanager
    def shown(self, params: Iterable[OffloadedParam]) -> Iterator[None]:
        """Shows copies of the gradients on the compute parameters for the time of a `with` block. A
        change of a copy becomes the gradient at the end."""
        own = [param for param in params if _own(param.compute) is None]
        try:
            for param in own:
                with torch.inference_mode(False):  # A copy that is made in it has no version.
                    gradient = self.read(param)
                    shown = None if gradient is None else gradient.to(param.compute)
                if shown is not None:
                    _set_own(param.compute, shown)
                    param.shown = shown, shown._version
            yield
        finally:
            for param in own:
                self._hide(param)

    def _hide(self, param: OffloadedParam) -> None:
        before, param.shown = param.shown, None
        now = _own(param.compute)
        _set_own(param.compute, None)
        if now is None:
            if before is not None:
                self.forget(param)
        elif before is None or now is not before[0] or now._version != before[1]:
            self.put(param, now, is_other=before is not None and now is not before[0])

    # -- Changing --------------------------------------------------------------------------------

    def forget(self, param: OffloadedParam) -> None:
        """Drops the gradient."""
        with self._lock:
            self._gradients.forget(param.spec)

    def scale(self, params: Iterable[OffloadedParam], factor: float) -> None:
        """Multiplies gradients by an fp32 value, as `mul_` does. The next reader of a gradient
        applies the factor; there may be no pending updates."""
        with UNINTERRUPTED, self._lock:
            for param in params:
                if self._gradients.factors([param.spec]):  # Both products are rounded, as in torch.
                    self.apply_scales([param.unit])
                self._gradients.note_scaled(param.spec, factor)

    def apply_scales(self, units: Iterable[Unit]) -> None:
        """Applies the factors that gradients of these units wait for. An early update with these
        gradients, which the step would not keep, is undone first."""
        for unit in filter(self._gradients.is_scaled, dict.fromkeys(units)):
            with UNINTERRUPTED, self._lock:
                self._updater.withdraw(unit.index)
                self._gradients.apply_scales(unit)

    def put(self, param: OffloadedParam, value: torch.Tensor, *, is_other: bool = False) -> None:
        """Makes `value`, in the parameter's shape, the sum; see `GradientStore.put`."""
        if param.spec.state_offset < 0:
            raise _frozen(param.name)
        self._process.refuse_others()
        with UNINTERRUPTED, self._lock:
            self._bring_up_to_date(param)
            self.apply_scales([param.unit])
            self._gradients.put(param.unit, param.spec, value, is_other=is_other)

    def zero(self, param: OffloadedParam) -> None:
        """Sets the gradient to zeros, if there is one."""
        with UNINTERRUPTED, self._lock:
            self._bring_up_to_date(param)
            self.apply_scales([param.unit])
            self._gradients.zero(param.unit, param.spec)
            optimizer = param.optimizer() if param.optimizer is not None else None
            if optimizer is not None:
                optimizer.note_zeroed(param.spec)

    def _bring_up_to_date(self, param: OffloadedParam) -> None:
        """Applies a pending update of the unit first, because it still needs the gradients."""
        if self._updater.is_pending(param.unit.index):
            assert not self._weight_cache.is_in_use(param.unit.index)
            self._updater.bring_up_to_date(param.unit.index)


def _frozen(*names: str) -> UnsupportedError:
    return UnsupportedError(
        f"{listed(names)} had no requires_grad when the model was offloaded, so there is no space "
        "for a gradient and no optimizer state; set requires_grad before infinity.offload, also on "
        "adapters that are to be trained"
    )
