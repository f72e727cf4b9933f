"""Optimizer steps and evaluations over batches: an ordinary PyTorch loop.

The loop does not depend on where state rests. The model's parameters are handles, and the optimizer
is a `torch.optim.Optimizer`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import infinity
from infinity.config import Optimizer, Train
from infinity.engine.optimizer import OffloadedOptimizer
from infinity.engine.optimizers import OPTIMIZERS
from infinity.engine.registry import engine_of
from infinity.errors import NonFiniteError
from infinity.modules.tiling.split import named_parameters_of
from infinity.training.data import Batches
from infinity.training.learning_rate import lr_ratio
from infinity.training.marks import count_learned, split_marks
from infinity.training.nonfinite import first_nonfinite_module
from infinity.training.ranks import JobRank

MOST_SKIPPED = 16  # Steps in a row; more are no coincidence.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The outcome of one optimizer step.

    `step` counts from 1. `loss` is the mean over the step's micro-batches, before the update.
    `learning_rate` is that of the update.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    num_tokens: int
    skipped: str | None = None  # The reason why the weights did not change.


def parameter_groups(model: torch.nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns groups of the trainable parameters, each once: those with weight decay, and the
    others."""
    decayed: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in named_parameters_of(model):
        if parameter.requires_grad:
            (decayed if optimizer.has_decay(name) else rest).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": optimizer.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: torch.nn.Module, options: Optimizer) -> OffloadedOptimizer:
    """Returns the optimizer of `[optimizer]` over the trainable parameters."""
    own = set(options.keys) & {"betas", "eps", "momentum", "dampening", "nesterov"}
    make: Callable[..., OffloadedOptimizer] = OPTIMIZERS[options.name]
    return make(
        parameter_groups(model, options),
        lr=options.lr,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        always_norm=True,
        error_if_nonfinite=True,
        **{key: getattr(options, key) for key in own},
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, train: Train
) -> torch.optim.lr_scheduler.LambdaLR:
    """Returns the learning-rate schedule of `[train]` for any optimizer."""

    def ratio(step: int) -> float:
        return lr_ratio(
            step,
            steps=train.steps,
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            min_lr_ratio=train.min_lr_ratio,
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)


class Loop:
    """Takes one step at a time. Owns the schedule; model, optimizer and batches belong to the
    caller.

    `num_steps` determines the next batch, too; a resumed run sets it. With `is_step_at_once` all
    micro-batches of a step pass a block together, not just those of one batch.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        *,
        train: Train,
        device: torch.device,
        micro_batch: int | None = None,
        is_step_at_once: bool = False,
        job: JobRank = JobRank(),  # noqa: B008  Frozen.
    ) -> None:
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._batches = batches
        self._train = train
        self._device = device
        self._micro_batch = micro_batch
        self._is_step_at_once = is_step_at_once
        self.scheduler = make_scheduler(optimizer, train)
        # Caches of keys and values serve generation only; not all architectures have them.
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        takes_cache = "use_cache" in inspect.signature(base.forward).parameters
        self._options = {"use_cache": False} if takes_cache else {}
        self.num_steps = 0
        self._num_skipped = 0  # In a row.
        self._num_learned: int | None = None  # In this step, of conversations.

    def step(self) -> StepOutcome:
        """Makes one optimizer step over `accumulation` micro-batches.

        If a loss or the norm of the gradients is not finite, the weights do not change: the method
        raises NonFiniteError or, with `train.nonfinite` "skip", continues with the next batches,
        unless too many steps in a row were skipped.
        """
        step = self.num_steps + 1
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        skipped, mean, num_tokens = None, math.nan, 0
        try:
            mean, num_tokens = self._backward_of_step(step)
            self._update(step)
            self._num_skipped = 0
        except NonFiniteError as error:
            self._num_skipped += 1
            if self._train.nonfinite == "error" or self._num_skipped > MOST_SKIPPED:
                raise
            skipped = str(error)
        self._optimizer.zero_grad()
        self.scheduler.step()
        self.num_steps = step
        norm = getattr(self._optimizer, "grad_norm", None)
        return StepOutcome(
            step=step,
            loss=mean,
            grad_norm=None if norm is None else float(norm),
            learning_rate=learning_rate,
            num_tokens=num_tokens * self._job.count,
            skipped=skipped,
        )

    def _update(self, step: int) -> None:
        try:
            self._optimizer.step()
        except NonFiniteError as error:  # The optimizer's own count omits skipped steps.
            raise NonFiniteError("the gradient norm", step=step, unit=error.unit) from None

    def _backward_of_step(self, step: int) -> tuple[float, int]:
        """Computes the gradients of the step's batches. Returns their mean loss over all ranks and
        the number of tokens of this rank."""
        losses = []
        num_tokens = 0
        batches: Iterable[list[torch.Tensor]] = ([ids] for ids in self._batches_of_step())
        if self._is_step_at_once:
            batches = [list(self._batches_of_step())]
        self._num_learned = self._learned_of_step() if self._batches.is_marked else None
        for part in batches:
            losses.append(self._backward(part))
            if not math.isfinite(losses[-1]):
                break
            num_tokens += sum(ids.numel() for ids in part)
        mean = self._mean_of_ranks(sum(losses) / len(losses))
        if not math.isfinite(mean):
            is_here = not math.isfinite(losses[-1])
            raise self._nonfinite(
                f"the loss ({losses[-1] if is_here else mean})", step, part[-1], is_here
            )
        return mean, num_tokens

    def _learned_of_step(self) -> int:
        """Returns the number of learned tokens in the step's batches, over all ranks."""
        count = self._train.gradient_accumulation_steps * self._job.count
        first = self.num_steps * count
        numbers = range(first, first + count)
        return sum(
            count_learned(torch.from_numpy(self._batches.train_batch(number))) for number in numbers
        )

    def _divisor(self, part: torch.Tensor, num_rows: int) -> float:
        """Returns the divisor of the mean loss of `part`, which has some of the `num_rows` of its
        batch: the gradients of a step add up to that of its mean over tokens."""
        if self._num_learned is not None:
            return self._num_learned / (count_learned(part) * self._job.count)
        # Equal parts are divided by their number, with the bits of plain accumulation.
        return self._train.gradient_accumulation_steps * (num_rows / len(part))

    def _mean_of_ranks(self, loss: float) -> float:
        """Returns the mean over all ranks, the same on every rank. One loss that is not finite
        makes it not finite."""
        if self._job.count == 1:
            return loss
        return sum(engine_of(self._model).all_gather_numbers("the loss", loss)) / self._job.count

    def evaluate(self) -> float:
        """Returns the mean loss over the held-out batches, with equal weight for every sequence,
        or every learned token of conversations."""
        total, count = 0.0, 0
        self._model.eval()
        try:
            with torch.no_grad():
                for batch in self._batches.held_out_batches(self._train.eval_batches):
                    ids = torch.from_numpy(batch)
                    weight = count_learned(ids) if self._batches.is_marked else len(ids)
                    total += self._loss(ids).item() * weight
                    count += weight
        finally:
            self._model.train()
        return total / count

    def _backward(self, batches: list[torch.Tensor]) -> float:
        """Adds the gradients of some batches and returns their mean loss. If the loss is not
        finite, the gradients may be missing or useless."""
        scale = self._train.gradient_accumulation_steps / len(batches)
        if self._micro_batch is not None:
            return self._backward_by_layers(batches) * scale
        (ids,) = batches
        loss, divisor = self._loss(ids), self._divisor(ids, len(ids))
        value = float(loss.item())
        if math.isfinite(value):
            (loss / divisor).backward()
        return value if self._num_learned is None else value / divisor * scale

    def _backward_by_layers(self, batches: list[torch.Tensor]) -> float:
        """Returns the sum of the shares that the batches have in the step's mean loss."""
        parts = [(part, len(ids)) for ids in batches for part in ids.split(self._micro_batch or 1)]

        def share_of(part: tuple[torch.Tensor, int]) -> torch.Tensor:
            return self._loss(part[0]) / self._divisor(*part)

        return sum(loss.item() for loss in infinity.forward_backward(self._model, share_of, parts))

    def _batches_of_step(self) -> Iterator[torch.Tensor]:
        """Yields this rank's batches. Ranks alternate: a step of N ranks uses the same batches as N
        times the accumulation."""
        first = self.num_steps * self._train.gradient_accumulation_steps
        for index in range(first, first + self._train.gradient_accumulation_steps):
            number = index * self._job.count + self._job.rank
            yield torch.from_numpy(self._batches.train_batch(number))

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.to(self._device)
        labels = ids
        if self._batches.is_marked:
            ids, labels = split_marks(ids)
        loss: torch.Tensor = self._model(input_ids=ids, labels=labels, **self._options).loss
        return loss

    def _nonfinite(self, what: str, step: int, ids: torch.Tensor, is_here: bool) -> NonFiniteError:
        self._optimizer.zero_grad()
        if not is_here:
            return NonFiniteError(what, step=step, unit="a module on another rank")
        if self._train.nonfinite == "skip" and self._job.count > 1:
            return NonFiniteError(what, step=step, unit=None)  # The other ranks continue meanwhile.
        unit = first_nonfinite_module(self._model, lambda: self._loss(ids))
        return NonFiniteError(what, step=step, unit=unit or "the loss itself")
