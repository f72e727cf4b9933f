"""Finds the engine of a model and of a parameter."""

from __future__ import annotations

from typing import Any

from torch import nn

from infinity.engine.engine import ENGINES, Engine
from infinity.errors import InfinityError
from infinity.modules.tiling.split import tiles_of


def is_offloaded(model: nn.Module) -> bool:
    """Whether this very module was offloaded."""
    return model in ENGINES


def engine_of(model: nn.Module) -> Engine:
    """Returns the engine of a model that was offloaded, or of an offloaded model around or inside
    it. Raises InfinityError if there is none."""
    for module, found in list(ENGINES.items()):
        is_same = module is model or any(child is module for child in model.modules())
        if is_same or any(child is model for child in module.modules()):
            engine = found()
            if engine is not None:
                return engine
    raise InfinityError(
        f"{type(model).__name__} is not offloaded; call infinity.offload(model, config) first"
    )


def engines() -> list[Engine]:
    """Returns every engine of this process that is alive and not closed."""
    found = (reference() for reference in list(ENGINES.values()))
    return [engine for engine in found if engine is not None]


def owner_of(tensor: Any) -> Engine | None:
    """Returns the engine of a handle or compute parameter, or None for any other tensor."""
    found = getattr(tiles_of(tensor)[0], "_offloaded_by", None)
    return None if found is None else found()
