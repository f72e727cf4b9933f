"""What an operation on a handle does: it fetches the bytes, computes, and lets go of them.

That is how a weight is read outside of the module that owns it (a tied head, a penalty on weights,
a print), and how the rules of modules initialise a model that is never whole in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from infinity.engine.changes import Changes
from infinity.engine.faces import Faces
from infinity.engine.handles import Handle, find_handles, replace_handles
from infinity.engine.holds import Holds
from infinity.engine.hooks import Backwards, Stay, nodes_since
from infinity.engine.machinery import Machinery
from infinity.engine.outputs import detach_from_parameters
from infinity.engine.parameter_grads import ParameterGrads
from infinity.engine.slot import Slot
from infinity.engine.whole import Whole
from infinity.errors import InfinityError, ParameterNotResident, UnsupportedError

if TYPE_CHECKING:
    from infinity.engine.engine import Engine

_log = logging.getLogger("infinity")

# Units that initialisation keeps attached at once, so that views it takes stay valid a while.
_INITIALISING_UNITS = 2


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
        slot = self._known(handle)
        if is_trainable and slot.spec.state_offset < 0:
            raise UnsupportedError(
                f"{slot.name!r} was frozen when the model was offloaded and has no optimizer "
                "state; set requires_grad before infinity.offload"
            )
        slot.compute.requires_grad_(is_trainable)
        with torch._C.DisableTorchFunctionSubclass():
            handle.requires_grad_(is_trainable)

    # -- Gradients -------------------------------------------------------------------------------

    def gradient_of(self, handle: Handle) -> torch.Tensor | None:
        slot = self._known(handle)
        if not self._grads.has(slot):
            return None
        return Handle.make(self, slot.name, handle, is_gradient=True)

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

    # -- Computing -------------------------------------------------------------------------------

    def compute_with(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        changes: Handle | None,
    ) -> Any:
        """An operation on handles outside their module: fetch, compute, let go."""
        handles = find_handles((args, kwargs))
        for handle in handles:
            if isinstance(handle.owner, Whole):
                return handle.owner.compute_with(function, args, kwargs, changes=changes)
        slots = {id(h): self.slot_of(h) for h in handles if not h.is_gradient}
        if changes is not None:
            self._may_change(changes, function)
        units = list(dict.fromkeys(slot.unit.index for slot in slots.values()))
        self._note_fault([slot.name for slot in slots.values()], function)

        def real(handle: Handle) -> torch.Tensor:
            return self._read_gradient(handle) if handle.is_gradient else slots[id(handle)].compute

        first = torch.autograd._get_sequence_nr()
        with self._holds.holding(units):
            answer = function(*replace_handles(args, real), **replace_handles(dict(kwargs), real))
            if self._initialising is not None:
                self._keep(self._initialising, units)
                by_compute = {id(slot.compute): slot.handle for slot in slots.values()}
                return by_compute.get(id(answer), answer)
            if changes is not None:
                self._changes.expect(units)
                return changes
            return self._watch_fault(units, answer, first)

    def _read_gradient(self, handle: Handle) -> torch.Tensor:
        gradient = self._grads.read(self._faces.named(handle.name_in_model))
        if gradient is None:
            raise InfinityError(
                f"the gradient of {handle.name_in_model!r} is not there any more: it was "
                "forgotten (zero_grad) after `.grad` was taken. Clone a gradient that is to "
                "be kept"
            )
        return gradient.to(handle.device)

    def _may_change(self, handle: Handle, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", str(function))
        if handle.is_gradient:
            raise UnsupportedError(
                f"{name} would change a fetched copy of the gradient of {handle.name_in_model!r} "
                "and be lost; to clip, give infinity.AdamW(..., max_grad_norm=...), or call its "
                "clip_grad_norm_; for a Trainer there is infinity.integrations.hf.prepare_trainer"
            )
        if self._initialising is None and not self._passes.is_in_forward:
            raise ParameterNotResident(
                handle.name_in_model,
                f"{name} changes it in place; do that inside "
                "`with infinity.gather(module, modify=True):`, and train with infinity.AdamW",
            )

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

    # -- Initialisation --------------------------------------------------------------------------

    @contextmanager
    def initialising(self) -> Iterator[None]:
        """Within, operations on handles may change them in place, and views of them stay valid
        until the next but one unit is touched. What was touched is written to its tiers."""
        assert self._initialising is None
        self._initialising = []
        try:
            yield
        finally:
            kept, self._initialising = self._initialising, None
            for unit in kept:
                self._let_go(unit)

    def _keep(self, kept: list[int], units: list[int]) -> None:
        for unit in units:
            if unit not in kept:
                self._holds.enter([unit])
                kept.append(unit)
            while len(kept) > max(_INITIALISING_UNITS, len(units)):
                self._let_go(kept.pop(0))

    def _let_go(self, unit: int) -> None:
        self._changes.expect([unit])
        self._holds.leave([unit])
