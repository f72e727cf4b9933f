"""Attributes of modules that change while micro-batches take turns; each micro-batch has its own.

`model.train()`, PEFT's `disable_adapter`, `set_adapter` and `rescale_adapter_scale`, and a loss
that replaces `model.forward` write attributes of modules for a call of the model. In plain
accumulation such a change ends before the next micro-batch begins. Fibers take turns in the middle
of it, so the attributes change with the fiber.

Note [Inside a block]
  What a block writes to its own modules belongs to the block: the next micro-batch sees it, as in
  plain accumulation. The micro-batch itself also keeps what it wrote, for a loss that reads it. A
  repeated forward begins with the attributes that the first one found, and leaves none changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.of_transformers import HOOKS_INSTALLED
from infinity.modules.accumulate.purity import (
    INSTALLS,
    hooked_nodes,
    is_trusted,
    refuse_hook,
)

Key: TypeAlias = tuple[int, str]  # The id of a module, and an attribute.
Attributes: TypeAlias = Mapping[Key, Any]

_ABSENT = object()
# Which parameters of adapters are trained: PEFT writes this with the modes of its layers.
_TRAINED: Key = (0, "requires_grad")
_NOTHING: Attributes = {}
_PREPARES = frozenset({"transformers"})
_MODES = ("training", "forward", "prepare_inputs_for_generation")

# What is watched while micro-batches take turns.
_PLAIN = {
    (owner, name): getattr(owner, name)
    for owner, name in (
        (nn.Module, "__setattr__"), (nn.Module, "__delattr__"),
        (nn.Module, "register_forward_hook"), (nn.Module, "register_forward_pre_hook"),
        (torch.Tensor, "register_hook"), (torch.Tensor, "retain_grad"),
    )
}  # fmt: skip
_watching: list[ModuleState] = []


class ModuleState:
    """The attributes of a model's modules that differ between micro-batches. Used by one running
    thread at a time. `on_hook` is called with the class of a module and its new forward hook."""

    def __init__(self, model: nn.Module, on_hook: Callable[[str, Any], None] = refuse_hook) -> None:
        self._on_hook = on_hook
        self.named = dict(model.named_modules())
        self._modules = {id(module): module for module in self.named.values()}
        layers = [m for m in self._modules.values() if "_disable_adapters" in m.__dict__]
        # The parameters of adapters. A layer's base holds parameters of its own, which PEFT leaves.
        params = {id(p): p for layer in layers for p in layer.parameters()}
        self._params: list[torch.Tensor] = list(params.values())
        # Outside of micro-batches: values of all attributes that differ inside of one.
        self._base: dict[Key, Any] = {_TRAINED: self._trained()}
        self._current: Attributes = _NOTHING
        self._noted: dict[Key, Any] = {}  # Written since the last look, with the value before.
        self._of_blocks: set[Key] = set()

    # -- Writes ------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes every attribute that is written, new hooks of the modules (those of one micro-batch
        would be called for the others), and the nodes of tensors that get a hook."""
        if not _watching:
            _watch()
        _watching.append(self)
        try:
            yield
        finally:
            _watching.remove(self)
            if not _watching:
                _stop_watching()

    def note(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute is about to be written. What transformers prepares in a first
        forward stays for all: it installs hooks, and keeps tables for the longest sequence."""
        if id(module) not in self._modules or (id(module), name) in self._noted:
            return
        if name not in _MODES and (name == HOOKS_INSTALLED or is_trusted(type(module), _PREPARES)):
            return
        if name not in module._parameters and name not in module._modules:
            key = id(module), name
            self._noted[key] = self._read(key)

    def note_hook(self, module: nn.Module, hook: Any) -> None:
        """Notes that a forward hook is about to be registered."""
        if id(module) in self._modules:
            self._on_hook(type(module).__name__, hook)

    def changed(self) -> Iterator[str]:
        """Yields the attributes that differ from those at the first look."""
        return (self._place(key) for key in self.now() if key != _TRAINED)

    def _read(self, key: Key) -> Any:
        if key == _TRAINED:
            return self._trained()
        module, name = self._modules[key[0]], key[1]
        table = module._buffers if name in module._buffers else module.__dict__
        return table.get(name, _ABSENT)

    def _write(self, key: Key, value: Any) -> None:
        if key == _TRAINED:
            for parameter, is_trained in zip(self._params, value, strict=True):
                if parameter.requires_grad is not is_trained:
                    parameter.requires_grad = is_trained
            return
        module, name = self._modules[key[0]], key[1]
        table: dict[str, Any] = module._buffers if name in module._buffers else module.__dict__
        if value is _ABSENT:
            table.pop(name, None)
        else:
            table[name] = value

    def _trained(self) -> tuple[bool, ...]:
        return tuple([parameter.requires_grad for parameter in self._params])

    # -- Micro-batches -----------------------------------------------------------------------------

    def now(self) -> Attributes:
        """Returns the attributes of the running micro-batch that differ from those outside. Equal
        ones are the same object, so that many calls can keep them."""
        if self._noted:
            self._noted[_TRAINED] = self._base[_TRAINED]
            current = dict(self._current)
            for key, before in self._noted.items():
                value = self._read(key)
                if _is_same(value, self._base.setdefault(key, before)):
                    current.pop(key, None)
                else:
                    current[key] = value
            self._noted.clear()
            self._current = current
        return self._current

    def set(self, attributes: Attributes) -> None:
        """Writes the attributes of another micro-batch."""
        current = self.now()
        if attributes is current:
            return
        for key in current:
            if key not in attributes:
                self._write(key, self._base[key])
        for key, value in attributes.items():
            self._write(key, value)
        self._current = attributes

    def keep(self, attributes: Attributes) -> None:
        """Makes these attributes those outside of micro-batches."""
        self.set(attributes)
        self._base.update(attributes)
        self._current = _NOTHING

    def refuse_counts(self, attributes: Attributes) -> None:
        """Raises UnsupportedError for a number that a micro-batch has changed for good: the next
        one has begun with the number before."""
        for key, value in attributes.items():
            if key in self._of_blocks or key == _TRAINED:
                continue
            kind, before = type(self._modules[key[0]]), self._base[key]
            if is_trusted(kind):
                continue
            before = getattr(kind, key[1], None) if before is _ABSENT else before
            numbers = type(value), type(before)
            if all(kind in (int, float) for kind in numbers) and value != before:
                raise UnsupportedError(
                    f"{self._place(key)} was {before} before a micro-batch and {value} after it. "
                    "Micro-batches that pass a block together cannot count on; count in a buffer "
                    "of a block, or accumulate by several backward() calls"
                )

    def _place(self, key: Key) -> str:
        name = next(name for name, module in self.named.items() if id(module) == key[0])
        return ".".join(filter(None, (name, key[1])))

    # -- Blocks ------------------------------------------------------------------------------------

    def end_block(self) -> Attributes:
        """Returns the attributes that a block has written since the last look, with the values
        before. From now on they are those outside, and the micro-batch has them for itself."""
        if not self._noted:
            return _NOTHING
        before, current = dict(self._noted), dict(self._current)
        for key in self._noted:
            current[key] = self._base[key] = self._read(key)
        self._of_blocks.update(before)
        self._noted.clear()
        self._current = current
        return before

    @contextmanager
    def again(self, before: Attributes) -> Iterator[None]:
        """Begins a repeated forward with the attributes that the first one found, and puts all
        attributes back behind it."""
        self.now()
        kept = {key: self._read(key) for key in before}
        for key, value in before.items():
            self._write(key, value)
        try:
            yield
        finally:
            for key, value in (self._noted | kept).items():
                self._write(key, value)
            self._noted.clear()


def _watch() -> None:
    def noting(plain: Any) -> Any:
        def write(module: nn.Module, name: str, *value: Any) -> None:
            for state in _watching:
                state.note(module, name)
            plain(module, name, *value)

        return write

    def noting_hook(plain: Any) -> Any:
        def register(module: nn.Module, hook: Any, **options: Any) -> Any:
            if not is_trusted(hook, INSTALLS):
                for state in _watching:
                    state.note_hook(module, hook)
            return plain(module, hook, **options)

        return register

    def noting_tensor(plain: Any) -> Any:
        def register(tensor: torch.Tensor, *hook: Any) -> Any:
            if tensor.grad_fn is not None:
                hooked_nodes.add(tensor.grad_fn)
            return plain(tensor, *hook)

        return register

    for (owner, name), plain in _PLAIN.items():
        is_write = name.startswith("__")
        change = noting if is_write else noting_hook if owner is nn.Module else noting_tensor
        setattr(owner, name, change(plain))


def _stop_watching() -> None:
    hooked_nodes.clear()
    for (owner, name), plain in _PLAIN.items():
        setattr(owner, name, plain)


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    is_plain = type(value) in (bool, int, float, str, list, tuple) and type(value) is type(other)
    try:
        return is_plain and bool(value == other)
    except (RuntimeError, ValueError):  # Tensors in a list have no truth.
        return False
