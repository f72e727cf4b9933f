"""Models that are built without memory for their parameters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.config import SwapConfig
from infinity.errors import ConfigError, InfinityError
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
    PEFT gives them. Only modules that this thread builds are without memory. Raises ConfigError
    where a constructor computes with values of a weight, as `orthogonal` does.
    """
    SwapConfig.load(config)
    kept: list[Provisional] = []
    thread = threading.get_ident()

    def leave_out(module: nn.Module, name: str, param: nn.Parameter) -> Awaited | None:
        if threading.get_ident() != thread:
            return None  # Modules that another thread builds have memory.
        if type(param) is nn.Parameter:
            if param.is_meta or param.numel() * param.element_size() > _KEPT_NBYTES:
                return Awaited.make(param)
            param.__class__ = Provisional
        if isinstance(param, Provisional):
            kept.append(param)
        return None

    hook = register_module_parameter_registration_hook(leave_out)  # type: ignore[arg-type]
    try:
        with building():
            yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, InfinityError) or "meta" not in str(error).lower():
            raise
        raise ConfigError(
            "a constructor needs the values of a weight that infinity.init_empty_weights leaves "
            f"without memory ({error}). Build this module, such as one with an orthogonal "
            "parametrization, before the `with` block, and put it into the model inside of it"
        ) from error
    finally:
        hook.remove()
        for parameter in kept:
            if isinstance(parameter, Provisional):
                parameter.built_version = parameter._version
