"""The values in `model.state_dict()` of an offloaded model, fetched on use.

A state dictionary names every parameter, but its caller often needs few of them: PEFT saves the
adapter and drops the rest. A value therefore has shape, dtype and device, and fetches its bytes for
each operation, as the handle of the parameter does. As in plain PyTorch, it shows the present value
of the parameter. `clone`, `copy.deepcopy`, `torch.save` and conversions return plain tensors.

Note [Storage]
  A caller that asks for memory (safetensors does, to find tensors that share it) gets that of a
  mirror (mirrors.py), which the value makes then and keeps: the address stays, and the bytes follow
  the parameter. A value is no mirror from the start, because a dictionary of mirrors would hold the
  full model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import override

from infinity.errors import UnsupportedError
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.torch_functions import TENSOR, StandIn, members, written
from infinity.private.torch import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    tree_map_only,
)

_OF_STORAGE = members("untyped_storage storage _typed_storage data_ptr __array__ numpy")
_SETTERS = {TENSOR.requires_grad.__set__, torch.Tensor.requires_grad_}


class StateValue(StandIn):
    """The value of one parameter, without a gradient."""

    handle: Handle
    mirror: torch.Tensor | None  # From the first question for memory on.

    @staticmethod
    def make(handle: Handle) -> StateValue:
        """Returns the value of a handle. Reads no bytes."""
        with DisableTorchFunctionSubclass():
            value: StateValue = make_wrapper_subclass(
                StateValue,
                handle.shape,
                strides=handle.stride(),
                dtype=handle.dtype,
                device=handle.device,
            )
        value.handle, value.mirror = handle, None
        return value

    def read(self) -> torch.Tensor:
        """Returns the present value: a plain tensor, a new copy."""
        with torch.no_grad():
            return self.handle.clone()

    def memory(self) -> torch.Tensor:
        """Returns the mirror that has the memory of this value."""
        if self.mirror is None:
            self.mirror = self.handle.detach()
        return self.mirror

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.read())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self.read().clone()
        return copy

    @classmethod
    @override
    def run(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        kwargs = dict(kwargs)
        handles, named = tree_map_only(StateValue, lambda value: value.handle, (args, kwargs))
        if written(func, handles, named, Handle) or getattr(func, "__name__", "") == "__set__":
            return _write(func, args, kwargs, handles, named)
        if func in _OF_STORAGE:
            return func(args[0].memory(), *args[1:], **kwargs)
        args, kwargs = tree_map_only(StateValue, StateValue.read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reached only if __torch_function__ was bypassed."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func._schema.is_mutable:
            raise UnsupportedError(f"{func} would change a copy; clone the value first")
        args, kwargs = tree_map_only(StateValue, StateValue.read, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def plain_value(value: torch.Tensor) -> torch.Tensor:
    """Returns a plain tensor for a state value, and anything else unchanged."""
    return value.read() if isinstance(value, StateValue) else value


def is_value_of(value: Any, tensor: Any) -> bool:
    """Whether a value of a state dictionary is the value of `tensor`, or `tensor` itself."""
    return (value.handle if isinstance(value, StateValue) else value) is tensor


def _write(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handles: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Writes to the parameter, or refuses, as the same call on its handle does."""
    if func in _SETTERS:
        is_wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if is_wanted:
            _refuse_parameter(args[0])
        return args[0]
    with torch.no_grad():
        func(*handles, **named)
    return args[0] if args else None


def _detach(value: StateValue) -> StateValue:
    # nn.Parameter(value) detaches its argument.
    if sys._getframe(2).f_code is torch.nn.Parameter.__new__.__code__:
        _refuse_parameter(value)
    return value


def _refuse_parameter(value: StateValue) -> None:
    raise UnsupportedError(
        f"the value of {value.handle.name_in_model!r} is read from its tier when it is used, so "
        "no parameter can be made of it; clone() it first"
    )


StateValue.special = {
    torch.Tensor.detach: _detach,
    TENSOR.data.__get__: lambda value: value,
    TENSOR.grad.__get__: lambda value: None,
}
