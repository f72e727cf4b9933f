"""Sums of one gradient each, which stay in bf16.

Note [Narrow sums]
  Where each parameter of a unit gets one gradient a step, in bf16, from a device with memory of its
  own, there is nothing to sum, and gradients that rest on the host stay in bf16: half of the bytes
  cross the link, and the update reads half as many. It widens them itself, and so do norms
  (`ops/bf16_norms.py`), so no bit changes. The last step says what this one is expected to be like.
  They lie in the second half of their fp32 memory. Before anything is added to one, or one is
  changed, all of the unit are widened, in place; whoever updates with them ends before
  (`GradientSink.widens`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients.leaving import LeavingGradients
from infinity.streaming.gradients.norms import CompleteSums
from infinity.streaming.gradients.sums import TensorGradient, UnitGradients, has_any


class NarrowSums:
    """Decides which sums are narrow. Under the engine's lock; `GradientStore` calls it.

    `is_on`: whether updates read bf16. `units`: those whose sums are narrow.
    """

    def __init__(
        self,
        tensors: Mapping[TensorSpec, TensorGradient],
        leaving: LeavingGradients,
        norms: CompleteSums,
    ) -> None:
        self._tensors = tensors
        self._leaving = leaving
        self._norms = norms
        self.is_on = False
        self.units: set[int] = set()

    def array_for(
        self, sums: UnitGradients, spec: TensorSpec, flat: torch.Tensor, *, first: bool
    ) -> torch.Tensor | None:
        """Returns the unit's gradients in bf16, (state_numel,), if this one is to be among them.
        The first of a unit decides it for all others."""
        if not self.is_on or sums.on_host is None:
            return None
        unit, is_bf16 = sums.unit, first and flat.dtype is torch.bfloat16
        if not has_any(self._tensors, unit):
            self._set(sums, is_bf16 and self._is_expected(unit, spec))
        return sums.narrow if is_bf16 else None

    def _is_expected(self, unit: Unit, spec: TensorSpec) -> bool:
        """Whether all tensors of the unit are bf16, and none had several gradients in the last
        step."""
        specs = list(unit.trainable())
        known = [self._tensors[other] for other in specs]
        is_measured = any(gradient.was_norm_needed for gradient in known)
        return (
            self._tensors[spec].num_expected == 1
            and all(other.facts.dtype is torch.bfloat16 for other in specs)
            and all(gradient.num_expected <= 1 for gradient in known)
            and (not is_measured or self._norms.takes_bf16)
        )

    def _set(self, sums: UnitGradients, is_narrow: bool) -> None:
        sums.narrow = sums.narrow_form() if is_narrow else None
        (self.units.add if is_narrow else self.units.discard)(sums.unit.index)

    def widen(self, sums: UnitGradients) -> None:
        """Ends the narrow form of a unit's sums. Waits for those that are on their way to it."""
        if has_any(self._tensors, sums.unit):
            self._leaving.end_all()
            for spec in sums.unit.trainable():
                self._tensors[spec].finish_task()
            sums.widen()
        self._set(sums, is_narrow=False)
