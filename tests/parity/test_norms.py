"""Norms of gradients: the bits of plain PyTorch, computed when a sum is complete, once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import infinity
from infinity.state.units import TensorSpec
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.two_sides import Side, compare, loss_of, make, offloaded

from .test_norm_tasks import let_norms_finish

NUM_TENSORS = len(list(make().parameters()))
CASES = [("host", False), ("nvme", False), ("host", True), ("nvme", True)]


def counted_norms(run: Side) -> Counter[str]:
    """Returns what will count the norms by the thread that has computed them."""
    counted: Counter[str] = Counter()
    norms = infinity.engine_of(run.model).gradients.norms
    measure = norms.measure

    def counting(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        counted[threading.current_thread().name] += 1
        return measure(flat, spec)

    norms.measure = counting
    return counted


def run_with(directory: Path, tier: str, *, is_apart: bool) -> Side:
    device = SimulatedDevice() if is_apart else None
    return offloaded(directory, device=device, gradients=tier, schedule={"updates": "deferred"})


def backwards(run: Side, step: int, count: int) -> None:
    for number in range(count):
        (loss_of(run.model, 10 * step + number) / count).backward()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("tier", "is_apart"), CASES)
def test_norms_are_computed_once_when_the_last_gradient_of_a_step_is_there(
    swap_directory: Path, tier: str, is_apart: bool, count: int
) -> None:
    computed: Counter[str] = Counter()

    def body(run: Side) -> list[torch.Tensor]:
        for step in range(4):
            computed.clear()
            backwards(run, step, count)
            if not run.is_plain and step > 0:
                if is_apart:
                    let_norms_finish(run)
                assert computed.total() == NUM_TENSORS, "each norm once, in the backward"
                here = threading.current_thread().name
                assert is_apart is (here not in computed), "where the device is the host: here"
            before = computed.total()
            run.step(0.1)
            assert run.is_plain or step == 0 or computed.total() == before
        return []

    run = run_with(swap_directory, tier, is_apart=is_apart)
    computed = counted_norms(run)
    compare(body, run)


@pytest.mark.parametrize(("tier", "is_apart"), CASES)
def test_more_gradients_than_before_and_changed_ones_have_another_norm(
    swap_directory: Path, tier: str, is_apart: bool
) -> None:
    def body(run: Side) -> list[torch.Tensor]:
        seen = []
        for step, count in enumerate((1, 1, 3, 2, 2, 1)):
            backwards(run, step, count)
            if step == 4:
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        if parameter.grad is not None:
                            parameter.grad.mul_(0.5)
            run.step(0.1)
            seen.append(run.weight("blocks.0.up.weight"))
        return seen

    compare(body, run_with(swap_directory, tier, is_apart=is_apart))


def test_without_clipping_no_norm_is_computed(swap_directory: Path) -> None:
    run = run_with(swap_directory, "nvme", is_apart=False)
    computed = counted_norms(run)
    for step in range(3):
        computed.clear()
        backwards(run, step, 1)
        run.step()
        assert step == 0 or not computed
    infinity.close(run.model)
