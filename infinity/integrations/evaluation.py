"""Evaluations of a Trainer in sweeps: each weight is read once for up to 32 batches.

Trainer's `evaluation_loop` takes a batch, calls `prediction_step` and gathers what that returns.
`EvaluationSweeps` stands for the dataloader there. It takes a window of batches, runs the
`prediction_step` of all of them in one sweep when the first one is asked for, and then returns one
result per call. Gathering, metrics, callbacks and logs are Trainer's own, in their order.

Note [As in the plain loop]
  The results have the bits of the plain loop. `why_unswept` (`windows.py`) names code that may mix
  batches. A window that has drawn random numbers, or that the engine refuses, is evaluated again
  batch by batch, after the metrics that it has left in the trainer and the state of the generators
  are put back. The rest of the run then takes the plain loop.

Written against transformers 5.23, accelerate 1.15 and TRL 1.16.
"""

from __future__ import annotations

import contextvars
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object

from infinity.engine.registry import engine_of
from infinity.errors import UnsupportedError
from infinity.modules.accumulate.fiber import Random
from infinity.modules.accumulate.reachable import is_alike
from infinity.private.torch import tree_leaves

MOST_BATCHES = 32  # Of a window. Each is a suspended thread.
_MOST_RESULTS_NBYTES = 1 << 29  # Of a window, where logits are asked for.
_METRICS = ("_metrics", "_stored_metrics")  # What `prediction_step` of TRL's trainers changes.

# Whether the batch of the running `prediction_step` is the last one of its dataloader.
_is_last: contextvars.ContextVar[bool] = contextvars.ContextVar("is_last")


class EvaluationSweeps:
    """The batches of one evaluation, in windows, in the place of its dataloader.

    sweep: runs calls without gradients, block by block, and returns their results
    is_loss_only: whether `prediction_step` returns no logits
    """

    def __init__(
        self,
        loader: Any,
        trainer: Any,
        sweep: Callable[[Sequence[Callable[[], Any]]], list[Any]],
        *,
        is_loss_only: bool,
    ) -> None:
        self._loader = loader
        self._trainer = trainer
        self._sweep = sweep
        self._is_loss_only = is_loss_only
        # Logits wait until they are asked for. The first window shows their size.
        self._most = MOST_BATCHES if is_loss_only else 1
        self._window: deque[tuple[Any, bool]] = deque()  # With whether each is the last one.
        self._results: deque[Any] = deque()
        self.cause: str | None = None  # Why the rest goes batch by batch.

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while window := self._take(batches):
            self._window, self._results = deque(window), deque()
            for batch, is_last in window:
                self._set_end(is_last)
                yield batch

    def _take(self, batches: Iterator[Any]) -> list[tuple[Any, bool]]:
        window: list[tuple[Any, bool]] = []
        most, left = self._most, engine_of(self._trainer.model).sweep_tokens
        for batch in batches:
            window.append((batch, self._is_at_end()))
            left -= num_tokens(batch)
            # After the last batch, a loader of accelerate is no longer the active one.
            if window[-1][1] or self.cause or len(window) == most or left < num_tokens(batch):
                break
        return window

    def result_of(self, inputs: Any, step: Callable[[Any], Any]) -> Any:
        """Returns what `step(inputs)` does: `prediction_step` of one batch."""
        if not self._window or inputs is not self._window[0][0]:
            return step(inputs)
        if not self._results and len(self._window) > 1 and self.cause is None:
            self._results.extend(self._run(step))
        self._window.popleft()
        if self._results:
            return self._results.popleft()
        result = step(inputs)
        if not self._is_loss_only:
            tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self._most = min(MOST_BATCHES, max(1, _MOST_RESULTS_NBYTES // max(1, nbytes)))
        return result

    def _run(self, step: Callable[[Any], Any]) -> list[Any]:
        """Returns the results of the window; an empty list if it is to be evaluated batch by
        batch."""
        trainer, engine = self._trainer, engine_of(self._trainer.model)
        random = Random(next(trainer.model.parameters()).device)
        drawn: list[bool] = []

        def call(batch: Any, is_last: bool) -> Any:
            before, token = random.state(), _is_last.set(is_last)
            result = step(batch)
            _is_last.reset(token)
            drawn.append(not is_alike(random.state(), before))
            return result

        kept = {name: vars(trainer)[name] for name in _METRICS if name in vars(trainer)}
        metrics, state = copy.deepcopy(kept), random.state()
        cause = None
        try:
            with self._each_ends_as_its_own():
                results = self._sweep([partial(call, *pair) for pair in self._window])
        except UnsupportedError as error:
            if engine.num_ranks > 1:  # The others may be in the middle of the sweep.
                raise
            cause = str(error)
        if any(drawn):
            cause = "it draws random numbers, which would be others"
        causes = gather_object([cause]) if engine.num_ranks > 1 else [cause]
        self.cause = next(filter(None, causes), None)
        if self.cause is None:
            return results
        vars(trainer).update(metrics)
        random.set(state)
        return []

    # -- The end of a dataloader, where accelerate leaves out what it has added to the last batch --

    def _active(self) -> Any:
        active = self._trainer.accelerator.gradient_state.active_dataloader
        return active if active is self._loader else None

    def _is_at_end(self) -> bool:
        active = self._active()
        return active is not None and bool(active.end_of_dataloader)

    def _set_end(self, is_last: bool) -> None:
        active = self._active()
        if active is not None:
            active.end_of_dataloader = is_last

    @contextmanager
    def _each_ends_as_its_own(self) -> Iterator[None]:
        """Lets a loss that gathers metrics in a sweep find the end of the dataloader as in the
        plain loop: behind the last batch alone."""
        accelerator = self._trainer.accelerator
        gather = accelerator.gather_for_metrics

        def gather_for_metrics(*args: Any, **options: Any) -> Any:
            self._set_end(_is_last.get())
            return gather(*args, **options)

        accelerator.gather_for_metrics = gather_for_metrics
        try:
            yield
        finally:
            del accelerator.gather_for_metrics
            self._set_end(self._window[0][1])


def num_tokens(batch: Any) -> int:
    """Returns the tokens of a batch; where it has no token ids, an estimate from its largest
    tensor, of patches of 16 x 16 pixels."""
    items = batch.items() if isinstance(batch, Mapping) else ()
    ids = [value.numel() for key, value in items if str(key).endswith("input_ids")]
    if ids:
        return sum(ids)
    tensors = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor)]
    return max((tensor.numel() // 256 for tensor in tensors), default=0)
