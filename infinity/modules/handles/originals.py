"""The user's original parameters that are still referenced after `offload`.

A list in a module, a set, a closure, the groups of an optimizer or another model may keep an
original parameter. Its handle therefore becomes the same Python object: it is found in sets and
dicts of before, by its identity too. An original with a weak reference, or saved in a graph, cannot
change places with its handle. It becomes a *follower*: an object without bytes that stands for the
handle in every operation. A follower reads the present value, and its gradient is added to the
gradient of the parameter.

Handles take the places after the model has released its parameters, of the originals that are still
alive. The objects that refer to them need not be known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy
import torch
from torch import nn

from infinity.errors import InfinityError, ParameterNotResident, UnsupportedError
from infinity.modules.autograd.param import ParamTable
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.torch_functions import map_tensors
from infinity.modules.reading.empty_weights import without_class
from infinity.private.torch import DisableTorchFunctionSubclass


class Follower(nn.Parameter):
    """An original parameter that stands for a handle. Only `Originals.follow` makes it."""

    # Weak, so that a model dropped without close() releases its memory.
    stands_for: weakref.ref[Handle]
    name_in_model: str

    @property
    def handle(self) -> Handle:
        """The handle in the modules. Raises ParameterNotResident if the model is gone."""
        handle = self.stands_for()
        if handle is None:
            raise ParameterNotResident(self.name_in_model, "its offloaded model is gone")
        return handle

    grad: Any = property(
        lambda self: self.handle.grad,
        lambda self, value: setattr(self.handle, "grad", value),
        lambda self: delattr(self.handle, "grad"),
    )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.handle)

    def __format__(self, spec: str) -> str:
        return format(self.handle, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.handle.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.handle.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__hash__:
            return id(args[0])
        args, kwargs = map_tensors((args, dict(kwargs or {})), followed)
        return func(*args, **kwargs)


def followed(tensor: Any) -> Any:
    """Returns the handle of a follower, and anything else as it is."""
    return tensor.handle if isinstance(tensor, Follower) else tensor


class Originals:
    """The user's own parameters while their model is offloaded. Keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        refuse_aliases(model)
        self._found = [(weakref.ref(p), name) for name, p in model.named_parameters()]

    def follow(self, table: ParamTable) -> None:
        """Makes the originals that are still alive the handles of the table, by name, or followers
        of them."""
        table.refresh(is_referenced=False)
        alive = [(parameter, name) for ref, name in self._found if (parameter := ref()) is not None]
        self._found.clear()  # Weak references.
        for original, name in alive:
            handle = table.handle(name)
            try:  # Exchanges the contents of the two objects, if PyTorch can.
                plain_swap_tensors(original, handle)
            except RuntimeError:
                _follow(original, handle)
                continue
            table.replace_handle(name, cast(Handle, original))
            _follow(handle, cast(Handle, original))  # A graph may know it.
        table.refresh()


# Before `patches.refuse_swaps` replaces it.
plain_swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


def _follow(original: Any, handle: Handle) -> None:
    # An original without a value has operations of its own, and no memory to give back.
    with DisableTorchFunctionSubclass():
        original.requires_grad_(handle.requires_grad)
        if not original.is_meta:
            original.data = torch.empty(0, dtype=original.dtype, device=original.device)

    name = handle.name_in_model

    def refuse(gradient: torch.Tensor) -> NoReturn:
        raise InfinityError(
            f"a graph that was made before infinity.offload reaches {name!r}, "
            "which is on its tier now; run that backward before, or the forward again"
        )

    with DisableTorchFunctionSubclass():
        original._backward_hooks = None  # They belong to the compute parameter now.
        if handle.requires_grad:
            original.register_hook(refuse)
    original.stands_for, original.name_in_model = weakref.ref(handle), name
    # INV-23: gradients of the original go to its handle.
    original.__class__ = Follower


# -- Tensors over the same memory ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spanned:
    """A tensor of a module, and the bytes that it spans."""

    space: tuple[str, int]  # Its device; on meta also its storage.
    first: int  # The first byte.
    end: int
    tensor: torch.Tensor
    name: str
    is_parameter: bool

    @staticmethod
    def of(tensor: torch.Tensor, name: str, *, is_parameter: bool) -> _Spanned | None:
        """None for a tensor without an element, or without strides."""
        tensor = without_class(tensor)
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        storage, first = 0, tensor.data_ptr()
        if tensor.is_meta:
            storage = tensor.untyped_storage()._cdata
            first = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = first + int(last + 1) * tensor.itemsize
        return _Spanned((str(tensor.device), storage), first, end, tensor, name, is_parameter)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        nbytes = self.tensor.itemsize
        strides = tuple(nbytes * step for step in self.tensor.stride())
        # The address is never read; that of a tensor on meta is 0, which numpy takes for none.
        data = (self.first + _META_ADDRESS * bool(self.space[1]), False)
        return {
            "version": 3, "typestr": f"|V{nbytes}", "data": data,
            "shape": tuple(self.tensor.shape), "strides": strides,
        }  # fmt: skip

    def shares_an_element(self, other: _Spanned) -> bool:
        """Whether a byte belongs to both. Columns of one matrix span the same bytes and share
        none."""
        if self.space != other.space or min(self.end, other.end) <= max(self.first, other.first):
            return False
        return bool(numpy.shares_memory(numpy.asarray(self), numpy.asarray(other)))


_META_ADDRESS = 1 << 20


def refuse_aliases(model: nn.Module) -> None:
    """Raises UnsupportedError for a parameter that shares memory with another one, with a buffer,
    or with a tensor in an attribute of a module: each would have values of its own from then on."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    spans = [_Spanned.of(p, own[id(p)], is_parameter=True) for p in model.parameters()]
    for path, module in model.named_modules():
        for attribute, tensor in _tensors_kept_by(module):
            if id(tensor) not in own:
                name = f"{path}.{attribute}" if path else attribute
                spans.append(_Spanned.of(tensor, name, is_parameter=False))
    reaching: list[_Spanned] = []  # Those before that end behind the beginning of the next.
    for span in sorted(filter(None, spans), key=lambda span: (span.space, span.first)):
        reaching = [s for s in reaching if s.space == span.space and s.end > span.first]
        for other in reaching:
            if (span.is_parameter or other.is_parameter) and span.shares_an_element(other):
                _refuse_shared(*sorted((other, span), key=lambda span: span.is_parameter))
        reaching.append(span)


def _refuse_shared(tensor: _Spanned, parameter: _Spanned) -> None:
    if tensor.is_parameter:
        raise UnsupportedError(
            f"parameters {tensor.name!r} and {parameter.name!r} share memory, and each of them "
            "gets its own place on the tiers; tie them before infinity.offload by one "
            "nn.Parameter that both modules have (a.weight = b.weight), or give one a clone "
            "(nn.Parameter(weight.detach().clone()))"
        )
    # The old spectral_norm keeps such a view, and sets it again in every forward.
    if parameter.name != f"{tensor.name}_orig":
        raise UnsupportedError(
            f"{tensor.name} is a view of the memory of parameter {parameter.name!r}, which leaves "
            "it for its tier; take the view in the forward, or clone it, before infinity.offload"
        )


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _tensors_kept_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers and plain attributes, also in lists and mappings, but none
    of an offloaded model."""
    own = [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    for name, value in [*module._buffers.items(), *own]:
        if isinstance(value, Mapping):
            value = tuple(value.values())
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, (Handle, Follower)):
                yield name, tensor
