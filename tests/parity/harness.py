"""Running the same loop twice: over a plain model and over an offloaded one, and comparing bits.

`run` is one ordinary PyTorch training loop. What differs between the sides is only how gradients
and weights are looked at (`PlainSide`, `OffloadedSide`) and which optimizer class is built, so that
a difference in the outcome is a difference in the engine.

Everything compared is compared with `torch.equal`: there is no tolerance in this folder except
where a docstring derives one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import CapacityError
from tests.support.bits import differences
from tests.support.offloading import offloaded

from .zoo import Entry

Named = dict[str, Tensor | None]


def seed_everything(seed: int) -> None:
    """Seeds every generator a model may draw from: torch, numpy (wav2vec2 masks), random.

    Where there is no accelerator, `torch.manual_seed` keeps a stack trace for the day when there is.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


@dataclass(frozen=True)
class Plan:
    """What the loop does. `max_norm` None: no clipping; `accumulation` backward passes per step."""

    steps: int = 2
    accumulation: int = 1
    max_norm: float | None = None
    lr: float = 1e-2
    weight_decay: float = 0.1
    scheduled: bool = False
    checkpointing: bool = False
    generate: bool = False
    updates: bool = True
    """False where the optimizer of the two sides is known to differ: only gradients are
    compared."""


@dataclass
class Record:
    """What a run left to compare. Per step, except weights, buffers and what is made at the end."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluation: Tensor | None = None
    tokens: Tensor | None = None


class PlainSide:
    """The reference: nothing but PyTorch, with the fused AdamW."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def optimizer(self, groups: Any, plan: Plan) -> torch.optim.Optimizer:
        self._groups = groups
        return torch.optim.AdamW(groups, lr=plan.lr, weight_decay=plan.weight_decay, fused=True)

    def step(self, optimizer: torch.optim.Optimizer, plan: Plan) -> Tensor | None:
        norm = None
        if plan.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.max_norm)
        optimizer.step()
        return norm

    def gradients(self) -> Named:
        return {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
        }

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def settled(self) -> None:
        pass


class OffloadedSide:
    """The engine, used as its users do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def optimizer(self, groups: Any, plan: Plan) -> torch.optim.Optimizer:
        return infinity.AdamW(
            groups, lr=plan.lr, weight_decay=plan.weight_decay, max_grad_norm=plan.max_norm
        )

    def step(self, optimizer: torch.optim.Optimizer, plan: Plan) -> Tensor | None:
        optimizer.step()
        return optimizer.grad_norm if plan.max_norm is not None else None

    # One unit at a time: the budgets of these tests do not hold the whole model.

    def gradients(self) -> Named:
        return self._copies(lambda parameter: parameter.grad)

    def weights(self) -> dict[str, Tensor]:
        found = self._copies(lambda parameter: parameter)
        return {name: value for name, value in found.items() if value is not None}

    def _copies(self, shown: Callable[[Tensor], Tensor | None]) -> Named:
        """Copies on the host of what is shown of every parameter, in the model's order."""
        engine = infinity.engine_of(self.model)
        handles = dict(self.model.named_parameters())
        together: dict[tuple[int, ...], list[str]] = {}
        for name, handle in handles.items():
            units = tuple(param.unit.index for param in engine.params_of([handle]))
            together.setdefault(units, []).append(name)
        found: Named = dict.fromkeys(handles)
        for names in together.values():
            with infinity.gather([handles[name] for name in names]):
                for name in names:
                    value = shown(self.model.get_parameter(name))
                    found[name] = None if value is None else value.detach().clone().cpu()
        return found

    def settled(self) -> None:
        in_use = held_units(self.model)
        assert not in_use, f"still held after the backward: {in_use}"


Side = PlainSide | OffloadedSide


def held_units(model: nn.Module) -> list[str]:
    """Units that some forward or backward has not given back."""
    return list(infinity.engine_of(model).resident_units())


def to_device(batch: Any, device: torch.device | str) -> Any:
    """The batch with every tensor on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    return batch


def run(
    entry: Entry,
    side: Side,
    plan: Plan,
    *,
    device: torch.device | str = "cpu",
    groups: Callable[[nn.Module], Any] | None = None,
) -> Record:
    """Trains `side.model` by `plan` and records everything that must be equal."""
    model = side.model
    record = Record()
    if plan.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = scheduler = None
    if plan.updates:
        optimizer = side.optimizer(model.parameters() if groups is None else groups(model), plan)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 / (1 + 0.1 * step) if plan.scheduled else 1.0
        )
    for step in range(plan.steps):
        for micro in range(plan.accumulation):
            seed = 1000 + step * plan.accumulation + micro
            seed_everything(seed)
            loss = entry.loss(model, to_device(entry.batch(seed), device)) / plan.accumulation
            loss.backward()
            record.losses.append(loss.detach().clone().cpu())
            del loss
            side.settled()
        record.gradients.append(side.gradients())
        if optimizer is not None and scheduler is not None:
            norm = side.step(optimizer, plan)
            if norm is not None:
                record.norms.append(norm.detach().clone().cpu())
            scheduler.step()
            optimizer.zero_grad()
        else:
            model.zero_grad()
        side.settled()
    record.weights = side.weights()
    record.buffers = {name: b.detach().clone().cpu() for name, b in model.named_buffers()}
    model.eval()
    seed_everything(7)
    with torch.no_grad():
        record.evaluation = entry.loss(model, to_device(entry.batch(7), device)).cpu()
    side.settled()
    if plan.generate and entry.prompt is not None:
        seed_everything(8)
        record.tokens = model.generate(
            **to_device(entry.prompt(8), device), max_new_tokens=5, do_sample=False,
            **entry.generate_options,
        ).cpu()  # fmt: skip
        side.settled()
    model.train()
    return record


# --- comparing --------------------------------------------------------------------------------


def assert_same_run(expected: Record, actual: Record) -> None:
    """Every loss, gradient, norm, weight, buffer and token of two runs is the same bits."""

    def by_step(tensors: list[Tensor]) -> dict[str, Tensor | None]:
        return {f"step {index}": tensor for index, tensor in enumerate(tensors)}

    found: dict[str, list[str]] = {}
    found["loss"] = differences(by_step(expected.losses), by_step(actual.losses))
    assert len(expected.gradients) == len(actual.gradients)
    for step, (wanted, came) in enumerate(zip(expected.gradients, actual.gradients, strict=True)):
        found[f"gradients of step {step}"] = differences(wanted, came)
    found["clip norm"] = differences(by_step(expected.norms), by_step(actual.norms))
    found["weights"] = differences(expected.weights, actual.weights)
    found["buffers"] = differences(expected.buffers, actual.buffers)
    ends = ("evaluation", "tokens")
    found["at the end"] = differences(
        {name: getattr(expected, name) for name in ends},
        {name: getattr(actual, name) for name in ends},
    )
    lines = [
        f"{what} ({len(names)}): " + "; ".join(names[:3]) for what, names in found.items() if names
    ]
    assert not lines, "not the same bits\n  " + "\n  ".join(lines)


# --- the swap-tier file -----------------------------------------------------------------------

LEAST_HOST_NBYTES = 256 << 10  # Four of the smallest update chunks, which the configuration needs.


def smallest_host_nbytes(
    build: Callable[[], nn.Module], config: dict[str, Any], device: Any = None
) -> int:
    """The smallest host budget `build()` trains in, as the engine's own refusal states it.

    The model is refused, and as it was, if the result is above LEAST_HOST_NBYTES.
    """
    starved = {"capacity": LEAST_HOST_NBYTES, "huge_pages": False}
    try:
        model = infinity.offload(
            build(), {**config, "tiers": {**config["tiers"], "host": starved}}, device=device
        )
    except CapacityError as error:
        assert error.tier == "host"
        return error.needed_nbytes
    infinity.engine_of(model).close()
    return LEAST_HOST_NBYTES


def plain_run(entry: Entry, plan: Plan, *, seed: int = 0, **options: Any) -> Record:
    """The reference: a fresh copy of the model, trained by PyTorch alone."""
    return run(entry, PlainSide(entry.build(seed)), plan, **options)


def offloaded_run(
    entry: Entry,
    plan: Plan,
    config: dict[str, Any],
    *,
    seed: int = 0,
    device_adapter: Any = None,
    **options: Any,
) -> Record:
    """The same training under the engine. `device_adapter` is `offload`'s `device` argument."""
    with offloaded(entry.build(seed), config, device=device_adapter) as model:
        return run(entry, OffloadedSide(model), plan, **options)
