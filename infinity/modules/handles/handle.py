"""The handle with its table of functions: those of torch with a meaning of their own for handles.

`handle_tensor.py` says what a handle is. Every other function of torch goes to the owner of the
handle, which runs the function with real tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from infinity.errors import ParameterNotResident, UnsupportedError
from infinity.modules.handles import handle_gradients
from infinity.modules.handles.handle_tensor import (
    Handle,
    find_handles,
    refuse_parametrization,
    replace_handles,
    set_gradient,
    targets,
)
from infinity.modules.handles.torch_names import TENSOR, members, was_called_by
from infinity.private.torch import has_compatible_shallow_copy_type, parse_to

__all__ = ["Handle", "find_handles", "replace_handles", "targets"]


def _get_data(handle: Handle) -> Handle:
    return handle if handle.is_gradient or handle.is_data else handle.make_data()


def _set_data(handle: Any, value: torch.Tensor) -> Any:
    if not isinstance(handle, Handle):
        raise ParameterNotResident(
            value.name_in_model,  # type: ignore[attr-defined]
            "no other tensor can share its memory; assign a clone: tensor.data = weight.clone()",
        )
    if handle.is_same(value):
        return
    if isinstance(value, Handle) and value.kept is not None:
        value = value.kept
    if handle.is_gradient:
        set_gradient(handle, value, is_other=False)
    elif handle.is_data:
        handle.kept = value
    else:
        _set_values(handle, value)


def _set_values(handle: Handle, value: torch.Tensor) -> None:
    if isinstance(value, Handle):
        raise ParameterNotResident(
            handle.name_in_model,
            f"it cannot share its memory with {value.name_in_model!r}; under torch.no_grad() use "
            "copy_",
        )
    if not _is_on(handle, value.device) or value.dtype is not handle.dtype:
        _refuse_conversion(handle, value.device, value.dtype)
    if value.shape != handle.shape:
        raise ParameterNotResident(
            handle.name_in_model,
            f"expected data of shape {tuple(handle.shape)}, got {tuple(value.shape)}: it has its "
            "place on the tiers. Change shapes (vocabularies, heads) before infinity.offload",
        )
    handle.lose_aliases(is_gradient=False)
    handle.make_data().copy_(value)
    # A graph that saved the old value, which is overwritten, must find out.
    handle.owner.increment_version(handle)


def _set_requires_grad(handle: Handle, value: bool) -> None:
    if not handle.is_gradient and not handle.is_data:
        handle.owner.set_trainable(handle, value)
    elif value:
        what = "gradient" if handle.is_gradient else ".data"
        raise UnsupportedError(
            f"the {what} of {handle.name_in_model!r} rests on its tier and cannot require a "
            "gradient of its own; take that of a detached clone"
        )


def _requires_grad_(handle: Handle, requires_grad: bool = True) -> Handle:
    _set_requires_grad(handle, requires_grad)
    return handle


def _zero_(handle: Handle) -> Any:
    if not handle.is_gradient:
        return NotImplemented
    handle.owner.zero_gradient(handle)  # nn.Module.zero_grad(set_to_none=False) calls this.
    return handle


def _copy_(handle: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    return handle if source is handle else NotImplemented


def _refuse_grad_hook(handle: Handle, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        f"a hook after the accumulation of the gradient of {handle.name_in_model!r} would find no "
        "gradient: the gradient moves to its tier first. Use register_hook"
    )


def _is_on(handle: Handle, device: torch.device | None) -> bool:
    return device is None or (
        device.type == handle.device.type
        and (device.index is None or handle.device.index in (None, device.index))
    )


def _converted(handle: Handle, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Returns the handle if `.to()` changes nothing. A copy in another dtype, or on the host, is
    computed like any function. Refuses another device, because the engine owns the device."""
    if _is_on(handle, device) and dtype in (None, handle.dtype):
        return handle
    if handle.is_gradient or _is_on(handle, device) or torch.device("cpu") == device:
        return NotImplemented
    return _refuse_conversion(handle, device, dtype)


def _refuse_conversion(
    handle: Handle, device: torch.device | None, dtype: torch.dtype | None
) -> NoReturn:
    raise UnsupportedError(
        f"{handle.name_in_model!r} cannot be converted from {handle.dtype} on {handle.device} to "
        f"{dtype or handle.dtype} on {device or handle.device}: its tier owns it. Choose the dtype "
        "with precision.compute and the device with tiers.device.kind before infinity.offload"
    )


def _to(handle: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(handle, Handle):
        other = args[0]  # tensor.to(handle) reads only dtype and device.
        return handle.to(device=other.device, dtype=other.dtype)
    if kwargs.get("copy"):
        return NotImplemented
    if args and isinstance(args[0], torch.Tensor):
        return _converted(handle, args[0].device, args[0].dtype)
    device, dtype, _, _ = parse_to(
        *args, **{key: value for key, value in kwargs.items() if key in ("device", "dtype")}
    )
    return _converted(handle, device, dtype)


def _detach(handle: Handle) -> Any:
    # nn.Parameter(handle) detaches its argument and would refuse the plain tensor that results with
    # a message about subclasses.
    if was_called_by(torch.nn.Parameter.__new__):
        refuse_parametrization(handle)
    if was_called_by(torch.nn.Module._save_to_state_dict):
        return handle.owner.state_value(handle)
    return NotImplemented


def _refuse_reshape(handle: Handle, *args: Any, **kwargs: Any) -> Any:
    raise ParameterNotResident(
        handle.name_in_model,
        "its shape and its memory are those it was offloaded with; change them before "
        "infinity.offload",
    )


def _array(handle: Handle, *args: Any, **kwargs: Any) -> Any:
    if handle.requires_grad and not kwargs.get("force"):
        torch.empty(0, requires_grad=True).numpy()  # Raises the message of torch.
    return handle.detach().__array__(*args) if args else handle.detach().numpy()


def _rests_as_is(handle: Handle) -> bool:
    return handle.device.type == "cpu"


def _convert_to(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda handle, *args, **kwargs: _converted(handle, None, dtype)


def _move_to(kind: str) -> Callable[..., Any]:
    return lambda handle, *args, **kwargs: _converted(handle, torch.device(kind), None)


def _refuse_storage(handle: Handle, *args: Any, **kwargs: Any) -> NoReturn:
    raise ParameterNotResident(
        handle.name_in_model,
        "it has no storage while released; use `with infinity.gather(module):`",
    )


def _data_ptr(handle: Handle) -> int:
    # PEFT compares the addresses of embedding and head after it has merged adapters into them.
    if sys._getframe(2).f_globals.get("__name__", "").startswith("peft."):
        return id(handle.owner.module_handle(handle.name_in_model))
    return _refuse_storage(handle)


_RESHAPING = members(
    "set_ resize_ resize_as_ as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ "
    "detach_ rename_"
)

Handle.functions = {
    torch.autograd.grad: handle_gradients.grad,
    torch.autograd.backward: handle_gradients.backward,
    torch.Tensor.register_hook: handle_gradients.register_hook,
    torch.Tensor.view_as: handle_gradients.view_as,
    TENSOR.data.__get__: _get_data,
    TENSOR.data.__set__: _set_data,
    TENSOR.requires_grad.__set__: _set_requires_grad,
    torch.Tensor.requires_grad_: _requires_grad_,
    torch.Tensor.zero_: _zero_,
    torch.Tensor.copy_: _copy_,
    torch.Tensor.register_post_accumulate_grad_hook: _refuse_grad_hook,
    torch.Tensor.detach: _detach,
    torch.Tensor.to: _to,
    torch.Tensor.half: _convert_to(torch.float16),
    torch.Tensor.bfloat16: _convert_to(torch.bfloat16),
    torch.Tensor.double: _convert_to(torch.float64),
    torch.Tensor.float: _convert_to(torch.float32),
    torch.Tensor.cpu: lambda h, *a, **k: h if _rests_as_is(h) else NotImplemented,
    torch.Tensor.cuda: _move_to("cuda"),
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.untyped_storage: _refuse_storage,
    torch.Tensor.storage: _refuse_storage,
    has_compatible_shallow_copy_type: lambda *args: True,  # nn.Module._apply calls this.
    torch.Tensor.numpy: _array,
    torch.Tensor.__array__: _array,
    torch.Tensor.__dlpack__: _refuse_storage,
    **dict.fromkeys(_RESHAPING, _refuse_reshape),
    torch.Tensor.share_memory_: _refuse_storage,
    torch.Tensor.pin_memory: _refuse_storage,
}
