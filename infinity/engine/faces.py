"""Which face every parameter shows, and which parameter a face is of.

Every parameter has two faces. While its unit is held the module has the *compute parameter*, a
plain persistent `nn.Parameter` over the unit's region; otherwise it has the *handle*. Both live as
long as the engine, so that autograd, optimizers and hooks may keep them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from infinity.engine.handles import Handle
from infinity.engine.slot import Slot
from infinity.errors import InfinityError


class Faces:
    """The faces of one model's parameters. Shown under the engine's lock; looked up anywhere."""

    def __init__(self, model: nn.Module, slots: Iterable[Slot]) -> None:
        self._model = model
        self._slots = list(slots)
        self._by_name = {slot.name: slot for slot in self._slots}
        self._by_face = {id(face): s for s in self._slots for face in (s.handle, s.compute)}
        self._by_unit: dict[int, list[Slot]] = {}
        for slot in self._slots:
            self._by_unit.setdefault(slot.unit.index, []).append(slot)
        self._rnns = {unit: _rnns_of(slots) for unit, slots in self._by_unit.items()}
        self._storages = {slot.compute.untyped_storage()._cdata for slot in self._slots}

    # -- Showing ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Handles in the place of the model's own parameters."""
        for slot in self._slots:
            assert slot.original is not None
            slot.show(slot.handle, slot.original)
        _refresh(self._model.modules())

    def restore(self) -> None:
        """The model's own parameters again, as far as they are still there."""
        for slot in self._slots:
            if slot.original is not None:
                slot.show(slot.original, slot.handle)
        _refresh(self._model.modules())

    def show_parameters(self, unit: int) -> None:
        for slot in self._by_unit[unit]:
            slot.show(slot.compute, slot.handle)
            slot.shown()
        _refresh(self._rnns[unit])

    def show_handles(self, unit: int) -> None:
        for slot in self._by_unit[unit]:
            slot.show(slot.handle, slot.compute)
        _refresh(self._rnns[unit])

    # -- Looking up ------------------------------------------------------------------------------

    def of_unit(self, unit: int) -> list[Slot]:
        """Empty for a unit without parameters of the model, such as another rank's shard."""
        return self._by_unit.get(unit, [])

    def find(self, face: torch.Tensor) -> Slot | None:
        """The slot of either face; None for any other tensor."""
        return self._by_face.get(id(face))

    def named(self, name: str) -> Slot:
        slot = self._by_name.get(name)
        if slot is None:
            raise InfinityError(f"no parameter {name!r}; see engine.parameter_names()")
        return slot

    def is_parameter_memory(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is, or is a view of, a compute parameter."""
        if tensor.layout is not torch.strided or isinstance(tensor, Handle):
            return False
        try:
            return tensor.untyped_storage()._cdata in self._storages
        except (NotImplementedError, RuntimeError):
            return False  # A wrapper subclass without storage is not our memory.


def _rnns_of(slots: Iterable[Slot]) -> list[nn.Module]:
    owners = {id(alias.module): alias.module for slot in slots for alias in slot.aliases}
    return [module for module in owners.values() if isinstance(module, nn.RNNBase)]


def _refresh(modules: Iterable[nn.Module]) -> None:
    """nn.RNN keeps its parameters a second time, in a list of its own."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [
                getattr(module, name, None) for name in module._flat_weights_names
            ]
