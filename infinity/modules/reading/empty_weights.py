"""Models that are built without memory for their parameters, by `infinity.init_empty_weights`.

An `Awaited` is a tensor on meta that reports the CPU as its device. Libraries put additions to a
model on the device of its parameters: PEFT moves an adapter to the device of the layer that it
adapts. On meta the values of the adapter would be lost. With `Awaited`, adapters have memory from
the start, and the values that they have over a model in memory.

Shapes and dtypes follow from operations as on meta. A complete value that is written to the
parameter is kept and makes it a plain parameter. A value that is computed from it and written to
memory would be undefined, and is refused.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from infinity.config import SwapConfig
from infinity.errors import ConfigError, InfinityError
from infinity.modules.handles.torch_functions import TENSOR, asked_of_to, says_it_writes
from infinity.private.torch import DisableTorchFunctionSubclass, make_subclass, tree_map

# Parameters up to this size keep the values of their module's constructor: for a scale made by
# torch.ones no reset_parameters exists that could make it again.
_KEPT_NBYTES = 64 << 10
_HUGE_NUMEL = 1 << 30  # No buffer is as large: those have values.


class _Building(threading.local):
    # Small parameters that this thread has built in its block of `building`. None: outside of one.
    kept: list[Provisional] | None = None


_building = _Building()


@contextmanager
def init_empty_weights(config: Any = None) -> Iterator[None]:
    """Builds modules without memory for their parameters inside a `with` block; buffers have
    values.

    `config` is checked, so that a bad file is refused before a model is built. Call
    `infinity.offload(model, config, weights=...)` afterwards, which reads or initialises the
    weights. Attach and load adapters between the two: adapters have memory, and the values that
    PEFT gives them. Only modules that this thread builds are without memory. Raises ConfigError
    where a constructor computes with values of a weight, as `orthogonal` does.
    """
    SwapConfig.load(config)
    _observe()
    outer = _building.kept
    _building.kept = kept = [] if outer is None else outer
    try:
        with _WithoutHugeMemory():
            yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, InfinityError) or "meta" not in str(error).lower():
            raise
        raise ConfigError(
            "a constructor needs the values of a weight that infinity.init_empty_weights leaves "
            f"without memory ({error}). Build this module, such as one with an orthogonal "
            "parametrization, before the `with` block, and put it into the model inside of it"
        ) from error
    finally:
        _building.kept = outer
        for parameter in kept:
            if isinstance(parameter, Provisional):
                parameter.built_version = parameter._version


@functools.cache
def _observe() -> None:
    """Has PyTorch call a hook for each parameter that a module registers. The hook stays: another
    thread may be going through PyTorch's hooks."""
    register_module_parameter_registration_hook(_registered)  # type: ignore[arg-type]


class _WithoutHugeMemory(TorchFunctionMode):
    """Makes huge tensors that have no values yet on meta: a stack of experts may be larger than the
    memory, and zeros would be written to all of it."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and "out" not in kwargs:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() >= _HUGE_NUMEL:
                return made
        return func(*args, **kwargs)


def _registered(module: nn.Module, name: str, parameter: nn.Parameter) -> Awaited | None:
    """Returns an Awaited for a parameter that this thread registers while it builds. A small one
    keeps its value and becomes a Provisional."""
    if _building.kept is None:
        return None
    if type(parameter) is nn.Parameter:
        if parameter.is_meta or parameter.numel() * parameter.element_size() > _KEPT_NBYTES:
            return Awaited.make(parameter)
        parameter.__class__ = Provisional
    if isinstance(parameter, Provisional):
        _building.kept.append(parameter)
    return None


class Awaited(torch.Tensor):
    """A parameter without a value, or the result of an operation on one."""

    _is_param: bool

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, **attributes: Any) -> Awaited:
        """Like `nn.Parameter`. PEFT registers a parameter again with all its attributes."""
        awaited = cls.make(data)
        awaited.__dict__.update(attributes)
        return cast("Awaited", awaited.requires_grad_(requires_grad))

    @staticmethod
    def make(parameter: torch.Tensor) -> Awaited:
        """Returns an Awaited in the place of `parameter`, with its attributes."""
        with DisableTorchFunctionSubclass():
            awaited: Awaited = make_subclass(
                Awaited, parameter.detach().to("meta"), parameter.requires_grad
            )
            awaited.__dict__.update(parameter.__dict__)
            awaited._is_param = True
        return awaited

    def __deepcopy__(self, memo: dict[int, Any]) -> Awaited:
        if id(self) not in memo:
            memo[id(self)] = Awaited.make(self)
            with DisableTorchFunctionSubclass():  # A copy shares no memory.
                memo[id(self)].data = torch.empty_like(self, requires_grad=False)
        copied: Awaited = memo[id(self)]
        return copied

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"<awaited parameter: shape={tuple(self.shape)}, dtype={self.dtype}>"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_building = _building.kept is not None
        with DisableTorchFunctionSubclass():
            special = None if is_building else _SPECIAL.get(func)
            if special is not None:
                return special(*args, **(kwargs or {}))
            if is_building and func is not torch.Tensor.detach:
                return func(*args, **(kwargs or {}))
            # A parameter may be made of `detach()`, or of `.T`.
            if is_building or getattr(func, "__name__", "") == "__get__":
                return _awaited(func(*args, **(kwargs or {})))
            return _shapes_only(func, args, kwargs or {})


class Provisional(nn.Parameter):
    """A parameter that is small enough to keep its constructor's value until it gets another
    one."""

    # Its version when its model was built. A later version means that a value was assigned.
    built_version: int = 0

    @override
    def copy_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = super().copy_(*args, **kwargs)
        if _building.kept is None:
            self.__class__ = nn.Parameter  # type: ignore[assignment]
        return copied

    @override
    def detach(self) -> torch.Tensor:
        detached = super().detach()
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            # A parameter over the same memory gets its value with this one.
            detached = detached.as_subclass(Provisional)
            detached.built_version = self.built_version
        return detached


def as_built(
    empty: torch.Tensor, requires_grad: bool, read: Callable[[], torch.Tensor]
) -> nn.Parameter:
    """Returns a parameter as `init_empty_weights` builds it. A small one has the value that `read`
    returns, for its constructor may be all that gives it one."""
    if empty.nbytes > _KEPT_NBYTES:
        return cast("nn.Parameter", Awaited(empty, requires_grad))
    return Provisional(read(), requires_grad)


def is_to_come(parameter: torch.Tensor) -> bool:
    """Whether the parameter still waits for its value, from a file or from the seed."""
    if isinstance(parameter, Provisional):
        return parameter._version == parameter.built_version
    return parameter.is_meta


def without_class(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an Awaited as the tensor on meta that it is; any other tensor as it is."""
    if not isinstance(tensor, Awaited):
        return tensor
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _shapes_only(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    first = args[0] if args else next(iter(kwargs.values()))
    if func in _DECOMPOSITIONS or kwargs.get("out") is not None:
        _refuse_to_make_up(first)
    name = getattr(func, "__name__", "")
    if says_it_writes(func) and name not in _SAY_NOTHING_OF_VALUES:
        if not isinstance(first, Awaited):
            _refuse_to_make_up(first)
        _refuse_to_lose(first, name)
    args, kwargs = tree_map(_on_meta, (args, dict(kwargs)))
    try:
        return tree_map(_awaited, func(*args, **kwargs))
    except (RuntimeError, NotImplementedError) as error:
        if "meta" in str(error).lower():  # The function needs values: `item()`, a comparison.
            _refuse_to_make_up(first)
        raise


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


def _awaited(value: Any) -> Any:
    return value.as_subclass(Awaited) if type(value) is torch.Tensor and value.is_meta else value


def _refuse_to_make_up(target: Any) -> NoReturn:
    raise ConfigError(
        f"a tensor of shape {tuple(target.shape)} would be computed from a weight that "
        "infinity.init_empty_weights left without a value: expected an initialisation of adapters "
        "that needs no weights of the model (LoRA's default, 'gaussian', ...). Build the model "
        "outside of infinity.init_empty_weights and load its weights first, or save the "
        "initialised adapter of such a model and load that. A weight that is resized, as by "
        "resize_token_embeddings, needs its value first, under torch.no_grad(): "
        'weight.copy_(infinity.checkpoint.weight_source(directory).read("its name"))'
    )


def _refuse_to_lose(tensor: torch.Tensor, name: str) -> NoReturn:
    raise ConfigError(
        f"{name} would write to a parameter of shape {tuple(tensor.shape)} that "
        f"infinity.init_empty_weights left "
        "without memory, and be lost. Write the whole parameter (copy_, load_state_dict), or "
        "change it after infinity.offload, inside `with infinity.gather(module, modify=True):`"
    )


_SAY_NOTHING_OF_VALUES = ("requires_grad_", "detach_", "share_memory_")

# The beginnings of names of initialisations from base weights (PiSSA, OLoRA, MiCA, ...).
_DECOMPOSITIONS = {
    torch.svd, torch.svd_lowrank, torch.pca_lowrank, torch.qr, torch.linalg.svd, torch.linalg.qr,
    torch.linalg.eigh, torch.linalg.svdvals, torch.Tensor.svd, torch.Tensor.qr,
}  # fmt: skip


# -- Operations with special handling ----------------------------------------------------


def _get_device(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _get_is_meta(tensor: torch.Tensor) -> bool:
    # load_state_dict warns that a copy to meta is lost; this copy is kept. A tuner of PEFT leaves
    # its own memory as it finds it where the base is on meta; its initialisation is refused.
    frame = sys._getframe(2)
    loads = frame.f_code is nn.Module._load_from_state_dict.__code__
    attaches = frame.f_globals.get("__name__", "").startswith("peft.tuners.")
    return tensor.is_meta and not loads and not attaches


def _get_data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(tensor, Awaited):
        _refuse_to_make_up(tensor)
    if value.is_meta:
        if value is not tensor and value.dtype is tensor.dtype:
            _refuse_to_make_up(tensor)
        TENSOR.data.__set__(tensor, value)
    else:
        _take(tensor, value)


def _copy_(tensor: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not isinstance(tensor, Awaited):
        _refuse_to_make_up(tensor)
    if source.is_meta:
        return tensor
    if not getattr(tensor, "_is_param", False):
        _refuse_to_lose(tensor, "copy_")
    return _take(tensor, source.expand(tensor.shape).to("cpu", tensor.dtype))


def _take(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Makes the parameter a plain one with this value."""
    attributes = dict(tensor.__dict__)
    plain = nn.Parameter(value.detach().clone(), requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, plain)
    attributes.pop("_is_param")
    tensor.__dict__.update(attributes)
    return tensor


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not isinstance(tensor, Awaited):
        # With dtype and device of an awaited one, as the target of a conversion.
        target: Any = [
            torch.empty(0, dtype=a.dtype, device=None) if isinstance(a, Awaited) else a
            for a in args
        ]
        return tensor.to(*target, **kwargs)
    device, dtype = asked_of_to(args, kwargs)
    if device is not None and device.type not in ("cpu", "meta"):
        return tensor.to(device)  # Refused by torch, because there is no data.
    return tensor if dtype in (None, tensor.dtype) else _awaited(tensor.to(dtype=dtype))


_SPECIAL: dict[Any, Callable[..., Any]] = {
    TENSOR.device.__get__: _get_device,
    TENSOR.is_meta.__get__: _get_is_meta,
    TENSOR.data.__get__: _get_data,
    TENSOR.data.__set__: _set_data,
    torch.Tensor.copy_: _copy_,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda tensor, *args, **kwargs: tensor,
    torch.Tensor.__deepcopy__: Awaited.__deepcopy__,
}
