"""Finds and replaces tensors in the outputs of modules.

The search visits tuples, lists, sets, mappings, and the attributes of other objects, with and
without `__slots__`. It does not visit modules, classes and functions. Finding and replacing use the
same traversal, so both see the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from infinity.errors import UnsupportedError

# An output may lead to the rest of the program through objects that refer to each other.
_MOST_DEPTH = 12

_NOT_LOOKED_INTO = (
    nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Node,
    str, bytes, int, float, complex, range, torch.dtype, torch.device, torch.Generator,
)  # fmt: skip


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns every tensor in an output, once."""
    found: list[torch.Tensor] = []
    _detached(tree, found.append, {}, [], 0)
    return found


def detach_from_parameters(output: Any, is_parameter_memory: Callable[[torch.Tensor], bool]) -> Any:
    """Replaces every view of a parameter in the output with a copy, in place if the container is
    mutable.

    A module's parameters lose their memory when the module ends, but class tokens and latents are
    returned as views of parameters. A tensor that appears twice becomes one copy that appears
    twice.
    """
    if isinstance(output, torch.Tensor):
        return output.clone() if is_parameter_memory(output) else output
    return _detached(output, is_parameter_memory, {}, [], 0)


def _detached(
    tree: Any,
    is_parameter_memory: Callable[[torch.Tensor], object],
    done: dict[int, Any],
    kept: list[Any],
    depth: int,
) -> Any:
    """`done`: the result for every visited object by its id. `kept`: all visited objects, so that
    no id is reused."""
    if tree is None or id(tree) in done:
        return done.get(id(tree))
    kept.append(tree)
    if isinstance(tree, torch.Tensor):
        done[id(tree)] = tree.clone() if is_parameter_memory(tree) else tree
        return done[id(tree)]
    if depth > _MOST_DEPTH:
        return tree
    done[id(tree)] = tree  # It may contain itself.
    changed = {}
    for key, value in _parts_of(tree):
        copy = _detached(value, is_parameter_memory, done, kept, depth + 1)
        if copy is not value:
            changed[key] = copy
    if changed:
        done[id(tree)] = _with(tree, changed)
    return done[id(tree)]


def _parts_of(tree: Any) -> list[tuple[Any, Any]]:
    """Returns the parts of a container or an object by index, key or attribute; the elements of a
    set by themselves."""
    if isinstance(tree, (tuple, list)):
        return list(enumerate(tree))
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (set, frozenset)):
        return [(leaf, leaf) for leaf in tree]
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
        return False  # An unset slot.
    return True


def _with(tree: Any, changed: dict[Any, Any]) -> Any:
    """Returns the container or object with other parts; the same object if it is mutable."""
    if isinstance(tree, tuple):
        return _tuple_with(tree, changed)
    if isinstance(tree, frozenset):
        return type(tree)(changed.get(leaf, leaf) for leaf in tree)
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
            object.__setattr__(tree, name, value)  # Works for frozen dataclasses, too.
    return tree


def _tuple_with(tree: tuple[Any, ...], changed: dict[int, Any]) -> Any:
    parts = [changed.get(index, leaf) for index, leaf in enumerate(tree)]
    if hasattr(tree, "n_sequence_fields"):  # torch.return_types
        return type(tree)(parts)
    new = tuple.__new__(type(tree), parts)
    if hasattr(tree, "__dict__"):
        vars(new).update(vars(tree))
    return new
