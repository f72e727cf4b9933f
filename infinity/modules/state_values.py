"""What `model.state_dict()` holds of an offloaded model: values that are read when they are used.

A state dictionary names every parameter, and who asks for one often wants few of them: PEFT saves
the adapter and drops the rest. So a value has shape, dtype and device, and fetches its bytes for
each operation, as the parameter's handle does. It shows the parameter as it is at that moment, as
in plain PyTorch; `clone`, `copy.deepcopy`, `torch.save` and conversions give plain tensors.

Note [Storage]
  Who asks for memory (safetensors does, to find tensors that share it) gets that of a copy, which
  the value keeps: an address has to stay what it was. From then on the copy is what is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from infinity.errors import UnsupportedError
from infinity.modules.handle import Handle, targets
from infinity.modules.torch_names import PLAIN, TENSOR, members

_OF_STORAGE = members("untyped_storage storage _typed_storage data_ptr __array__ numpy")
_SETTERS = {TENSOR.requires_grad.__set__, torch.Tensor.requires_grad_}


class StateValue(torch.Tensor):
    """The value of one parameter, without a gradient."""

    handle: Handle
    kept: torch.Tensor | None

    @staticmethod
    def make(handle: Handle) -> StateValue:
        with torch._C.DisableTorchFunctionSubclass():
            value = torch.Tensor._make_wrapper_subclass(
                StateValue,
                handle.shape,
                strides=handle.stride(),
                dtype=handle.dtype,
                device=handle.device,
            )
        value.handle, value.kept = handle, None
        return value

    def read(self) -> torch.Tensor:
        """A plain tensor: a copy that is the caller's, or the one that this value keeps."""
        if self.kept is not None:
            return self.kept
        with torch.no_grad():
            return self.handle.clone()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.read())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self.read().clone()
        return copy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SPECIAL:
            return _SPECIAL[func](*args, **kwargs)
        as_handles = tree_map_only(StateValue, lambda value: value.handle, (args, kwargs))
        if targets(func, *as_handles) or getattr(func, "__name__", "") == "__set__":
            return _write(func, args, kwargs, *as_handles)
        if func in _OF_STORAGE:
            args[0].kept = args[0].read()
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
        """Reached only where __torch_function__ was switched off."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func._schema.is_mutable:
            raise UnsupportedError(f"{func} would change a copy; clone the value first")
        args, kwargs = tree_map_only(StateValue, StateValue.read, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def plain_value(value: torch.Tensor) -> torch.Tensor:
    """A plain tensor in the place of a state value; anything else as it is."""
    return value.read() if isinstance(value, StateValue) else value


def is_value_of(value: Any, tensor: Any) -> bool:
    """Whether a value of a state dictionary is that of `tensor`, or `tensor` itself."""
    return (value.handle if isinstance(value, StateValue) else value) is tensor


def _write(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handles: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Writes to the parameter, or is refused, as the same call on its handle."""
    if func in _SETTERS:
        is_wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if is_wanted:
            _refuse_parameter(args[0])
        return args[0]
    with torch.no_grad():
        func(*handles, **named)
    for each in (*args, *kwargs.values()):
        if isinstance(each, StateValue):
            each.kept = None
    return args[0] if args else None


def _detach(value: StateValue) -> StateValue:
    # nn.Parameter(value) detaches what it is given.
    if sys._getframe(2).f_code is torch.nn.Parameter.__new__.__code__:
        _refuse_parameter(value)
    return value


def _refuse_parameter(value: StateValue) -> None:
    raise UnsupportedError(
        f"the value of {value.handle.name_in_model!r} is read from its tier when it is used, so "
        "no parameter can be made of it; clone() it first"
    )


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.detach: _detach,
    TENSOR.data.__get__: lambda value: value,
    TENSOR.grad.__get__: lambda value: None,
}
