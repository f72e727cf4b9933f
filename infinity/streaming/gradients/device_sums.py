"""Sums of gradients on a device: several gradients of a parameter are added there, in the order in
which they come, and leave it once.

A block's sums end when all micro-batches have passed its backward. Those of a unit outside of
blocks may get more after that, when another use of the unit (a tied head, a shared block) is
reached: they stay until as many gradients have come as to the last sum, and at most until the end
of the backward. Their memory is lent of the device's window for weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.state.units import STATE_ITEM_NBYTES, TensorSpec, Unit
from infinity.streaming.gradients.sink import Lend
from infinity.streaming.gradients.sums import TensorGradient


class DeviceSums:
    """The sums on the device, by unit. Under the engine's lock."""

    def __init__(self) -> None:
        self._sums: dict[Unit, dict[TensorSpec, torch.Tensor]] = {}  # Flat; the oldest unit first.
        # Units to which more gradients come, and whether their sums stay until all of them have.
        self._open: dict[Unit, bool] = {}
        self._own: set[TensorSpec] = set()  # Those whose memory nobody else has.

    def begin(self, unit: Unit, lend: Lend | None) -> int:
        """Several gradients will come to each parameter of the unit, until it ends. `lend`: see
        `GradientSink.sum_on_device`. Returns the bytes that were not lent."""
        if unit in self._open:
            return 0
        nbytes = 0 if lend is None else sum(s.numel for s in unit.trainable()) * STATE_ITEM_NBYTES
        if lend is not None and nbytes and not lend(nbytes):
            return nbytes
        self._open[unit] = lend is not None
        return 0

    def is_open(self, unit: Unit) -> bool:
        """Whether the gradients of the unit are summed here."""
        return unit in self._open

    def end_block(self, unit: Unit) -> None:
        """No more gradients are added to the unit's sums, unless it is used outside of blocks."""
        if not self._open.get(unit, True):
            del self._open[unit]

    def end(self) -> None:
        """No more gradients are added to any sums."""
        self._open.clear()

    def add(self, unit: Unit, spec: TensorSpec, flat: torch.Tensor) -> None:
        """Adds a gradient, at most fp32 and (numel,), to the sum: fp32 unless it is the only
        one."""
        sums = self._sums.setdefault(unit, {})
        before = sums.get(spec)
        if before is None:  # One alone leaves in its own dtype, from where autograd put it.
            sums[spec] = flat
        elif spec in self._own:
            before.add_(flat)
        else:
            is_wide = before.dtype is torch.float32
            sums[spec] = before + flat if is_wide else before.float().add_(flat)
            self._own.add(spec)

    def has(self, unit: Unit) -> bool:
        """Whether sums of the unit are here."""
        return unit in self._sums

    def units(self) -> list[Unit]:
        """Returns the units of which sums are here."""
        return list(self._sums)

    def take(self, unit: Unit) -> dict[TensorSpec, torch.Tensor]:
        """Hands the unit's sums over: flat. They are the caller's from now on."""
        taken = self._sums.pop(unit, {})
        self._own.difference_update(taken)
        return taken

    def stays(self, unit: Unit, tensors: Mapping[TensorSpec, TensorGradient]) -> bool:
        """Whether the sums await gradients that came to the last ones after the end of a block."""
        if not self._open.get(unit, False):
            return False
        return any(tensors[s].num_added < tensors[s].num_expected for s in self._sums.get(unit, ()))
