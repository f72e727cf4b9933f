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

Note [With the next step]
  An evaluation after step K needs the weights that the window of step K + 1 begins with. Where
  nothing needs its numbers before, its batches are taken at once, because that may draw numbers,
  and pass the blocks with that window: the evaluation reads no byte. Trainer's `evaluate` follows
  in the first `training_step` of step K + 1, while the trainer's state is still that of step K.

Written against transformers 5.23, accelerate 1.15 and TRL 1.16.
"""

from __future__ import annotations

import contextvars
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

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
_is_last: contextvars.ContextVar[bool | None] = contextvars.ContextVar("is_last", default=None)


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
        ignore_keys: list[str] | None = None,
    ) -> None:
        self._loader = loader
        self._trainer = trainer
        self._sweep = sweep
        self._is_loss_only = is_loss_only
        self.ignore_keys = ignore_keys
        # Logits wait until they are asked for. The first window shows their size.
        self._most = MOST_BATCHES if is_loss_only else 1
        self._taken: list[tuple[Any, bool]] | None = None  # With whether each is the last one.
        self._window: deque[tuple[Any, bool]] = deque()
        self._results: deque[Any] = deque()
        self._drawn: list[bool] = []  # Whether a batch of the window has drawn random numbers.
        self.fits = False  # Into one sweep, as `take_all` has found.
        self.cause: str | None = None  # Why the rest goes batch by batch.

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        taken = self._taken
        pairs = iter(taken) if taken is not None else self._pairs()
        with nullcontext() if taken is None else self._active(is_last=False):
            while window := self._next_window(pairs):
                self._window = deque(window)
                for batch, is_last in window:
                    self._set_end(is_last)
                    yield batch

    def _pairs(self) -> Iterator[tuple[Any, bool]]:
        for batch in self._loader:
            yield batch, self._is_active() and bool(self._loader.end_of_dataloader)

    def _next_window(self, pairs: Iterator[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
        window: list[tuple[Any, bool]] = []
        most, left = self._most, engine_of(self._trainer.model).sweep_tokens
        for batch, is_last in pairs:
            window.append((batch, is_last))
            left -= num_tokens(batch)
            # After the last batch, a loader of accelerate is no longer the active one.
            if is_last or self.cause or len(window) == most or left < num_tokens(batch):
                break
        return window

    def result_of(self, inputs: Any, step: Callable[[Any], Any]) -> Any:
        """Returns what `step(inputs)` does: `prediction_step` of one batch."""
        if not self._window or inputs is not self._window[0][0]:
            return step(inputs)
        if not self._results and self.cause is None:
            self._trainer.begin_evaluated([batch for batch, _ in self._window])
            with self.kept(), self._gathering():
                self._results.extend(self._sweep(self.calls(step)))
        self._window.popleft()
        result = self._results.popleft() if self._results else step(inputs)
        if not self._is_loss_only:
            tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self._most = min(MOST_BATCHES, max(1, _MOST_RESULTS_NBYTES // max(1, nbytes)))
        return result

    def calls(self, step: Callable[[Any], Any]) -> list[Callable[[], Any]]:
        """Returns the calls of a window."""
        random = Random(next(self._trainer.model.parameters()).device)

        def call(batch: Any, is_last: bool) -> Any:
            before, token = random.state(), _is_last.set(is_last)
            result = step(batch)
            _is_last.reset(token)
            self._drawn.append(not is_alike(random.state(), before))
            return result

        return [partial(call, *pair) for pair in self._window]

    @contextmanager
    def kept(self, *, is_own: bool = True) -> Iterator[None]:
        """Runs a sweep of the window. Forgets what it has left if it is to be evaluated batch by
        batch. `is_own`: nothing else is in the sweep."""
        trainer, engine = self._trainer, engine_of(self._trainer.model)
        random = Random(next(trainer.model.parameters()).device)
        tables = [vars(trainer)[name] for name in _METRICS if name in vars(trainer)]
        tables = [table for table in tables if isinstance(table, dict)]
        metrics, state = [copy.deepcopy(table.get("eval")) for table in tables], random.state()
        self._drawn.clear()
        cause = None
        try:
            yield
        except UnsupportedError as error:
            if engine.num_ranks > 1 or not is_own:  # Others may be in the middle of the sweep.
                raise
            cause = str(error)
        if any(self._drawn):
            cause = "it draws random numbers, which would be others"
        causes = gather_object([cause]) if engine.num_ranks > 1 else [cause]
        self.cause = next(filter(None, causes), None)
        if self.cause is not None:
            self._results.clear()
            for table, before in zip(tables, metrics, strict=True):
                table["eval"] = before
                if before is None:
                    del table["eval"]
            if is_own:
                random.set(state)

    # -- With the next step ------------------------------------------------------------------------

    def take_all(self) -> bool:
        """Takes all batches. Returns whether they pass in one sweep, on every rank."""
        self._taken = list(self._pairs())
        self._window = deque(self._next_window(iter(self._taken)))
        self.fits = len(self._window) == len(self._taken)
        if engine_of(self._trainer.model).num_ranks > 1:
            self.fits = all(gather_object([self.fits]))
        return self.fits

    @contextmanager
    def riding(self, step: Callable[[Any], Any]) -> Iterator[list[Callable[[], Any]]]:
        """Yields the calls of the batches that were taken, for a sweep that trains; the block puts
        their results in the place of the calls."""
        calls = self.calls(step)
        with self.kept(is_own=False), self._gathering():
            yield calls
            self._results.extend(calls)

    # -- The end of a dataloader, where accelerate leaves out what it has added to the last batch --

    def _is_active(self) -> bool:
        return self._trainer.accelerator.gradient_state.active_dataloader is self._loader

    def _set_end(self, is_last: bool) -> None:
        if self._is_active():
            self._loader.end_of_dataloader = is_last

    @contextmanager
    def _active(self, *, is_last: bool) -> Iterator[None]:
        """Makes the loader the one that accelerate looks at."""
        is_begun = not self._is_active() and hasattr(self._loader, "begin")
        if is_begun:
            self._loader.begin()
        try:
            self._set_end(is_last)
            yield
        finally:
            self._set_end(False)
            if is_begun:
                self._loader.end()

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Lets a loss that gathers metrics in a sweep find the end of the dataloader as in the
        plain loop: behind the last batch alone."""
        gather = self._trainer.accelerator.gather_for_metrics

        def gather_for_metrics(*args: Any, **options: Any) -> Any:
            is_last = _is_last.get()
            if is_last is None:  # Of a step.
                return gather(*args, **options)
            with self._active(is_last=is_last):
                return gather(*args, **options)

        try:
            with patch.object(self._trainer.accelerator, "gather_for_metrics", gather_for_metrics):
                yield
        finally:
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
