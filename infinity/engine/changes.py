"""Weights that are changed otherwise than by the optimizer's step, and become the units' state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.autograd.graph import Node

from infinity.engine.faces import Faces
from infinity.engine.gradients import in_memory_order
from infinity.engine.machinery import Machinery
from infinity.engine.slot import Slot
from infinity.errors import UnsupportedError
from infinity.state.units import TensorSpec, Unit, weight_of


class Changes:
    """Units that may be changed on the device, from when they are lent until what was changed is
    taken over; and writes of values that come from elsewhere. Called under the engine's lock."""

    def __init__(self, parts: Machinery, faces: Faces) -> None:
        self._store = parts.store
        self._executor = parts.executor
        self._updater = parts.updater
        self._masters = parts.masters
        self._faces = faces
        self._expected: set[int] = set()
        self._before: dict[Slot, torch.Tensor] = {}  # Weights as they were lent.

    def expect(self, units: Iterable[int]) -> None:
        """These units, which are held, are changed before they are let go."""
        self._expected.update(units)

    def lend(self, units: Iterable[int]) -> None:
        """As `expect`; elements that are not changed keep the value behind them to the bit."""
        for unit in units:
            self._expected.add(unit)
            for slot in self._faces.of_unit(unit):
                if self._masters.has(slot.unit, slot.spec) and slot not in self._before:
                    copy = slot.compute.detach().to("cpu", copy=True)
                    self._before[slot] = in_memory_order(copy, slot.spec)

    def put_back(self, unit: int) -> UnsupportedError | None:
        """The unit is held for the last moment: values that `.data =` put in the place of
        parameters are copied to where these stand. Returns the refusal of one that cannot be."""
        refusal = None
        for slot in self._faces.of_unit(unit):
            value = slot.put_back()
            if value is None:
                continue
            fault = self._why_not(slot, value)
            if fault is None:
                # Behind autograd's back, as the assignment was: graphs that saved it are valid.
                slot.place.copy_(value.clone() if _overlaps(value, slot.place) else value)
                slot.was_replaced = True
            else:
                refusal = UnsupportedError(
                    f"the data of {slot.name!r} was replaced by {fault}; expected a tensor of its "
                    f"own with shape {tuple(slot.place.shape)}, {slot.place.dtype} on "
                    f"{slot.place.device}. The parameter keeps its value; copy into it instead"
                )
        return refusal

    def refuse_saved(self, replaced: Iterable[Slot], nodes: Iterable[Node]) -> None:
        """Of parameters whose data was replaced, the old value must not be in a graph: the new one
        takes its memory."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return  # Saved otherwise, such as by a checkpoint: looking would run its forward.
        saved = [tensor for node in nodes for tensor in _saved_by(node)]
        for slot in replaced:
            if any(t.dtype == slot.place.dtype and _overlaps(t, slot.place) for t in saved):
                raise UnsupportedError(
                    f"the data of {slot.name!r} was replaced after the forward had used it, and "
                    "the backward needs the old value; replace it before its first use"
                )

    def _why_not(self, slot: Slot, value: torch.Tensor) -> str | None:
        place = slot.place
        facts = (value.shape, value.dtype, value.device, value.layout)
        if facts != (place.shape, place.dtype, place.device, place.layout):
            return f"one with shape {tuple(value.shape)}, {value.dtype} on {value.device}"
        if self._faces.is_parameter_memory(value) and not _overlaps(value, place):
            return "the memory of another parameter, which it would share from then on"
        return None

    def take_over(self, unit: int) -> None:
        """Nobody holds the unit any more: if it was changed, that is its state from now on."""
        slots = self._faces.of_unit(unit)
        # Also by its module's own code.
        if unit not in self._expected and not any(slot.was_changed for slot in slots):
            return
        self._expected.discard(unit)
        self._executor.absorb(unit)
        facts, masters = self._store.units[unit], self._masters
        with_master = [slot for slot in slots if masters.has(facts, slot.spec)]
        if not with_master:
            return
        self._updater.finish_writes()
        weights = self._executor.check_out(unit, read=True)
        for slot in with_master:
            before = self._before.pop(slot, None)
            if before is not None or slot.was_changed:
                masters.follow(facts, slot.spec, weight_of(weights, slot.spec), before)
        self._executor.check_in(unit, dirty_nbytes=facts.weight_nbytes, write_now=False)

    def write(self, unit: Unit, values: Mapping[TensorSpec, torch.Tensor]) -> None:
        """Replaces weights (and masters) of a unit that nobody holds; the write to NVMe is left
        for later. Values of any float dtype, in the tensors' shapes."""
        whole = len(values) == len(unit.tensors)
        weights = self._executor.check_out(unit.index, read=not whole)
        for spec, value in values.items():
            flat = in_memory_order(value.detach().cpu(), spec)
            if self._masters.has(unit, spec):
                self._masters.write(unit, spec, weight_of(weights, spec), flat)
            else:
                weight_of(weights, spec).copy_(flat)
        self._executor.check_in(unit.index, dirty_nbytes=unit.weight_nbytes, write_now=False)

    def fill(self, unit: Unit) -> None:
        """Writes a unit's original parameters, those that have memory, to its tiers."""
        values = {
            slot.spec: slot.original.detach()
            for slot in self._faces.of_unit(unit.index)
            if slot.original is not None and not slot.original.is_meta
        }
        if values:
            with torch.no_grad():
                self.write(unit, values)


def _overlaps(value: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether `value`, of the same dtype, begins inside of `place`."""
    if value.untyped_storage()._cdata != place.untyped_storage()._cdata:
        return False
    return 0 <= value.storage_offset() - place.storage_offset() < max(place.numel(), 1)


def _saved_by(node: Node) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            found = getattr(node, name)
            for each in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                    yield each
