"""Calls of the user's `torch.autograd.Function`, and of functions of torch.jit, with handles as
arguments.

These are the entries to autograd that bypass `__torch_function__`. A handle passed to one would be
a leaf beside the compute parameter, and its gradient would never be collected. Therefore they are
replaced: the function receives compute parameters. Their units are in use
while the forward of the function runs, and while its node of the backward runs.
`ctx.save_for_backward`, memory addresses and reentrant checkpoints then work as in plain PyTorch,
and all gradients of a parameter are added in one sum, in the order of plain autograd.

Note [The lower apply]
  `MyFunction.apply` is often bound when its file is imported, before anything is offloaded. Up to
  PyTorch 2.13, a bound `Function.apply` is Python and still calls `apply` of its base class, so the
  method of the base class is replaced. From 2.14 on it is a method in C, which calls nothing that
  could be replaced: the bound methods that exist are found, and those that hold them get others.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinMethodType, CellType, MethodType
from typing import Any

from torch.autograd.function import Function

from infinity.modules.handles import handle_gradients
from infinity.modules.handles.handle import Handle, find_handles
from infinity.modules.handles.originals import Follower
from infinity.private.torch import (
    FunctionBase,
    ScriptFunction,
    ScriptMethod,
    SingleLevelFunction,
)

_log = logging.getLogger("infinity")


def install() -> None:
    """Makes every `Function.apply` and every compiled function of torch.jit of the process look for
    handles among its arguments, and `torch.autograd.backward` among its inputs."""
    handle_gradients.install()
    if "apply" in vars(SingleLevelFunction):
        return
    SingleLevelFunction.apply = classmethod(_apply)
    for kind in (ScriptFunction, ScriptMethod):
        kind.__call__ = _looking(kind.__call__)
    if vars(Function)["apply"] is vars(FunctionBase)["apply"]:
        Function.apply = classmethod(_apply)  # type: ignore[assignment]
        is_frozen = gc.get_freeze_count() > 0  # Frozen objects are not shown.
        gc.unfreeze()
        _replace_bound()
        if is_frozen:
            gc.freeze()


def _replace_bound() -> None:
    """Replaces the methods in C that were bound earlier, wherever a name, an attribute, a list, a
    dict, a closure, a partial or a static method holds them. Logs those that stay elsewhere."""
    bound: list[Any] = [
        found
        for found in gc.get_objects()
        if type(found) is BuiltinMethodType
        and found.__name__ == "apply"
        and isinstance(found.__self__, type)
        and issubclass(found.__self__, Function)
    ]
    for early in bound:
        name, later = early.__self__.__name__, MethodType(_apply, early.__self__)
        num_left = 0
        for holder in gc.get_referrers(early):
            num_left += holder is not bound and not _replaced(holder, early, later)
        if num_left:
            _log.warning(
                "%s.apply was bound before infinity.offload, where it cannot be replaced: the "
                "gradient of a weight that is given to it is added by itself; call %s.apply",
                name,
                name,
            )


def _replaced(holder: Any, early: Any, later: Any) -> bool:
    """Puts `later` in the place of `early`. Returns whether `holder` is of a kind that can."""
    if isinstance(holder, CellType):
        holder.cell_contents = later
    elif isinstance(holder, list):
        for index, element in enumerate(holder):
            if element is early:
                holder[index] = later
    elif isinstance(holder, dict):
        names = _names_of(early, holder)
        holder.update(dict.fromkeys(names, later))
        for owner in gc.get_referrers(holder) if "__module__" in holder else ():
            if isinstance(owner, type):  # It caches its attributes.
                for name in names:
                    setattr(owner, name, later)
    elif isinstance(holder, staticmethod):
        staticmethod.__init__(holder, later)
    elif isinstance(holder, partial) and holder.func is early:
        state = later, holder.args, holder.keywords, vars(holder)
        holder.__setstate__(state)  # type: ignore[attr-defined]
    elif hasattr(holder, "__dict__"):  # From Python 3.12 on it holds its attributes itself.
        names = _names_of(early, vars(holder))
        for name in names:
            setattr(holder, name, later)
        return bool(names)
    else:
        return type(holder).__name__ == "frame"
    return True


def _names_of(value: Any, table: Mapping[Any, Any]) -> list[Any]:
    return [name for name, found in table.items() if found is value]


def _looking(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def look(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        named = {key: _followed(argument) for key, argument in kwargs.items()}
        arguments = (tuple(map(_followed, args)), named)
        for handle in find_handles(arguments):
            return handle.owner.compute_with(partial(look, compiled), *arguments, changes=())
        return call(compiled, *args, **kwargs)

    return look


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Follower):
            args = tuple(map(_followed, args))
            return _apply(
                cls, *args, **{key: _followed(argument) for key, argument in kwargs.items()}
            )
        if isinstance(argument, Handle):
            return _apply_to_parameters(cls, argument.owner, args, kwargs)
    return super(SingleLevelFunction, cls).apply(*args, **kwargs)


def _followed(argument: Any) -> Any:
    return argument.handle if isinstance(argument, Follower) else argument


def _apply_to_parameters(
    cls: Any, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replaces the handles of one owner. Handles of another owner are replaced when the function is
    applied again. Lists stay the same objects, because no gradient flows into their elements."""
    arguments = [*args, *kwargs.values()]
    own = {
        id(handle): handle
        for handle in arguments
        if isinstance(handle, Handle) and handle.owner is owner
    }

    def apply(*parameters: Any) -> Any:
        real = dict(zip(own, parameters, strict=True))
        return _apply(
            cls,
            *(real.get(id(argument), argument) for argument in args),
            **{key: real.get(id(argument), argument) for key, argument in kwargs.items()},
        )

    # INV-23: gradients arrive at the compute parameters and nowhere else.
    apply.__name__ = cls.__name__  # Shown in messages.
    return owner.compute_with(apply, tuple(own.values()), {}, changes=())
