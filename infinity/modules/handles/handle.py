"""The handle: the tensor without bytes that stands in a module while its parameter is away.

A handle is an `nn.Parameter` for every caller: it has the true shape, dtype and device in
`named_parameters` and in the groups of an optimizer. It has no storage. An operation that reads a
handle outside its module, or changes it in place under no_grad, fetches the bytes for that one
operation. Copying, pickling or converting a handle raises an error that names the parameter and the
remedy.

`handle.data` is a handle of the same bytes without a gradient. A function that would return a view
of the parameter returns a mirror (`mirrors.py`).

Note [State values]
  A state dictionary names every parameter, but its caller often needs few of them: PEFT saves the
  adapter and drops the rest. A value is a handle for `.data`, so it fetches its bytes for each
  operation and shows the present value of the parameter, as in plain PyTorch. `clone`,
  `copy.deepcopy`, `torch.save` and conversions return plain tensors. A caller that asks for memory
  (safetensors does, to find tensors that share it) gets that of a mirror, which the value makes
  then and keeps: the address stays, and the bytes follow the parameter. A value is no mirror from
  the start, because a dictionary of mirrors would hold the full model.

Simpler stand-ins fail: a full-shape tensor over an empty storage crashes the interpreter when it is
read, a meta tensor silently computes garbage in `F.linear`, and a one-element placeholder
broadcasts.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, cast

import torch
from typing_extensions import override

from infinity.errors import ConfigError, ParameterNotResident, UnsupportedError
from infinity.modules.handles.mirrors import Mirror, Origin
from infinity.modules.handles.torch_functions import (
    TENSOR,
    StandIn,
    asked_of_to,
    find_tensors,
    map_tensors,
    members,
    was_called_by,
    written,
)
from infinity.private.torch import (
    DisableTorchFunctionSubclass,
    get_grad_fn_or_grad_acc,
    has_compatible_shallow_copy_type,
    make_wrapper_subclass,
)


class Handle(StandIn):
    """A released parameter; or a gradient on a tier (`is_gradient`); or the `.data` of a parameter
    (`is_data`), also as a value of a state dictionary (`is_state`). See Note [State values]."""

    owner: Any  # `HandleOps`, which imports this module.
    name_in_model: str
    is_gradient: bool
    is_data: bool = False
    is_state: bool = False
    kept: torch.Tensor | None = None  # The old values, after the parameter or `.grad` got others.
    number: int = 0  # Numbers the gradients of one parameter.
    memory: torch.Tensor | None = None  # Of a state value: a mirror, once somebody asked for it.
    aliases: weakref.WeakValueDictionary[int, Origin | Handle] | None = None

    # The metaclass of nn.Parameter reads this attribute in isinstance() for tensor subclasses.
    _is_param = True

    @staticmethod
    def make(
        owner: Any, name: str, like: torch.Tensor, *, is_gradient: bool = False,
        is_data: bool = False, shape: Sequence[int] | None = None,
    ) -> Handle:  # fmt: skip
        """Returns a handle with the shape, stride, dtype, device and requires_grad of `like`. A
        given `shape` replaces that of `like` and is row-major."""
        is_param = not (is_gradient or is_data)
        strides = like.stride() if shape is None else torch.empty(shape, device="meta").stride()
        handle: Handle = make_wrapper_subclass(
            Handle,
            like.shape if shape is None else shape,
            strides=strides,
            dtype=torch.float32 if is_gradient else like.dtype,
            device=like.device,
            requires_grad=like.requires_grad and is_param,
        )
        handle.owner = owner
        handle.name_in_model = name
        handle.is_gradient, handle.is_data, handle._is_param = is_gradient, is_data, is_param
        if handle.requires_grad:
            with DisableTorchFunctionSubclass():
                handle.register_post_accumulate_grad_hook(_take_stray)  # type: ignore[no-untyped-call]
        return handle

    def make_data(self, *, is_state: bool = False) -> Handle:
        """Returns the handle for `.data`, or for the value in a `state_dict()`."""
        with DisableTorchFunctionSubclass():
            handle = Handle.make(self.owner, self.name_in_model, self, is_data=True)
        handle.is_state = is_state
        self.owner.module_handle(self.name_in_model).note_alias(handle)
        return handle

    def note_alias(self, alias: Origin | Handle) -> None:
        """Registers a tensor that shows this parameter's memory, or that of its gradient.
        `alias.lose` runs when the memory is replaced."""
        if self.aliases is None:
            self.aliases = weakref.WeakValueDictionary()
        self.aliases[id(alias)] = alias

    def lose_aliases(self, kind: type | tuple[type, ...] = object, *, is_gradient: bool) -> None:
        """Makes the aliases keep their content."""
        aliases: MutableMapping[int, Origin | Handle] = self.aliases or {}
        for key, alias in list(aliases.items()):
            if alias.is_gradient == is_gradient and isinstance(alias, kind):
                alias.lose()
                del aliases[key]

    def lose(self) -> None:
        """Keeps the present content, because the parameter is about to get other memory."""
        stamp = self.owner.stamp(self.name_in_model, is_gradient=self.is_gradient)
        if not self.is_gradient or (stamp is not None and stamp[0] == self.number):
            self.kept = self.clone()

    def is_same(self, other: Any) -> bool:
        """Whether both stand for the same bytes."""
        return isinstance(other, Handle) and (
            (other.owner, other.name_in_model, other.is_gradient)
            == (self.owner, self.name_in_model, self.is_gradient)
            and self.kept is other.kept
        )

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient summed so far, as a handle that fetches the gradient when read; None without
        one."""
        if self.is_gradient or self.is_data:
            return None
        if (
            torch.__future__.get_swap_module_params_on_conversion()
            and sys._getframe(1).f_code is torch.nn.Module._apply.__code__
        ):
            refuse_swap(self)  # `_apply` would drop the gradient first.
        gradient: torch.Tensor | None = self.owner.gradient_of(self)
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.is_gradient or self.is_data:
            if value is not None:
                raise UnsupportedError(
                    f"expected the gradient of {self.name_in_model!r} to be set on the parameter "
                    "itself, got it for its .grad or .data; use `parameter.grad = value`"
                )
        elif value is None:
            self.owner.forget_gradient(self)
        else:
            set_gradient(self, value, is_other=True)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def in_memory(self) -> torch.Tensor:
        """Returns the mirror that has the memory of a state value."""
        if self.memory is None:
            self.memory = self[...]
        return self.memory

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self.is_state:
            return repr(self.clone())
        what = "gradient" if self.is_gradient else "parameter"
        return (
            f"<released {what} {self.name_in_model!r}: shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device={self.device}>"
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: object) -> Any:
        if self.is_state:  # torch.load(weights_only=True) calls torch's own functions alone.
            return self._plain().__reduce_ex__(protocol)
        # `cast` returns its argument: the pickle has one tensor for all that refer to it.
        return cast, (None, self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(), memo)

    def _plain(self) -> torch.Tensor:
        """Returns the plain tensor that a copy or a pickle has the values of."""
        if self.is_gradient or self.is_data:
            return self.clone().as_subclass(torch.Tensor)
        shown: torch.Tensor | None = self.owner.shown(self)
        if shown is None:
            raise UnsupportedError(
                f"{self.name_in_model!r} is on a tier and cannot be pickled or copied there: copy "
                "or pickle the module inside `with infinity.gather(module):`. Save a model with "
                "infinity.checkpoint.export_safetensors(model, directory); copy values alone with "
                "copy.deepcopy(module.state_dict()). Attach an adapter with modules_to_save before "
                "infinity.offload, as infinity.from_pretrained(path, config, peft_config) does"
            )
        return shown

    @classmethod
    @override
    def run(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if "_foreach_" in getattr(func, "__name__", ""):
            count = max(len(sequence) for sequence in args if isinstance(sequence, (tuple, list)))
            if count > 1:
                return _one_by_one(func, args, kwargs, count)
        owner = _first_handle((args, kwargs)).owner
        return owner.compute_with(func, args, kwargs, changes=written(func, args, kwargs, Handle))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuses an operation that bypasses __torch_function__, because a handle has no bytes. A
        state value is read."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        handle = _first_handle((args, kwargs or {}))
        if handle.is_state and not func._schema.is_mutable:
            args, named = replace_handles((args, dict(kwargs or {})), Handle.clone)
            return func(*args, **named)
        if func.overloadpacket is torch.ops.aten.set_:  # `set_` never reaches __torch_function__.
            refuse_parametrization(handle)
        raise ParameterNotResident(
            handle.name_in_model,
            f"{func} reached it below the engine; wrap the code in infinity.gather(model)",
        )


def _first_handle(tree: Any) -> Handle:
    found = find_handles(tree)
    assert found
    return found[0]


def find_handles(tree: Any) -> list[Handle]:
    """Returns every handle in nested tuples, lists and mappings."""
    return find_tensors(tree, Handle)


def replace_handles(tree: Any, replace: Callable[[Handle], torch.Tensor]) -> Any:
    """Returns the same nest with every handle replaced."""
    return map_tensors(tree, lambda t: replace(t) if isinstance(t, Handle) else t)


def _one_by_one(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int
) -> list[Any] | None:
    """Runs a function over lists element by element, so that one element at a time is in memory."""

    def part(value: Any, index: int) -> Any:
        is_list = isinstance(value, (tuple, list)) and len(value) == count
        return [value[index]] if is_list else value

    answers: list[Any] = []
    for index in range(count):
        positional = [part(argument, index) for argument in args]
        named = {key: part(argument, index) for key, argument in kwargs.items()}
        answers += func(*positional, **named) or ()
    return answers or None


def _take_stray(handle: Any) -> None:
    """Passes on a gradient that reached the handle itself, through a graph made by code that
    bypassed `__torch_function__`."""
    with DisableTorchFunctionSubclass():
        gradient = TENSOR.grad.__get__(handle)
        TENSOR.grad.__set__(handle, None)
    handle.owner.take_gradient(handle, gradient)


def set_gradient(handle: Handle, value: torch.Tensor, *, is_other: bool) -> None:
    """Carries out `parameter.grad = value` (`is_other`) and `parameter.grad.data = value`."""
    parameter = handle.owner.module_handle(handle.name_in_model)
    present = parameter.grad
    if isinstance(present, Handle) and present.is_same(value):
        return
    if not isinstance(value, torch.Tensor) or value.shape != handle.shape:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(
            f"expected a gradient of {handle.name_in_model!r} with shape {tuple(handle.shape)}, "
            f"got {got}"
        )
    # nn.Module.to(dtype) assigns a rounded copy of the fp32 gradient.
    is_narrow = present is not None and value.dtype is parameter.dtype is not torch.float32
    if is_narrow and torch.equal(present.to(value.dtype), value):
        return
    if isinstance(value, Handle) and value.kept is not None:
        value = value.kept
    if isinstance(value, Handle) or (
        isinstance(value, Mirror)
        and not value.origin.is_of(parameter.owner, handle.name_in_model, is_gradient=True)
    ):
        raise UnsupportedError(
            f"the gradient of {handle.name_in_model!r} would share the memory of another gradient "
            "or parameter, which has a place of its own; assign a clone: "
            "p.grad = other.grad.clone()"
        )
    value = value.detach()
    parameter.lose_aliases(object if is_other else Origin, is_gradient=True)
    parameter.owner.put_gradient(parameter, value, is_other=is_other)


def refuse_parametrization(handle: Handle) -> NoReturn:
    """Raises UnsupportedError for another parameter that is made of a handle."""
    if handle.is_state:
        raise UnsupportedError(
            f"the value of {handle.name_in_model!r} is read from its tier when it is used, so "
            "no parameter can be made of it; clone() it first"
        )
    raise UnsupportedError(
        f"{handle.name_in_model!r} is on a tier, so no other parameter can be made of it; apply "
        "weight_norm and other parametrizations before infinity.offload"
    )


def refuse_swap(tensor: torch.Tensor) -> NoReturn:
    """Raises UnsupportedError for a parameter that would change places with another tensor."""
    raise UnsupportedError(
        f"{getattr(tensor, 'name_in_model', 'a parameter')!r} is on a tier, so it cannot change "
        "places with another tensor, as torch.utils.swap_tensors does it; copy values into it "
        "under torch.no_grad(), and call load_state_dict() and .to() with "
        "torch.__future__.set_swap_module_params_on_conversion(False)"
    )


def refuse_wrapper(wrapper: str, name: str) -> NoReturn:
    """Raises UnsupportedError for a wrapper that divides a model among ranks, or sums gradients."""
    raise UnsupportedError(
        f"{wrapper} of a model whose {name!r} is offloaded: the engine shares it among the ranks "
        "of torch.distributed and averages its gradients; use the model as it is, and wrap only "
        "modules that are not offloaded"
    )


def plain_value(value: torch.Tensor) -> torch.Tensor:
    """Returns a plain tensor for a state value, and anything else unchanged."""
    with torch.no_grad():
        return value.clone() if isinstance(value, Handle) and value.is_state else value


def is_value_of(value: Any, handle: Any) -> bool:
    """Whether a value of a state dictionary is that of `handle` now, or `handle` itself."""
    is_state = isinstance(value, Handle) and value.is_state and value.kept is None
    if not is_state or not isinstance(handle, Handle):
        return value is handle
    return (value.owner, value.name_in_model) == (handle.owner, handle.name_in_model)


# -- Functions of torch with a meaning of their own for handles; the owner runs all others ---------


def _device(handle: Handle) -> Any:
    # FSDP reads the device of each parameter before it hooks a module or replaces a parameter.
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch.distributed.fsdp."):
        refuse_wrapper("fully_shard", handle.name_in_model)
    return NotImplemented


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
    return _converted(handle, *asked_of_to(args, kwargs))


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
        torch.empty(0, requires_grad=True, device="cpu").numpy()  # Raises the message of torch.
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
    leaves: list[torch.Tensor] = handle.owner.leaves_of(handle)
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
    TENSOR.device.__get__: _device,
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
