"""Models that are built without memory for their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from infinity.config import SwapConfig
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
