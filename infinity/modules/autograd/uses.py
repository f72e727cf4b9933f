"""Units in use: what the hooks of modules and of autograd call.

A unit is in use from the first of its overlapping uses to the last: its weights are on the device
and its modules show real parameters (INV-5). When a backward has left a unit, its gradients go to
where they rest; not at once, for the last of them arrive right after the unit's last node has run,
but when the backward comes to the next unit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident

import torch

from infinity.errors import InfinityError, UnsupportedError
from infinity.modules.autograd.forward_nodes import ForwardNodes
from infinity.modules.autograd.param import OffloadedParam, ParamTable
from infinity.modules.autograd.threads import OwnProcess
from infinity.modules.handles.edits import WeightEdits
from infinity.modules.interrupts import UNINTERRUPTED
from infinity.observe import Track
from infinity.ops.rules import Settings
from infinity.private.torch import is_any_autocast_enabled, peek_interpreter_stack
from infinity.state.units import TensorSpec, Unit
from infinity.storage.protocol import Priority
from infinity.streaming.gradients.sink import GradientSink
from infinity.streaming.passes import (
    OUTSIDE_BACKWARD,
    Passes,
    current_backward,
    outside_inference_mode,
)
from infinity.streaming.updates.record import StepRecord, StepRunner
from infinity.streaming.weights.cache import WeightCache


def _drop_casts(passes: Passes) -> None:
    """Autocast keeps a copy of each fp32 weight until its context ends. Without gradients nothing
    but memory depends on it; with them, the gradient of a weight that is used twice does, also
    around a part without gradients."""
    if current_backward() != OUTSIDE_BACKWARD:
        return
    if torch.is_grad_enabled():
        passes.is_graded = True
    elif not (passes.is_graded or passes.is_layer_major) and torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


OnTile = Callable[[list[int], bool], None]  # See `UnitUses.tiles_stop`.
Lent = Sequence[OffloadedParam]  # See `UnitUses.enter`.


class UnitUses:
    """Counts the uses of each unit, and knows which units a backward has left. Any thread."""

    def __init__(
        self,
        units: Sequence[Unit],
        weight_cache: WeightCache,
        gradients: GradientSink,
        updater: StepRunner,
        passes: Passes,
        param_table: ParamTable,
        changes: WeightEdits,
        lock: threading.RLock,
    ) -> None:
        self._units = units
        self._weight_cache = weight_cache
        self._gradients = gradients
        self._updater = updater
        self.passes = passes
        self._tracer = passes.tracer
        self.param_table = param_table
        self.current_stream = weight_cache.current_stream
        self._changes = changes
        self.lock = lock
        self._process = OwnProcess()
        # By the backward that is running, in its order: that of their writes and early updates.
        self._left: dict[int, None] = {}
        # That of the last function outside of modules; a loop over parameters writes it once.
        self._unwritten: int | None = None
        self.users: list[int] = []  # The threads that use units outside of hooks.
        self.is_closed = False
        self.on_tile: OnTile | None = None

    @contextmanager
    def tiles_stop(self, on_tile: OnTile) -> Iterator[None]:
        """Lets other micro-batches reach the same tile: `on_tile(units, is_over)` is called before
        `enter` (False), and when the backward of the units is complete and about to continue behind
        them (True)."""
        self.on_tile = on_tile
        try:
            yield
        finally:
            self.on_tile = None

    # -- Uses ------------------------------------------------------------------------------------

    def enter(self, units: Sequence[int], lent: Lent = (), *, is_of_pass: bool = True) -> None:
        """Begins a use of each unit, or of none: a failure ends the uses that have begun. The
        caller delays interrupts.

        lent: all parameters that the use needs. Without it the modules show those of the units
        is_of_pass: a hooked module begins its pass; without it nothing is fetched ahead
        """
        self._process.refuse_others()
        if torch.is_inference_mode_enabled():
            with outside_inference_mode():
                self.enter(units, lent, is_of_pass=is_of_pass)
            return
        done: list[int] = []
        priority = Priority.FORWARD if current_backward() == OUTSIDE_BACKWARD else Priority.BACKWARD
        try:
            with self.lock:
                begun_ns = time.monotonic_ns()
                self._gradients.take_in()  # What other ranks gave.
                if self._left:
                    self._write_left(but=units)
                if self._unwritten is not None and self._unwritten not in units:
                    self._weight_cache.write_behind(self._unwritten)
                    self._unwritten = None
                # All updates first: the optimizer's ring needs one range of free memory.
                for unit in units:
                    self._update(unit, lent)
                for unit in units:
                    is_first = self._weight_cache.acquire(unit, priority, is_of_pass=is_of_pass)
                    if not lent:
                        self.param_table.show_parameters(unit)
                    if is_first:
                        self._changes.begin_use(unit)
                    done.append(unit)
                for param in lent:
                    param.in_unit.lent.add(param)
                self._updater.advance()
        except BaseException:
            self.leave(done)
            raise
        if self._tracer.is_on:
            self._tracer.span(Track.ENGINE, "enter", begun_ns, time.monotonic_ns())
            if units:
                names = [self._units[unit].name for unit in units]
                self._tracer.begin(tuple(units), Track.MODULES, ", ".join(names))

    def join(self, units: list[int]) -> None:
        """Makes units that are in use usable for the stream that is current, too."""
        with UNINTERRUPTED, self.lock:
            for unit in units:
                self._weight_cache.join(unit)

    def leave(self, units: Sequence[int]) -> None:
        """Ends one use of each unit. The caller delays interrupts."""
        if torch.is_inference_mode_enabled():
            with outside_inference_mode():
                self.leave(units)
            return
        if self._tracer.is_on:
            self._tracer.end(tuple(units))
        if is_any_autocast_enabled():
            _drop_casts(self.passes)
        refusal: BaseException | None = None
        with self.lock:
            begun_ns = time.monotonic_ns()
            for unit in units:
                try:
                    if self._weight_cache.has_one_use(unit):
                        refusal = self._changes.put_back(unit) or refusal
                        self._changes.note_raw_writes(unit)
                    if self._weight_cache.release(unit):
                        if self._release_unit(unit):
                            self._weight_cache.write_behind(unit)
                        else:
                            self._unwritten = unit
                except BaseException as error:  # The uses of the others end, too.
                    refusal = refusal or error
            self._updater.advance()
        if self._tracer.is_on:
            self._tracer.span(Track.ENGINE, "leave", begun_ns, time.monotonic_ns())
        if refusal is not None:
            raise refusal

    @contextmanager
    def using(
        self, units: Sequence[int], lent: Lent = (), *, is_of_pass: bool | None = None
    ) -> Iterator[None]:
        """Uses units outside the hooks: for reads from outside and operations on handles, and for
        a module whose caller keeps its units. `is_of_pass`: None if a pass is running."""
        if is_of_pass is None:
            is_in_backward = current_backward() != OUTSIDE_BACKWARD
            is_of_pass = self.passes.is_in_forward or self.passes.is_layer_major or is_in_backward
        has_entered, thread = False, get_ident()
        try:
            with UNINTERRUPTED:  # A delayed interrupt comes at its end.
                self.enter(units, lent, is_of_pass=is_of_pass)
                self.users.append(thread)
                has_entered = True
            yield
        finally:
            if has_entered:
                with UNINTERRUPTED:
                    try:
                        self.leave(units)
                    finally:
                        self.users.remove(thread)

    def _update(self, unit: int, lent: Lent) -> None:
        if self.is_closed:
            raise InfinityError("the engine of this model is closed; its parameters are gone")
        self._changes.refuse_changed_away(unit, lent)
        if not self._weight_cache.is_in_use(unit):
            self._updater.bring_up_to_date(unit, is_needed=True)

    def _release_unit(self, unit: int) -> bool:
        """Returns whether the modules have shown it."""
        was_shown = self.param_table.show_handles(unit)
        try:
            self._changes.take_over(unit)
        finally:
            self._changes.end_use(unit)
        if current_backward() != OUTSIDE_BACKWARD:
            self._left[unit] = None
        return was_shown

    def refuse_in_use(self, what: str) -> None:
        """Raises InfinityError, which names the caller, while units are in use."""
        in_use = self._weight_cache.in_use()
        if in_use:
            raise InfinityError(
                f"{what} while {', '.join(in_use[:4])} is in use; "
                "leave infinity.gather() and finish the backward first"
            )

    def refuse_transforms(self, units: list[int]) -> None:
        """Raises UnsupportedError inside a transform of torch.func, unless the units are in use:
        the graphs of a transform have nodes that no hook reaches."""
        if peek_interpreter_stack() is None:
            return
        if not all(map(self._weight_cache.is_in_use, units)):
            names = ", ".join(self._units[unit].name for unit in units[:4])
            raise UnsupportedError(
                f"{names} would be used inside a transform of torch.func (vmap, grad, jvp), whose "
                "backward the engine does not see. Run the transform, and the backward of its "
                "result, inside `with infinity.gather(model):`"
            )

    def close(self) -> None:
        """Refuses further uses; modules of units in use show handles."""
        self.is_closed = True
        for unit in self._units:
            if self._weight_cache.is_in_use(unit.index):
                self.param_table.show_handles(unit.index)

    def check_saved(self, units: list[int], nodes: ForwardNodes) -> None:
        """Raises UnsupportedError if a node has saved a weight whose memory will be released."""
        replaced = [param for u in units for param in self.param_table.moved_away(u)]
        if replaced:
            self._changes.refuse_saved(replaced, [*nodes.inner, *nodes.exits])

    # -- Work of other units that rides along ------------------------------------------------------

    # Gradients and updates have no thread of their own where the device computes on the host. They
    # move a step whenever the thread that trains comes by, under the engine's lock, which it holds.

    def _write_left(self, but: Sequence[int]) -> None:
        """In a backward, starts to write the gradients of the units that it has left, but for those
        that it enters again."""
        if self.passes.is_layer_major or current_backward() == OUTSIDE_BACKWARD:
            return
        for unit in self._left:
            if unit not in but:
                self._write_out(unit)
        self._left.clear()

    def _write_out(self, unit: int) -> None:
        """The gradients of a unit are complete, as far as this backward goes."""
        self._gradients.write_out(self._units[unit])
        if self._updater.note_left(unit):
            record = self._expected_step(unit)
            if record is not None:
                self._updater.begin_early(unit, record)

    def _expected_step(self, unit: int) -> StepRecord | None:
        """Returns the settings of the unit's next step, if it comes now and clips nothing: of the
        parameters that have a gradient. None without one, or if one has no optimizer."""
        settings: dict[TensorSpec, Settings] = {}
        for param in self.param_table.of_unit(unit):
            if not self._gradients.has(param.spec):
                continue
            optimizer = None if param.optimizer is None else param.optimizer()
            if optimizer is None:
                return None
            settings[param.spec] = optimizer.next_settings(param)
        return StepRecord(settings, {}) if settings else None

    # -- Backward --------------------------------------------------------------------------------

    def backward_started(self) -> None:
        """A backward has reached the first hooked module."""
        if not self.passes.is_layer_major:
            self.passes.begin_backward()
            with self.lock:
                self._weight_cache.begin_backward()

    def backward_ended(self) -> None:
        """A backward has ended, or failed."""
        if self.passes.is_layer_major:
            return  # One of many small ones.
        while (wait := self._next_wait()) is not None:
            wait()
        with self.lock, self._tracer.during(Track.ENGINE, "end of backward"):
            self._left.clear()
            self._gradients.write_out_all()
        self.passes.end_backward()

    def _next_wait(self) -> Callable[[], None] | None:
        """The host may be far ahead of a device here. Units are updated early meanwhile."""
        with self.lock:
            wait = self._gradients.next_wait()
            self._updater.advance()
            return wait

    def begin_block_backward(self, units: list[int]) -> None:
        """Several gradients will come to each parameter of these units."""
        with self.lock:
            self._gradients.sum_on_device(self._units[unit] for unit in units)

    def sum_outside_blocks(self, units: Sequence[int]) -> int:
        """As `begin_block_backward`, of units outside of blocks and until the backward ends. Their
        sums take memory of the device window. Returns the bytes for which there is none."""
        with self.lock:
            return self._gradients.sum_on_device(
                (self._units[unit] for unit in units), self._weight_cache.space.lend_device
            )

    def end_of_block(self, units: list[int]) -> None:
        """The gradients of these units are complete: they go to where they rest."""
        with UNINTERRUPTED, self.lock:
            for unit in dict.fromkeys([*self._left, *units]):  # Tiles have units of their own.
                self._write_out(unit)
            self._left.clear()
            self._updater.advance()
