"""Scenarios: a function of a side (plain or offloaded, see `harness`) that trains in some way and
returns what it saw, by name. `compare` runs it on both sides and asks for the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.support.bits import differences
from tests.support.offloading import offloaded, swap_config

from .harness import Named, OffloadedSide, PlainSide, Plan, Side, held_units, seed_everything
from .zoo import ZOO, module_loss

Scenario = Callable[[Side], Named]
PLAN = Plan(lr=1e-2, weight_decay=0.1)


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
    plan: Plan = PLAN,
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
    of = groups or (lambda model: model.parameters())
    optimizer = side.optimizer(of(side.model), plan)
    counts = [micro] * steps if isinstance(micro, int) else micro
    for step, count in enumerate(counts):
        before(step)
        for index in range(count):
            value = loss(side.model, step if count == 1 else 10 * step + index)
            value.backward()
            seen[f"loss {step} {index}"] = value.detach()
            side.settled()
            seen.update({f"{step} {index} {name}": g for name, g in side.gradients().items()})
        norm = side.step(optimizer, plan)
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
    expected = scenario(PlainSide(build()))
    with offloaded(build(), swap_config(directory, **options)) as model:
        came = scenario(OffloadedSide(model))
        assert not held_units(model)
    found = differences(expected, came)
    assert not found, "not the same bits\n  " + "\n  ".join(found[:6])
