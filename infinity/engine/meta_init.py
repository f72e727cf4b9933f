"""Models that are never complete in memory: built on meta and initialised tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.config import SwapConfig
from infinity.engine.adapters import adapter_modules
from infinity.engine.engine import Engine
from infinity.errors import ConfigError, listed
from infinity.modules.awaited import Awaited, Provisional, building

# Parameters up to this size keep the values of their module's constructor: for a scale made by
# torch.ones no reset_parameters exists that could make it again.
_KEPT_NBYTES = 64 << 10


@contextmanager
def init_empty_weights(config: Any = None) -> Iterator[None]:
    """Builds modules without memory for their parameters inside a `with` block; buffers have
    values.

    `config` is checked, so that a bad file is refused before a model is built. Call
    `infinity.offload(model, config, weights=...)` afterwards, which reads or initialises the
    weights. Attach and load adapters between the two: adapters have memory, and the values that
    PEFT gives them.
    """
    SwapConfig.load(config)
    kept: list[Provisional] = []
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if type(param) is not nn.Parameter or param.is_meta:
            return
        if param.numel() * param.element_size() <= _KEPT_NBYTES:
            param.__class__ = Provisional
            kept.append(param)  # type: ignore[arg-type]
        else:
            module._parameters[name] = Awaited.make(param)  # type: ignore[assignment]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        with building():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        for parameter in kept:
            if isinstance(parameter, Provisional):
                parameter.built_version = parameter._version


def initialise(engine: Engine, missing: set[str], without: set[str], seed: int) -> None:
    """Initialises the `missing` parameters by their modules' own rules. The parameters `without`
    any value must have a rule.

    Rules run on modules that `init_empty_weights` has built, not on modules attached later, which
    have values. The same seed gives the same values for every placement: operations and their order
    are the model's, only their memory differs.
    """
    names = {
        id(tensor): param.name
        for param in engine.params
        for tensor in (param.handle, param.compute)
    }
    adapters = {id(module) for module in adapter_modules(engine.model)}
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        engine.handle_ops.initialising(),
        _marked(engine, missing),
    ):
        torch.manual_seed(seed)
        covered: set[int] = set()
        for model in _transformers_models(engine.model):
            for module in model.modules():
                # A model built without memory claims to be initialised; adapters are.
                module._is_hf_initialized = id(module) in adapters
            model.initialize_weights()
            covered.update(id(child) for child in model.modules())
        for name, module in engine.model.named_modules():
            own = {names[id(p)] for p in module._parameters.values() if p is not None}
            if id(module) not in covered and own & missing:
                _reset(name, module, kept=own - missing, needs=own & without)


def _reset(name: str, module: nn.Module, *, kept: set[str], needs: set[str]) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None and not kept:
        reset()
    elif needs and kept:
        raise ConfigError(
            f"{listed(sorted(needs))} have no value, and reset_parameters() of "
            f"{type(module).__name__} would also change {listed(sorted(kept))}; give "
            "offload(weights=...) all of them or none"
        )
    elif needs:
        raise ConfigError(
            f"{name or type(module).__name__} was built without memory and has no "
            "reset_parameters() to initialise it; give offload(weights=...), add the method, or "
            "build it outside infinity.init_empty_weights()"
        )


def _transformers_models(root: nn.Module) -> list[Any]:
    """Returns the outermost transformers models in `root`."""
    if hasattr(root, "initialize_weights") and hasattr(root, "_init_weights"):
        return [root]
    return [found for child in root.children() for found in _transformers_models(child)]


@contextmanager
def _marked(engine: Engine, names: set[str]) -> Iterator[None]:
    """Marks parameters that have values, so that transformers' initialisation skips them."""
    parameters = [
        (tensor, param.name) for param in engine.params for tensor in (param.handle, param.compute)
    ]
    for tensor, name in parameters:
        tensor._is_hf_initialized = name not in names  # type: ignore[union-attr]
    try:
        yield
    finally:
        for tensor, _ in parameters:
            del tensor._is_hf_initialized  # type: ignore[union-attr]
