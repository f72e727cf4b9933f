"""Norms of gradients whose sums are complete, computed before the step needs them.

A sum is complete when as many gradients have come as to the last sum of the parameter, or, over
ranks, when the owner of the sum says so (`GradientStore.note_complete`). That is a prediction:
another gradient makes the norm unknown again. Norms are wanted of those parameters whose norm the
last step needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from infinity.ops.bf16_norms import has_norm_of_bf16, norm_of_bf16
from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients.memory import flat_of, shaped
from infinity.streaming.gradients.norm_tasks import Measure, NormTask, NormThreads
from infinity.streaming.gradients.sums import TensorGradient
from infinity.tiers.device import Copy


def norm_of(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns the 2-norm of a sum, an fp32 scalar with the bits of plain PyTorch. `flat`: fp32
    (numel,), or fewer elements, which `nonzero_rows.py` has picked; or bf16 (numel,), whose norm is
    that of the same numbers in fp32."""
    if flat.dtype is torch.bfloat16:
        return norm_of_bf16(flat)
    elements = shaped(flat, spec) if flat.numel() == spec.numel else flat
    norm: torch.Tensor = torch.linalg.vector_norm(elements)
    return norm


class CompleteSums:
    """Has the norms of complete sums computed: from `measure_beside` on by threads of its own, else
    by the thread that added the last gradient, at once. Under the engine's lock.

    `measure` returns what is kept of a sum, fp32 (numel,): its norm, or what a norm over ranks is
    made from. `counts`: the number of gradients says whether a sum is complete. Over ranks it does
    not, because ranks' gradients may come one by one or as their sum. `is_on_device`: `measure` has
    the same bits on a device, so sums that rest there do not leave it.
    """

    def __init__(
        self, measure: Measure = norm_of, *, counts: bool = True, is_on_device: bool = False
    ) -> None:
        self.measure, self.is_on_device = measure, is_on_device
        self.counts = counts
        self._threads: NormThreads | None = None

    def measure_beside(self, begin_thread: Callable[[], None]) -> None:
        """From now on norms are computed beside the thread that trains, until `close`. Each thread
        calls `begin_thread` first.

        For a device with memory of its own: the host's cores are free while it computes.
        """
        self._threads = NormThreads(begin_thread)

    @property
    def takes_bf16(self) -> bool:
        """Whether a sum may be measured that is kept in bf16."""
        return self.measure is norm_of and self.counts and has_norm_of_bf16()

    @property
    def follow_copies(self) -> bool:
        """Whether sums that rest on a device are copied to be measured, see `start`."""
        return self._threads is not None and not self.is_on_device

    def start(self, flat: torch.Tensor, spec: TensorSpec, *, after: Copy) -> NormTask:
        """Has a sum measured when a copy is over. `flat`: fp32 on the host, as of `norm_of`, the
        copy's target, valid until the task is over."""
        assert self._threads is not None

        def measure(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
            after.wait()
            return self.measure(flat, spec)

        return self._threads.start(measure, flat, spec)

    def note(self, spec: TensorSpec, known: TensorGradient, flat: torch.Tensor) -> None:
        """A sum is complete. `flat`: fp32 (numel,), valid until the task of `known` is ended."""
        if known.norm is not None or known.task is not None:
            return
        if self._threads is None:
            known.norm = self.measure(flat, spec)
        else:
            known.task = self._threads.start(self.measure, flat, spec)

    def note_leaving(
        self, unit: Unit, tensors: Mapping[TensorSpec, TensorGradient], array: torch.Tensor
    ) -> None:
        """The unit's sums are about to leave memory. Notes those that have more gradients than the
        last ones, and whose norms are needed. `array`: fp32 (state_numel,)."""
        for spec in unit.trainable():
            known = tensors[spec]
            # To read a sum again costs more than its norm; of the first one nothing is known.
            is_needed = known.was_norm_needed or not known.num_expected
            is_late = self.counts and known.num_added > known.num_expected
            if known.is_present and is_needed and is_late:
                self.note(spec, known, flat_of(array, spec))

    def finish(self, unit: Unit, tensors: Mapping[TensorSpec, TensorGradient]) -> None:
        """The unit's memory is given up: ends the tasks that read it, and keeps their norms."""
        for spec in unit.trainable():
            tensors[spec].finish_task()

    def close(self, tensors: Iterable[TensorGradient]) -> None:
        """Ends the tasks of these sums, and the threads. Idempotent."""
        for known in tensors:
            known.end_task()
        if self._threads is not None:
            self._threads.close()
