"""infinity: train PyTorch models whose state does not fit the GPU, nor the RAM.

    import infinity

    with infinity.init_empty_weights("swap.toml"):
        model = AutoModelForCausalLM.from_config(config)
    infinity.offload(model, "swap.toml", weights="path/to/hf-checkpoint")
    optimizer = infinity.AdamW(model, lr=1e-5, max_grad_norm=1.0)

Importing this touches no device and no file; PyTorch is imported when a name that needs it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity import checkpoint
    from infinity.api import (
        SGD,
        Adam,
        AdamW,
        Lion,
        engine_of,
        forward_backward,
        gather,
        init_empty_weights,
        offload,
    )
    from infinity.config import SwapConfig

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "SwapConfig",
    "checkpoint",
    "engine_of",
    "forward_backward",
    "gather",
    "init_empty_weights",
    "offload",
]

_HOMES = {
    "SGD": "infinity.api",
    "Adam": "infinity.api",
    "AdamW": "infinity.api",
    "Lion": "infinity.api",
    "SwapConfig": "infinity.config",
    "forward_backward": "infinity.api",
    "engine_of": "infinity.api",
    "gather": "infinity.api",
    "init_empty_weights": "infinity.api",
    "offload": "infinity.api",
}


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return importlib.import_module("infinity.checkpoint")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
