"""Which units are updated in the backward, before `optimizer.step()` has decided. Pure.

An *early update* expects that a step follows the backward, with the settings of now and without
clipping. The policy predicts when the gradients of a unit are complete, chooses the units, and
rests after steps that were not as expected. No torch, no I/O, no clock.

Note [Share of the backward]
  Drives and compute overlap best where both passes have their part of the traffic. Units that the
  backward does not get to by its end are the first that the forward needs, and the forward waits
  for them. Units that the policy leaves out are spread over the whole forward. So the share of
  the early units grows while the forward waits for drives and the backward gets to all of them,
  and shrinks by those that the backward does not get to.

  Where a thread updates the newest unit first (`ShardUpdates`), what the backward does not get to
  is what the forward needs last, and every unit is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

_FIRST_SHARE = 0.5
_GROWTH = 1 / 16
_MOST_QUIET_STEPS = 1024
_NAMEABLE_WAIT = 0.02  # Of the time of a step.


def choose_early(order: Sequence[int], nbytes: Mapping[int, int], share: float) -> list[int]:
    """Returns the units of `order` that are updated early: about `share` of their bytes, spread
    evenly. A larger share takes no unit back at 0 and 1: 0 gives none and 1 gives all of them."""
    chosen, owed = [], 0.0
    for unit in order:
        owed += share * nbytes[unit]
        if share > 0 and owed >= nbytes[unit] / 2:
            chosen.append(unit)
            owed -= nbytes[unit]
    return chosen


class EarlyPolicy:
    """Predicts from one step to the next. `nbytes`: state of each unit that can be updated early.
    `is_newest_first`: the unit whose gradients came last is updated first."""

    def __init__(self, nbytes: Mapping[int, int], *, is_newest_first: bool = False) -> None:
        self._nbytes = nbytes
        self.adapts = not is_newest_first
        self.share = _FIRST_SHARE if self.adapts else 1.0
        # Of the last step: the gradients of each unit, and the units in the order in which a
        # backward completed them.
        self._expected: Counter[int] = Counter()
        self._order: tuple[int, ...] = ()
        # Of this step.
        self._arrived: Counter[int] = Counter()
        self._left: dict[int, int] = {}  # Gradients that had arrived when the backward left.
        self._num_quiet_steps = 0  # That were as expected, since the last one that was not.
        self._num_wanted_steps = 0  # Before the next attempt.

    @property
    def is_on(self) -> bool:
        """Whether this step is expected to be like the last."""
        return bool(self._order) and self._num_quiet_steps >= self._num_wanted_steps

    def plan(self) -> list[int]:
        """Returns the units to update early in this step, in the order of their gradients."""
        return choose_early(self._order, self._nbytes, self.share) if self.is_on else []

    def note_gradient(self, unit: int) -> bool:
        """A gradient of one parameter arrived. Returns whether it is the first of the step."""
        is_first = not self._arrived
        self._arrived[unit] += 1
        return is_first

    def note_dropped(self, units: Iterable[int]) -> bool:
        """The gradients of the units are gone. Returns whether the step has none any more: it is
        left out, and the next is expected to be like the one before."""
        for unit in units:
            self._arrived.pop(unit, None)
            self._left.pop(unit, None)
        return not self._arrived

    def note_left(self, unit: int) -> bool:
        """A backward has left the unit. Returns whether its gradients are complete, if this step
        is like the last."""
        self._left.pop(unit, None)
        self._left[unit] = self._arrived[unit]
        return 0 < self._arrived[unit] == self._expected[unit]

    def end_step(
        self, *, num_undone: int, is_clipped: bool, missed: Sequence[int], wait_share: float
    ) -> None:
        """The optimizer has decided. `num_undone`: early updates that were taken back. `missed`:
        planned units that the backward did not get to. `wait_share`: the part of the step that
        the forward waited for drives."""
        was_on = self.is_on
        self._expected = self._arrived
        self._order = tuple(
            unit
            for unit, count in self._left.items()
            if unit in self._nbytes and count == self._arrived[unit] > 0
        )
        self._arrived, self._left = Counter(), {}
        if num_undone:
            self._num_wanted_steps = min(max(2 * self._num_wanted_steps, 2), _MOST_QUIET_STEPS)
            self._num_quiet_steps = 0
        elif is_clipped:
            self._num_quiet_steps = 0
            self._num_wanted_steps = max(self._num_wanted_steps, 2)
        else:
            self._num_quiet_steps += 1
            if was_on:
                self._num_wanted_steps = max(0, self._num_wanted_steps - 1)
        if self.adapts and was_on and not num_undone:
            self._adapt(missed, wait_share)

    def _adapt(self, missed: Sequence[int], wait_share: float) -> None:
        total_nbytes = sum(self._nbytes[unit] for unit in self._order)
        if not total_nbytes:
            return
        if missed:
            missed_nbytes = sum(self._nbytes[unit] for unit in missed)
            self.share = max(0.0, self.share - missed_nbytes / total_nbytes)
        elif wait_share > _NAMEABLE_WAIT:
            self.share = min(1.0, self.share + _GROWTH)
