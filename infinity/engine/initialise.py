"""Models that are never whole in memory: built on meta, initialised tensor by tensor into the
tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.config import SwapConfig
from infinity.engine.engine import Engine
from infinity.errors import ConfigError

# Parameters up to this size keep the values their module's constructor gave them: a scale made by
# torch.ones has no reset_parameters to make it again.
_KEPT_NBYTES = 64 << 10


@contextmanager
def init(config: Any = None) -> Iterator[None]:
    """Within, modules are built without memory for their parameters; buffers are real.

    `config` is checked, so that a bad file is refused before a model is built. Follow with
    `infinity.offload(model, config, weights=...)`, which streams weights in or initialises them.
    """
    SwapConfig.load(config)
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta or param.numel() * param.element_size() <= _KEPT_NBYTES:
            return
        on_meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        on_meta.__dict__.update(param.__dict__)
        module._parameters[name] = on_meta

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def initialise(engine: Engine, missing: set[str], seed: int, *, renew_all: bool) -> None:
    """Gives values to the `missing` parameters, which were built on meta, by their modules' own
    rules.

    With `renew_all` every parameter whose module has a rule is initialised again: the small ones
    that `init` kept got their values from a generator nobody seeded. The same seed gives the same
    values on every placement: operations and order are the model's, only the memory they run in
    differs.
    """
    fresh = {slot.name for slot in engine.slots} if renew_all else missing
    names = {id(face): slot.name for slot in engine.slots for face in (slot.handle, slot.compute)}
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        engine.handle_operations.initialising(),
        _marked(engine, fresh),
    ):
        torch.manual_seed(seed)
        covered: set[int] = set()
        for model in _transformers_models(engine.model):
            for module in model.modules():
                module._is_hf_initialized = False  # A model built without memory says it is done.
            model.initialize_weights()
            covered.update(id(child) for child in model.modules())
        for name, module in engine.model.named_modules():
            own = {names[id(p)] for p in module._parameters.values() if p is not None}
            if id(module) not in covered and own & fresh:
                _reset(name, module, must=bool(own & missing))


def _reset(name: str, module: nn.Module, *, must: bool) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
    elif must:
        raise ConfigError(
            f"{name or type(module).__name__} was built without memory and has no "
            "reset_parameters() to initialise it; give offload(weights=...), add the method, or "
            "build it outside infinity.init()"
        )


def _transformers_models(root: nn.Module) -> list[Any]:
    """The outermost transformers models in `root`."""
    if hasattr(root, "initialize_weights") and hasattr(root, "_init_weights"):
        return [root]
    return [found for child in root.children() for found in _transformers_models(child)]


@contextmanager
def _marked(engine: Engine, names: set[str]) -> Iterator[None]:
    """Within, parameters that have their values carry the mark that transformers' initialisation
    passes over."""
    faces = [(face, slot.name) for slot in engine.slots for face in (slot.handle, slot.compute)]
    for face, name in faces:
        face._is_hf_initialized = name not in names  # type: ignore[union-attr]
    try:
        yield
    finally:
        for face, _ in faces:
            del face._is_hf_initialized  # type: ignore[union-attr]
