"""Changes of weights other than the optimizer's step, and their way into the state of the units.

Note [Accesses past the counters]
  A write through `.data`, a numpy array or a DLPack capsule changes no version counter, so only a
  comparison of bytes finds it. `patches.py` reports every such access, by the code of modules, of
  hooks and of functions outside the modules, and the bytes are compared when the use of the unit
  ends. A parameter that is not accessed this way is never compared.
  A tensor over a parameter's memory may outlive the use of the unit. While it lives, the unit is
  compared from the beginning of each further use. Between two uses the memory belongs to the tiers;
  a write to it there is refused when the memory leaves the device, or is used again.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node

from infinity.errors import InfinityError, ParameterNotResident, UnsupportedError
from infinity.modules.autograd.param import OffloadedParam, ParamTable, increment_versions, settle
from infinity.modules.reading.empty_weights import is_to_come
from infinity.private.torch import top_saved_tensors_default_hooks
from infinity.sizes import PAGE_NBYTES, align_down
from infinity.state.store import StateStore
from infinity.state.units import TensorSpec, Unit, weight_of
from infinity.storage.checksums import digest as digest_of_pages
from infinity.streaming.gradients.sums import in_memory_order
from infinity.streaming.updates.masters import MasterWeights
from infinity.streaming.updates.record import StepRunner
from infinity.streaming.weights.cache import WeightCache

_DIGESTED_NBYTES = 16 << 20  # Digests at most this much at a time, if the memory is not the host's.


class WeightEdits:
    """Units that may be changed on the device, and writes of values from elsewhere.

    `lend` and `expect` announce a change of units in use; `take_over` moves the changed weights to
    the units' state when the last use ends. Every method but `begin_raw` and `note_raw`, which take
    the engine's lock, runs under it.
    """

    def __init__(
        self,
        store: StateStore,
        weight_cache: WeightCache,
        updater: StepRunner,
        masters: MasterWeights,
        param_table: ParamTable,
        lock: threading.RLock,
        *,
        is_sharded: bool,
    ) -> None:
        self._store = store
        self._weight_cache = weight_cache
        self._updater = updater
        self._masters = masters
        self._is_sharded = is_sharded
        self._param_table = param_table
        self._lock = lock
        self._expected: set[int] = set()
        # See Accesses past the counters: digests from before, and objects that share the memory.
        self._raw: dict[OffloadedParam, bytes] = {}
        self._views: dict[OffloadedParam, list[weakref.ref[Any]]] = {}
        self._before: dict[OffloadedParam, torch.Tensor] = {}  # Weights at the time of `lend`.

    def expect(self, units: Iterable[int]) -> None:
        """Announces a change of these units, which are in use, before their last use ends."""
        self._expected.update(units)

    def lend(self, units: Iterable[int]) -> None:
        """Like `expect`. Elements that do not change keep their fp32 value to the bit."""
        self.lend_params(param for unit in units for param in self._param_table.of_unit(unit))

    def lend_params(self, params: Iterable[OffloadedParam]) -> None:
        """Like `lend`, for single parameters."""
        for param in params:
            self._expected.add(param.unit.index)
            if self._masters.has(param.unit, param.spec) and param not in self._before:
                copy = param.compute.detach().to("cpu", copy=True)
                self._before[param] = in_memory_order(copy, param.spec)

    @contextmanager
    def watching(self, params: Sequence[OffloadedParam]) -> Iterator[None]:
        """Guards a block that only reads these parameters, which are in use. A change is taken over
        nevertheless, with a warning."""
        before = {param: _digest(param.compute) for param in params}
        yield
        undeclared = []
        for param, digest in before.items():
            if param in self._before or _digest(param.compute) == digest:
                continue
            if param.unit.index not in self._expected:
                undeclared.append(param.name)
            param.changes += 1
            # Also counts changes made through `.data`.
            torch.autograd.graph.increment_version([param.compute])
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
        """Copies values that `.data =` assigned into the memory of their parameters, before the
        last use of the unit ends. Returns the refusal of a value that cannot be copied, or None."""
        refusal = None
        for param in self._param_table.moved_away(unit):
            value = param.put_back()
            assert value is not None
            fault = self._why_not(param, value)
            if fault is None:
                # Autograd does not see the copy, as it did not see the assignment: graphs that
                # saved the parameter stay valid.
                param.place.copy_(value.clone() if _overlaps(value, param.place) else value)
                param.note_replaced()
            else:
                refusal = UnsupportedError(
                    f"the data of {param.name!r} was replaced by {fault}; expected a tensor of its "
                    f"own with shape {tuple(param.place.shape)}, {param.place.dtype} on "
                    f"{param.place.device}. The parameter keeps its value; copy into it instead"
                )
        return refusal

    def refuse_saved(self, replaced: Iterable[OffloadedParam], nodes: Iterable[Node]) -> None:
        """Raises UnsupportedError if a graph has saved the old value of a parameter whose data was
        replaced, because the new value takes the same memory."""
        if top_saved_tensors_default_hooks(True) is not None:
            return  # Saved by other means, such as a checkpoint: reading it would run its forward.
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

    # -- Writes past the version counters --------------------------------------------------------

    def begin_raw(self, tensor: torch.Tensor) -> list[OffloadedParam]:
        """Returns the parameters whose memory `tensor` shows, and watches them from now on. Raises
        ParameterNotResident for a compute parameter whose unit is not in use. In any thread."""
        params, is_in_use = self._param_table.under(tensor), self._weight_cache.is_in_use
        if not any(is_in_use(p.unit.index) or tensor is p.compute for p in params):
            return []  # The engine's own access to memory that rests on the device.
        with self._lock:
            for param in params:
                if is_in_use(param.unit.index):
                    self._watch_raw(param)
                elif tensor is param.compute:
                    raise ParameterNotResident(
                        param.name,
                        "its memory was asked for outside of the module's forward and backward, "
                        "through a reference that was kept in one; take it from the module, or "
                        "inside `with infinity.gather(model, modify=True):`",
                    )
            return params

    def handle_of(self, tensor: torch.Tensor) -> Any:
        """Returns the handle of a compute parameter that shows no gradient; None for another
        tensor."""
        param = self._param_table.find(tensor)
        return None if param is None or param.shown is not None else param.handle

    def note_raw(self, params: Iterable[OffloadedParam], view: Any) -> None:
        """Remembers an object over the memory of these parameters, as long as it lives. In any
        thread."""
        with self._lock:
            for param in params:
                self._views[param] = [*self._alive(param), weakref.ref(view)]

    def _watch_raw(self, param: OffloadedParam) -> None:
        """Records the bytes of a parameter in use, before its memory is handed to a caller."""
        if param not in self._raw:
            self._raw[param] = _digest(param.compute)

    def _alive(self, param: OffloadedParam) -> list[weakref.ref[Any]]:
        return [view for view in self._views.pop(param, ()) if view() is not None]

    def _kept(self, unit: int) -> list[OffloadedParam]:
        """Returns the parameters of a unit whose memory another object still has."""
        found = []
        for param in [*self._views]:
            if param.unit.index == unit and (alive := self._alive(param)):
                self._views[param] = alive
                found.append(param)
        return found

    def refuse_changed_away(self, unit: int, lent: Sequence[OffloadedParam]) -> None:
        """Raises UnsupportedError, before a use of the unit begins, if a caller has changed its
        parameters (some: `lent`) since the last one, through a reference that was kept there."""
        self._weight_cache.check_kept(unit)
        for param in self._param_table.changed(unit, lent):
            settle([param])
            raise _changed_away(param)

    def begin_use(self, unit: int) -> None:
        """The first use of a unit has begun."""
        for param in self._kept(unit) if self._views else ():
            self._watch_raw(param)

    def note_raw_writes(self, unit: int) -> None:
        """Marks the parameters that were written past their version counters. The last use of the
        unit is about to end."""
        for param in [*self._raw]:
            if param.unit.index == unit and self._raw.pop(param) != _digest(param.compute):
                param.note_replaced()

    def end_use(self, unit: int) -> None:
        """The last use of a unit has ended, and its changes are taken over."""
        self._param_table.settle(unit)
        kept = self._kept(unit) if self._views else None
        if kept and self._weight_cache.is_evictable(unit):
            digests = {param: _digest(param.compute) for param in kept}
            self._weight_cache.keep_check(unit, lambda: _refuse_written(digests))

    def take_over(self, unit: int) -> None:
        """Makes the weights of a changed unit its state. Runs after the last use of the unit."""
        # The module's own code may have changed them, too.
        if unit not in self._expected and not self._param_table.was_changed(unit):
            return
        self._expected.discard(unit)
        self._weight_cache.absorb(unit)
        facts, masters = self._store.units[unit], self._masters
        used = self._param_table.used(unit)
        with_master = [param for param in used if masters.has(facts, param.spec)]
        if not with_master:
            return
        self._updater.withdraw(unit)
        weights = self._weight_cache.check_out(unit, read=True)
        try:
            for param in with_master:
                before = self._before.get(param)
                if before is not None or param.was_changed:
                    masters.follow(facts, param.spec, weight_of(weights, param.spec), before)
        finally:
            for param in with_master:
                self._before.pop(param, None)
            self._weight_cache.check_in(unit, dirty_nbytes=facts.weight_nbytes, write_now=False)

    def read_wide(self, param: OffloadedParam, narrow: torch.Tensor) -> torch.Tensor:
        """Returns the fp32 master of a parameter with this value; the value in fp32 without one."""
        unit, spec = param.unit, param.spec
        if not self._masters.has(unit, spec):
            return narrow.float()
        self._updater.finish_writes()
        wide = self._masters.read(unit, spec, in_memory_order(narrow, spec))
        return wide.as_strided(spec.facts.shape, spec.facts.stride)

    def write_one(self, param: OffloadedParam, value: torch.Tensor) -> None:
        """Replaces the value of a parameter by that of a caller; see `write`. Raises InfinityError
        while the unit is in use."""
        if self._weight_cache.is_in_use(param.unit.index):
            raise InfinityError(
                f"write_parameter({param.name!r}) while {param.unit.name!r} is in use; leave "
                "infinity.gather() first"
            )
        self._updater.settle()
        self.write(param.unit, {param.spec: value})

    def write(self, unit: Unit, values: Mapping[TensorSpec, torch.Tensor]) -> None:
        """Replaces weights and masters of a unit that is not in use; the write to NVMe may come
        later. Values have the shapes of the tensors and any float dtype."""
        self._weight_cache.refuse_change(unit.index)
        self._updater.withdraw(unit.index)
        is_complete = len(values) == len(unit.tensors)
        weights = self._weight_cache.check_out(unit.index, read=not is_complete)
        is_valid = not is_complete
        try:
            for spec, value in values.items():
                flat = in_memory_order(value.detach().cpu(), spec)
                if self._masters.has(unit, spec):
                    self._masters.write(unit, spec, weight_of(weights, spec), flat)
                else:
                    weight_of(weights, spec).copy_(flat)
            is_valid = True
        finally:
            self._weight_cache.check_in(
                unit.index, dirty_nbytes=unit.weight_nbytes, write_now=False, is_valid=is_valid
            )
        written = [param for param in self._param_table.of_unit(unit.index) if param.spec in values]
        increment_versions(written)

    def fill(self, unit: Unit) -> None:
        """Gives a unit the values of its original parameters that have any.

        Weights on NVMe that wait for further values are written once, with these.
        """
        originals = {
            param.spec: param.original
            for param in self._param_table.of_unit(unit.index)
            if param.original is not None
        }
        values = {spec: own.detach() for spec, own in originals.items() if not own.is_meta}
        with torch.no_grad():
            if any(map(is_to_come, originals.values())) and self._begin_with(unit, values):
                return
            if values:
                self.write(unit, values)

    def _begin_with(self, unit: Unit, values: Mapping[TensorSpec, torch.Tensor]) -> bool:
        """Leaves first values with the store; returns whether it takes them. Masters are
        written."""
        narrow: dict[TensorSpec, torch.Tensor] = {}

        def fill(weights: torch.Tensor) -> None:
            weights.zero_()
            for spec, value in narrow.items():
                weight_of(weights, spec).copy_(value)

        if not self._store.put_first(unit, fill):
            return False
        for spec, value in values.items():
            flat = in_memory_order(value.detach().cpu(), spec)
            narrow[spec] = flat.to(spec.facts.dtype, copy=True)
            if self._masters.has(unit, spec):
                self._masters.write(unit, spec, narrow[spec], flat)
        return True

    def write_first_values(self) -> None:
        """Writes the units that got no value after `fill`."""
        for unit in self._store.unwritten():
            self._weight_cache.check_out(unit.index, read=True)
            self._weight_cache.check_in(unit.index, dirty_nbytes=unit.weight_nbytes)


def _changed_away(param: OffloadedParam) -> UnsupportedError:
    return UnsupportedError(
        f"{param.name!r} was changed between two uses of its module, through a tensor over its "
        "memory that was kept from a forward; that memory belongs to the tiers then. Take the "
        "parameter from the module each time, and change it under torch.no_grad() or by .data. "
        "Its value is uncertain now: load a checkpoint, or write it again"
    )


def _refuse_written(digests: Mapping[OffloadedParam, bytes]) -> None:
    for param, digest in digests.items():
        if _digest(param.compute) != digest:
            raise _changed_away(param)


def _overlaps(value: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether `value`, of the same dtype, begins inside `place`."""
    if value.untyped_storage()._cdata != place.untyped_storage()._cdata:
        return False
    return 0 <= value.storage_offset() - place.storage_offset() < max(place.numel(), 1)


def _saved_by(node: Node) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            found = getattr(node, name)
            for value in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    yield value


def _digest(tensor: torch.Tensor) -> bytes:
    """Returns a digest of the parameter's bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    parts = []
    for part in flat.split(_DIGESTED_NBYTES) if flat.numel() else ():
        block = part.cpu()
        aligned_nbytes = align_down(block.numel(), PAGE_NBYTES)
        parts.append(digest_of_pages(block.data_ptr(), aligned_nbytes))
        parts.append(bytes(block[aligned_nbytes:].tolist()))
    return b"".join(parts)
