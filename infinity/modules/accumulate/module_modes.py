"""Modes of modules that a loss may change around a call of the model; each fiber has its own.

`model.train()`, PEFT's `disable_adapter` and `set_adapter` write attributes of modules, and PEFT
writes `requires_grad` of adapters. In plain accumulation such a change ends before the next
micro-batch begins. Fibers take turns in the middle of it, so the modes change with the fiber.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn

_IS_TRAINING = itemgetter("training")
# The attributes of PEFT's layers, tuners and models that choose adapters.
_ADAPTER_MODES = ("_disable_adapters", "_active_adapter", "_adapters_disabled", "active_adapter")
# The methods that a PEFT model of prompts gets when its adapter is disabled.
_PROMPT_MODES = ("forward", "prepare_inputs_for_generation")
_ABSENT = object()


@dataclass(frozen=True, eq=False, slots=True)
class ModuleModes:
    """The modes of all modules at one moment."""

    is_training: tuple[Any, ...]
    adapters: tuple[Any, ...]
    is_trained: tuple[bool, ...]


class ModeSwitch:
    """Reads and writes the modes of a model's modules. Used by one running thread at a time.

    `requires_grad` is read again when a mode of an adapter has changed: PEFT changes both together.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._modules = [module.__dict__ for module in modules]
        self._adapters = [
            (module.__dict__, name)
            for module in modules
            for name in _ADAPTER_MODES
            if name in module.__dict__
        ]
        self._adapters += [
            (module.__dict__, name)
            for module in modules
            for name in _PROMPT_MODES
            if "_adapters_disabled" in module.__dict__
        ]
        layers = [module for module in modules if "_disable_adapters" in module.__dict__]
        # The parameters of adapters. A layer's base holds parameters of its own, which PEFT leaves.
        params = {id(p): p for layer in layers for p in layer.parameters()}
        self._params: list[torch.Tensor] = list(params.values())
        self._current = self._read()

    def _read(self) -> ModuleModes:
        return ModuleModes(
            self._read_training(),
            self._read_adapters(),
            tuple([parameter.requires_grad for parameter in self._params]),
        )

    def _read_training(self) -> tuple[Any, ...]:
        return tuple(map(_IS_TRAINING, self._modules))

    def _read_adapters(self) -> tuple[Any, ...]:
        return tuple([_frozen(adapter.get(name, _ABSENT)) for adapter, name in self._adapters])

    def now(self) -> ModuleModes:
        """Returns the present modes. Equal modes are the same object, so that many calls can keep
        them."""
        current = self._current
        training, adapters = self._read_training(), self._read_adapters()
        if training != current.is_training or adapters != current.adapters:
            self._current = self._read()
        return self._current

    def set(self, modes: ModuleModes) -> None:
        """Writes the modes that differ from the present ones."""
        current = self._current
        if modes is current:
            return
        if modes.is_training != current.is_training:
            for attributes, is_training in zip(self._modules, modes.is_training, strict=True):
                attributes["training"] = is_training
        if modes.adapters != current.adapters:
            for (attributes, name), mode in zip(self._adapters, modes.adapters, strict=True):
                if mode is _ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = list(mode) if isinstance(mode, tuple) else mode
        if modes.is_trained != current.is_trained:
            for parameter, before, after in zip(
                self._params, current.is_trained, modes.is_trained, strict=True
            ):
                if before is not after:
                    parameter.requires_grad = after
        self._current = modes


def _frozen(mode: Any) -> Any:
    return tuple(mode) if isinstance(mode, list) else mode
