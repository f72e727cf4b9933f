"""What a run would do, without running it: places, bytes, seconds, and what would help.

`model` makes units from shapes, `hardware` knows machines, `predict` puts both on the clock of
`infinity.simulate.step`, `advice` asks again with one thing changed, `report` says it.
"""

from infinity.plan.advice import Advice, advise
from infinity.plan.hardware import Hardware, load_hardware
from infinity.plan.model import ModelShape, load_model, scaled_gpt
from infinity.plan.predict import Forecast, forecast
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
