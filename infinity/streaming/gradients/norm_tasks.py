"""Threads that compute norms beside the thread that trains, without the engine's lock.

Note [Who reads a sum]
  A task reads the memory of a sum that is complete. The record of the sum (`TensorGradient`) has
  the task, and ends it before the sum changes or its memory is given up: a task that no thread has
  begun is cancelled, one that runs is waited for. So what a task returns is the norm of the content
  that the record has.

torch computes the 2-norm of one tensor on one thread, whatever its number of threads: each lane of
a vector adds all of its squares in order. So several tensors are measured at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from infinity.config.cores import norm_threads, threads_here
from infinity.state.units import TensorSpec

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


class NormThreads:
    """The pool: a part of the threads that updates have. Each thread starts when a task finds none
    that is idle."""

    def __init__(self, begin: Callable[[], None]) -> None:
        """`begin` is called first in each thread."""
        count = norm_threads(threads_here(torch.get_num_threads()))
        self._pool = ThreadPoolExecutor(count, THREAD_NAME, _begin_thread, (begin,))

    def start(self, measure: Measure, flat: torch.Tensor, spec: TensorSpec) -> NormTask:
        """Computes `measure(flat, spec)` beside the caller, with the caller's number of threads."""
        future = self._pool.submit(_measured, measure, flat, spec, torch.get_num_threads())
        return NormTask(future, measure, flat, spec)

    def close(self) -> None:
        """Ends the threads, after the tasks that run. Idempotent."""
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
