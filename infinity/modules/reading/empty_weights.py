"""Models that are built without memory for their parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.config import SwapConfig
from infinity.errors import ConfigError, InfinityError
from infinity.modules.reading.awaited import Awaited, building, leave_out

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
    _observe()
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


@functools.cache
def _observe() -> None:
    """Has PyTorch call a hook for each parameter that a module registers. The hook stays: another
    thread may be going through PyTorch's hooks."""

    def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> Awaited | None:
        return leave_out(parameter, kept_nbytes=_KEPT_NBYTES)

    register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
