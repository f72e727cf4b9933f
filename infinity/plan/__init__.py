"""Predicts a run without running it: placement, bytes, seconds, and changes that would help.

`model` makes units from shapes, `hardware` describes machines, `predict` combines both on the clock
of `infinity.simulate.step`, `advice` repeats the prediction with one change, `report` prints it.
"""

from infinity.plan.advice import Advice, advise
from infinity.plan.hardware import Hardware, load_hardware
from infinity.plan.model import load_model
from infinity.plan.predict import Forecast, forecast
from infinity.plan.shapes import ModelShape, scaled_gpt
from infinity.simulate.job import Batch

__all__ = [
    "Advice",
    "Batch",
    "Forecast",
    "Hardware",
    "ModelShape",
    "advise",
    "forecast",
    "load_hardware",
    "load_model",
    "scaled_gpt",
]
