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
from typing import Any, NoReturn, Protocol, cast

import torch
from typing_extensions import override

from infinity.errors import ConfigError, ParameterNotResident, UnsupportedError
from infinity.modules.handles.mirrors import Mirror, Origin, Original
from infinity.modules.handles.torch_functions import (
    TENSOR,
    StandIn,
    find_tensors,
    map_tensors,
    written,
)
from infinity.private.torch import DisableTorchFunctionSubclass, make_wrapper_subclass


class Owner(Original, Protocol):
    """The object that serves handles, which are below it: `HandleOps`."""

    def is_tiled(self, handle: Handle) -> bool:
        """Whether the handle stands for tiles."""

    def tiles_of(self, handle: Handle) -> list[Handle]:
        """Returns the handles of the tiles that a handle stands for, or that of the parameter."""

    def compute_with(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        changes: Sequence[Handle],
    ) -> Any:
        """Runs `function` with real tensors in the place of this owner's handles.

        `changes`: the handles that the function writes to, according to its signature.
        """

    def module_handle(self, name: str) -> Handle:
        """Returns the handle in the modules, for a handle that `.data` or `.grad` returned."""

    def gradient_of(self, handle: Handle) -> torch.Tensor | None:
        """Returns the gradient as a handle or tensor; None without one."""

    def put_gradient(self, handle: Handle, value: torch.Tensor, *, is_other: bool) -> None:
        """Makes `value` the gradient. `is_other`: a new one, and not a change of the former."""

    def forget_gradient(self, handle: Handle) -> None:
        """Drops the gradient."""

    def zero_gradient(self, handle: Handle) -> None:
        """Fills the gradient with zeros."""

    def set_trainable(self, handle: Handle, is_trainable: bool) -> None:
        """Sets `requires_grad` of the parameter."""

    def shown(self, handle: Handle) -> torch.Tensor | None:
        """Returns the parameter that modules show in the place of the handle now, if they do."""

    def leaves_of(self, handle: Handle) -> list[torch.Tensor]:
        """Returns the parameters that accumulate the handle's gradients, in order of rows."""

    def increment_version(self, handle: Handle) -> None:
        """Makes a graph that saved the old value raise in its backward."""

    def take_gradient(self, handle: Handle, gradient: torch.Tensor) -> None:
        """Adds a gradient that autograd has delivered to the handle itself."""


class Handle(StandIn):
    """A released parameter; or a gradient on a tier (`is_gradient`); or the `.data` of a parameter
    (`is_data`), also as a value of a state dictionary (`is_state`). See Note [State values]."""

    owner: Owner
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
        owner: Owner,
        name: str,
        like: torch.Tensor,
        *,
        is_gradient: bool = False,
        is_data: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Handle:
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
        return self.owner.gradient_of(self)

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
        shown = self.owner.shown(self)
        if shown is None:
            raise UnsupportedError(
                f"{self.name_in_model!r} is on a tier and cannot be pickled or copied there: copy "
                "or pickle the module inside `with infinity.gather(module):`. Save a model with "
                "infinity.checkpoint.export_safetensors(model, directory); copy values alone with "
                "copy.deepcopy(module.state_dict())"
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
    if is_narrow and torch.equal(present.to(value.dtype), value):  # type: ignore[union-attr]
        return
    if isinstance(value, Handle) and value.kept is not None:
        value = value.kept
    if isinstance(value, Handle) or (
        isinstance(value, Mirror)
        and not value.shows(parameter.owner, handle.name_in_model, is_gradient=True)
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
