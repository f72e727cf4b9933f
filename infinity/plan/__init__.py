"""Predicts a run without running it: placement, bytes, seconds.

`model` makes units from shapes, `hardware` describes machines, `predict` combines both on the clock
of `infinity.simulate.step`. `infinity.tools.plan` measures a machine, advises and prints.
Names are imported on their first use, so that `infinity plan --list` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.plan.hardware import Hardware, load_hardware
    from infinity.plan.model import load_model
    from infinity.plan.predict import Forecast, forecast
    from infinity.plan.shapes import ModelShape, scaled_gpt
    from infinity.simulate.job import Batch

_MODULES = {
    "Batch": "infinity.simulate.job",
    "Forecast": "infinity.plan.predict",
    "Hardware": "infinity.plan.hardware",
    "ModelShape": "infinity.plan.shapes",
    "forecast": "infinity.plan.predict",
    "load_hardware": "infinity.plan.hardware",
    "load_model": "infinity.plan.model",
    "scaled_gpt": "infinity.plan.shapes",
}

__all__ = [
    "Batch",
    "Forecast",
    "Hardware",
    "ModelShape",
    "forecast",
    "load_hardware",
    "load_model",
    "scaled_gpt",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'infinity.plan' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
