"""Units in use: what the hooks of modules and of autograd call.

A unit is held from the first of its uses that overlap to the last: its weights are on the device
and its modules show real parameters (INV-5). When a backward has left a unit, its gradients go to
where they rest; not at once, for the last of them arrive right after the unit's last node has run,
but when the backward comes to the next unit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch.autograd.graph import Node

from infinity.engine.changes import Changes
from infinity.engine.faces import Faces
from infinity.engine.hooks import OUTSIDE_BACKWARD, Site, current_backward
from infinity.engine.interrupts import uninterrupted
from infinity.engine.machinery import Machinery
from infinity.errors import InfinityError
from infinity.observe import Lane
from infinity.storage.engine import Priority


def _ignore(site: Site) -> None:
    return None


Turns = Callable[[list[int], bool], None]  # See `Residency.await_turn`.


class Holds:
    """Who uses which units, and which of them a backward has left. Any thread.

    What hooks know as `Residency`, and `accumulate` as `Blocks`.
    """

    def __init__(
        self, parts: Machinery, faces: Faces, changes: Changes, lock: threading.RLock
    ) -> None:
        self._units = parts.store.units
        self._executor = parts.executor
        self._gradients = parts.gradients
        self._updater = parts.updater
        self._passes = parts.passes
        self._tracer = parts.counters.tracer
        self._faces = faces
        self._changes = changes
        self._lock = lock
        self._left: set[int] = set()  # By the backward that is running.
        self.is_closed = False
        self.turns: Turns | None = None  # Of `accumulate`, while it runs.
        self.is_parameter_memory = faces.is_parameter_memory
        self.begin_use: Callable[[Site], None] = _ignore  # Of the engine, once it is installed.

    # -- Uses ------------------------------------------------------------------------------------

    @property
    def takes_turns(self) -> bool:
        return self.turns is not None

    def await_turn(self, units: list[int], *, is_over: bool = False) -> None:
        if self.turns is not None:
            self.turns(units, is_over)

    def enter(self, units: list[int]) -> None:
        """Makes units usable. All or none: a failure lets go of those already held."""
        done: list[int] = []
        priority = Priority.FORWARD if current_backward() == OUTSIDE_BACKWARD else Priority.BACKWARD
        try:
            with uninterrupted(), self._lock, self._tracer.during(Lane.ENGINE, "enter"):
                self._gradients.take_in()
                if priority is Priority.BACKWARD and not self._passes.is_layer_major:
                    self._write_out_left(but=units)
                for unit in units:
                    self._hold(unit, priority)
                    done.append(unit)
                self._updater.read_ahead()
        except BaseException:
            self.leave(done)
            raise
        if self._tracer.is_on and units:
            names = [self._units[unit].name for unit in units]
            self._tracer.begin(tuple(units), Lane.SITES, ", ".join(names))

    def leave(self, units: list[int]) -> None:
        """Ends one use of each unit."""
        self._tracer.end(tuple(units))
        refusal = None
        with uninterrupted(), self._lock, self._tracer.during(Lane.ENGINE, "leave"):
            for unit in units:
                if self._executor.is_last_hold(unit):
                    refusal = self._changes.put_back(unit) or refusal
                if self._executor.release(unit):
                    self._let_go(unit)
                    self._executor.write_behind(unit)
            self._updater.read_ahead()
        if refusal is not None:
            raise refusal

    @contextmanager
    def holding(self, units: list[int]) -> Iterator[None]:
        self.enter(units)
        try:
            yield
        finally:
            self.leave(units)

    def _hold(self, unit: int, priority: Priority) -> None:
        if self.is_closed:
            raise InfinityError("the engine of this model is closed; its parameters are gone")
        if not self._executor.is_held(unit):
            self._updater.bring_up_to_date(unit, is_needed=True)
        if self._executor.hold(unit, priority):
            self._faces.show_parameters(unit)

    def _let_go(self, unit: int) -> None:
        self._faces.show_handles(unit)
        self._changes.take_over(unit)
        if current_backward() != OUTSIDE_BACKWARD:
            self._left.add(unit)

    def refuse_held(self, what: str) -> None:
        """Raises InfinityError, which names the caller, while units are in use."""
        held = self._executor.held()
        if held:
            raise InfinityError(
                f"{what} while {', '.join(held[:4])} is in use; "
                "leave infinity.gather() and finish the backward first"
            )

    def close(self) -> None:
        """Nobody can hold a unit any more; those that are held show handles."""
        self.is_closed = True
        for unit in self._units:
            if self._executor.is_held(unit.index):
                self._faces.show_handles(unit.index)

    def check_saved(self, units: list[int], nodes: Iterable[Node]) -> None:
        replaced = [s for u in units for s in self._faces.of_unit(u) if s.stands_elsewhere]
        if replaced:
            self._changes.refuse_saved(replaced, nodes)

    # -- Backward --------------------------------------------------------------------------------

    def _write_out_left(self, but: list[int]) -> None:
        for unit in self._left - set(but):
            self._gradients.write_out(self._units[unit])
        self._left.clear()

    def backward_started(self) -> None:
        """A backward has reached the first site."""
        if not self._passes.is_layer_major:
            self._passes.begin_backward()
            with self._lock:
                self._executor.begin_backward()

    def backward_ended(self) -> None:
        if self._passes.is_layer_major:
            return  # One of many small ones.
        with self._lock, self._tracer.during(Lane.ENGINE, "end of backward"):
            self._left.clear()
            self._gradients.write_out_all()
        self._passes.end_backward()

    def begin_block_backward(self, units: list[int]) -> None:
        """Several gradients will come to each parameter of these units."""
        with self._lock:
            self._gradients.sum_on_device(self._units[unit] for unit in units)

    def end_of_block(self, units: list[int]) -> None:
        """The gradients of these units are complete: they go to where they rest."""
        with uninterrupted(), self._lock:
            for unit in {*units, *self._left}:  # Tiles have units of their own.
                self._gradients.write_out(self._units[unit])
            self._left.clear()
