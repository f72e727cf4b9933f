"""Running the same loop twice: over a plain model and over an offloaded one, and comparing bits.

`run` is one ordinary PyTorch training loop. What differs between the sides is only how gradients
and weights are looked at and which optimizer class is built (`Side`), so that a difference in the
outcome is a difference in the engine. A *scenario* is any function of a side that trains in some way
and returns what it saw, by name; `compare` runs it on both sides and asks for the same bits.

Everything compared is compared with `torch.equal`: there is no tolerance in this folder except
where a docstring derives one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import CapacityError
from tests.support.bits import differences
from tests.support.offloading import offloaded, swap_config
from tests.support.two_sides import Named, Side, held_units

from .zoo import ZOO, Entry, module_loss


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

    def by_name(self) -> Named:
        seen: Named = {"evaluation": self.evaluation, "tokens": self.tokens}
        for kind, values in (("loss", self.losses), ("clip norm", self.norms)):
            seen |= {f"{kind} {step}": value for step, value in enumerate(values)}
        for step, gradients in enumerate(self.gradients):
            seen |= {f"gradient {step} of {name}": value for name, value in gradients.items()}
        return seen | self.weights | {f"buffer {name}": b for name, b in self.buffers.items()}


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
        optimizer = side.adamw(
            None if groups is None else groups(model), lr=plan.lr, weight_decay=plan.weight_decay
        )
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
            norm = side.update(plan.max_norm)
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
    found = differences(expected.by_name(), actual.by_name())
    assert not found, "not the same bits\n  " + "\n  ".join(found[:12])


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
    return run(entry, Side(entry.build(seed), is_plain=True), plan, **options)


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
        return run(entry, Side(model), plan, **options)


# --- scenarios: functions of a side that train in some way and return what they saw, by name ------

Scenario = Callable[[Side], Named]


def decoder(seed: int = 0) -> nn.Module:
    return ZOO["TinyDecoder"].build(seed)


def mlp(seed: int = 0) -> nn.Module:
    return ZOO["Mlp"].build(seed)


def conditional(seed: int = 0) -> nn.Module:
    return ZOO["Conditional"].build(seed)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    seed_everything(seed)
    return module_loss(model, model.inputs(seed))


def trained(
    side: Side,
    loss: Callable[[Any, int], Tensor] = loss_of,
    *,
    steps: int = 3,
    micro: int | Sequence[int] = 1,
    max_norm: float | None = None,
    lr: float = 1e-2,
    groups: Callable[[nn.Module], Any] | None = None,
    before: Callable[[int], object] = lambda step: None,
    after: Callable[[int, Any], object] = lambda step, optimizer: None,
    clear: Callable[[Any], object] = lambda optimizer: optimizer.zero_grad(),
) -> Named:
    """A loop over steps of `micro` backwards each, or each as many as the list says.

    Returns losses, gradients of every backward, norms of every step, and what `finish` adds. `before` is called
    before a step's first forward, `after` when its gradients have been cleared by `clear`.
    """
    seen: Named = {}
    optimizer = side.adamw(None if groups is None else groups(side.model), lr=lr)
    counts = [micro] * steps if isinstance(micro, int) else micro
    for step, count in enumerate(counts):
        before(step)
        for index in range(count):
            value = loss(side.model, step if count == 1 else 10 * step + index)
            value.backward()
            seen[f"loss {step} {index}"] = value.detach()
            side.settled()
            seen.update({f"{step} {index} {name}": g for name, g in side.gradients().items()})
        norm = side.update(max_norm)
        seen[f"norm {step}"] = None if norm is None else norm.detach().clone()
        clear(optimizer)
        after(step, optimizer)
    return finish(side, seen)


def finish(side: Side, seen: Named) -> Named:
    """What a scenario returns: what it saw, and the final weights and gradients."""
    seen.update({f"weight {name}": tensor for name, tensor in side.weights().items()})
    seen.update({f"gradient {name}": tensor for name, tensor in side.gradients().items()})
    return seen


def compare(
    scenario: Scenario, build: Callable[[], nn.Module], directory: Path, **options: Any
) -> None:
    """The scenario sees the same bits on both sides, and no unit stays in use."""
    expected = scenario(Side(build(), is_plain=True))
    with offloaded(build(), swap_config(directory, **options)) as model:
        came = scenario(Side(model))
        assert not held_units(model)
    found = differences(expected, came)
    assert not found, "not the same bits\n  " + "\n  ".join(found[:6])
