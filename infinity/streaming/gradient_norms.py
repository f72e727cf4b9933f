"""Norms of gradients whose sums are complete, computed before the step needs them.

A sum is complete when as many gradients have come as to the last sum of the parameter, or, over
ranks, when the owner of the sum says so (`GradientStore.note_complete`). That is a prediction:
another gradient makes the norm unknown again. Norms are wanted of those parameters whose norm the
last step needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradient_memory import flat_of, shaped
from infinity.streaming.gradient_sums import TensorGradient

Measure = Callable[[torch.Tensor, TensorSpec], torch.Tensor]


def norm_of(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns the 2-norm of a sum, fp32 (numel,): an fp32 scalar, the bits of plain PyTorch."""
    norm: torch.Tensor = torch.linalg.vector_norm(shaped(flat, spec))
    return norm


@dataclass(frozen=True, slots=True)
class _DueNorm:
    unit: Unit
    spec: TensorSpec
    known: TensorGradient
    stamp: tuple[int, int]
    flat: torch.Tensor

    def compute(self, measure: Measure) -> None:
        """Computes the norm, unless the sum has changed since."""
        known = self.known
        if known.is_present and known.norm is None and known.stamp == self.stamp:
            known.norm = measure(self.flat, self.spec)


class CompleteSums:
    """Norms that are due. `is_beside`: a worker calls `compute_next`; else the norm of a sum is
    computed when it is complete, by the thread that added the last gradient. Under the engine's
    lock.

    `measure` returns what is kept of a sum, fp32 (numel,): its norm, or what a norm over ranks is
    made from. `counts`: the number of gradients says whether a sum is complete. Over ranks it does
    not, because ranks' gradients may come one by one or as their sum. `is_on_device`: `measure` has
    the same bits on a device, so sums that rest there do not leave it.
    """

    def __init__(
        self, measure: Measure = norm_of, *, counts: bool = True, is_on_device: bool = False
    ) -> None:
        self.measure, self.is_on_device = measure, is_on_device
        self.is_beside = False
        self.counts = counts
        self._due: dict[TensorSpec, _DueNorm] = {}

    def __len__(self) -> int:
        return len(self._due)

    def note(self, unit: Unit, spec: TensorSpec, known: TensorGradient, flat: torch.Tensor) -> None:
        """A sum is complete. `flat`: fp32 (numel,), valid until `finish` of its unit."""
        if self.is_beside:
            self._due[spec] = _DueNorm(unit, spec, known, known.stamp, flat)
        else:
            known.norm = self.measure(flat, spec)

    def compute_late(
        self, unit: Unit, tensors: Mapping[TensorSpec, TensorGradient], array: torch.Tensor
    ) -> None:
        """Computes the norms that are needed of sums with more gradients than the last ones, before
        they leave memory. `array`: the unit's gradients, fp32 (state_numel,)."""
        for spec in unit.trainable():
            known = tensors[spec]
            # To read a sum again costs more than its norm; of the first one nothing is known.
            is_needed = known.was_norm_needed or not known.num_expected
            is_late = self.counts and known.num_added > known.num_expected
            if known.is_present and is_needed and is_late:
                known.norm = self.measure(flat_of(array, spec), spec)

    def compute_next(self) -> bool:
        """Computes one norm. Returns whether there was one to compute."""
        if not self._due:
            return False
        self._due.pop(next(iter(self._due))).compute(self.measure)
        return True

    def finish(self, unit: Unit) -> None:
        """Computes the norms of a unit, whose memory is given up."""
        for due in [norm for norm in self._due.values() if norm.unit is unit]:
            del self._due[due.spec]
            due.compute(self.measure)
