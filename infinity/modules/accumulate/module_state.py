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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.of_transformers import HOOKS_INSTALLED
from infinity.modules.accumulate.purity import (
    INSTALLS,
    hooked_nodes,
    is_own,
    is_trusted,
    refuse_hook,
)
from infinity.modules.handles.handle_ops import HandleOps
from infinity.private.torch import named_members

Key: TypeAlias = tuple[int, str]  # The id of a module, and an attribute.
Attributes: TypeAlias = Mapping[Key, Any]

_ABSENT = object()
_NOTHING: Attributes = {}
_PREPARES = frozenset({"transformers"})
_MODES = ("training", "forward", "prepare_inputs_for_generation")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Runs the block in eval mode; the modes of all modules are then as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # `train`, in which a class may do more, takes submodules along.
            if module.training != mode:
                module.train(mode)


class Touched(NamedTuple):
    """The attributes that a micro-batch has written, and those that it has read before."""

    written: set[Key]
    read: set[Key]


class ModuleState:
    """The attributes of a model's modules that differ between micro-batches. Used by one running
    thread at a time. `on_hook` is called with the class of a module and its new forward hook,
    `on_backward` with the outputs and inputs of a backward."""

    def __init__(
        self,
        model: nn.Module,
        on_hook: Callable[[str, Any], None] = refuse_hook,
        on_backward: Callable[[Sequence[Any], Sequence[Any]], None] = lambda *_: None,
    ) -> None:
        self._on_hook, self.on_backward = on_hook, on_backward
        self._first_forward: tuple[str, int] | None = None  # A block, and its first node.
        self.named = dict(model.named_modules())
        self._modules = {id(module): module for module in self.named.values()}
        self._params = {id(parameter): parameter for parameter in model.parameters()}
        owners = (*self.named.items(), *model.named_parameters())
        self._names = {id(owner): name for name, owner in owners}
        # Outside of micro-batches: values of all attributes that differ inside of one.
        self._base: dict[Key, Any] = {}
        self._current: Attributes = _NOTHING
        self._noted: dict[Key, Any] = {}  # Written since the last look, with the value before.
        self.touched = Touched(set(), set())  # By the running micro-batch.

    # -- Writes ------------------------------------------------------------------------------------

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes every attribute that is written, new hooks of the modules (those of one micro-batch
        would be called for the others), and the nodes of tensors that get a hook."""
        for place, plain in _PLAIN.items() if not _watching else ():
            setattr(*place, _method(_CHANGES[place], plain))
        _watching.append(self)
        kinds: Any = {type(module) for module in self._modules.values()}
        plain_read = object.__getattribute__
        read = [k for k in kinds if is_own(k) and k.__getattribute__ is plain_read]
        for cls in read:
            cls.__getattribute__ = _note_read
        try:
            yield
        finally:
            for cls in read:
                del cls.__getattribute__
            _watching.remove(self)
            if not _watching:
                hooked_nodes.clear()
                for place, plain in _PLAIN.items():
                    setattr(*place, plain)

    def note(self, owner: nn.Module | torch.Tensor, name: str) -> None:
        """Notes that an attribute, or `requires_grad` of a parameter, is about to be written."""
        key = id(owner), name
        self.touched.written.add(key)
        is_known = key[0] in self._params or key[0] in self._modules
        if is_known and key not in self._noted and not _is_for_all(owner, name):
            self._noted[key] = self._read(key)

    def note_read(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute is about to be read. What a block reads is its own."""
        key = id(module), name
        if self._first_forward is None and key not in self.touched.written:
            self.touched.read.add(key)

    def note_hook(self, module: nn.Module, hook: Any) -> None:
        """Notes that a forward hook is about to be registered."""
        if id(module) in self._modules:
            self._on_hook(type(module).__name__, hook)

    @contextmanager
    def graph_dropped(self, block: str, first_node: int) -> Iterator[None]:
        """Runs the first forward of a block, whose graph is dropped."""
        outer, self._first_forward = self._first_forward, (block, first_node)
        try:
            yield
        finally:
            self._first_forward = outer

    def note_tensor(self, tensor: torch.Tensor, method: str) -> None:
        """Notes that a tensor is about to get a hook, or to keep its gradient."""
        if self._first_forward is None or isinstance(tensor, nn.Parameter):
            return
        (block, first), node = self._first_forward, tensor.grad_fn
        is_from_outside = node is None or node._sequence_nr() < first
        if is_from_outside is (method == "register_hook"):
            tensor_of = "its own input" if is_from_outside else "a tensor inside it"
            raise UnsupportedError(
                f"{block} calls {method} of {tensor_of}, and its forward runs twice, on other "
                "tensors; accumulate micro-batches by several backward() calls instead"
            )

    def changed(self) -> Iterator[str]:
        """Yields the attributes that differ from those at the first look."""
        return map(self._place, self.now())

    def _read(self, key: Key) -> Any:
        if key[0] in self._params:
            return None, self._params[key[0]].requires_grad
        module, name = self._modules[key[0]], key[1]
        return next(((t, t[name]) for t in _tables(module) if name in t), _ABSENT)

    def _write(self, key: Key, value: Any) -> None:
        if key[0] in self._params:
            self._params[key[0]].requires_grad = value[1]
            return
        module, name = self._modules[key[0]], key[1]
        place, found = (None, None) if value is _ABSENT else value
        for table in _tables(module):
            if table is not place:
                table.pop(name, None)
        if place is not None:
            place[name] = found

    # -- Micro-batches -----------------------------------------------------------------------------

    def now(self) -> Attributes:
        """Returns the attributes of the running micro-batch that differ from those outside. Equal
        ones are the same object, so that many calls can keep them."""
        if self._noted:
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

    def refuse_left(self, micro_batches: Sequence[tuple[Attributes, Touched]]) -> None:
        """Raises UnsupportedError for an attribute that a micro-batch has left with another value
        and that a later one has read before it wrote it."""
        left: set[Key] = set()
        for attributes, touched in micro_batches:
            needed = touched.read | {
                key for key in left - touched.written if key[0] in self._params
            }
            for key in left & needed:
                raise UnsupportedError(
                    f"{self._place(key)} is read in a micro-batch, and an earlier one has left "
                    "another value there. Micro-batches that pass blocks together do not see what "
                    "the others leave; accumulate by several backward() calls instead"
                )
            left = (left - touched.written) | {
                k for k in attributes if self._is_other(k, attributes[k])
            }

    def _is_other(self, key: Key, value: Any) -> bool:
        """Whether a value is another than that outside, which the class may have."""
        base = self._base[key]
        if base is not _ABSENT or value is _ABSENT:
            return True  # Equal ones are no attributes of a micro-batch.
        of_class = getattr(type(self._modules[key[0]]), key[1], _ABSENT)
        return not _is_same((None, getattr(value[1], "__func__", value[1])), (None, of_class))

    def _place(self, key: Key) -> str:
        return ".".join(filter(None, (self._names[key[0]], key[1])))

    # -- Blocks ------------------------------------------------------------------------------------

    def end_block(self) -> Attributes:
        """Returns the attributes that a block has written since the last look, with the values
        before. From now on they are those outside, and the micro-batch has them for itself."""
        if not self._noted:
            return _NOTHING
        before, current = dict(self._noted), dict(self._current)
        for key in self._noted:
            current[key] = self._base[key] = self._read(key)
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


def _is_for_all(owner: nn.Module | torch.Tensor, name: str) -> bool:
    """Whether it is what transformers prepares in a first forward, which stays for all: it installs
    hooks, and keeps tables for the longest sequence."""
    if not isinstance(owner, nn.Module) or name in _MODES:
        return False
    is_part = name in owner._parameters or name in owner._modules
    return not is_part and (name == HOOKS_INSTALLED or is_trusted(type(owner), _PREPARES))


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module.__dict__, module._buffers, module._parameters, module._modules


def _is_same(value: Any, other: Any) -> bool:
    if value is _ABSENT or other is _ABSENT:
        return value is other
    (table, value), (other_table, other) = value, other
    if value is other or table is not other_table:
        return table is other_table
    is_plain = type(value) in (bool, int, float, str, list, tuple) and type(value) is type(other)
    try:
        return is_plain and bool(value == other)
    except (RuntimeError, ValueError):  # Tensors in a list have no truth.
        return False


# -- What is replaced in PyTorch while micro-batches take turns ------------------------------------

_watching: list[ModuleState] = []


def _method(change: Callable[..., Any], plain: Any) -> Any:
    """Returns a function that becomes a method where a class has it."""

    def changed(*args: Any, **options: Any) -> Any:
        return change(plain, *args, **options)

    return changed


def _note_read(module: Any, name: str) -> Any:
    for watcher in _watching:
        watcher.note_read(module, name)
    return object.__getattribute__(module, name)


def _write(plain: Any, module: nn.Module, name: str, *value: Any, **options: Any) -> Any:
    for watcher in _watching:
        watcher.note(module, name)
    return plain(module, name, *value, **options)


def _train(plain: Any, owner: Any, *value: Any, **options: Any) -> Any:
    for parameter in owner.parameters() if isinstance(owner, nn.Module) else value[:1]:
        for watcher in _watching:
            watcher.note(parameter, "requires_grad")
    return plain(owner, *value, **options)


def _hook_module(plain: Any, module: nn.Module, hook: Any, **options: Any) -> Any:
    if not is_trusted(hook, INSTALLS):
        for watcher in _watching:
            watcher.note_hook(module, hook)
    return plain(module, hook, **options)


def _hook_tensor(plain: Any, tensor: torch.Tensor, *hook: Any) -> Any:
    for watcher in _watching:
        watcher.note_tensor(tensor, plain.__name__)
    if tensor.grad_fn is not None:
        hooked_nodes.add(tensor.grad_fn)
    return plain(tensor, *hook)


def _run_backward(
    plain: Any, outputs: Any, gradients: Any, keep: Any, create: Any, *args: Any, **options: Any
) -> Any:
    for watcher in _watching:
        watcher.on_backward(outputs, args[0] if args else options.get("inputs", ()))
    try:
        return plain(outputs, gradients, keep, create, *args, **options)
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        raise UnsupportedError(
            "micro-batches that pass blocks together run this compiled backward in parts; set "
            "torch._functorch.config.donated_buffer = False before it is compiled"
        ) from error


_CHANGES: dict[tuple[Any, str], Callable[..., Any]] = {
    (nn.Module, "__setattr__"): _write,
    (nn.Module, "__delattr__"): _write,
    (named_members, "swap_tensor"): _write,
    (nn.Module, "requires_grad_"): _train,
    (HandleOps, "set_trainable"): _train,
    (nn.Module, "register_forward_hook"): _hook_module,
    (nn.Module, "register_forward_pre_hook"): _hook_module,
    (torch.Tensor, "register_hook"): _hook_tensor,
    (torch.Tensor, "retain_grad"): _hook_tensor,
    (torch.autograd, "_engine_run_backward"): _run_backward,
}
_PLAIN = {place: getattr(*place) for place in _CHANGES}
