"""Weights are fetched ahead of their use: read into host memory, and brought to the device.

Note [How far it has looked]
  Every use asks what else can be fetched, and few units are new since the last one. `_read` and
  `_filled` are the first expected uses whose weights are not known to be read, or on the device.
  A unit that leaves before takes them back. Beyond a unit whose read or update is under way, a few
  more are looked at.
"""

from __future__ import annotations

import torch

from infinity.errors import StorageError
from infinity.storage.protocol import Priority
from infinity.streaming.inputs.activations import InputMemory
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.space import WeightSpace
from infinity.streaming.weights.state import Weights, WeightState

# Units: the next ones are read in time even if their space must be made.
_NEAR = 2
# Uses behind the first unit that is not on the device and waits for something.
_MOST_BEHIND = 32


class ReadAhead:
    """Starts reads for the next units of the prediction, up to the window, and fills their regions
    where the device has space. Called under the engine's lock.

    window_nbytes: of the units to come, on their way or there; 0: nothing is fetched ahead
    """

    def __init__(
        self, moves: WeightMoves, space: WeightSpace, inputs: InputMemory, window_nbytes: int
    ) -> None:
        self._moves = moves
        self._space = space
        self._order = moves.order
        self._source = moves.source
        self._inputs = inputs  # Layer inputs in the same memory.
        self._fills = not moves.device.shares_host_memory
        self.is_on = window_nbytes > 0
        self._window_nbytes = window_nbytes
        self._epoch: int | None = None  # When it has looked.
        self._num_moved = 0
        self._read = self._filled = 0
        self._nbytes: dict[int, int] = {}  # By unit that is used next before `_read`: in all
        self._ahead_nbytes = 0  # so many.

    def look_anew(self) -> None:
        """Looks at all uses again: one that could not be fetched may fit now."""
        self._epoch = None

    def fetch(self, priority: Priority) -> None:
        """Fetches what can be fetched now."""
        order = self._order
        self._follow()
        window_nbytes = self._inputs.window_nbytes(self._window_nbytes)
        end = order.end(this_pass=self._source.is_outdated_by_step)
        while self._read < end and self._read_next(priority, window_nbytes):
            self._read += 1
        if self._fills:
            self._fill()

    def _follow(self) -> None:
        """Takes back what has changed since the last look."""
        order = self._order
        if self._epoch == order.epoch:
            for unit in order.moved[self._num_moved :]:
                if unit in self._nbytes and order.next_use(unit) >= self._read:
                    self._ahead_nbytes -= self._nbytes.pop(unit)
            for unit in self._moves.lost:
                use = order.next_use(unit)
                self._filled = min(self._filled, use)
                if use < self._read and self._moves.weights[unit].state is WeightState.ABSENT:
                    self._epoch = None
        if self._epoch != order.epoch:
            self._epoch = order.epoch
            self._read = self._filled = order.now
            self._nbytes, self._ahead_nbytes = {}, 0
        self._moves.lost.clear()
        self._num_moved = len(order.moved)
        self._read, self._filled = max(self._read, order.now), max(self._filled, order.now)

    def _read_next(self, priority: Priority, window_nbytes: int) -> bool:
        """Makes sure that the weights of the use `_read` are read, if there is space. Returns
        whether there is."""
        unit = self._order.unit_at(self._read)
        if unit in self._nbytes:
            return True
        weights, nbytes = self._moves.weights[unit], 0
        is_absent = weights.state is WeightState.ABSENT
        if not _is_old(weights):
            feeder = self._moves.feeder_of(weights)
            source = weights if feeder is None else feeder
            nbytes = self._moves.nbytes[source.unit.index]
            ahead_nbytes = self._ahead_nbytes + nbytes
            if ahead_nbytes > window_nbytes:
                return False
            if is_absent and source.state is WeightState.ABSENT:
                # Without dropping weights that are needed sooner.
                waits = self._inputs.are_returning and ahead_nbytes > _NEAR * nbytes
                block = self._space.find_block(source, only_free=waits)
                if block is None:
                    return False
                self._moves.start_read(source, block, priority)
        self._nbytes[unit] = nbytes
        self._ahead_nbytes += nbytes
        return True

    def _fill(self) -> None:
        """Fills the regions of units that are read, those of the next uses first."""
        use = self._filled
        has_space = True
        while has_space and use < self._read and use <= self._filled + _MOST_BEHIND:
            weights = self._moves.weights[self._order.unit_at(use)]
            if not self._moves.is_on_device(weights):
                try:
                    has_space = self._fill_one(weights)
                except StorageError:
                    return  # The next use reads them again.
                except torch.OutOfMemoryError:
                    return  # The computation may still have enough.
            if use == self._filled and self._moves.is_on_device(weights):
                self._filled += 1
            use += 1

    def _fill_one(self, weights: Weights) -> bool:
        """Returns whether the device may have space for more."""
        if _is_old(weights):
            return True
        has_space = True
        if weights.state is WeightState.ABSENT:
            feeder = self._moves.feeder_of(weights)
            if feeder is not None:
                has_space = self._space.fill_ahead(weights, feeder)
        if weights.state is WeightState.READING and weights.reading and weights.reading.done():
            self._moves.finish_read(weights)
        is_read = weights.state in (WeightState.READY, WeightState.STAGED)
        if has_space and is_read and not (weights.is_checked_out or weights.awaits_update):
            has_space = self._space.fill_ahead(weights, None)
        # It is decoded when it is there, and has space.
        return has_space and weights is not self._moves.decoding.staged


def _is_old(weights: Weights) -> bool:
    """Whether what could be fetched is old after the decision of the step."""
    is_fetched = weights.rests_on_host or weights.state is WeightState.ABSENT
    return weights.undecided is not None and is_fetched
