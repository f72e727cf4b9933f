"""Replacements in PyTorch for the whole process, so that no use of a parameter escapes.

Everything gives what the original gives where no handle and no memory of a parameter is concerned,
and nothing is ever put back: another module may have kept what it found.

  Function.apply, compiled functions of torch.jit, torch.autograd.backward(inputs=)
      enter autograd past `__torch_function__`
  Tensor.data, Tensor.numpy, Tensor.__dlpack__
      hand out memory past the version counters
  Tensor.grad
      would be None on a compute parameter, because the gradient leaves it for the store
  torch.utils.swap_tensors
      would exchange a handle and leave the module with the old value
  DistributedDataParallel, DataParallel
      would wait for gradients of handles, or copy handles, beside the engine's own ranks

Note [Functions of autograd]
  A handle passed to one would be a leaf beside the compute parameter, and its gradient would never
  be collected. The function receives compute parameters instead. Their units are in use while the
  forward of the function runs, and while its node of the backward runs. `ctx.save_for_backward`,
  memory addresses and reentrant checkpoints then work as in plain PyTorch, and all gradients of a
  parameter are added in one sum, in the order of plain autograd.

Note [The lower apply]
  `MyFunction.apply` is often bound when its file is imported, before anything is offloaded. Up to
  PyTorch 2.13, a bound `Function.apply` is Python and still calls `apply` of its base class, so the
  method of the base class is replaced. From 2.14 on it is a method in C, which calls nothing that
  could be replaced: the bound methods that exist are found, and those that hold them get others.

Note [Replaced attributes]
  PyTorch calls no hook when `.data` of a plain parameter is read. The class itself gives the
  originals: `torch.Tensor.data` is what it was for `__torch_function__` and its tables.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import BuiltinMethodType, CellType, MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import Function
from torch.overrides import handle_torch_function, has_torch_function

from infinity.modules.handles.edits import WeightEdits
from infinity.modules.handles.handle import (
    Handle,
    backward_of_handles,
    find_handles,
    refuse_swap,
    refuse_wrapper,
)
from infinity.modules.handles.originals import followed, plain_swap_tensors
from infinity.modules.handles.torch_functions import TENSOR
from infinity.private.torch import FunctionBase, ScriptFunction, ScriptMethod, SingleLevelFunction

_log = logging.getLogger("infinity")


def install() -> None:
    """Replaces everything but `swap_tensors`, once in a process."""
    _install_backward()
    for name in ("data", "numpy", "__dlpack__"):
        original = getattr(TENSOR, name)
        if not isinstance(vars(TENSOR).get(name), _Observed):
            setattr(TENSOR, name, (_Method if callable(original) else _Property)(original))
    if not isinstance(vars(TENSOR).get("grad"), _Observed):
        TENSOR.grad = _Gradient(TENSOR.grad)
    if "apply" in vars(SingleLevelFunction):
        return
    SingleLevelFunction.apply = classmethod(_apply)
    for wrapper in (nn.parallel.DistributedDataParallel, nn.DataParallel):
        wrapper.__init__ = _of_plain_modules(wrapper.__init__)  # type: ignore[method-assign]
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


def _of_plain_modules(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_plain(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        offloaded = [name for name, p in module.named_parameters() if isinstance(p, Handle)]
        if offloaded:
            refuse_wrapper(type(wrapper).__name__, offloaded[0])
        begin(wrapper, module, *args, **kwargs)

    return begin_plain


def _looking(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def look(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        named = {key: followed(argument) for key, argument in kwargs.items()}
        arguments = (tuple(map(followed, args)), named)
        for handle in find_handles(arguments):
            return handle.owner.compute_with(partial(look, compiled), *arguments, changes=())
        return call(compiled, *args, **kwargs)

    return look


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    args = tuple(map(followed, args))
    kwargs = {key: followed(argument) for key, argument in kwargs.items()}
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Handle):
            return _apply_to_parameters(cls, argument.owner, args, kwargs)
    return super(SingleLevelFunction, cls).apply(*args, **kwargs)


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


def _install_backward() -> None:
    """Makes `torch.autograd.backward` look for handles among its `inputs`.

    That of PyTorch 2.10 does not, and no gradient of these would arrive.
    """
    plain = torch.autograd.backward
    if "has_torch_function" in plain.__code__.co_names:
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def asking(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(*args, **kwargs).arguments
        inputs = named.get("inputs")
        targets = (inputs,) if isinstance(inputs, torch.Tensor) else inputs or ()
        tensors = tuple(target for target in targets if isinstance(target, torch.Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(asking, tensors, named.pop("tensors"), **named)
        return plain(*args, **kwargs)

    torch.autograd.backward = asking
    Handle.special = {**Handle.special, asking: backward_of_handles}


# -- Memory that code takes past the version counters ----------------------------------------------

# By the address of the storage, for the storages of all engines. Keeps no engine alive.
_owners: weakref.WeakValueDictionary[int, WeightEdits] = weakref.WeakValueDictionary()


def observe_memory(storages: Iterable[int], edits: WeightEdits) -> None:
    """Begins to report accesses to the memory of one engine's parameters."""
    for storage in storages:
        _owners[storage] = edits


def forget_memory(storages: Iterable[int]) -> None:
    """Undoes `observe_memory`."""
    for storage in storages:
        _owners.pop(storage, None)


def _owner_of(tensor: Any) -> WeightEdits | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return None  # A handle, or another subclass with memory of its own kind.
    try:
        return _owners.get(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # Sparse, or a tensor of a function transform: it has no storage.


_COMPILERS = ("torch._subclasses", "torch._dynamo", "torch._functorch", "torch._inductor")


class _Observed:
    """An attribute of torch.Tensor whose reading is observed. See Note [Replaced attributes]."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.__doc__ = original.__doc__


class _Property(_Observed):
    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        if tensor is None:
            return self._original
        owner = _owner_of(tensor) if _owners else None
        if owner is None:
            return self._original.__get__(tensor, kind)
        params = owner.begin_raw(tensor)
        view = self._original.__get__(tensor, kind)
        owner.note_raw(params, view)
        return view

    def __set__(self, tensor: Any, value: Any) -> None:
        self._original.__set__(tensor, value)

    def __delete__(self, tensor: Any) -> None:
        self._original.__delete__(tensor)


class _Gradient(_Observed):
    """`.grad`: a compute parameter without one of its own has that of its handle."""

    def _stored(self, tensor: Any) -> Handle | None:
        """Returns the handle of a compute parameter without a gradient of its own."""
        owner = _owner_of(tensor) if _owners else None
        # Compilers look at the gradients of their inputs.
        if owner is None or sys._getframe(2).f_globals["__name__"].startswith(_COMPILERS):
            return None
        return owner.handle_of(tensor) if self._original.__get__(tensor) is None else None

    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        if tensor is None:
            return self._original
        handle = self._stored(tensor)
        return self._original.__get__(tensor, kind) if handle is None else handle.grad

    def __set__(self, tensor: Any, value: Any) -> None:
        handle = self._stored(tensor)
        if handle is None:
            self._original.__set__(tensor, value)
        else:
            handle.grad = value

    def __delete__(self, tensor: Any) -> None:
        self.__set__(tensor, None)


class _Method(_Observed):
    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        if tensor is None:
            return self._original
        bound = self._original.__get__(tensor, kind)
        owner = _owner_of(tensor) if _owners else None
        if owner is None:
            return bound

        def call(*args: Any, **kwargs: Any) -> Any:
            params = owner.begin_raw(tensor)
            view = bound(*args, **kwargs)
            # A capsule cannot be followed; the tensor or array that is made of it holds `tensor`.
            owner.note_raw(params, tensor if self._original.__name__ == "__dlpack__" else view)
            return view

        return call


# -- Exchanges of tensors --------------------------------------------------------------------------


def refuse_swaps(tensors: Iterable[Any]) -> None:
    """Makes `torch.utils.swap_tensors` refuse these handles and compute parameters, and any other
    handle. A swap would exchange the objects and leave the module with the old value."""
    torch.utils.swap_tensors = _guarded_swap_tensors
    for tensor in tensors:
        tensor._is_guarded = weakref.ref(tensor)  # Where the function was imported before.


def _guarded_swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    for tensor in (t1, t2):
        if hasattr(tensor, "name_in_model") or hasattr(tensor, "_offloaded_by"):
            refuse_swap(tensor)
    plain_swap_tensors(t1, t2)
