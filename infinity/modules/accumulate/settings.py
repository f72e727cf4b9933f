"""Settings of transformers models that a repeated forward needs off: caches and checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def without_caches_and_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switches off caches of keys and values, which repeated forwards would fill again, and
    gradient checkpointing, whose work the schedule does: it would repeat each block once more."""
    caching = [config for config in _configs_of(model) if config.use_cache]
    checkpointing: list[Any] = [
        module
        for module in model.modules()
        if module.__dict__.get("gradient_checkpointing") is True
    ]
    for config in caching:
        config.use_cache = False
    for module in checkpointing:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
        for module in checkpointing:
            module.gradient_checkpointing = True


def _configs_of(model: nn.Module) -> list[Any]:
    """Returns the configurations of transformers models in `model` that have a cache setting."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = [c for c in configs if isinstance(getattr(c, "use_cache", None), bool)]
    return list({id(config): config for config in found}.values())
