"""Saves and loads training state: checkpoints, Hugging Face safetensors, torch DCP directories.

`save(directory, model, optimizer)` and `load(path, model, optimizer)` keep everything that an exact
continuation needs. `async_save` returns before a copy to another file system ends, and
`commit(model, optimizer)` makes a single step durable. `weight_source(path)` streams weights into
tiers, and `export_safetensors(model, directory)` writes them. `export_dcp` and `import_dcp` do the
same with torch.distributed.checkpoint, with the state of the optimizer. No function holds the full
model in memory. Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.checkpoint.dcp.export_state import (
        export_checkpoint_dcp,
        export_dcp,
        optimizer_state_dict,
    )
    from infinity.checkpoint.dcp.import_state import import_dcp
    from infinity.checkpoint.huggingface.export_weights import (
        export_checkpoint_safetensors,
        export_safetensors,
    )
    from infinity.checkpoint.huggingface.import_weights import WeightSource, weight_source
    from infinity.checkpoint.run.copy import Saving
    from infinity.checkpoint.run.inspection import inspect
    from infinity.checkpoint.run.load import load
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

_MODULE_OF = {
    name: f"{__name__}.{module}"
    for module, names in {
        "dcp.export_state": ("export_checkpoint_dcp", "export_dcp", "optimizer_state_dict"),
        "dcp.import_state": ("import_dcp",),
        "huggingface.export_weights": ("export_checkpoint_safetensors", "export_safetensors"),
        "huggingface.import_weights": ("WeightSource", "weight_source"),
        "run.copy": ("Saving",),
        "run.inspection": ("inspect",),
        "run.load": ("load",),
        "run.save": ("async_save", "commit", "save"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
