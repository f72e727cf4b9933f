"""Weights in and out of files: Hugging Face safetensors import and export.

`weight_source(path)` streams a checkpoint into tiers, `export_safetensors(model, directory)` writes
one; neither ever holds the model. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity.checkpoint.safetensors_export import export_safetensors
    from infinity.checkpoint.safetensors_import import WeightSource, weight_source

__all__ = ["WeightSource", "export_safetensors", "weight_source"]


def __getattr__(name: str) -> Any:
    if name == "export_safetensors":
        from infinity.checkpoint.safetensors_export import export_safetensors

        return export_safetensors
    if name in ("WeightSource", "weight_source"):
        from infinity.checkpoint import safetensors_import

        return getattr(safetensors_import, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
