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
from infinity.modules.handles.handle_tensor import (
    Handle,
    find_handles,
    plain_value,
    refuse_parametrization,
    replace_handles,
    set_gradient,
)
from infinity.modules.handles.torch_functions import TENSOR, members, was_called_by
from infinity.private.torch import (
    get_grad_fn_or_grad_acc,
    has_compatible_shallow_copy_type,
    parse_to,
)

__all__ = ["Handle", "find_handles", "replace_handles"]


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
        return plain_value(handle)  # A state value gives a tensor that outlives the engine.
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
        return handle.make_data(is_state=True)
    return handle if handle.is_state else NotImplemented


def _refuse_reshape(handle: Handle, *args: Any, **kwargs: Any) -> Any:
    raise ParameterNotResident(
        handle.name_in_model,
        "its shape and its memory are those it was offloaded with; change them before "
        "infinity.offload",
    )


def _array(handle: Handle, *args: Any, **kwargs: Any) -> Any:
    if handle.requires_grad and not kwargs.get("force"):
        torch.empty(0, requires_grad=True).numpy()  # Raises the message of torch.
    if handle.is_state:
        return handle.in_memory().__array__(*args)
    return handle.detach().__array__(*args) if args else handle.detach().numpy()


def _convert_to(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda handle, *args, **kwargs: _converted(handle, None, dtype)


def _move_to(kind: str) -> Callable[..., Any]:
    return lambda handle, *args, **kwargs: _converted(handle, torch.device(kind), None)


def _memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """Asks the mirror of a state value for its memory."""

    def ask(handle: Handle, *args: Any, **kwargs: Any) -> Any:
        if handle.is_state:
            return function(handle.in_memory(), *args, **kwargs)
        return _refuse_storage(handle)

    return ask


def _refuse_storage(handle: Handle, *args: Any, **kwargs: Any) -> NoReturn:
    raise ParameterNotResident(
        handle.name_in_model,
        "it has no storage while released; use `with infinity.gather(module):`",
    )


def _data_ptr(handle: Handle) -> int:
    if handle.is_state:
        return handle.in_memory().data_ptr()
    # PEFT compares the addresses of embedding and head after it has merged adapters into them.
    if sys._getframe(2).f_globals.get("__name__", "").startswith("peft."):
        return id(handle.owner.module_handle(handle.name_in_model))
    return _refuse_storage(handle)


# -- Gradients: a handle stands for one leaf of the graph, or for the leaves of its tiles ---------


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` for handles. The backward itself fetches the parameters it needs."""
    if find_handles(outputs):
        return NotImplemented
    tensors = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    leaves = [_leaves_of(tensor) for tensor in tensors]
    wanted = [leaf for tiles in leaves for leaf in tiles]
    flat = iter(torch.autograd.grad(outputs, wanted, *args, **kwargs))
    dim = 1 if kwargs.get("is_grads_batched") else 0
    return tuple(_joined([next(flat) for _ in tiles], tiles, dim) for tiles in leaves)


def _leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return tensor.owner.leaves_of(tensor) if isinstance(tensor, Handle) else [tensor]


def _joined(
    parts: list[torch.Tensor | None], leaves: list[torch.Tensor], dim: int
) -> torch.Tensor | None:
    """Joins the gradients of tiles into one gradient; a tile without a gradient counts as zero."""
    first = next((part for part in parts if part is not None), None)
    if len(parts) == 1 or first is None:
        return first
    lead = first.shape[:dim]
    return torch.cat(
        [
            first.new_zeros((*lead, *leaf.shape)) if part is None else part
            for part, leaf in zip(parts, leaves, strict=True)
        ],
        dim,
    )


def backward_of_handles(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.backward(..., inputs=handles)`."""
    inputs = kwargs.get("inputs")
    if inputs is None or find_handles((tensors, args)):
        return NotImplemented
    targets = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    leaves = [leaf for target in targets for leaf in _leaves_of(target)]
    return torch.autograd.backward(tensors, *args, **{**kwargs, "inputs": leaves})


def _register_hook(handle: Handle, hook: Any) -> Any:
    """Registers a hook on the leaf of a handle."""
    if handle.is_gradient:
        return NotImplemented
    return _leaf_of(handle, "a hook").register_hook(hook)


def _view_as(handle: Any, other: Any) -> Any:
    """Returns a tensor whose node `torch.autograd.graph` can inspect; its values are not used."""
    if not was_called_by(get_grad_fn_or_grad_acc):
        return NotImplemented
    leaf = _leaf_of(handle, "a gradient edge")
    return leaf.view_as(leaf)


def _leaf_of(handle: Handle, what: str) -> torch.Tensor:
    leaves = handle.owner.leaves_of(handle)
    if len(leaves) != 1:
        raise UnsupportedError(
            f"{what} of {handle!r}: the parameter is split into {len(leaves)} tiles, each with a "
            "gradient of its own; use the tiles, which model.parameters() yields"
        )
    return leaves[0]


_RESHAPING = members(
    "set_ resize_ resize_as_ as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ "
    "detach_ rename_"
)

Handle.special = {
    torch.autograd.grad: _grad,
    torch.autograd.backward: backward_of_handles,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.view_as: _view_as,
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
    torch.Tensor.cpu: _move_to("cpu"),
    torch.Tensor.cuda: _move_to("cuda"),
    torch.Tensor.data_ptr: _data_ptr,
    **{func: _memory(func) for func in members("untyped_storage storage _typed_storage")},
    has_compatible_shallow_copy_type: lambda *args: True,  # nn.Module._apply calls this.
    torch.Tensor.numpy: _array,
    torch.Tensor.__array__: _array,
    torch.Tensor.__dlpack__: _refuse_storage,
    **dict.fromkeys(_RESHAPING, _refuse_reshape),
    torch.Tensor.share_memory_: _refuse_storage,
    torch.Tensor.pin_memory: _refuse_storage,
}
