"""A model under the names of its checkpoint: the tensors that a file may fill, and PEFT taken off.

The model may be on meta, or have handles or plain parameters: only names, shapes and dtypes are
used. A PEFT model has the names of the model that it wraps; its adapters have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.huggingface.names import is_expected_missing
from infinity.modules.reading.adapters import follows
from infinity.modules.reading.empty_weights import is_to_come


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTarget:
    """One parameter or persistent buffer of the model.

    `canonical` is its first name in the view, which all aliases of a tied weight share.
    `parameter_names` are its names for the writer: one, or several if PEFT keeps a trainable copy
    of a module beside the frozen one. Exactly one of the fields of names and buffers is filled.
    `has_value`: it was given one, in a model that was built without memory.
    """

    canonical: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter_names: tuple[str, ...] = ()
    buffers: tuple[tuple[nn.Module, str], ...] = ()
    has_value: bool = False

    def is_resized_from(self, shape: tuple[int, ...]) -> bool:
        """Whether it has a value with more or fewer rows than `shape`, as embeddings have after
        `resize_token_embeddings`."""
        return self.has_value and len(shape) > 0 and self.shape[1:] == shape[1:]


class ModelView:
    """A model under the names of its checkpoint, without the wrapping of PEFT.

    `config` and `get_parameter` are what conversions need of a model.
    """

    def __init__(self, model: Any) -> None:
        is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        self.model: nn.Module = model.get_base_model() if is_peft else model
        self.config: Any = getattr(self.model, "config", None)
        self.targets: dict[str, WeightTarget] = {}
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters: dict[str, list[nn.Parameter]] = {}
        buffers: dict[str, list[tuple[nn.Module, str]]] = {}
        self._computed: dict[str, list[str]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for leaf, parameter in module._parameters.items():
                name = _without_peft(self.model, prefix + leaf)
                if parameter is not None and name is not None:
                    parameters.setdefault(name, []).append(parameter)
            for leaf, buffer in module._buffers.items():
                name = _without_peft(self.model, prefix + leaf)
                is_saved = leaf not in module._non_persistent_buffers_set
                if not is_saved and name is not None:
                    self._computed.setdefault(leaf, []).append(name)
                if buffer is not None and is_saved and name is not None:
                    buffers.setdefault(name, []).append((module, leaf))
        is_built_empty = any(map(is_to_come, model.parameters()))
        first_name: dict[int, str] = {}
        for name, copies in parameters.items():
            same = [copies[0], *(copy for copy in copies[1:] if follows(copy, copies[0]))]
            self.targets[name] = WeightTarget(
                canonical=first_name.setdefault(id(same[0]), name),
                shape=tuple(same[0].shape),
                dtype=same[0].dtype,
                parameter_names=tuple(dict.fromkeys(name_of[id(one)] for one in same)),
                has_value=is_built_empty and not is_to_come(same[0]),
            )
        for name, places in buffers.items():
            module, leaf = places[0]
            buffer = module._buffers[leaf]
            assert buffer is not None
            self.targets[name] = WeightTarget(
                canonical=first_name.setdefault(id(buffer), name),
                shape=tuple(buffer.shape),
                dtype=buffer.dtype,
                buffers=tuple(places),
            )

    def may_be_missing(self, name: str) -> bool:
        """Whether a checkpoint is complete without `name`.

        The model computes its buffers itself, and transformers lists some weights by pattern.
        """
        return bool(self.targets[name].buffers) or is_expected_missing(self.model, name)

    def computes(self, name: str) -> bool:
        """Whether `name` is a buffer that the model computes itself; older versions saved some."""
        leaf = name.rpartition(".")[2]
        return any(
            own == name or own.endswith(f".{name}") or name.endswith(f".{own}")
            for own in self._computed.get(leaf, ())
        )

    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a parameter on meta: conversions look at its shape."""
        if name not in self.targets:
            raise AttributeError(f"the model has no parameter {name!r}")
        return torch.empty(self.targets[name].shape, device="meta")


def _without_peft(model: nn.Module, name: str) -> str | None:
    """Returns the name that a parameter had before PEFT wrapped its module; None for adapters.

    A tuner layer keeps the wrapped module as `base_layer` and names its own parts in
    `adapter_layer_names`; a module to save keeps `original_module` and copies by adapter name, and
    trainable tokens are a tuner layer called `token_adapter` in one of those.
    """
    kept: list[str] = []
    parts = name.split(".")
    module: Any = model
    while parts:
        part = parts.pop(0)
        child = getattr(module, part, None)
        if hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer"):
            if part != "base_layer":
                return None
        elif hasattr(module, "original_module"):
            if part == "modules_to_save":
                child = child[parts.pop(0)]  # type: ignore[index]
            elif part not in ("original_module", "token_adapter"):
                return None
        else:
            kept.append(part)
        module = child
    return ".".join(kept)
