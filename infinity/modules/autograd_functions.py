"""Functions of the user's own (`torch.autograd.Function`) that are given handles.

`Function.apply` is the one door to autograd that does not ask `__torch_function__`. A handle that
went through it would be a leaf beside the compute parameter, and its gradient would wait on it for
nobody. So the door asks here: the function is given compute parameters, which are held while its
forward runs, and while its node of the backward does. `ctx.save_for_backward`, addresses of memory
and reentrant checkpoints then work as in plain PyTorch, and all gradients of a parameter meet in
one sum, in the order of plain autograd.

Note [The lower of two doors]
  `MyFunction.apply` is often bound when its file is imported, long before anything is offloaded. A
  bound `Function.apply` still calls `apply` of the class below it, so it is that one which asks.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.function import _SingleLevelFunction

from infinity.modules.handle import Handle
from infinity.modules.originals import Follower


def install() -> None:
    """From now on every `Function.apply` of the process asks whether it was given handles."""
    if "apply" not in vars(_SingleLevelFunction):
        _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    for each in (*args, *kwargs.values()):
        if isinstance(each, Follower):
            args = tuple(map(_followed, args))
            return _apply(cls, *args, **{key: _followed(each) for key, each in kwargs.items()})
        if isinstance(each, Handle):
            return _apply_to_parameters(cls, each.owner, args, kwargs)
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)


def _followed(given: Any) -> Any:
    return given.handle if isinstance(given, Follower) else given


def _apply_to_parameters(
    cls: Any, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The handles of one owner are replaced; those of another owner when the function is applied
    anew. Lists stay the objects they are: no gradient flows to what is in them."""
    given = [*args, *kwargs.values()]
    mine = {id(each): each for each in given if isinstance(each, Handle) and each.owner is owner}

    def apply(*parameters: Any) -> Any:
        real = dict(zip(mine, parameters, strict=True))
        return _apply(
            cls,
            *(real.get(id(each), each) for each in args),
            **{key: real.get(id(each), each) for key, each in kwargs.items()},
        )

    apply.__name__ = cls.__name__  # For messages.
    return owner.compute_with(apply, tuple(mine.values()), {}, changes=None)
