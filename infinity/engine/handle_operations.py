"""What an operation on a handle does: it fetches the bytes, computes, and lets go of them.

That is how a weight is read outside of the module that owns it (a tied head, a penalty on weights,
a print), how it is changed in place there (an average of weights, a merged adapter, a clipped
gradient), and how the rules of modules initialise a model that is never whole in memory.

Note [Who writes]
  A function is run on the parameter itself, and what it changed shows in the version that PyTorch
  counts. Only what the function's name says is known before: of such a parameter a copy is kept, so
  that the fp32 values behind elements that do not change are kept to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from infinity.engine.changes import Changes
from infinity.engine.faces import Faces
from infinity.engine.handles import Handle, find_handles, replace_handles
from infinity.engine.holds import Holds
from infinity.engine.hooks import Backwards, Stay, nodes_since
from infinity.engine.machinery import Machinery
from infinity.engine.mirrors import mirrored
from infinity.engine.outputs import detach_from_parameters
from infinity.engine.parameter_grads import ParameterGrads
from infinity.engine.slot import Slot
from infinity.engine.state_values import StateValue
from infinity.engine.whole import Whole
from infinity.errors import CapacityError, InfinityError, ParameterNotResident, UnsupportedError

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

_log = logging.getLogger("infinity")

# Units that initialisation keeps attached at once, so that views it takes stay valid a while.
_INITIALISING_UNITS = 2


@dataclass(slots=True)
class _Lent:
    """What stands in the place of a handle while a function runs."""

    handle: Handle
    slot: Slot
    tensor: torch.Tensor
    version: int
    is_target: bool  # Some functions over lists change no version.

    @property
    def was_changed(self) -> bool:
        return self.is_target or self.tensor._version != self.version


class HandleOperations:
    """The owner of every handle of one engine: see `handles.Owner`."""

    def __init__(
        self,
        engine: Engine,
        parts: Machinery,
        faces: Faces,
        holds: Holds,
        changes: Changes,
        backwards: Backwards,
        grads: ParameterGrads,
    ) -> None:
        self._engine = engine  # Who keeps a handle keeps what it needs.
        self._counters = parts.counters
        self._passes = parts.passes
        self._pool = parts.pool
        self._units = parts.store.units
        self._ranks = parts.ranks
        self._faces = faces
        self._holds = holds
        self._changes = changes
        self._backwards = backwards
        self._grads = grads
        self._warned: set[str] = set()
        self._initialising: list[int] | None = None  # Units held by initialisation, oldest first.

    def slot_of(self, face: torch.Tensor) -> Slot:
        """The slot of a parameter, given either of its faces."""
        slot = self._faces.find(face)
        if slot is None or self._holds.is_closed:
            raise ParameterNotResident(
                getattr(face, "name_in_model", "a parameter"),
                "its engine is closed, or the handle is of another model",
            )
        return slot

    def set_trainable(self, handle: Handle, is_trainable: bool) -> None:
        """One that was frozen when the model was offloaded may say that it is trainable, as an
        adapter does that is made active to be evaluated; a gradient of it is refused."""
        slot = self._known(handle)
        slot.compute.requires_grad_(is_trainable)
        with torch._C.DisableTorchFunctionSubclass():
            handle.requires_grad_(is_trainable)

    def state_value(self, handle: Handle) -> torch.Tensor:
        return StateValue.make(handle)

    # -- Gradients -------------------------------------------------------------------------------

    def gradient_of(self, handle: Handle) -> torch.Tensor | None:
        slot = self._known(handle)
        if not self._grads.has(slot):
            return None
        gradient = Handle.make(self, slot.name, handle, is_gradient=True)
        slot.handle.note_alias(gradient)
        stamp = self._grads.stamp(slot)
        gradient.number = 0 if stamp is None else stamp[0]
        return gradient

    def put_gradient(self, handle: Handle, value: torch.Tensor, *, is_other: bool) -> None:
        """`value` is the sum of gradients from now on."""
        self._refuse_closed(handle.name_in_model)
        self._grads.put(self._known(handle), value, is_other=is_other)

    def forget_gradient(self, handle: Handle) -> None:
        self._grads.forget(self._known(handle))

    def leaves_of(self, handle: Handle) -> list[torch.Tensor]:
        return [self._known(handle).compute]

    def take_gradient(self, handle: Handle, gradient: torch.Tensor) -> None:
        self._grads.take(self._known(handle), gradient)

    def zero_gradient(self, handle: Handle) -> None:
        """Of the gradient that `handle` stands for."""
        self._grads.zero(self._faces.named(handle.name_in_model))

    def _known(self, handle: Handle) -> Slot:
        slot = self._faces.find(handle)
        assert slot is not None, handle
        return slot

    def whole_handle(self, name: str) -> Handle:
        return self._faces.named(name).handle

    def _refuse_closed(self, name: str) -> None:
        if self._holds.is_closed:
            raise ParameterNotResident(name, "its engine is closed")

    # -- Computing -------------------------------------------------------------------------------

    def compute_with(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        changes: Sequence[Handle],
    ) -> Any:
        """An operation on handles outside their module: fetch, compute, let go.

        Handles of other models fetch themselves when the function comes to them.
        """
        handles = find_handles((args, kwargs))
        for handle in handles:
            if isinstance(handle.owner, Whole) and handle.kept is None:
                return handle.owner.compute_with(function, args, kwargs, changes=changes)
        mine = {id(h): h for h in handles if h.owner is self and h.kept is None}
        slots = {key: self._slot_behind(handle) for key, handle in mine.items()}
        changed = [h for h in changes if id(h) in mine and not h.is_gradient]
        read = [slots[key] for key, handle in mine.items() if not handle.is_gradient]
        units = list(dict.fromkeys(slot.unit.index for slot in read))
        self._note_fault([slot.name for slot in read], function)
        first = torch.autograd._get_sequence_nr()
        if self._initialising is not None:
            self._keep(self._initialising, units)
        setting = self._setting([slots[id(h)].unit.index for h in changed])
        with setting, self._holds.holding(units):
            if self._initialising is None:
                self._changes.lend_slots(slots[id(h)] for h in changed)
            lent = {key: self._lend(h, slots[key], changes) for key, h in mine.items()}

            def real(handle: Handle) -> torch.Tensor:
                if handle.kept is not None:
                    return handle.kept
                return lent[id(handle)].tensor if id(handle) in lent else handle

            try:
                answer = function(
                    *replace_handles(args, real), **replace_handles(dict(kwargs), real)
                )
            finally:
                if self._initialising is None:
                    self._take_changes(lent.values())
            if self._initialising is not None:
                by_compute = {id(each.tensor): each.slot.handle for each in lent.values()}
                return by_compute.get(id(answer), answer)
            return self._shown(units, answer, first, lent.values())

    def _slot_behind(self, handle: Handle) -> Slot:
        if handle.is_gradient or handle.is_data:
            self._refuse_closed(handle.name_in_model)
            return self._faces.named(handle.name_in_model)
        return self.slot_of(handle)

    def _setting(self, units: list[int]) -> AbstractContextManager[None]:
        """Around a change of weights, which all ranks make alike; a forward's own is each rank's
        business."""
        if self._ranks is None or not units or self._initialising is not None:
            return nullcontext()
        return nullcontext() if self._passes.is_in_forward else self._ranks.setting(units)

    def _lend(self, handle: Handle, slot: Slot, changes: Sequence[Handle]) -> _Lent:
        if handle.is_gradient:
            tensor = self._read_gradient(handle)
        else:
            tensor = slot.compute.data if handle.is_data else slot.compute
        is_target = any(handle is each for each in changes)
        return _Lent(handle, slot, tensor, tensor._version, is_target)

    def _take_changes(self, lent: Iterable[_Lent]) -> None:
        """What a function has changed becomes the state of its parameter."""
        for each in lent:
            if not each.was_changed:
                continue
            if each.handle.is_gradient:
                self._grads.put(each.slot, each.tensor)
                continue
            each.slot.changes += 1
            self._changes.expect([each.slot.unit.index])
            if each.slot.compute.grad_fn is not None:
                each.slot.compute.detach_()
                raise UnsupportedError(
                    f"{each.slot.name!r} would become the result of an operation that needs a "
                    "gradient, and a parameter is none; change it under torch.no_grad()"
                )

    def _shown(self, units: list[int], answer: Any, first: int, lent: Iterable[_Lent]) -> Any:
        """The answer as whoever asked may keep it."""
        for each in lent:
            if answer is each.tensor and each.was_changed:
                return each.handle
            answer = mirrored(
                answer, each.tensor, each.slot.handle.note_alias, self, each.slot.name,
                is_gradient=each.handle.is_gradient, is_copy=each.handle.is_gradient,
            )  # fmt: skip
        return self._watch_fault(units, answer, first)

    def _read_gradient(self, handle: Handle) -> torch.Tensor:
        slot = self._faces.named(handle.name_in_model)
        stamp = self._grads.stamp(slot)
        gradient = self._grads.read(slot) if stamp and stamp[0] == handle.number else None
        if gradient is None:
            raise InfinityError(
                f"the gradient of {handle.name_in_model!r} is not there any more: it was "
                "forgotten (zero_grad) after `.grad` was taken. Clone a gradient that is to "
                "be kept"
            )
        return gradient.to(handle.device)

    def _note_fault(self, names: list[str], function: Callable[..., Any]) -> None:
        if self._initialising is not None:
            return
        self._counters.add("faults", len(names))
        fresh = [name for name in names if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            _log.info(
                "%s used outside the module that owns it, by %s; fetched for this operation",
                ", ".join(fresh),
                getattr(function, "__name__", function),
            )

    def _watch_fault(self, units: list[int], answer: Any, first: int) -> Any:
        """The result keeps no view of memory that goes away, and its backward fetches again."""
        answer = detach_from_parameters(answer, self._faces.is_parameter_memory)
        self._backwards.watch(Stay(units), *nodes_since(first, answer))
        return answer

    # -- Mirrors ---------------------------------------------------------------------------------

    def stamp(self, name: str, *, is_gradient: bool) -> tuple[int, ...] | None:
        slot = self._faces.named(name)
        if is_gradient:
            return self._grads.stamp(slot)
        return 0, slot.compute._version, slot.changes

    def read_bytes(self, name: str, start: int, into: torch.Tensor, *, is_gradient: bool) -> None:
        slot = self._faces.named(name)
        stop = start + into.numel()
        if is_gradient:
            gradient = self._grads.read(slot)
            assert gradient is not None
            into.copy_(_bytes_of(gradient, slot)[start:stop])
            return
        self._refuse_closed(name)
        with self._holds.holding([slot.unit.index]):
            into.copy_(_bytes_of(slot.compute, slot)[start:stop])

    def write_bytes(
        self, name: str, start: int, values: torch.Tensor, *, is_gradient: bool
    ) -> None:
        slot = self._faces.named(name)
        place = slice(start, start + values.numel())
        self._refuse_closed(name)
        if is_gradient:
            gradient = self._grads.read(slot)
            assert gradient is not None
            _bytes_of(gradient, slot)[place] = values
            self._grads.put(slot, gradient)
            return
        unit = slot.unit.index
        with self._setting([unit]), self._holds.holding([unit]), torch.no_grad():
            self._changes.lend_slots([slot])
            _bytes_of(slot.compute, slot)[place] = values
            torch.autograd.graph.increment_version([slot.compute])

    # -- Initialisation --------------------------------------------------------------------------

    @contextmanager
    def initialising(self) -> Iterator[None]:
        """Within, operations on handles may change them in place, and views of them stay valid
        until the next unit is touched, or where there is room the next but one. What was touched is
        written to its tiers."""
        assert self._initialising is None
        self._initialising = []
        try:
            yield
        finally:
            kept, self._initialising = self._initialising, None
            for unit in kept:
                self._let_go(unit)

    def _keep(self, kept: list[int], units: list[int]) -> None:
        """Holds units, and lets go of others before: the budget is that of training, which holds no
        unit for later."""
        coming = [unit for unit in units if unit not in kept]
        while coming and kept and not self._may_stay([*kept, *coming]):
            # Without a master first: to take one over needs room.
            self._let_go(kept.pop(kept.index(min(kept, key=self._has_master))))
        coming = [unit for unit in units if unit not in kept]
        try:
            self._holds.enter(coming, is_of_pass=False)
        except CapacityError:
            if not kept:
                raise
            while kept:
                self._let_go(kept.pop(kept.index(min(kept, key=self._has_master))))
            coming = units
            self._holds.enter(coming, is_of_pass=False)
        kept.extend(coming)

    def _may_stay(self, units: list[int]) -> bool:
        """Whether to try to hold all of these. Where memory is scarce one of two units with a
        master could not be taken over beside the other."""
        is_safe = not self._pool.is_tight or sum(map(self._has_master, units)) < 2
        return len(units) <= _INITIALISING_UNITS and is_safe

    def _has_master(self, unit: int) -> bool:
        return self._units[unit].master_dtype is not None

    def _let_go(self, unit: int) -> None:
        self._changes.expect([unit])
        self._holds.leave([unit])


def _bytes_of(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The dense memory behind a parameter, or its gradient: uint8, flat."""
    return tensor.detach().as_strided((slot.spec.numel,), (1,)).view(torch.uint8)
