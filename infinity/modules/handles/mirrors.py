"""Mirrors: tensors that a handle returns instead of views of the parameter's memory.

The memory of a released parameter is freed after the operation that fetched it, so a view of that
memory (`weight[0]`, `weight.detach()`, `weight.t()`) cannot be returned. A mirror is a tensor with
its own memory that behaves like the view:

  read   shows the present value of the parameter; it is fetched again if it has changed
  write  an in-place write to a mirror is written to the parameter, or to the gradient
  numpy  returns a read-only array, because a write to it could not be detected

Note [Bytes]
  The storage of a mirror is a copy of one range of bytes of the parameter, with the strides of the
  view. Views of a mirror are therefore views of the same storage. Reading and writing back copy
  that range, for any chain of view operations and dtypes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from infinity.errors import UnsupportedError
from infinity.modules.handles.torch_functions import (
    TENSOR,
    StandIn,
    map_tensors,
    members,
    version_of,
    written,
)
from infinity.private.torch import DisableTorchFunctionSubclass


class Origin:
    """The bytes that the storage of a mirror, and of all views of it, copies."""

    def __init__(self, handle: Any, start: int, storage: Any) -> None:
        """`handle`: of the parameter or gradient."""
        owner = handle.owner
        self._owner = weakref.ref(owner)  # A dict of mirrors does not keep a dropped model alive.
        self._name, self.is_gradient = handle.name_in_model, handle.is_gradient
        self._start = start  # First byte, relative to the first byte of the parameter.
        self._storage = storage
        self._stamp = owner.stamp(self._name, is_gradient=self.is_gradient)
        self.is_lost = False  # The parameter or the gradient got other memory.

    def is_of(self, owner: Any, name: str, *, is_gradient: bool) -> bool:
        """Whether the bytes are nobody else's, or those of this parameter or gradient."""
        found = self._owner(), self._name, self.is_gradient
        return self.is_lost or found == (owner, name, is_gradient)

    def pull_updated(self) -> bool:
        """Updates the storage. Returns whether it has changed."""
        owner = self._owner()
        if owner is None or self.is_lost:
            return False
        stamp = owner.stamp(self._name, is_gradient=self.is_gradient)
        if stamp == self._stamp:
            return False
        if stamp is None or (self._stamp is not None and stamp[0] != self._stamp[0]):
            self.is_lost = True
            return False
        owner.read_bytes(self._name, self._start, self._bytes(), is_gradient=self.is_gradient)
        self._stamp = stamp
        return True

    def write_back(self) -> None:
        """Writes the changed storage to the parameter."""
        owner = self._owner()
        if owner is None or self.is_lost:
            return
        owner.write_bytes(self._name, self._start, self._bytes(), is_gradient=self.is_gradient)
        self._stamp = owner.stamp(self._name, is_gradient=self.is_gradient)

    def spoil(self) -> None:
        """Marks the storage as changed by a refused operation, so that the next read fetches it
        again."""
        self._stamp = (self._stamp[0], -1) if self._stamp else None

    def lose(self) -> None:
        """Updates the mirror a last time, before the parameter gets other memory."""
        self.pull_updated()
        self.is_lost = True

    def lost(self) -> Origin:
        """Returns the origin of a former mirror that has its own memory."""
        other = object.__new__(Origin)
        other.__dict__.update(self.__dict__, is_lost=True)
        return other

    def _bytes(self) -> torch.Tensor:
        device = self._storage.device
        return torch.empty(0, dtype=torch.uint8, device=device).set_(self._storage)


class Mirror(StandIn):
    """A tensor with the content of a view of a parameter. Results other than its views are plain
    tensors."""

    origin: Origin

    @classmethod
    @override
    def run(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        plain: dict[int, _Plain] = {}
        args, kwargs = map_tensors((args, dict(kwargs)), lambda t: _lend(t, plain))
        targets = written(func, args, kwargs, torch.Tensor)
        for lent in plain.values():
            lent.is_target = any(target is lent.tensor for target in targets)
        try:
            answer = func(*args, **kwargs)
        finally:
            # Functions of torch.nn.init write under a no_grad of their own, which is over here.
            is_recording = (
                torch.is_grad_enabled() and getattr(func, "__module__", "") != "torch.nn.init"
            )
            for lent in plain.values():
                lent.take_changes(is_recording=is_recording)
        return map_tensors(answer, lambda t: _wrap(t, plain.values()))

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __copy__(self) -> torch.Tensor:
        return self.detach()


class _Plain:
    """A mirror as a plain tensor, during one operation."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        with DisableTorchFunctionSubclass():
            if mirror.origin.pull_updated() and not mirror.is_inference():
                torch.autograd.graph.increment_version(mirror)
            # A leaf made from a mirror allows in-place writes like any leaf.
            self._is_view = mirror.requires_grad and not mirror.is_leaf
            self.tensor = mirror.as_subclass(torch.Tensor)
            self.storage = mirror.untyped_storage()._cdata
        self._version = version_of(self.tensor)
        self.is_target = False  # Some functions over lists change no version.

    def take_changes(self, *, is_recording: bool) -> None:
        if not self.is_target and version_of(self.tensor) == self._version:
            return
        origin = self.mirror.origin
        if self._is_view and is_recording:
            origin.spoil()
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place "
                "operation."
            )
        origin.write_back()


def _lend(tensor: torch.Tensor, plain: dict[int, _Plain]) -> torch.Tensor:
    if not isinstance(tensor, Mirror):
        return tensor
    if id(tensor) not in plain:
        plain[id(tensor)] = _Plain(tensor)
    return plain[id(tensor)].tensor


def _wrap(tensor: torch.Tensor, plain: Any) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    for lent in plain:
        origin = lent.mirror.origin
        if tensor is lent.tensor:
            mirror: torch.Tensor = lent.mirror
            return mirror
        if not origin.is_lost and tensor.untyped_storage()._cdata == lent.storage:
            return _as_mirror(tensor, origin)
    return tensor


def _as_mirror(tensor: torch.Tensor, origin: Origin) -> Mirror:
    mirror: Mirror = tensor.as_subclass(Mirror)
    mirror.origin = origin
    return mirror


# -- Making ----------------------------------------------------------------------------------------


class _Copied(torch.autograd.Function):
    """A copy with the strides of a view. Its gradient is the gradient of the view."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return _copied(view)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


@torch.inference_mode(False)  # A copy that is made in it has no version.
def _copied(view: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the memory that a view spans, with the strides of the view."""
    span = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    storage = view.detach().as_strided((span,), (1,)).clone().untyped_storage()
    copy = torch.empty(0, dtype=view.dtype, device=view.device)
    return copy.set_(storage, 0, view.shape, view.stride())  # Not a view for autograd.


def mirrored(answer: Any, base: torch.Tensor, handle: Any, *, is_copy: bool) -> Any:
    """Replaces the views of `base` in a result with mirrors. `base` is the dense memory that stands
    in the place of `handle`. `is_copy`: it is a copy already and need not be copied again."""
    note_alias = handle.owner.module_handle(handle.name_in_model).note_alias
    storage = base.untyped_storage()._cdata
    first = base.storage_offset() * base.itemsize
    nbytes = base.numel() * base.itemsize

    def mirror(view: torch.Tensor) -> torch.Tensor:
        if type(view) not in (torch.Tensor, torch.nn.Parameter):
            return view
        if view.layout is not torch.strided or view.untyped_storage()._cdata != storage:
            return view
        start = view.storage_offset() * view.itemsize - first
        if not 0 <= start < nbytes or view.numel() == 0 or view.is_conj() or view.is_neg():
            return view
        if is_copy:
            assert first == 0
            copy, start = view, 0
        else:
            copy = _Copied.apply(view) if view.requires_grad else _copied(view)  # type: ignore[no-untyped-call]
        origin = Origin(handle, int(start), copy.untyped_storage())
        note_alias(origin)
        return _as_mirror(copy, origin)

    return map_tensors(answer, mirror)


# -- Operations with special handling --------------------------------------------------------


def _own(func: Callable[..., Any], mirror: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the function on the tensor itself, without its values."""
    with DisableTorchFunctionSubclass():
        return func(mirror, *args, **kwargs)


def _up_to_date(func: Callable[..., Any], mirror: Mirror, *args: Any, **kwargs: Any) -> Any:
    if mirror.origin.pull_updated():
        torch.autograd.graph.increment_version(mirror)
    return _own(func, mirror, *args, **kwargs)


def _array(func: Callable[..., Any], mirror: Mirror, *args: Any, **kwargs: Any) -> Any:
    array = _up_to_date(func, mirror, *args, **kwargs)
    array.flags.writeable = False
    return array


def _set_data(mirror: Any, value: torch.Tensor) -> None:
    """Gives the mirror other memory; the parameter keeps its own."""
    if not isinstance(mirror, Mirror):  # tensor.data = mirror
        value = value.clone()
    else:
        mirror.origin = mirror.origin.lost()
    _own(TENSOR.data.__set__, mirror, value)


def _refuse(func: Callable[..., Any], mirror: Mirror, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        f"{getattr(func, '__name__', func)} would export or replace the memory of a view of a "
        "parameter that rests on a tier; writes to that memory would be lost. Clone it first"
    )


def _detach(mirror: Mirror) -> Any:
    """Detaches a mirror. A parameter that is made of one is a mirror as well: it has the values of
    the view, writes to them, and gets a gradient of its own."""
    caller = sys._getframe(2)
    loads = caller.f_back is not None and caller.f_back.f_code.co_name == "_load_from_state_dict"
    if caller.f_code is not torch.nn.Parameter.__new__.__code__ or not loads:
        return _as_mirror(_up_to_date(torch.Tensor.detach, mirror), mirror.origin)
    copy = _up_to_date(torch.Tensor.clone, mirror).detach()
    return _as_mirror(copy, mirror.origin.lost())  # Another model loads with assign=True.


_OWN = members(
    "requires_grad_ grad backward register_hook retain_grad register_post_accumulate_grad_hook"
) | {TENSOR.requires_grad.__set__, TENSOR.grad.__set__, TENSOR.grad.__delete__}
_UP_TO_DATE = members("data_ptr untyped_storage storage")

Mirror.special = {
    **{func: partial(_own, func) for func in _OWN},
    **{func: partial(_up_to_date, func) for func in _UP_TO_DATE},
    **{func: partial(_array, func) for func in members("numpy __array__")},
    **{func: partial(_refuse, func) for func in members("set_ resize_ resize_as_ __dlpack__")},
    TENSOR.data.__set__: _set_data,
    torch.Tensor.detach: _detach,
}
