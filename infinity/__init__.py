"""infinity: train PyTorch models whose state fits neither the GPU nor the RAM.

    import infinity

    with infinity.init_empty_weights("swap.toml"):
        model = AutoModelForCausalLM.from_config(config)
    infinity.offload(model, "swap.toml", weights="path/to/hf-checkpoint")
    optimizer = infinity.AdamW(model, lr=1e-5, max_grad_norm=1.0)

Importing the package touches no device and no file. PyTorch is imported on the first use of a name
that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from infinity import namesake

if TYPE_CHECKING:
    from infinity import checkpoint
    from infinity.api import (
        SGD,
        Adam,
        AdamW,
        Lion,
        beside,
        close,
        describe,
        engine_of,
        factored_experts,
        forward_backward,
        gather,
        init_empty_weights,
        offload,
    )
    from infinity.config import SwapConfig
    from infinity.errors import (
        CapacityError,
        ConfigError,
        CorruptionError,
        DeviceError,
        InfinityError,
        NonFiniteError,
        ParameterNotResident,
        RankError,
        StorageError,
        SwapLockedError,
        UnsupportedError,
    )

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CapacityError",
    "ConfigError",
    "CorruptionError",
    "DeviceError",
    "InfinityError",
    "Lion",
    "NonFiniteError",
    "ParameterNotResident",
    "RankError",
    "StorageError",
    "SwapConfig",
    "SwapLockedError",
    "UnsupportedError",
    "beside",
    "checkpoint",
    "close",
    "describe",
    "engine_of",
    "factored_experts",
    "forward_backward",
    "gather",
    "init_empty_weights",
    "offload",
    "shrink",
]

_MODULES = {
    "SGD": "infinity.api",
    "Adam": "infinity.api",
    "AdamW": "infinity.api",
    "CapacityError": "infinity.errors",
    "ConfigError": "infinity.errors",
    "CorruptionError": "infinity.errors",
    "DeviceError": "infinity.errors",
    "InfinityError": "infinity.errors",
    "Lion": "infinity.api",
    "NonFiniteError": "infinity.errors",
    "ParameterNotResident": "infinity.errors",
    "RankError": "infinity.errors",
    "StorageError": "infinity.errors",
    "SwapConfig": "infinity.config",
    "SwapLockedError": "infinity.errors",
    "UnsupportedError": "infinity.errors",
    "close": "infinity.api",
    "describe": "infinity.api",
    "engine_of": "infinity.api",
    "factored_experts": "infinity.api",
    "beside": "infinity.api",
    "forward_backward": "infinity.api",
    "gather": "infinity.api",
    "init_empty_weights": "infinity.api",
    "offload": "infinity.api",
    "shrink": "infinity.api",
}


if _strange := namesake.strange_entries(__path__):
    import warnings

    warnings.warn(namesake.explain(_strange), stacklevel=2)


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return importlib.import_module("infinity.checkpoint")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    if module == "infinity.api":
        from infinity.config.extras import require_release

        require_release("torch", "infinity")
    return getattr(importlib.import_module(module), name)
