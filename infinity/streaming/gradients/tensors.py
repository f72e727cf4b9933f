"""One parameter's gradient: what is known of it, and its norm, computed before the step needs it.

A sum is complete when as many gradients have come as to the last sum of the parameter, or, over
ranks, when the owner of the sum says so (`GradientStore.note_complete`). That is a prediction:
another gradient makes the norm unknown again. Norms are wanted of those parameters whose norm the
last step needed.

Note [Who reads a sum]
  A task reads the memory of a sum that is complete, in a thread of its own and without the engine's
  lock. The record of the sum (`TensorGradient`) has the task, and ends it before the sum changes or
  its memory is given up: a task that no thread has begun is cancelled, one that runs is waited for.
  So what a task returns is the norm of the content that the record has.

torch computes the 2-norm of one tensor on one thread, whatever its number of threads: each lane of
a vector adds all of its squares in order. So several tensors are measured at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from infinity.config.machine import norm_threads, threads_here
from infinity.ops.norms import has_norm_of_bf16, norm_of_bf16
from infinity.state.units import TensorSpec, Unit
from infinity.streaming.gradients.sums import flat_of, shaped
from infinity.tiers.device import Copy

Measure = Callable[[torch.Tensor, TensorSpec], torch.Tensor]

THREAD_NAME = "infinity-norms"
_here = threading.local()


class NormTask:
    """The norm of one sum, on its way. Called under the engine's lock; no thread of the pool takes
    it."""

    def __init__(
        self, future: Future[torch.Tensor], measure: Measure, flat: torch.Tensor, spec: TensorSpec
    ) -> None:
        self._future = future
        self._measure, self._flat, self._spec = measure, flat, spec

    def result(self) -> torch.Tensor:
        """Returns what `measure` returns, or raises what it raises. The caller computes it where no
        thread has begun. The sum is read no more."""
        if self._future.cancel():
            return self._measure(self._flat, self._spec)
        return self._future.result()

    def is_over(self) -> bool:
        """Whether no thread reads the sum, or will. Never waits."""
        return self._future.done()

    def end(self) -> None:
        """The sum is read no more, and nobody needs its norm."""
        # Garbage is collected on any thread, also on one that computes this norm: the views of a
        # task keep the memory that it reads.
        if not self._future.cancel() and not hasattr(_here, "is_of_pool"):
            wait([self._future])


@dataclass(eq=False, slots=True)
class TensorGradient:
    """The facts about one parameter's gradient. Only its methods write its fields; the norm and its
    task come from `CompleteSums` alone."""

    is_present: bool = False
    # Of the present sum, see `CompleteSums`; None: unknown. While `task` computes it, the
    # task reads the sum: Note [Who reads a sum].
    norm: torch.Tensor | None = None
    task: NormTask | None = None
    is_due: bool = False  # The norm will be needed, and no further gradient is expected.
    # What is read of the sum is its product with this fp32 value, which no reader has applied yet.
    scale: float | None = None
    number: int = 0  # Which gradient of the parameter, counted from the first.
    num_changes: int = 0
    # Gradients in the present sum, and in the last one; whether norms of them were needed.
    num_added: int = 0
    num_expected: int = 0
    is_norm_needed: bool = False
    was_norm_needed: bool = False

    @property
    def stamp(self) -> tuple[int, int]:
        """Another one for each content."""
        return self.number, self.num_changes

    def note_added(self, *, counts: bool) -> None:
        """A gradient is about to be added to the sum. `counts`: see `CompleteSums`."""
        self.num_changes += 1
        self.norm = None
        if self.task is not None:
            self.end_task()
        self.num_added += 1
        is_like_last = counts and self.num_added == self.num_expected
        self.is_due = is_like_last and self.was_norm_needed

    def note_there(self) -> None:
        """The gradient is in its sum, or on its way there."""
        self.is_present = True

    def note_complete(self) -> None:
        """No further gradient is expected."""
        self.is_due = self.was_norm_needed

    def begin_measuring(self, task: NormTask) -> None:
        """The task computes the norm of the present content."""
        self.task = task

    def note_norm(self, norm: torch.Tensor) -> None:
        """The norm of the present content."""
        self.norm = norm

    def need_norm(self) -> None:
        """The step asks for the norm, so the next one probably will."""
        self.is_norm_needed = True

    def note_scaled(self, scale: float) -> None:
        """The gradient is the product of the sum with `scale` from now on."""
        assert self.is_present and self.scale is None
        self.num_changes += 1
        self.norm = None
        self.end_task()
        self.scale = scale

    def apply_scale(self, flat: torch.Tensor) -> None:
        """Multiplies the sum, fp32 (numel,), by its scale, if it has one. Nobody reads the sum."""
        if self.scale is not None:
            self.end_task()
            self.norm = None
            flat.mul_(self.scale)
            self.scale = None

    def finish_task(self) -> None:
        """Takes the norm from the task that computes it, if there is one. Waits, or computes it.
        Raises what the task has raised; the norm is unknown then."""
        if self.task is not None:
            task, self.task = self.task, None
            self.norm = task.result()

    def finished_norm(self) -> torch.Tensor:
        """Returns the norm, which is known or on its way; see `finish_task`."""
        self.finish_task()
        assert self.norm is not None
        return self.norm

    def end_task(self) -> None:
        """Nobody reads the sum any more, and its norm is not needed. Waits for a reader."""
        if self.task is not None:
            self.task.end()
            self.task = None

    def forget(self, *, is_other: bool = True) -> None:
        """The parameter has no gradient. `is_other`: the next one is another."""
        if self.task is not None:
            self.end_task()
        if self.num_added:
            self.num_expected, self.num_added = self.num_added, 0
            self.was_norm_needed, self.is_norm_needed = self.is_norm_needed, False
        self.is_present, self.norm, self.scale = False, None, None
        self.is_due = False
        self.number += is_other

    def become_zeros(self) -> None:
        """The same gradient has another content, which is no sum."""
        self.forget(is_other=False)
        self.is_present = True
        self.num_changes += 1


def has_any(tensors: Mapping[TensorSpec, TensorGradient], unit: Unit) -> bool:
    """Whether a tensor of the unit has a gradient."""
    return any(tensors[spec].is_present for spec in unit.trainable())


def norm_of(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns the 2-norm of a sum, an fp32 scalar with the bits of plain PyTorch. `flat`: fp32
    (numel,), or fewer elements, which `resting_norms.py` has picked; or bf16 (numel,), whose norm
    is that of the same numbers in fp32."""
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
        # A part of the threads that updates have; each starts when a task finds none that is idle.
        self._pool: ThreadPoolExecutor | None = None

    def measure_beside(self, begin_thread: Callable[[], None]) -> None:
        """From now on norms are computed beside the thread that trains, until `close`. Each thread
        calls `begin_thread` first.

        For a device with memory of its own: the host's cores are free while it computes.
        """
        count = norm_threads(threads_here(torch.get_num_threads()))
        self._pool = ThreadPoolExecutor(count, THREAD_NAME, _begin_thread, (begin_thread,))

    @property
    def takes_bf16(self) -> bool:
        """Whether a sum may be measured that is kept in bf16."""
        return self.measure is norm_of and self.counts and has_norm_of_bf16()

    @property
    def follow_copies(self) -> bool:
        """Whether sums that rest on a device are copied to be measured, see `start`."""
        return self._pool is not None and not self.is_on_device

    def start(
        self, spec: TensorSpec, known: TensorGradient, flat: torch.Tensor, *, after: Copy
    ) -> NormTask:
        """Has a sum measured when a copy is over. `flat`: fp32 on the host, as of `norm_of`, the
        copy's target, valid until the task is over."""

        def measure(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
            after.wait()
            return self.measure(flat, spec)

        return self._begin(known, measure, flat, spec)

    def _begin(
        self, known: TensorGradient, measure: Measure, flat: torch.Tensor, spec: TensorSpec
    ) -> NormTask:
        """Computes `measure(flat, spec)` beside the caller, with the caller's number of threads."""
        assert self._pool is not None
        future = self._pool.submit(_measured, measure, flat, spec, torch.get_num_threads())
        task = NormTask(future, measure, flat, spec)
        known.begin_measuring(task)
        return task

    def measure_now(self, spec: TensorSpec, known: TensorGradient, flat: torch.Tensor) -> None:
        """Measures a sum in this thread. `flat`: as of `norm_of`."""
        if flat.dtype is torch.bfloat16 and not self.takes_bf16:
            flat = flat.float()
        known.note_norm(self.measure(flat, spec))

    def note(self, spec: TensorSpec, known: TensorGradient, flat: torch.Tensor) -> None:
        """A sum is complete. `flat`: fp32 (numel,), valid until the task of `known` is ended."""
        if known.norm is not None or known.task is not None:
            return
        if self._pool is None:
            known.note_norm(self.measure(flat, spec))
        else:
            self._begin(known, self.measure, flat, spec)

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
        """Ends the tasks of these sums, and the threads, after the tasks that run. Idempotent."""
        for known in tensors:
            known.end_task()
        if self._pool is not None:
            self._pool.shutdown(wait=not hasattr(_here, "is_of_pool"), cancel_futures=True)


def _begin_thread(begin: Callable[[], None]) -> None:
    _here.is_of_pool = True
    begin()


def _measured(
    measure: Measure, flat: torch.Tensor, spec: TensorSpec, num_threads: int
) -> torch.Tensor:
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return measure(flat, spec)
