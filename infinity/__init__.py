"""infinity: train PyTorch models whose state fits neither the GPU nor the RAM.

    import infinity

    model = infinity.from_pretrained("path/to/hf-checkpoint", "swap.toml")
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
        forward,
        forward_backward,
        gather,
        init_empty_weights,
        offload,
        shrink,
        together,
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
    from infinity.tools.logprobs import score
    from infinity.tools.mlp_slices import slice_mlps
    from infinity.tools.pretrained import from_pretrained

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
    "forward",
    "forward_backward",
    "from_pretrained",
    "gather",
    "init_empty_weights",
    "offload",
    "score",
    "shrink",
    "slice_mlps",
    "together",
]

_TOOLS = {
    "from_pretrained": "infinity.tools.pretrained", "score": "infinity.tools.logprobs",
    "slice_mlps": "infinity.tools.mlp_slices",
}  # fmt: skip

if _strange := namesake.strange_entries(__path__):
    import warnings

    warnings.warn(namesake.explain(_strange), stacklevel=2)


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return importlib.import_module("infinity.checkpoint")
    if name not in __all__:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    if name == "SwapConfig":
        return importlib.import_module("infinity.config").SwapConfig
    if hasattr(errors := importlib.import_module("infinity.errors"), name):
        return getattr(errors, name)
    from infinity.config.extras import require_release

    require_release("torch", "infinity")
    # Kept: the check reads the metadata of torch, a millisecond for each `infinity.gather`.
    place = _TOOLS.get(name, "infinity.api")
    globals()[name] = found = getattr(importlib.import_module(place), name)
    return found
