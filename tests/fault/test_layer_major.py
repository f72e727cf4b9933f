"""Layer inputs on a drive that fails: the error is raised, and nothing is left behind."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import StorageError
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.offloading import units_in_use

from .harness import mlp, offload, swap_config, trapped

BATCHES = [torch.full((2, 96), 0.1 * number) for number in range(1, 4)]


def accumulate(model: torch.nn.Module) -> tuple[list[float], Any]:
    losses = infinity.forward_backward(model, lambda x: model(x).square().mean(), BATCHES)
    engine = infinity.engine_of(model)
    gradients = {name: engine.read_gradient(name) for name in engine.parameter_names()}
    return [loss.item() for loss in losses], gradients


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_failed_transfer_of_inputs_is_raised_and_leaks_nothing(
    operation: str, nth: int, tmp_path: Path
) -> None:
    """State on the host, inputs on NVMe: every transfer is of inputs."""
    config = swap_config(tmp_path / "swap", placement="host", host_nbytes="32MiB")
    config["placement"]["activations"] = "nvme"
    reference = mlp()
    with offload(reference, config, device=SimulatedDevice()):
        expected_losses, expected = accumulate(reference)
    model = mlp()
    with trapped(model, config, device=SimulatedDevice(seed=nth, delay_s=1e-4)) as (engine, trap):
        lent = engine.store._host.lent()
        trap.set(operation, nth, errno.EIO)
        with pytest.raises(StorageError, match=operation):
            accumulate(model)
        assert units_in_use(engine) == []
        assert engine.store._host.lent() == lent
        model.zero_grad()
        if operation == "write":
            with pytest.raises(StorageError, match="write"):  # The volume takes nothing any more.
                accumulate(model)
            return
        losses, gradients = accumulate(model)
        assert losses == expected_losses
        assert all(torch.equal(expected[name], gradients[name]) for name in expected)
