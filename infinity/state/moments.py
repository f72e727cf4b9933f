"""Which moments the configured optimizer keeps, and in which format."""

from __future__ import annotations

from infinity.config import SwapConfig
from infinity.state.units import MomentFormat, Moments, Piece

_PIECES = {
    "adamw": (Piece.EXP_AVG, Piece.EXP_AVG_SQ),
    "adam": (Piece.EXP_AVG, Piece.EXP_AVG_SQ),
    "lion": (Piece.EXP_AVG,),
    "sgd": (Piece.MOMENTUM_BUFFER,),
}


def moments_of(config: SwapConfig) -> Moments:
    """The moments that a model is given room for when it is offloaded."""
    pieces = _PIECES[config.optimizer.name][: config.optimizer.num_moments]
    return Moments(pieces, MomentFormat(config.precision.moments))
