"""State in and out of files: checkpoints of a run, and weights as Hugging Face safetensors.

`save(directory, model, optimizer)` and `load(path, model, optimizer)` carry everything an exact
continuation needs. `weight_source(path)` streams weights into tiers, `export_safetensors(model,
directory)` writes them. None of these ever holds the model. Importing this package does not import
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.checkpoint.safetensors_export import export_safetensors
    from infinity.checkpoint.safetensors_import import WeightSource, weight_source
    from infinity.checkpoint.state_export import optimizer_state_dict
    from infinity.checkpoint.state_inspect import inspect
    from infinity.checkpoint.state_load import load
    from infinity.checkpoint.state_save import save

__all__ = [
    "WeightSource",
    "export_safetensors",
    "inspect",
    "load",
    "optimizer_state_dict",
    "save",
    "weight_source",
]

_HOMES = {
    "WeightSource": "safetensors_import",
    "export_safetensors": "safetensors_export",
    "inspect": "state_inspect",
    "load": "state_load",
    "optimizer_state_dict": "state_export",
    "save": "state_save",
    "weight_source": "safetensors_import",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"infinity.checkpoint.{home}"), name)
