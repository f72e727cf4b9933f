"""Calls of the user's `torch.autograd.Function`, and of functions of torch.jit, with handles as
arguments.

These are the entries to autograd that bypass `__torch_function__`. A handle passed to one would be
a leaf beside the compute parameter, and its gradient would never be collected. Therefore they are
replaced: the function receives compute parameters. Their units are in use
while the forward of the function runs, and while its node of the backward runs.
`ctx.save_for_backward`, memory addresses and reentrant checkpoints then work as in plain PyTorch,
and all gradients of a parameter are added in one sum, in the order of plain autograd.

Note [The lower apply]
  `MyFunction.apply` is often bound when its file is imported, before anything is offloaded. A bound
  `Function.apply` still calls `apply` of its base class, so the method of the base class is
  replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction

from infinity.modules.handle import Handle, find_handles
from infinity.modules.originals import Follower


def install() -> None:
    """Makes every `Function.apply` and every compiled function of torch.jit of the process look for
    handles among its arguments."""
    if "apply" not in vars(_SingleLevelFunction):
        _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            kind.__call__ = _looking(kind.__call__)  # type: ignore[method-assign]


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
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)


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
