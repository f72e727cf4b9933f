"""The step that is expected of a unit, from the optimizer as it is now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from infinity.modules.autograd.param import OffloadedParam
from infinity.ops.optimizers import Settings
from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients.sink import GradientSink
from infinity.streaming.updates.record import StepRecord


class StepForecasts:
    """Tells the settings of the next step of a unit, if it comes now and clips nothing."""

    def __init__(self, params: Sequence[OffloadedParam], gradients: GradientSink) -> None:
        self._gradients = gradients
        self._params: defaultdict[int, list[OffloadedParam]] = defaultdict(list)
        for param in params:
            self._params[param.unit.index].append(param)

    def __call__(self, unit: Unit) -> StepRecord | None:
        """Returns the record of the unit's parameters that have a gradient; None without one, or
        if a parameter has no optimizer."""
        settings: dict[TensorSpec, Settings] = {}
        for param in self._params[unit.index]:
            if not self._gradients.has(param.spec):
                continue
            optimizer = None if param.optimizer is None else param.optimizer()
            if optimizer is None:
                return None
            settings[param.spec] = optimizer.next_settings(param)
        return StepRecord(settings, {}) if settings else None
