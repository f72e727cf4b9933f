"""Memory of parameters that code takes past their version counters.

A write through `.data`, a numpy array or a DLPack capsule changes no version counter, so only a
comparison of bytes finds it. `RawAccess` learns of every such access to the memory of its
parameters, by the code of modules, of hooks and of functions outside the modules, and has the bytes
compared when the use of the unit ends. A parameter that is not accessed this way is never compared.

Note [Replaced attributes]
  PyTorch calls no hook when `.data` of a plain parameter is read, so three attributes of
  torch.Tensor are replaced for the whole process. They give what the originals give. The class
  itself gives the originals: `torch.Tensor.data` is what it was for `__torch_function__` and its
  tables.

Note [Kept tensors]
  A tensor over a parameter's memory may outlive the use of the unit. While it lives, the unit is
  compared from the beginning of each further use. Between two uses the memory belongs to the tiers;
  a write to it there is refused when the memory leaves the device, or is used again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.errors import ParameterNotResident
from infinity.modules.autograd.param import OffloadedParam, ParamTable
from infinity.modules.handles.edits import WeightEdits
from infinity.modules.handles.torch_names import TENSOR

_ATTRIBUTES = ("data", "numpy", "__dlpack__")

# By the address of the storage, for the storages of all engines. Keeps no engine alive.
_owners: weakref.WeakValueDictionary[int, RawAccess] = weakref.WeakValueDictionary()


class RawAccess:
    """The accesses to the memory of one engine's parameters. Any thread; takes the engine's
    lock."""

    def __init__(
        self,
        param_table: ParamTable,
        edits: WeightEdits,
        lock: threading.RLock,
        *,
        is_in_use: Callable[[int], bool],
    ) -> None:
        self._param_table = param_table
        self._edits = edits
        self._lock = lock
        self._is_in_use = is_in_use

    def install(self) -> None:
        """Begins to observe. Replaces the attributes of torch.Tensor the first time."""
        for name in _ATTRIBUTES:
            original = getattr(TENSOR, name)
            if not isinstance(vars(TENSOR).get(name), _Observed):
                kind = _Method if callable(original) else _Property
                setattr(TENSOR, name, kind(original))
        for storage in self._param_table.storages():
            _owners[storage] = self

    def uninstall(self) -> None:
        """Ends the observation of this engine's parameters."""
        for storage in self._param_table.storages():
            _owners.pop(storage, None)

    def begin(self, tensor: torch.Tensor) -> list[OffloadedParam]:
        """Returns the parameters whose memory `tensor` shows, and watches them from now on. Raises
        ParameterNotResident for a compute parameter whose unit is not in use."""
        params = self._param_table.under(tensor)
        if not any(self._is_in_use(p.unit.index) or tensor is p.compute for p in params):
            return []  # The engine's own access to memory that rests on the device.
        with self._lock:
            for param in params:
                if self._is_in_use(param.unit.index):
                    self._edits.watch_raw(param)
                elif tensor is param.compute:
                    raise ParameterNotResident(
                        param.name,
                        "its memory was asked for outside of the module's forward and backward, "
                        "through a reference that was kept in one; take it from the module, or "
                        "inside `with infinity.gather(model, modify=True):`",
                    )
            return params

    def note_view(self, params: list[OffloadedParam], view: Any) -> None:
        """Remembers an object over the memory, as long as it lives."""
        with self._lock:
            self._edits.note_raw(params, weakref.ref(view))


def _owner_of(tensor: Any) -> RawAccess | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return None  # A handle, or another subclass with memory of its own kind.
    try:
        return _owners.get(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # Sparse, or a tensor of a function transform: it has no storage.


class _Observed:
    """An attribute of torch.Tensor whose reading is observed. See Note [Replaced attributes]."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.__doc__ = original.__doc__


class _Property(_Observed):
    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        if tensor is None:
            return self._original
        owner = _owner_of(tensor) if _owners else None
        if owner is None:
            return self._original.__get__(tensor, kind)
        params = owner.begin(tensor)
        view = self._original.__get__(tensor, kind)
        owner.note_view(params, view)
        return view

    def __set__(self, tensor: Any, value: Any) -> None:
        self._original.__set__(tensor, value)

    def __delete__(self, tensor: Any) -> None:
        self._original.__delete__(tensor)


class _Method(_Observed):
    def __get__(self, tensor: Any, kind: Any = None) -> Any:
        if tensor is None:
            return self._original
        bound = self._original.__get__(tensor, kind)
        owner = _owner_of(tensor) if _owners else None
        if owner is None:
            return bound

        def call(*args: Any, **kwargs: Any) -> Any:
            params = owner.begin(tensor)
            view = bound(*args, **kwargs)
            # A capsule cannot be followed; the tensor or array that is made of it holds `tensor`.
            owner.note_view(params, tensor if self._original.__name__ == "__dlpack__" else view)
            return view

        return call
