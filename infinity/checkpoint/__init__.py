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
    from infinity.checkpoint.dcp.export_state import export_checkpoint_dcp, export_dcp
    from infinity.checkpoint.dcp.import_state import import_dcp
    from infinity.checkpoint.huggingface.export_weights import export_safetensors
    from infinity.checkpoint.huggingface.from_checkpoint import export_checkpoint_safetensors
    from infinity.checkpoint.huggingface.import_weights import WeightSource, weight_source
    from infinity.checkpoint.run.copy import Saving
    from infinity.checkpoint.run.inspection import inspect
    from infinity.checkpoint.run.load import load
    from infinity.checkpoint.run.optimizer_export import optimizer_state_dict
    from infinity.checkpoint.run.save import async_save, commit, save

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
    "Saving": "run.copy",
    "WeightSource": "huggingface.import_weights",
    "async_save": "run.save",
    "commit": "run.save",
    "export_checkpoint_dcp": "dcp.export_state",
    "export_checkpoint_safetensors": "huggingface.from_checkpoint",
    "export_dcp": "dcp.export_state",
    "export_safetensors": "huggingface.export_weights",
    "import_dcp": "dcp.import_state",
    "inspect": "run.inspection",
    "load": "run.load",
    "optimizer_state_dict": "run.optimizer_export",
    "save": "run.save",
    "weight_source": "huggingface.import_weights",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"infinity.checkpoint.{home}"), name)
