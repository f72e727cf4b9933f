"""Steps over gradients of which an earlier step has kept the sum: `zero_grad` was left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infinity.testing.simulated_device import SimulatedDevice
from tests.support.two_sides import Side, compare, offloaded


def clipped_then_not(run: Side) -> list[torch.Tensor]:
    """Steps over one sum; a clip factor stays in the sum that the next one measures and uses."""
    zero_grad, run.optimizer.zero_grad = run.optimizer.zero_grad, lambda: None
    for number in range(2):
        run.backward(number)
        for max_norm in (1e-3, 5e-4, None, None):
            run.step(max_norm)
        zero_grad()
    return []


@pytest.mark.parametrize("updates", ["at_step", "deferred", "both_passes"])
@pytest.mark.parametrize("gradients", ["host", "nvme", "device"])
def test_a_step_uses_the_sum_that_the_last_one_has_clipped(
    swap_directory: Path, gradients: str, updates: str
) -> None:
    device = SimulatedDevice() if gradients == "device" else None
    schedule = {"updates": updates}
    run = offloaded(swap_directory, device=device, gradients=gradients, schedule=schedule)
    compare(clipped_then_not, run)
