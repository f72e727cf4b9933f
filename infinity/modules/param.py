"""The parameters of an offloaded model, each with a handle and a compute parameter.

While the unit of a parameter is in use, its module shows the *compute parameter*: a plain,
persistent `nn.Parameter` over the unit's region. At other times the module shows the *handle*. Both
live as long as the engine, so autograd, optimizers and hooks may keep references to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.modules.discover import Registration
from infinity.modules.handle import Handle
from infinity.state.units import TensorSpec, Unit


@dataclass(eq=False, slots=True, repr=False)
class OffloadedParam:
    """One parameter of the model: its unit, its handle and its compute parameter.

    registrations: every place in the model's modules that shows the parameter
    place: the memory of the compute parameter in the unit's region, with its own version counter
    """

    name: str
    unit: Unit
    spec: TensorSpec
    handle: Handle
    compute: nn.Parameter
    registrations: list[Registration]
    original: nn.Parameter | None  # The parameter before offload; restored if offload fails.
    version: int = 0  # Version of the compute parameter when its last use began, or ended.
    changes: int = 0  # Counts the changes that `compute._version` does not count.
    optimizer: weakref.ref[Any] | None = None  # The optimizer that owns its moments.
    place: torch.Tensor = field(init=False)
    is_shown: bool = False
    was_replaced: bool = False  # Its `.data` was assigned since the module began to show it.

    def __post_init__(self) -> None:
        self.place = self.compute.data
        self.version = self.compute._version

    def __repr__(self) -> str:
        # Without the compute parameter: printing it would read released memory.
        return f"OffloadedParam({self.name!r})"

    @property
    def was_changed(self) -> bool:
        """Whether it was changed, in place or by `.data =`, since the module began to show it."""
        return self.was_replaced or self.compute._version != self.version

    @property
    def stands_elsewhere(self) -> bool:
        """Whether `.data =` has moved the compute parameter to memory outside the unit's region."""
        return not self.compute.is_set_to(self.place)

    def mark(self, engine: object) -> None:
        """Marks the handle and the compute parameter as those of an engine: see `owner_of`."""
        for tensor in (self.handle, self.compute):
            tensor._offloaded_by = weakref.ref(engine)  # type: ignore[union-attr]

    def put_back(self) -> torch.Tensor | None:
        """Moves the compute parameter back to the unit's region, if `.data =` has moved it away.

        Returns the tensor that was assigned, or None.
        """
        if not self.stands_elsewhere:
            return None
        value = self.compute.data
        self.compute.data = self.place
        return value

    def show(self, tensor: nn.Parameter | Handle, other: nn.Parameter | Handle) -> None:
        """Registers `tensor` in every module that shows `other`."""
        for place in self.registrations:
            if place.module._parameters.get(place.attribute) is other:
                place.module._parameters[place.attribute] = tensor  # type: ignore[assignment]
            else:
                # A parametrization may have moved the parameter into a child module.
                _replace_below(place.module, other, tensor)


def settle(params: Iterable[OffloadedParam]) -> None:
    """Records that the engine has taken over every change of the compute parameters."""
    for param in params:
        param.version = param.compute._version
        param.is_shown = False


def increment_versions(params: Sequence[OffloadedParam]) -> None:
    """Records a change by the engine: a backward that saved an old value raises, as in plain
    PyTorch."""
    torch.autograd.graph.increment_version([param.compute for param in params])
    settle([param for param in params if not param.is_shown])


class ParamTable:
    """All parameters of one model. Lookups from any thread; `show_*` under the engine's lock."""

    def __init__(self, model: nn.Module, params: Iterable[OffloadedParam]) -> None:
        self._model = model
        self._params = list(params)
        self._by_name = {param.name: param for param in self._params}
        self._by_tensor = {
            id(tensor): param for param in self._params for tensor in (param.handle, param.compute)
        }
        self._by_unit: dict[int, list[OffloadedParam]] = {}
        for param in self._params:
            self._by_unit.setdefault(param.unit.index, []).append(param)
        # What every use of a unit walks through, twice: parameter, module, attribute.
        self._places: dict[int, list[tuple[OffloadedParam, Any, str]]] = {
            unit: [
                (param, at.module, at.attribute) for param in params for at in param.registrations
            ]
            for unit, params in self._by_unit.items()
        }
        self._rnns = {unit: _rnns_of(params) for unit, params in self._by_unit.items()}
        self._by_storage: dict[int, list[OffloadedParam]] = {}
        for param in self._params:
            storage = param.compute.untyped_storage()._cdata
            self._by_storage.setdefault(storage, []).append(param)

    # -- Showing ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Replaces the model's own parameters with handles."""
        for param in self._params:
            assert param.original is not None
            param.show(param.handle, param.original)
        _refresh(self._model.modules())

    def restore(self) -> None:
        """Replaces handles with the model's own parameters, as far as these still exist."""
        for param in self._params:
            if param.original is not None:
                param.show(param.original, param.handle)
        _refresh(self._model.modules())

    def show_parameters(self, unit: int) -> None:
        """Replaces the handles of a unit with its compute parameters."""
        for param, module, attribute in self._places[unit]:
            if module._parameters.get(attribute) is param.handle:
                module._parameters[attribute] = param.compute
            else:
                param.show(param.compute, param.handle)
        for param in self._by_unit[unit]:
            param.version, param.was_replaced = param.compute._version, False
            param.is_shown = True
        if self._rnns[unit]:
            _refresh(self._rnns[unit])

    def show_handles(self, unit: int) -> None:
        """Replaces the compute parameters of a unit with its handles."""
        for param, module, attribute in self._places[unit]:
            if module._parameters.get(attribute) is param.compute:
                module._parameters[attribute] = param.handle
            else:
                param.show(param.handle, param.compute)
        if self._rnns[unit]:
            _refresh(self._rnns[unit])

    def moved_away(self, unit: int) -> list[OffloadedParam]:
        """Returns the parameters of a unit that `.data =` has moved out of the unit's region."""
        moved = []
        for param in self.of_unit(unit):
            if not param.compute.is_set_to(param.place):
                moved.append(param)  # noqa: PERF401 - A comprehension is one more call in each use.
        return moved

    def was_changed(self, unit: int) -> bool:
        """Whether a parameter of the unit was changed since its module began to show it."""
        for param in self.of_unit(unit):
            if param.was_replaced or param.compute._version != param.version:
                return True
        return False

    # -- Looking up ------------------------------------------------------------------------------

    def of_unit(self, unit: int) -> list[OffloadedParam]:
        """Returns the parameters of a unit. Another rank's shard has none."""
        return self._by_unit.get(unit, [])

    def find(self, tensor: torch.Tensor) -> OffloadedParam | None:
        """Returns the parameter of a handle or compute parameter; None for any other tensor."""
        return self._by_tensor.get(id(tensor))

    def named(self, name: str) -> OffloadedParam:
        """Returns the parameter of this name. Raises InfinityError if there is none."""
        param = self._by_name.get(name)
        if param is None:
            raise InfinityError(f"no parameter {name!r}; see engine.parameter_names()")
        return param

    def is_parameter_memory(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a compute parameter or a view of one."""
        if tensor.layout is not torch.strided or isinstance(tensor, Handle):
            return False
        try:
            return tensor.untyped_storage()._cdata in self._by_storage
        except (NotImplementedError, RuntimeError):
            return False  # A wrapper subclass has no storage.

    def storages(self) -> Iterable[int]:
        """Returns the addresses of the storages that hold compute parameters."""
        return self._by_storage.keys()

    def under(self, tensor: torch.Tensor) -> list[OffloadedParam]:
        """Returns the parameters whose memory a strided tensor over it spans."""
        found = self._by_storage.get(tensor.untyped_storage()._cdata, [])
        first, end = _span(tensor)
        return [
            param
            for param in found
            if first < _span(param.place)[1] and _span(param.place)[0] < end
        ]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte and the end of a tensor in its storage."""
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + int(sum((n - 1) * step for n, step in steps))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _replace_below(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is old:
                child._parameters[name] = new  # type: ignore[assignment]


def _rnns_of(params: Iterable[OffloadedParam]) -> list[nn.Module]:
    owners = {id(place.module): place.module for param in params for place in param.registrations}
    return [module for module in owners.values() if isinstance(module, nn.RNNBase)]


def _refresh(modules: Iterable[nn.Module]) -> None:
    """Updates the second list of parameters that `nn.RNN` keeps."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [
                getattr(module, name, None) for name in module._flat_weights_names
            ]
