"""State in and out of files: checkpoints of a run, and weights as Hugging Face safetensors.

`save(directory, model, optimizer)` and `load(path, model, optimizer)` carry everything an exact
continuation needs; `async_save` does not wait for a copy to another file system, and
`commit(model, optimizer)` makes a single step durable. `weight_source(path)` streams weights into
tiers, `export_safetensors(model, directory)` writes them; `export_dcp` and `import_dcp` do so with
torch.distributed.checkpoint, with the optimizer's state. None of these ever holds the model.
Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.checkpoint.checkpoint_export import export_checkpoint_safetensors
    from infinity.checkpoint.dcp_export import export_checkpoint_dcp, export_dcp
    from infinity.checkpoint.dcp_import import import_dcp
    from infinity.checkpoint.safetensors_export import export_safetensors
    from infinity.checkpoint.safetensors_import import WeightSource, weight_source
    from infinity.checkpoint.state_copy import Saving
    from infinity.checkpoint.state_export import optimizer_state_dict
    from infinity.checkpoint.state_inspect import inspect
    from infinity.checkpoint.state_load import load
    from infinity.checkpoint.state_save import async_save, commit, save

__all__ = [
    "Saving",
    "WeightSource",
    "async_save",
    "commit",
    "export_checkpoint_dcp",
    "export_checkpoint_safetensors",
    "export_dcp",
    "export_safetensors",
    "import_dcp",
    "inspect",
    "load",
    "optimizer_state_dict",
    "save",
    "weight_source",
]

_HOMES = {
    "Saving": "state_copy",
    "WeightSource": "safetensors_import",
    "async_save": "state_save",
    "commit": "state_save",
    "export_checkpoint_dcp": "dcp_export",
    "export_checkpoint_safetensors": "checkpoint_export",
    "export_dcp": "dcp_export",
    "export_safetensors": "safetensors_export",
    "import_dcp": "dcp_import",
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
