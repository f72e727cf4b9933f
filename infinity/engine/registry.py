"""Finds the engine of a model and of a parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from infinity.errors import InfinityError
from infinity.modules.param import OffloadedParam
from infinity.modules.tiling.split import tiles_of

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

# Weak references on both sides: only the hooks of a model keep its engine alive.
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def register(engine: Engine) -> None:
    """Makes the engine of a model findable; the table does not keep the engine alive."""
    _engines[engine.model] = weakref.ref(engine)


def forget(engine: Engine) -> None:
    """Removes the engine of a model, if it is registered."""
    _engines.pop(engine.model, None)


def mark(param: OffloadedParam, engine: Engine) -> None:
    """Marks the handle and the compute parameter of a parameter with their engine."""
    for tensor in (param.handle, param.compute):
        tensor._offloaded_by = weakref.ref(engine)  # type: ignore[union-attr]


def is_offloaded(model: nn.Module) -> bool:
    """Whether this very module was offloaded."""
    return model in _engines


def engine_of(model: nn.Module) -> Engine:
    """Returns the engine of a model that was offloaded, or of an offloaded model around or inside
    it. Raises InfinityError if there is none."""
    for module, found in list(_engines.items()):
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
    found = (reference() for reference in list(_engines.values()))
    return [engine for engine in found if engine is not None]


def owner_of(tensor: Any) -> Engine | None:
    """Returns the engine of a handle or compute parameter, or None for any other tensor."""
    found = getattr(tiles_of(tensor)[0], "_offloaded_by", None)
    return None if found is None else found()
