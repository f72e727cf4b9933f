"""Weights that are changed otherwise than by the optimizer's step, and become the units' state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import Node

from infinity.errors import InfinityError, UnsupportedError
from infinity.modules.param import OffloadedParam
from infinity.modules.param_table import ParamTable
from infinity.sizes import PAGE_NBYTES, align_down
from infinity.state.store import StateStore
from infinity.state.units import TensorSpec, Unit, weight_of
from infinity.storage.checksums import digest as digest_of_pages
from infinity.streaming.gradients import in_memory_order
from infinity.streaming.masters import MasterWeights
from infinity.streaming.optimizer_step import StepRunner
from infinity.streaming.parameters import WeightCache

_DIGESTED_NBYTES = 16 << 20  # At a time, where memory is not the host's.


class WeightEdits:
    """Units that may be changed on the device, from when they are lent until what was changed is
    taken over; and writes of values that come from elsewhere. Called under the engine's lock."""

    def __init__(
        self,
        store: StateStore,
        weight_cache: WeightCache,
        updater: StepRunner,
        masters: MasterWeights,
        param_table: ParamTable,
        *,
        is_sharded: bool,
    ) -> None:
        self._store = store
        self._weight_cache = weight_cache
        self._updater = updater
        self._masters = masters
        self._is_sharded = is_sharded
        self._param_table = param_table
        self._expected: set[int] = set()
        self._before: dict[OffloadedParam, torch.Tensor] = {}  # Weights as they were lent.

    def expect(self, units: Iterable[int]) -> None:
        """These units, which are held, are changed before they are let go."""
        self._expected.update(units)

    def lend(self, units: Iterable[int]) -> None:
        """As `expect`; elements that are not changed keep the value behind them to the bit."""
        self.lend_params(param for unit in units for param in self._param_table.of_unit(unit))

    def lend_params(self, params: Iterable[OffloadedParam]) -> None:
        """As `lend`, of single parameters."""
        for param in params:
            self._expected.add(param.unit.index)
            if self._masters.has(param.unit, param.spec) and param not in self._before:
                copy = param.compute.detach().to("cpu", copy=True)
                self._before[param] = in_memory_order(copy, param.spec)

    @contextmanager
    def watching(self, params: Sequence[OffloadedParam]) -> Iterator[None]:
        """Within, these parameters, which are held, are there to be read. What changes all the
        same is taken over, and a warning says so."""
        before = {param: _digest(param.compute) for param in params}
        yield
        undeclared = []
        for param, digest in before.items():
            if param in self._before or _digest(param.compute) == digest:
                continue
            if param.unit.index not in self._expected:
                undeclared.append(param.name)
            param.changes += 1
            torch.autograd.graph.increment_version([param.compute])  # Also what `.data` changed.
        if undeclared and self._is_sharded:
            raise InfinityError(
                f"{', '.join(undeclared[:4])} changed inside infinity.gather() without "
                "modify=True, and other ranks do not see it; give modify=True, on all ranks"
            )
        if undeclared:
            warnings.warn(
                f"{', '.join(undeclared[:4])} changed inside infinity.gather() without modify=True;"
                " the change is kept, and a master in fp32 is rounded to it. Give modify=True",
                stacklevel=6,
            )

    def put_back(self, unit: int) -> UnsupportedError | None:
        """The unit is held for the last moment: values that `.data =` put in the place of
        parameters are copied to where these stand. Returns the refusal of one that cannot be."""
        refusal = None
        for param in self._param_table.of_unit(unit):
            value = param.put_back()
            if value is None:
                continue
            fault = self._why_not(param, value)
            if fault is None:
                # Behind autograd's back, as the assignment was: graphs that saved it are valid.
                param.place.copy_(value.clone() if _overlaps(value, param.place) else value)
                param.was_replaced = True
            else:
                refusal = UnsupportedError(
                    f"the data of {param.name!r} was replaced by {fault}; expected a tensor of its "
                    f"own with shape {tuple(param.place.shape)}, {param.place.dtype} on "
                    f"{param.place.device}. The parameter keeps its value; copy into it instead"
                )
        return refusal

    def refuse_saved(self, replaced: Iterable[OffloadedParam], nodes: Iterable[Node]) -> None:
        """Of parameters whose data was replaced, the old value must not be in a graph: the new one
        takes its memory."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return  # Saved otherwise, such as by a checkpoint: looking would run its forward.
        saved = [tensor for node in nodes for tensor in _saved_by(node)]
        for param in replaced:
            if any(t.dtype == param.place.dtype and _overlaps(t, param.place) for t in saved):
                raise UnsupportedError(
                    f"the data of {param.name!r} was replaced after the forward had used it, and "
                    "the backward needs the old value; replace it before its first use"
                )

    def _why_not(self, param: OffloadedParam, value: torch.Tensor) -> str | None:
        place = param.place
        facts = (value.shape, value.dtype, value.device, value.layout)
        if facts != (place.shape, place.dtype, place.device, place.layout):
            return f"one with shape {tuple(value.shape)}, {value.dtype} on {value.device}"
        if self._param_table.is_parameter_memory(value) and not _overlaps(value, place):
            return "the memory of another parameter, which it would share from then on"
        return None

    def take_over(self, unit: int) -> None:
        """Nobody holds the unit any more: if it was changed, that is its state from now on."""
        params = self._param_table.of_unit(unit)
        # Also by its module's own code.
        if unit not in self._expected and not any(param.was_changed for param in params):
            return
        self._expected.discard(unit)
        self._weight_cache.absorb(unit)
        facts, masters = self._store.units[unit], self._masters
        with_master = [param for param in params if masters.has(facts, param.spec)]
        if not with_master:
            return
        self._updater.finish_writes()
        weights = self._weight_cache.check_out(unit, read=True)
        for param in with_master:
            before = self._before.pop(param, None)
            if before is not None or param.was_changed:
                masters.follow(facts, param.spec, weight_of(weights, param.spec), before)
        self._weight_cache.check_in(unit, dirty_nbytes=facts.weight_nbytes, write_now=False)

    def write(self, unit: Unit, values: Mapping[TensorSpec, torch.Tensor]) -> None:
        """Replaces weights (and masters) of a unit that nobody holds; the write to NVMe is left
        for later. Values of any float dtype, in the tensors' shapes."""
        whole = len(values) == len(unit.tensors)
        weights = self._weight_cache.check_out(unit.index, read=not whole)
        for spec, value in values.items():
            flat = in_memory_order(value.detach().cpu(), spec)
            if self._masters.has(unit, spec):
                self._masters.write(unit, spec, weight_of(weights, spec), flat)
            else:
                weight_of(weights, spec).copy_(flat)
        self._weight_cache.check_in(unit.index, dirty_nbytes=unit.weight_nbytes, write_now=False)
        written = [param for param in self._param_table.of_unit(unit.index) if param.spec in values]
        # Who saved the old weights for a backward must find out, as in plain PyTorch.
        torch.autograd.graph.increment_version([param.compute for param in written])

    def fill(self, unit: Unit) -> None:
        """Writes a unit's original parameters, those that have memory, to its tiers."""
        values = {
            param.spec: param.original.detach()
            for param in self._param_table.of_unit(unit.index)
            if param.original is not None and not param.original.is_meta
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


def _digest(tensor: torch.Tensor) -> bytes:
    """Of a parameter's bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    parts = []
    for part in flat.split(_DIGESTED_NBYTES) if flat.numel() else ():
        here = part.cpu()
        whole = align_down(here.numel(), PAGE_NBYTES)
        parts += [digest_of_pages(here.data_ptr(), whole), here[whole:].numpy().tobytes()]
    return b"".join(parts)
