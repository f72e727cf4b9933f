"""What is replaced in PyTorch while micro-batches take turns, so that what they set is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.modules.accumulate.purity import INSTALLS, hooked_nodes, is_trusted
from infinity.modules.handles.handle_ops import HandleOps
from infinity.private.torch import named_members


class Watcher(Protocol):
    """Hears of each change before it is made."""

    on_backward: Callable[[Sequence[Any], Sequence[Any]], None]  # With outputs and inputs.
    classes: tuple[type, ...]  # Whose attributes it hears to be read.

    def note_read(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute is about to be read."""

    def note(self, module: nn.Module, name: str) -> None:
        """Notes that an attribute, a parameter or a submodule is about to be written."""

    def note_trained(self, parameter: torch.Tensor) -> None:
        """Notes that `requires_grad` is about to be written."""

    def note_hook(self, module: nn.Module, hook: Any) -> None:
        """Notes that a forward hook is about to be registered."""

    def note_tensor(self, tensor: torch.Tensor, method: str) -> None:
        """Notes that a tensor is about to get a hook, or to keep its gradient."""


_watching: list[Watcher] = []


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Tells a watcher of all changes, and notes the nodes of tensors that get a hook."""
    for (owner, name), plain in _PLAIN.items() if not _watching else ():
        setattr(owner, name, _method(_CHANGES[name], plain))
    _watching.append(watcher)
    read = [cls for cls in watcher.classes if _reads_plainly(cls)]
    for cls in read:
        cls.__getattribute__ = _read  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        for cls in read:
            del cls.__getattribute__
        _watching.remove(watcher)
        if not _watching:
            hooked_nodes.clear()
            for (owner, name), plain in _PLAIN.items():
                setattr(owner, name, plain)


def _method(change: Callable[..., Any], plain: Any) -> Any:
    """Returns a function that becomes a method where a class has it."""

    def changed(*args: Any, **options: Any) -> Any:
        return change(plain, *args, **options)

    return changed


def _reads_plainly(cls: Any) -> bool:
    return cls.__getattribute__ is object.__getattribute__


def _read(module: Any, name: str) -> Any:
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
            watcher.note_trained(parameter)
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


_CHANGES: dict[str, Callable[..., Any]] = {
    "__setattr__": _write, "__delattr__": _write, "swap_tensor": _write,
    "requires_grad_": _train, "set_trainable": _train,
    "register_forward_hook": _hook_module, "register_forward_pre_hook": _hook_module,
    "register_hook": _hook_tensor, "retain_grad": _hook_tensor,
    "_engine_run_backward": _run_backward,
}  # fmt: skip
_OWNERS: dict[str, Any] = {
    "register_hook": torch.Tensor, "retain_grad": torch.Tensor, "set_trainable": HandleOps,
    "swap_tensor": named_members, "_engine_run_backward": torch.autograd,
}  # fmt: skip
_PLAIN = {
    (owner, name): getattr(owner, name)
    for name in _CHANGES
    for owner in (_OWNERS.get(name, nn.Module),)
}
