"""One parameter of an offloaded model, and its two faces: its module shows one at a time."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.modules.discover import Alias
from infinity.modules.handle import Handle
from infinity.state.units import TensorSpec, Unit


@dataclass(eq=False, slots=True, repr=False)
class OffloadedParam:
    """One parameter of the model: its facts, its place and its two faces."""

    name: str
    unit: Unit
    spec: TensorSpec
    handle: Handle
    compute: nn.Parameter
    aliases: list[Alias]
    original: nn.Parameter | None  # What the module had before; back in place after a failure.
    version: int = 0  # Of the compute parameter when it was shown.
    changes: int = 0  # Those that its version does not show, too.
    optimizer: weakref.ref[Any] | None = None  # The one its moments belong to.
    place: torch.Tensor = field(init=False)
    was_replaced: bool = False  # Its data was, since the compute parameter was shown.

    def __post_init__(self) -> None:
        # The compute parameter's place, with a version counter of its own.
        self.place = self.compute.data

    def __repr__(self) -> str:
        return f"Slot({self.name!r})"  # A released compute parameter must not be printed.

    def shown(self) -> None:
        """Its module has the compute parameter from now on."""
        self.version = self.compute._version
        self.was_replaced = False

    @property
    def was_changed(self) -> bool:
        """In place or by `.data =`, since the compute parameter was shown."""
        return self.was_replaced or self.compute._version != self.version

    @property
    def stands_elsewhere(self) -> bool:
        """`.data =` has put the compute parameter over other memory than the unit's."""
        return not self.compute.is_set_to(self.place)

    def put_back(self) -> torch.Tensor | None:
        """The compute parameter stands over its place again, if `.data =` has put it elsewhere.
        Returns what it stood over."""
        if not self.stands_elsewhere:
            return None
        value = self.compute.data
        self.compute.data = self.place
        return value

    def show(self, tensor: nn.Parameter | Handle, other: nn.Parameter | Handle) -> None:
        """Registers `tensor` wherever `other` stands."""
        for alias in self.aliases:
            if alias.module._parameters.get(alias.attribute) is other:
                alias.module._parameters[alias.attribute] = tensor  # type: ignore[assignment]
            else:
                _replace_below(alias.module, other, tensor)


def _replace_below(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """A parametrization may have moved the parameter into a child since it was found."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is old:
                child._parameters[name] = new  # type: ignore[assignment]
