"""Which face every parameter shows, and which parameter a face is of.

Every parameter has two faces. While its unit is held the module has the *compute parameter*, a
plain persistent `nn.Parameter` over the unit's region; otherwise it has the *handle*. Both live as
long as the engine, so that autograd, optimizers and hooks may keep them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.modules.handle import Handle
from infinity.modules.param import OffloadedParam


class ParamTable:
    """The faces of one model's parameters. Shown under the engine's lock; looked up anywhere."""

    def __init__(self, model: nn.Module, params: Iterable[OffloadedParam]) -> None:
        self._model = model
        self._params = list(params)
        self._by_name = {param.name: param for param in self._params}
        self._by_tensor = {id(tensor): s for s in self._params for tensor in (s.handle, s.compute)}
        self._by_unit: dict[int, list[OffloadedParam]] = {}
        for param in self._params:
            self._by_unit.setdefault(param.unit.index, []).append(param)
        self._rnns = {unit: _rnns_of(params) for unit, params in self._by_unit.items()}
        self._storages = {param.compute.untyped_storage()._cdata for param in self._params}

    # -- Showing ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Handles in the place of the model's own parameters."""
        for param in self._params:
            assert param.original is not None
            param.show(param.handle, param.original)
        _refresh(self._model.modules())

    def restore(self) -> None:
        """The model's own parameters again, as far as they are still there."""
        for param in self._params:
            if param.original is not None:
                param.show(param.original, param.handle)
        _refresh(self._model.modules())

    def show_parameters(self, unit: int) -> None:
        for param in self._by_unit[unit]:
            param.show(param.compute, param.handle)
            param.shown()
        _refresh(self._rnns[unit])

    def show_handles(self, unit: int) -> None:
        for param in self._by_unit[unit]:
            param.show(param.handle, param.compute)
        _refresh(self._rnns[unit])

    # -- Looking up ------------------------------------------------------------------------------

    def of_unit(self, unit: int) -> list[OffloadedParam]:
        """Empty for a unit without parameters of the model, such as another rank's shard."""
        return self._by_unit.get(unit, [])

    def find(self, tensor: torch.Tensor) -> OffloadedParam | None:
        """The slot of either face; None for any other tensor."""
        return self._by_tensor.get(id(tensor))

    def named(self, name: str) -> OffloadedParam:
        param = self._by_name.get(name)
        if param is None:
            raise InfinityError(f"no parameter {name!r}; see engine.parameter_names()")
        return param

    def is_parameter_memory(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is, or is a view of, a compute parameter."""
        if tensor.layout is not torch.strided or isinstance(tensor, Handle):
            return False
        try:
            return tensor.untyped_storage()._cdata in self._storages
        except (NotImplementedError, RuntimeError):
            return False  # A wrapper subclass without storage is not our memory.


def _rnns_of(params: Iterable[OffloadedParam]) -> list[nn.Module]:
    owners = {id(alias.module): alias.module for param in params for alias in param.aliases}
    return [module for module in owners.values() if isinstance(module, nn.RNNBase)]


def _refresh(modules: Iterable[nn.Module]) -> None:
    """nn.RNN keeps its parameters a second time, in a list of its own."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [
                getattr(module, name, None) for name in module._flat_weights_names
            ]
