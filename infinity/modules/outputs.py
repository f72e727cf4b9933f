"""What a module returns: its tensors, wherever they are, and copies in the place of some of them.

Looked into are tuples, lists, sets, mappings, and the attributes of other objects, with and without
`__slots__`; not modules, classes and functions. One traversal says what is found and what is
replaced, so that no tensor is seen by one and missed by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from infinity.errors import UnsupportedError

# An output may lead to the rest of the program, by objects that know each other.
_MOST_DEPTH = 12

_NOT_LOOKED_INTO = (
    nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Node,
    str, bytes, int, float, complex, range, torch.dtype, torch.device, torch.Generator,
)  # fmt: skip


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in an output."""
    seen: dict[int, Any] = {}  # Kept, so that no id is given anew.
    waiting = [(tree, 0)]
    while waiting:
        here, depth = waiting.pop()
        if isinstance(here, torch.Tensor):
            yield here
        elif here is not None and id(here) not in seen and depth <= _MOST_DEPTH:
            seen[id(here)] = here
            waiting += [(value, depth + 1) for _, value in reversed(_parts_of(here))]


def detach_from_parameters(output: Any, is_parameter_memory: Callable[[torch.Tensor], bool]) -> Any:
    """The output with every view of a parameter replaced by a copy, in place where it is mutable.

    A parameter's memory goes away when its module is left; class tokens and latents are returned as
    views of it. What was one tensor in two places is one copy in both.
    """
    return _detached(output, is_parameter_memory, {}, [], 0)


def _detached(
    tree: Any,
    is_parameter_memory: Callable[[torch.Tensor], bool],
    done: dict[int, Any],
    kept: list[Any],
    depth: int,
) -> Any:
    """`done`: what came of everything by its id. `kept`: all of it, so that no id is given anew."""
    if tree is None or depth > _MOST_DEPTH:
        return tree
    if id(tree) in done:
        return done[id(tree)]
    kept.append(tree)
    if isinstance(tree, torch.Tensor):
        done[id(tree)] = tree.clone() if is_parameter_memory(tree) else tree
        return done[id(tree)]
    done[id(tree)] = tree  # It may lead to itself.
    changed = {}
    for key, value in _parts_of(tree):
        copy = _detached(value, is_parameter_memory, done, kept, depth + 1)
        if copy is not value:
            changed[key] = copy
    if changed:
        done[id(tree)] = _with(tree, changed)
    return done[id(tree)]


def _parts_of(tree: Any) -> list[tuple[Any, Any]]:
    """What a container or an object holds, by index, key or attribute; of a set by itself."""
    if isinstance(tree, (tuple, list)):
        return list(enumerate(tree))
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (set, frozenset)):
        return [(each, each) for each in tree]
    if isinstance(tree, _NOT_LOOKED_INTO):
        return []
    names = [*getattr(tree, "__dict__", ()), *_params_of(type(tree))]
    return [(name, object.__getattribute__(tree, name)) for name in names if _has(tree, name)]


def _params_of(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        params = vars(base).get("__slots__", ())
        for name in (params,) if isinstance(params, str) else params:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name


def _has(tree: Any, name: str) -> bool:
    try:
        object.__getattribute__(tree, name)
    except AttributeError:
        return False  # A slot that was never set.
    return True


def _with(tree: Any, changed: dict[Any, Any]) -> Any:
    """The container or object with other parts: itself where it is mutable."""
    if isinstance(tree, tuple):
        return _tuple_with(tree, changed)
    if isinstance(tree, frozenset):
        return type(tree)(changed.get(each, each) for each in tree)
    if isinstance(tree, set):
        tree.difference_update(changed)
        tree.update(changed.values())
    elif isinstance(tree, (list, MutableMapping)):
        for key, value in changed.items():
            tree[key] = value
    elif isinstance(tree, Mapping):
        raise UnsupportedError(
            f"a module returns parameters in a {type(tree).__name__}, where no copy can be put in "
            "their place; clone them in its forward, or return a dict"
        )
    else:
        for name, value in changed.items():
            object.__setattr__(tree, name, value)  # Frozen dataclasses, too.
    return tree


def _tuple_with(tree: tuple[Any, ...], changed: dict[int, Any]) -> Any:
    parts = [changed.get(index, each) for index, each in enumerate(tree)]
    if hasattr(tree, "n_sequence_fields"):  # torch.return_types
        return type(tree)(parts)
    new = tuple.__new__(type(tree), parts)
    if hasattr(tree, "__dict__"):
        vars(new).update(vars(tree))
    return new
