"""The parameters of an offloaded model, each with a handle and a compute parameter.

While the unit of a parameter is in use, its module shows the *compute parameter*: a plain,
persistent `nn.Parameter` over the unit's region. At other times the module shows the *handle*. Both
live as long as the engine, so autograd, optimizers and hooks may keep references to them.
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import EllipsisType
from typing import Any, TypeAlias

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.modules.handles.handle import Handle
from infinity.modules.reading.discover import Registration
from infinity.modules.tiling.layers import TiledParam
from infinity.state.units import TensorSpec, Unit

Rows: TypeAlias = slice | EllipsisType  # Of a tiled parameter; all of another one.

_version_of = attrgetter("_version")


@dataclass(eq=False, slots=True, repr=False)
class OffloadedParam:
    """One parameter of the model: its unit, its handle and its compute parameter.

    registrations: every place in the model's modules that shows the parameter
    place: the memory of the compute parameter in the unit's region, with its own version counter
    shown: the gradient that `.grad` of the compute parameter shows, with the version at that time
    """

    name: str
    unit: Unit
    spec: TensorSpec
    handle: Handle
    compute: nn.Parameter
    registrations: list[Registration]
    original: nn.Parameter | None  # The parameter before offload; restored if offload fails.
    changes: int = 0  # Counts the changes that `compute._version` does not count.
    optimizer: weakref.ref[Any] | None = None  # The optimizer that owns its moments.
    shown: tuple[torch.Tensor, int] | None = None
    place: torch.Tensor = field(init=False)
    number: int = 0  # Among the parameters of its unit.
    in_unit: UnitParams = field(init=False)  # With the others, once there is a `ParamTable`.

    def __post_init__(self) -> None:
        self.place = self.compute.data
        UnitParams([self])

    def __repr__(self) -> str:
        # Without the compute parameter: printing it would read released memory.
        return f"OffloadedParam({self.name!r})"

    @property
    def was_changed(self) -> bool:
        """Whether it was changed, in place or by `.data =`, since the module began to show it."""
        is_replaced = self.number in self.in_unit.replaced
        return is_replaced or self.compute._version != self.in_unit.versions[self.number]

    def note_replaced(self) -> None:
        """Records a change that no version counter counts, while the module shows it."""
        self.in_unit.replaced.add(self.number)

    @property
    def stands_elsewhere(self) -> bool:
        """Whether `.data =` has moved the compute parameter to memory outside the unit's region."""
        return not self.compute.is_set_to(self.place)

    def mark(self, engine: object) -> None:
        """Marks the handle and the compute parameter as those of an engine: see `owner_of`."""
        for tensor in (self.handle, self.compute):
            tensor._offloaded_by = weakref.ref(engine)  # type: ignore[union-attr]
        own = weakref.ref(self.compute)
        # A pickle of the tensor itself would hold all of its unit, and the mark.
        self.compute.__reduce_ex__ = lambda protocol: _plain(own()).__reduce_ex__(protocol)  # type: ignore[method-assign]

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
    """Records that the engine has taken over every change of compute parameters that are not
    shown."""
    for param in params:
        param.in_unit.versions[param.number] = param.compute._version


def increment_versions(params: Sequence[OffloadedParam]) -> None:
    """Records a change by the engine: a backward that saved an old value raises, as in plain
    PyTorch."""
    torch.autograd.graph.increment_version([param.compute for param in params])
    settle([param for param in params if not (u := param.in_unit).is_shown and param not in u.lent])


class UnitParams:
    """The parameters of one unit, as every use of it walks through them.

    is_shown: modules show the compute parameters, and not the handles. `lent`: if they do not, the
    parameters that functions outside the modules use. `versions`: those of the compute parameters
    when their last use began, or ended. `replaced`: the numbers of those whose `.data` was assigned
    in this use.
    """

    def __init__(self, params: list[OffloadedParam]) -> None:
        self.params = params
        self.computes = [param.compute for param in params]
        self.memory = [param.place for param in params]
        self.places: list[tuple[Any, str, OffloadedParam]] = [
            (at.module, at.attribute, param) for param in params for at in param.registrations
        ]
        owners = {id(module): module for module, _, _ in self.places}
        self.rnns = [module for module in owners.values() if isinstance(module, nn.RNNBase)]
        self.is_shown, self.versions, self.replaced = False, self.versions_now(), set[int]()
        self.lent = set[OffloadedParam]()
        for number, param in enumerate(params):
            param.number, param.in_unit = number, self

    def versions_now(self) -> list[int]:
        """The present versions of the compute parameters."""
        return list(map(_version_of, self.computes))


class ParamTable:
    """All parameters of one model. Lookups from any thread; `show_*` under the engine's lock.

    tiled: the parameters that are split into some of `params`, by name
    """

    def __init__(
        self, model: nn.Module, params: Iterable[OffloadedParam], tiled: Mapping[str, TiledParam]
    ) -> None:
        self._model = model
        self.params = list(params)
        self.tiled = tiled
        self._by_name = {param.name: param for param in self.params}
        self._by_tensor = {
            id(tensor): param for param in self.params for tensor in (param.handle, param.compute)
        }
        by_unit: dict[int, list[OffloadedParam]] = {}
        for param in self.params:
            by_unit.setdefault(param.unit.index, []).append(param)
        self._by_unit = {unit: UnitParams(params) for unit, params in by_unit.items()}
        self._none = UnitParams([])
        # In the order of their first bytes, which are in the second list.
        self._by_storage: dict[int, tuple[list[OffloadedParam], list[int]]] = {}
        for param in sorted(self.params, key=lambda param: _span(param.place)):
            found = self._by_storage.setdefault(param.compute.untyped_storage()._cdata, ([], []))
            found[0].append(param)
            found[1].append(_span(param.place)[0])

    # -- Showing ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Replaces the model's own parameters with handles."""
        for param in self.params:
            assert param.original is not None
            param.show(param.handle, param.original)
        self.refresh()

    def refresh(self, *, is_referenced: bool = True) -> None:
        """Updates what modules keep of their parameters beside these; see `_refresh`."""
        _refresh(self._model.modules(), is_referenced=is_referenced)

    def restore(self) -> None:
        """Replaces handles with the model's own parameters, as far as these still exist."""
        for param in self.params:
            if param.original is not None:
                param.show(param.original, param.handle)
        self.refresh()

    def show_parameters(self, unit: int) -> None:
        """Replaces the handles of a unit with its compute parameters."""
        here = self._by_unit[unit]
        if here.is_shown:
            return
        for module, attribute, param in here.places:
            if module._parameters.get(attribute) is param.handle:
                module._parameters[attribute] = param.compute
            else:
                param.show(param.compute, param.handle)
        here.is_shown = True
        if not here.lent:
            here.versions = here.versions_now()
        if here.rnns:
            _refresh(here.rnns)

    def show_handles(self, unit: int) -> bool:
        """Replaces the compute parameters of a unit with its handles. Returns whether modules have
        shown them."""
        here = self._by_unit[unit]
        for module, attribute, param in here.places if here.is_shown else ():
            if module._parameters.get(attribute) is param.compute:
                module._parameters[attribute] = param.handle
            else:
                param.show(param.handle, param.compute)
        if here.rnns:
            _refresh(here.rnns)
        return here.is_shown

    def settle(self, unit: int) -> None:
        """Records that the engine has taken over every change of a unit, which shows handles."""
        here = self._by_unit.get(unit, self._none)
        if here.is_shown:
            here.is_shown, here.versions = False, here.versions_now()
        else:
            settle(here.lent)
        here.lent.clear()
        here.replaced.clear()

    def moved_away(self, unit: int) -> list[OffloadedParam]:
        """Returns the parameters of a unit that `.data =` has moved out of the unit's region."""
        here = self._by_unit.get(unit, self._none)
        if here.is_shown and all(map(torch.Tensor.is_set_to, here.computes, here.memory)):
            return []  # Mostly; without a call of Python for each.
        return [param for param in self.used(unit) if param.stands_elsewhere]

    def was_changed(self, unit: int) -> bool:
        """Whether a parameter of the unit was changed in the use that ends."""
        here = self._by_unit.get(unit, self._none)
        if not here.is_shown:
            return any(param.was_changed for param in here.lent)
        return bool(here.replaced) or here.versions_now() != here.versions

    def used(self, unit: int) -> Collection[OffloadedParam]:
        """Returns the parameters of a unit that the present use may change."""
        here = self._by_unit.get(unit, self._none)
        return here.params if here.is_shown else here.lent

    def changed(self, unit: int, lent: Iterable[OffloadedParam]) -> list[OffloadedParam]:
        """Returns the parameters of a unit (those in `lent`, if there are any) that were changed
        since their last use ended."""
        here = self._by_unit.get(unit, self._none)
        if here.is_shown or (not lent and here.versions_now() == here.versions):
            return []  # Mostly.
        own = [param for param in lent or here.params if param.in_unit is here]
        return [param for param in own if param not in here.lent and param.was_changed]

    def replace_handle(self, name: str, handle: Handle) -> None:
        """Makes another object, which has taken the content of the handle, the handle."""
        if name in self.tiled:
            self.tiled[name].tensor = handle
            return
        param = self.named(name)
        before, param.handle = param.handle, handle
        del self._by_tensor[id(before)]
        self._by_tensor[id(handle)] = param
        param.show(handle, before)

    # -- Looking up ------------------------------------------------------------------------------

    def of_unit(self, unit: int) -> list[OffloadedParam]:
        """Returns the parameters of a unit. Another rank's shard has none."""
        return self._by_unit.get(unit, self._none).params

    def find(self, tensor: torch.Tensor) -> OffloadedParam | None:
        """Returns the parameter of a handle or compute parameter; None for any other tensor."""
        return self._by_tensor.get(id(tensor))

    def named(self, name: str) -> OffloadedParam:
        """Returns the parameter of this name. Raises InfinityError if there is none."""
        param = self._by_name.get(name)
        if param is None:
            raise InfinityError(f"no parameter {name!r}; see engine.parameter_names()")
        return param

    def handle(self, name: str) -> Handle:
        """Returns the handle of a parameter by its name in the user's model."""
        if name not in self.tiled:
            return self.named(name).handle
        tensor = self.tiled[name].tensor
        assert isinstance(tensor, Handle)
        return tensor

    def parts(self, name: str) -> list[tuple[OffloadedParam, Rows]]:
        """Returns a parameter, or each tile of a tiled one, with its rows."""
        if name not in self.tiled:
            return [(self.named(name), ...)]
        tiled = self.tiled[name]
        rows = itertools.starmap(slice, itertools.pairwise(tiled.starts))
        params = [self.named(handle.name_in_model) for handle in tiled.handles]
        return list(zip(params, rows, strict=True))

    def tile_rows(self, name: str) -> list[tuple[str, int, int]]:
        """Returns (name, first row, end) of every tile of a parameter; one entry if it is not
        tiled."""
        end = next(iter(self.handle(name).shape), 1)
        return [
            (param.name, *((0, end) if rows is ... else (rows.start, rows.stop)))
            for param, rows in self.parts(name)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Returns the handles and compute parameters, and the handles of tiled parameters."""
        own = [tensor for param in self.params for tensor in (param.handle, param.compute)]
        return [*own, *(tiled.tensor for tiled in self.tiled.values())]

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
        params, starts = self._by_storage.get(tensor.untyped_storage()._cdata, ([], []))
        first, end = _span(tensor)
        near = slice(max(bisect_left(starts, first) - 1, 0), bisect_left(starts, end))
        return [param for param in params[near] if first < _span(param.place)[1]]


def _plain(parameter: Any) -> nn.Parameter:
    """Returns a parameter with a copy of the values."""
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte and the end of a tensor in its storage."""
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + int(sum((n - 1) * step for n, step in steps)) if tensor.numel() else 0
    return first * tensor.itemsize, (first + length) * tensor.itemsize


def _replace_below(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is old:
                child._parameters[name] = new  # type: ignore[assignment]


def _refresh(modules: Iterable[nn.Module], *, is_referenced: bool = True) -> None:
    """Updates the second list of parameters that `nn.RNN` keeps, and its weak references to these,
    by which it finds parameters that were replaced since."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            weights = [getattr(module, name, None) for name in module._flat_weights_names]
            module._flat_weights = weights
            module._flat_weight_refs = [
                weakref.ref(weight) if is_referenced and weight is not None else None
                for weight in weights
            ]
