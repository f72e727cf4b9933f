"""What stands in a module while a parameter is away: a tensor without bytes that fails loudly.

A handle is an `nn.Parameter` to everyone who asks: true shape, dtype and device, in
`named_parameters`, in an optimizer's groups. It has no storage. Reading it outside its module
fetches the bytes for that one operation; changing it in place, copying, pickling or converting it
raises an error that names the parameter and the way to do it.

Why a wrapper subclass and nothing simpler: a full-shape tensor over an empty storage crashes the
interpreter when touched, a meta tensor silently computes rubbish in `F.linear`, and a one-element
placeholder broadcasts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.autograd.graph import _get_grad_fn_or_grad_acc

from infinity.errors import ParameterNotResident, UnsupportedError


class Owner(Protocol):
    """Who answers for a handle: `HandleOperations`, or the `Whole` of tiles."""

    def compute_with(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        changes: Handle | None,
    ) -> Any:
        """Runs `function` with real tensors in the place of handles.

        `changes` is the handle the function writes to, or None.
        """

    def gradient_of(self, handle: Handle) -> torch.Tensor | None: ...
    def forget_gradient(self, handle: Handle) -> None: ...
    def zero_gradient(self, handle: Handle) -> None: ...
    def set_trainable(self, handle: Handle, is_trainable: bool) -> None: ...
    def leaves_of(self, handle: Handle) -> list[torch.Tensor]:
        """The parameters that gradients of the handle's values arrive at, in order of rows."""

    def take_gradient(self, handle: Handle, gradient: torch.Tensor) -> None:
        """A gradient has arrived at the handle itself."""


class Handle(torch.Tensor):
    """A released parameter, or (with `is_gradient`) a gradient that rests on a tier."""

    owner: Owner
    name_in_model: str
    is_gradient: bool

    # nn.Parameter's metaclass answers isinstance() for tensor subclasses by this attribute.
    _is_param = True

    @staticmethod
    def make(
        owner: Owner,
        name: str,
        like: torch.Tensor,
        *,
        is_gradient: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Handle:
        """A handle with the shape, stride, dtype, device and requires_grad of `like`; or with a
        shape of its own, row-major."""
        strides = like.stride() if shape is None else torch.empty(shape, device="meta").stride()
        handle = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Handle,
            like.shape if shape is None else shape,
            strides=strides,
            dtype=torch.float32 if is_gradient else like.dtype,
            device=like.device,
            requires_grad=like.requires_grad and not is_gradient,
        )
        handle.owner = owner
        handle.name_in_model = name
        handle.is_gradient = is_gradient
        handle._is_param = not is_gradient
        if handle.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                handle.register_post_accumulate_grad_hook(_take_stray)
        return handle

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient summed so far, as a handle that fetches it when read; None if there is
        none."""
        return None if self.is_gradient else self.owner.gradient_of(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise UnsupportedError(
                f"the gradient of {self.name_in_model!r} rests on its tier and cannot be replaced; "
                "only None may be assigned. Change the loss instead, or scale it"
            )
        if not self.is_gradient:
            self.owner.forget_gradient(self)

    @grad.deleter
    def grad(self) -> None:
        self.owner.forget_gradient(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        what = "gradient" if self.is_gradient else "parameter"
        return (
            f"<released {what} {self.name_in_model!r}: shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device={self.device}>"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise UnsupportedError(
            f"{self.name_in_model!r} is on a tier and cannot be pickled or copied with the model; "
            "save with infinity.checkpoint.export_safetensors(model, directory), or read it inside "
            "`with infinity.gather(model):`"
        )

    def __deepcopy__(self, memo: object) -> Any:
        self.__reduce_ex__(4)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            answer = special(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        owner = _first_handle((args, kwargs)).owner
        return owner.compute_with(func, args, kwargs, changes=_target(func, args, kwargs))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reached only where __torch_function__ was switched off: nothing may compute on a
        handle."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        handle = _first_handle((args, kwargs or {}))
        if func.overloadpacket is torch.ops.aten.set_:  # It never comes by __torch_function__.
            _refuse_parametrization(handle)
        raise ParameterNotResident(
            handle.name_in_model,
            f"{func} reached it below the engine; wrap the code in infinity.gather(model)",
        )


def _known(names: str) -> set[Any]:
    """Getters and methods of torch.Tensor among `names` that this PyTorch has."""
    found: set[Any] = set()
    for name in names.split():
        member = getattr(torch.Tensor, name, None)
        if member is not None:
            found.add(member.__get__ if not callable(member) else member)
    return found


# What is known of a parameter without its bytes.
_PLAIN = _known(
    "shape dtype device layout is_leaf grad_fn ndim names is_cuda is_cpu is_meta is_sparse "
    "is_sparse_csr is_quantized is_mkldnn is_nested is_mps is_xla is_xpu is_ipu is_vulkan is_mtia "
    "is_maia is_hpu is_ort is_neg is_conj is_inference itemsize nbytes _version output_nr "
    "retains_grad _backward_hooks _base name size dim numel nelement ndimension stride "
    "storage_offset element_size is_floating_point is_complex is_signed is_contiguous is_pinned "
    "is_same_size get_device __len__ __hash__ _is_view is_coalesced requires_grad dense_dim "
    "sparse_dim dim_order has_names"
) | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}


def _first_handle(tree: Any) -> Handle:
    found = find_handles(tree)
    assert found
    return found[0]


def find_handles(tree: Any) -> list[Handle]:
    """Every handle in nested tuples, lists and dicts."""
    if isinstance(tree, Handle):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [handle for each in tree for handle in find_handles(each)]
    if isinstance(tree, Mapping):
        return [handle for each in tree.values() for handle in find_handles(each)]
    return []


def replace_handles(tree: Any, replace: Callable[[Handle], torch.Tensor]) -> Any:
    """The same nest with every handle replaced."""
    if isinstance(tree, Handle):
        return replace(tree)
    if isinstance(tree, tuple):
        parts = [replace_handles(each, replace) for each in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [replace_handles(each, replace) for each in tree]
    if isinstance(tree, dict):
        return {key: replace_handles(value, replace) for key, value in tree.items()}
    return tree


def _target(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Handle | None:
    """The handle that `func` writes to, judged by PyTorch's naming: `add_`, `__iadd__`, `out=`."""
    out = find_handles(kwargs.get("out"))
    if out:
        return out[0]
    name = getattr(func, "__name__", "")
    dunder = name.startswith("__") and name.endswith("__")
    writes = name in _WRITING_DUNDERS if dunder else name.endswith("_")
    if not writes:
        return None
    first = args[0] if args else next(iter(kwargs.values()), None)
    found = find_handles(first)
    return found[0] if found else None


_WRITING_DUNDERS = frozenset(
    f"__{name}__"
    for name in [
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
        "setitem",
    ]
)


# -- Gradients -------------------------------------------------------------------------------------


def _take_stray(handle: Any) -> None:
    """Something that did not ask `__torch_function__` has put the handle itself into a graph."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = torch.Tensor.grad.__get__(handle)
        torch.Tensor.grad.__set__(handle, None)
    handle.owner.take_gradient(handle, gradient)


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` by handles. The backward itself fetches what it needs."""
    if find_handles(outputs):
        return NotImplemented
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    leaves = [each.owner.leaves_of(each) if isinstance(each, Handle) else [each] for each in given]
    wanted = [leaf for each in leaves for leaf in each]
    flat = iter(torch.autograd.grad(outputs, wanted, *args, **kwargs))
    rows = 1 if kwargs.get("is_grads_batched") else 0
    return tuple(_of_rows([next(flat) for _ in each], each, rows) for each in leaves)


def _of_rows(
    parts: list[torch.Tensor | None], leaves: list[torch.Tensor], dim: int
) -> torch.Tensor | None:
    """One gradient, where the parameter stands as tiles and some of them may have none."""
    there = next((part for part in parts if part is not None), None)
    if len(parts) == 1 or there is None:
        return there
    lead = there.shape[:dim]
    return torch.cat(
        [
            there.new_zeros((*lead, *leaf.shape)) if part is None else part
            for part, leaf in zip(parts, leaves, strict=True)
        ],
        dim,
    )


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.backward(..., inputs=handles)`."""
    inputs = kwargs.get("inputs")
    if inputs is None or find_handles((tensors, args)):
        return NotImplemented
    leaves = [
        leaf
        for each in ((inputs,) if isinstance(inputs, torch.Tensor) else inputs)
        for leaf in (each.owner.leaves_of(each) if isinstance(each, Handle) else [each])
    ]
    return torch.autograd.backward(tensors, *args, **{**kwargs, "inputs": leaves})


def _register_hook(handle: Handle, hook: Any) -> Any:
    if handle.is_gradient:
        return NotImplemented
    return _leaf_of(handle, "a hook").register_hook(hook)


def _view_as(handle: Any, other: Any) -> Any:
    """`torch.autograd.graph` asks for a view in order to see the node behind it, not its values."""
    if not _was_called_by(_get_grad_fn_or_grad_acc):
        return NotImplemented
    leaf = _leaf_of(handle, "a gradient edge")
    return leaf.view_as(leaf)


def _leaf_of(handle: Handle, what: str) -> torch.Tensor:
    leaves = handle.owner.leaves_of(handle)
    if len(leaves) != 1:
        raise UnsupportedError(
            f"{what} of {handle!r}: it stands as {len(leaves)} tiles, whose gradients never meet; "
            "use the tiles, which model.parameters() gives"
        )
    return leaves[0]


# -- Operations with a meaning of their own --------------------------------------------------------


def _get_data(handle: Handle) -> Handle:
    return handle


def _set_data(handle: Handle, value: torch.Tensor) -> None:
    if value is handle:
        return
    _converted(handle, value.device, value.dtype)  # Says more where these are what changes.
    if isinstance(value, Handle):
        value = value.clone()  # Not the memory of another parameter.
    assign = torch.Tensor.data.__set__  # type: ignore[attr-defined]
    handle.owner.compute_with(assign, (handle, value.detach()), {}, changes=handle)
    # A graph that has saved the old value, which is overwritten, must find out.
    torch.autograd.graph.increment_version(handle.owner.leaves_of(handle))


def _set_requires_grad(handle: Handle, value: bool) -> None:
    if not handle.is_gradient:
        handle.owner.set_trainable(handle, value)
    elif value:
        raise UnsupportedError(
            f"the gradient of {handle.name_in_model!r} rests on its tier and cannot require a "
            "gradient of its own; take it from torch.autograd.grad"
        )


def _requires_grad_(handle: Handle, requires_grad: bool = True) -> Handle:
    _set_requires_grad(handle, requires_grad)
    return handle


def _zero_(handle: Handle) -> Any:
    if not handle.is_gradient:
        return NotImplemented
    handle.owner.zero_gradient(handle)  # nn.Module.zero_grad(set_to_none=False) does this.
    return handle


def _copy_(handle: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    return handle if source is handle else NotImplemented


def _refuse_grad_hook(handle: Handle, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        f"a hook after the accumulation of the gradient of {handle.name_in_model!r} would find no "
        "gradient: it has left for its tier by then. Use register_hook"
    )


def _converted(handle: Handle, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """`.to()` of what it already is; anything else is refused, for the engine owns both."""
    if handle.is_gradient:
        return NotImplemented
    same_device = device is None or (
        device.type == handle.device.type
        and (device.index is None or handle.device.index in (None, device.index))
    )
    if same_device and dtype in (None, handle.dtype):
        return handle
    raise UnsupportedError(
        f"{handle.name_in_model!r} cannot be converted from {handle.dtype} on {handle.device} to "
        f"{dtype or handle.dtype} on {device or handle.device}: its tier owns it. Choose the dtype "
        "with precision.compute and the device with tiers.device.kind before infinity.offload"
    )


def _to(handle: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(handle, Handle):
        other = args[0]  # tensor.to(handle): only dtype and device are asked of it.
        return handle.to(device=other.device, dtype=other.dtype)
    if args and isinstance(args[0], torch.Tensor):
        return _converted(handle, args[0].device, args[0].dtype)
    device, dtype, _, _ = torch._C._nn._parse_to(
        *args, **{key: value for key, value in kwargs.items() if key in ("device", "dtype")}
    )
    return _converted(handle, device, dtype)


def _detach(handle: Handle) -> Any:
    # nn.Parameter(handle) detaches what it is given and would refuse the plain tensor that comes of
    # it with words about subclasses.
    if _was_called_by(torch.nn.Parameter.__new__):
        _refuse_parametrization(handle)
    return NotImplemented


def _was_called_by(function: Any) -> bool:
    """Whether `function` is what came to `__torch_function__`, which has called the caller."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is function.__code__


def _refuse_parametrization(handle: Handle) -> NoReturn:
    raise UnsupportedError(
        f"{handle.name_in_model!r} is on a tier, so no other parameter can be made of it; apply "
        "weight_norm and other parametrizations before infinity.offload"
    )


def _rests_as_is(handle: Handle) -> bool:
    return handle.device.type == "cpu" and not handle.is_gradient


def _convert_to(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda handle, *args, **kwargs: _converted(handle, None, dtype)


def _move_to(kind: str) -> Callable[..., Any]:
    return lambda handle, *args, **kwargs: _converted(handle, torch.device(kind), None)


def _refuse_storage(handle: Handle, *args: Any, **kwargs: Any) -> Any:
    raise ParameterNotResident(
        handle.name_in_model,
        "it has no storage while released; use `with infinity.gather(module):`",
    )


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: _grad,
    torch.autograd.backward: _backward,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.view_as: _view_as,
    torch.Tensor.data.__get__: _get_data,
    torch.Tensor.data.__set__: _set_data,
    torch.Tensor.requires_grad.__set__: _set_requires_grad,
    torch.Tensor.requires_grad_: _requires_grad_,
    torch.Tensor.zero_: _zero_,
    torch.Tensor.copy_: _copy_,
    torch.Tensor.register_post_accumulate_grad_hook: _refuse_grad_hook,
    torch.Tensor.detach: _detach,
    torch.Tensor.to: _to,
    torch.Tensor.half: _convert_to(torch.float16),
    torch.Tensor.bfloat16: _convert_to(torch.bfloat16),
    torch.Tensor.double: _convert_to(torch.float64),
    torch.Tensor.float: lambda h, *a, **k: h if h.dtype is torch.float32 else NotImplemented,
    torch.Tensor.cpu: lambda h, *a, **k: h if _rests_as_is(h) else NotImplemented,
    torch.Tensor.cuda: _move_to("cuda"),
    torch.Tensor.data_ptr: _refuse_storage,
    torch.Tensor.untyped_storage: _refuse_storage,
    torch.Tensor.storage: _refuse_storage,
    torch._has_compatible_shallow_copy_type: lambda *args: True,  # nn.Module._apply asks.
    torch.Tensor.share_memory_: _refuse_storage,
    torch.Tensor.pin_memory: _refuse_storage,
}
