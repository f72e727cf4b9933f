"""Which engine stands behind a model, and behind a parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from infinity.errors import InfinityError
from infinity.modules.param import OffloadedParam
from infinity.modules.tiling.split import tiles_of

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

# Weak on both sides: a model keeps its engine by the hooks it carries, nothing else keeps either.
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()


def register(engine: Engine) -> None:
    _engines[engine.model] = weakref.ref(engine)


def forget(engine: Engine) -> None:
    _engines.pop(engine.model, None)


def mark(param: OffloadedParam, engine: Engine) -> None:
    """Both faces of the parameter say whose they are."""
    for tensor in (param.handle, param.compute):
        tensor._offloaded_by = weakref.ref(engine)  # type: ignore[union-attr]


def is_offloaded(model: nn.Module) -> bool:
    """This very module."""
    return model in _engines


def engine_of(model: nn.Module) -> Engine:
    """The engine that `infinity.offload` gave to this model, or to a model around or inside it."""
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
    """Every engine of this process that somebody still has, and that is not closed."""
    found = (reference() for reference in list(_engines.values()))
    return [engine for engine in found if engine is not None]


def owner_of(tensor: Any) -> Engine | None:
    """The engine of a parameter, whichever face of it this is; None if it is not offloaded."""
    found = getattr(tiles_of(tensor)[0], "_offloaded_by", None)
    return None if found is None else found()
