"""Finds effects of a block or a program that micro-batches, which take turns, would see in another
order."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules import module as torch_modules

from infinity.errors import UnsupportedError

# The permanent hooks, forwards and attributes of these keep nothing from one micro-batch to the
# next. PEFT registers further hooks for one call of the model (aLoRA, Poly, X-LoRA).
_TRUSTED = frozenset({"torch", "transformers", "peft", "trl", "accelerate", "infinity"})
INSTALLS = frozenset({"torch", "transformers", "infinity"})
_TABLES = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_TABLES = ("_backward_hooks", "_backward_pre_hooks")
# Classes of these modules have no code that a forward runs.
_GROUND = frozenset({"builtins", "abc", "typing", "collections", "enum"})
_BESIDE = {"numpy", "tqdm", ""}  # No loss depends on a progress bar.
_NOT_OWN = _TRUSTED | _GROUND | _BESIDE | (sys.stdlib_module_names - {"__main__"})
_INSTEAD = "accumulate micro-batches by several backward() calls instead"
# Of tensors that got a hook, or keep their gradient, while micro-batches take turns.
hooked_nodes: set[Node] = set()


def is_trusted(found: Any, packages: frozenset[str] = _TRUSTED) -> bool:
    """Whether a function, a class or an object with a call is of one of these packages."""
    while isinstance(found, functools.partial):
        found = found.func
    return str(getattr(found, "__module__", "")).partition(".")[0] in packages


def is_own(found: Any) -> bool:
    """Whether a class or function, or a class that it derives from, is a program's own."""
    classes = found.__mro__ if isinstance(found, type) else (found,)
    names = {str(getattr(cls, "__module__", "")).partition(".")[0] for cls in classes}
    return not names <= _NOT_OWN


def foreign_hook(named: Mapping[str, nn.Module]) -> tuple[str, Any] | None:
    """Returns the first forward hook of a program's own and the name of its module, or None.

    named: the modules of a model
    """
    for name, hook in hooks_of(named):
        if not is_trusted(hook):
            return name, hook
    return None


def hooks_of(
    named: Mapping[str, nn.Module], tables: Sequence[str] = _TABLES
) -> Iterator[tuple[str, Any]]:
    """Yields the hooks of modules, and the names of their modules."""
    for name, module in named.items():
        for table in tables:
            for hook in module.__dict__[table].values():
                yield name or type(module).__name__, hook
    for table in tables:
        for hook in getattr(torch_modules, f"_global{table}").values():
            yield "every module", hook


def own_code(model: nn.Module) -> str | None:
    """Returns the first module of a model whose class, or backward hook, is a program's own, with
    that class or hook; or None.

    What such code keeps, in objects, globals or closures, from one micro-batch to the next cannot
    be seen.
    """
    named = dict(model.named_modules())
    for name, module in named.items():
        for cls in type(module).__mro__:
            if not is_trusted(cls, _TRUSTED | _GROUND):
                return f"{name or 'the model'} is of the class {describe(cls)}"
    for name, hook in hooks_of(named, BACKWARD_TABLES):
        if not is_trusted(hook):
            return f"{name} has the backward hook {describe(hook)}"
    return None


def own_method(cls: type, harmless: frozenset[str]) -> str | None:
    """Returns the first method of a program's own that a class has, except those with a name that
    is `harmless`; or None."""
    for base in cls.__mro__:
        if is_trusted(base, _TRUSTED | _GROUND):
            continue
        for name, value in vars(base).items():
            if callable(value) and name not in harmless:
                return f"{base.__name__}.{name}"
    return None


def replaced_forward(model: nn.Module) -> str | None:
    """Returns the name of the first module whose `forward` a program has replaced, or None."""
    for name, module in model.named_modules():
        if "forward" in module.__dict__ and not is_trusted(module.__dict__["forward"]):
            return name or type(module).__name__
    return None


def refuse_hook(name: str, hook: Any) -> None:
    """Raises UnsupportedError for a forward hook of the module with this name."""
    raise UnsupportedError(
        f"{name} has the forward hook {describe(hook)}. All micro-batches pass a block before the "
        "first of them computes its loss, and the forward of a block is repeated, so a hook that "
        f"stores or counts would mix them; remove the hook, or {_INSTEAD}"
    )


def describe(hook: Any) -> str:
    """Returns the name of a hook with its module."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{getattr(hook, '__module__', '?')}.{name}"
