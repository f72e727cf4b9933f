"""The moments that the configured optimizer keeps, and their format."""

from __future__ import annotations

from infinity.config.schema.engine import Precision
from infinity.config.schema.optimizer import Optimizer
from infinity.state.units import MomentFormat, Moments, StateKind

_MOMENTS = {
    "adamw": (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ),
    "adam": (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ),
    "lion": (StateKind.EXP_AVG,),
    "sgd": (StateKind.MOMENTUM_BUFFER,),
}


def moments_of(optimizer: Optimizer, precision: Precision) -> Moments:
    """Returns the moments that a model reserves space for at offload."""
    kinds = _MOMENTS[optimizer.name][: optimizer.num_moments]
    return Moments(kinds, MomentFormat(precision.moments))
