"""Clipping over ranks: parts of the gradients, by calls, with the values of plain PyTorch that clips
by the same norms."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import UnsupportedError

from .models import batch, loss_of
from .processes import run_ranks
from .work import LR, NVME, Case, build, offload_case, plain_optimizer, read_weights

COUNT = 2
# By step: names of modules, "" is all of them, and their norms, in the order of the calls.
CALLS: list[list[tuple[str, float]]] = [
    [("", 0.05)],
    [("blocks.0", 0.01), ("head", 0.02)],
    [],
    [("head", 1e6), ("blocks.1", 0.005), ("", 0.01)],
    [("blocks.0", 0.01), ("blocks.0", 0.001)],
]
KEPT = (1, 3)  # Steps behind which gradients are not dropped.
OPTIONS = (0.02, 0.01)  # Of steps over one more backward, `max_grad_norm`.


def _train(rank: int, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    model = offload_case(case, Path(tempfile.gettempdir(), "swap"))
    optimizer, norms = infinity.AdamW(model, lr=LR), []
    for step, calls in enumerate(CALLS):
        loss_of(model, batch(10 * step + rank, model.width)).backward()
        for name, max_norm in calls:
            given = model.get_submodule(name).parameters()
            norms.append(optimizer.clip_grad_norm_(max_norm, parameters=given).item())
        optimizer.step()
        if step not in KEPT:
            optimizer.zero_grad()
    loss_of(model, batch(10 * len(CALLS) + rank, model.width)).backward()
    for max_norm in OPTIONS:
        optimizer.max_grad_norm = max_norm
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm.item())
    optimizer.zero_grad()
    found = read_weights(model)
    infinity.close(model)
    return norms, found


def _reference(norms: list[float]) -> dict[str, Tensor]:
    """Plain PyTorch with the gradients of all ranks, and with the norms that the ranks have found."""
    case, left = Case(), list(norms)
    model: Any = build(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = plain_optimizer(trained, case)

    def backward(step: int) -> None:
        of_ranks = []
        for rank in range(COUNT):
            loss = loss_of(model, batch(10 * step + rank, model.width))
            of_ranks.append(torch.autograd.grad(loss, trained))
        for parameter, *parts in zip(trained, *of_ranks, strict=True):
            mean = parts[0] * (1 / COUNT) + parts[1] * (1 / COUNT)
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def clip(given: list[nn.Parameter], max_norm: float) -> None:
        norm = left.pop(0)
        rounded = nn.utils.get_total_norm([p.grad for p in given if p.grad is not None]).item()
        assert abs(norm - rounded) <= 1e-5 * rounded
        nn.utils.clip_grads_with_norm_(given, max_norm, torch.tensor(norm))

    for step, calls in enumerate(CALLS):
        backward(step)
        for name, max_norm in calls:
            clip(list(model.get_submodule(name).parameters()), max_norm)
        optimizer.step()
        if step not in KEPT:
            optimizer.zero_grad()
    backward(len(CALLS))
    for max_norm in OPTIONS:
        clip(trained, max_norm)
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    "case",
    [
        Case(1), Case(2), Case(3, updates="at_step"), Case(3, NVME, updates="deferred"),
        Case(3, NVME, updates="both_passes", update_chunk="8KiB"),
        Case(3, simulated=True, exchange="collective"),
    ],
    ids=lambda case: f"{case}-{case.updates}-{case.exchange}",
)  # fmt: skip
def test_parts_that_are_clipped_over_ranks_have_the_values_of_plain_pytorch(case: Case) -> None:
    runs = run_ranks(COUNT, _train, case)
    (norms, weights), (others, same) = runs
    assert norms == others
    expected = _reference(norms)
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight) and torch.equal(same[name], weight), name


def _refused(rank: int) -> list[str]:
    model = offload_case(Case(3), Path("unused"))
    optimizer = infinity.AdamW(model, lr=LR)
    loss_of(model, batch(rank, model.width)).backward()
    found = []
    for clip in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: optimizer.clip_grad_norm_(1.0, norm_type=1),
    ):
        with pytest.raises(UnsupportedError) as caught:
            clip()
        found.append(str(caught.value))
    optimizer.step()
    infinity.close(model)
    return found


def test_what_needs_a_whole_gradient_over_ranks_is_refused_with_the_way() -> None:
    for by_norm, by_value, other_norm in run_ranks(COUNT, _refused):
        assert "optimizer.clip_grad_norm_" in by_norm and "optimizer.clip_grad_norm_" in by_value
        assert "2-norm" in other_norm
