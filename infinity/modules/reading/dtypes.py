"""The dtypes in which the engine keeps a model's parameters and buffers.

With `precision.compute = "bfloat16"`, a float32 model is narrowed. A transformers model is narrowed
as its class does it for `from_pretrained(dtype=torch.bfloat16)`, any other model as
`model.to(bfloat16)` does it. A model that has narrow parameters already is a deliberate mixture
(float32 adapters over a bfloat16 base, a router kept in float32) and stays as it is.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from infinity.config.schema.engine import Precision
from infinity.modules.reading.adapters import adapter_modules
from infinity.modules.reading.empty_weights import is_to_come

_log = logging.getLogger("infinity")

_NARROW = (torch.bfloat16, torch.float16)

# PEFT adds these parts to the name of a module that it wraps.
_WRAPPING = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


class Dtypes:
    """The dtype of every parameter, decided once from the given model."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        compute: torch.dtype = getattr(torch, precision.compute_dtype)
        has_narrow = any(parameter.dtype in _NARROW for parameter in model.parameters())
        self._model = model
        self._narrowed = None if compute is torch.float32 or has_narrow else compute
        self._pattern = names_kept_wide(model)
        self._twins: dict[str, torch.dtype] = {}
        self._unknown: set[int] = set()  # Modules whose buffers keep their dtype.
        if self._narrowed is not None:
            self._unknown = {id(module) for module in adapter_modules(model)}
            self._ask_twins(self._narrowed)
        self._wide_ids = {id(p) for name, p in model.named_parameters() if self._is_wide(name)}

    def of(self, parameter: torch.Tensor, name: str = "") -> torch.dtype:
        """Returns the dtype of a parameter. `name` is needed if the parameter is a tile."""
        if id(parameter) in self._wide_ids or self._is_wide(name):
            if parameter.dtype is torch.float32 or is_to_come(parameter):
                return torch.float32
        elif self._narrowed is not None and parameter.dtype is torch.float32:
            return self._narrowed
        return parameter.dtype

    def narrow_buffers(self) -> None:
        """Converts float32 buffers to the dtype that they have in the narrow model."""
        if self._narrowed is None:
            return
        for name, module in self._model.named_modules():
            if id(module) in self._unknown:
                continue
            for leaf, buffer in module._buffers.items():
                full_name = f"{name}.{leaf}".lstrip(".")
                if buffer is None or buffer.dtype is not torch.float32 or self._is_wide(full_name):
                    continue
                module._buffers[leaf] = buffer.to(self._narrowed)

    def _is_wide(self, name: str) -> bool:
        if self._pattern is not None and self._pattern.search(name):
            return True
        return self._twins.get(_WRAPPING.sub("", f".{name}")[1:]) is torch.float32

    def _ask_twins(self, dtype: torch.dtype) -> None:
        names = {id(module): name for name, module in self._model.named_modules()}
        for root in models_in(self._model):
            twin = _twin(root, dtype)
            if twin is None:
                self._unknown.update(id(module) for module in root.modules())
                continue
            prefix = _WRAPPING.sub("", f".{names[id(root)]}.")[1:].lstrip(".")
            for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
                self._twins[prefix + name] = tensor.dtype


def names_kept_wide(model: nn.Module) -> re.Pattern[str] | None:
    """Returns a pattern of the parameters that transformers keeps in float32 in a bfloat16
    model."""
    patterns = {
        pattern.replace("*", r".*")
        for root in models_in(model)
        for pattern in getattr(root, "_keep_in_fp32_modules_strict", None) or ()
    }
    return re.compile("|".join(sorted(patterns))) if patterns else None


def models_in(module: nn.Module) -> Iterator[Any]:
    """Yields the outermost transformers models."""
    if hasattr(type(module), "get_init_context") and hasattr(module, "config"):
        yield module
        return
    for child in module.children():
        yield from models_in(child)


def _twin(model: Any, dtype: torch.dtype) -> nn.Module | None:
    """Builds a model of the same class on meta, as `from_pretrained` builds it."""
    try:
        with ExitStack() as stack:
            for context in type(model).get_init_context(dtype, False, False, None):
                stack.enter_context(context)
            twin: nn.Module = type(model)(copy.deepcopy(model.config))
            return twin
    except Exception as error:  # The constructor of the model does not run on meta.
        _log.warning(
            "buffers of %s stay float32: it cannot be built in %s to see what it makes of them "
            "(%s); where its forward needs them narrow, convert the model before infinity.offload",
            type(model).__name__,
            dtype,
            error,
        )
        return None
