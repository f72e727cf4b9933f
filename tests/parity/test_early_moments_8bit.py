"""Updates in the backward of state with moments of eight bits: the bits are those of updates at the
step. Their spare generation belongs to early updates alone; commits have copies of such moments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.exhaustive import in_turn

from .test_early_updates import Clip, Run, idle_drives, make, steps


@pytest.fixture(autouse=True)
def drives() -> Iterator[None]:
    with idle_drives():
        yield


def trained(
    directory: Path, updates: str, clip: Clip, on_host: tuple[str, ...], *, has_device: bool = False
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Losses, weights and moments after nine steps, and the engine's counters."""
    placement = dict.fromkeys(("parameters", "moments"), "nvme") | dict.fromkeys(on_host, "host")
    config: dict[str, Any] = {
        "tiers": {
            "host": {"capacity": "32MiB", "huge_pages": False},
            "nvme": [{"path": str(directory)}],
        },
        "placement": placement | {"gradients": "host"},
        "precision": {"moments": "8bit"},
        "schedule": {"updates": updates},
    }
    options: dict[str, Any] = {"device": SimulatedDevice()} if has_device else {}
    model = infinity.offload(make(), config, **options)
    optimizer = infinity.AdamW(model, lr=1e-2)
    run = Run(model, optimizer, is_plain=False)
    found = [*steps(run, 9, clip), *run.values().values()]
    for parameter in model.parameters():
        found += [torch.as_tensor(value).clone() for value in optimizer.state[parameter].values()]
    counters = infinity.engine_of(model).counters.snapshot()
    infinity.close(model)
    return found, counters


@pytest.mark.parametrize(("has_device", "on_host"), in_turn([False, True], [("parameters",), ()]))
def test_kept_and_undone_updates_of_moments_of_eight_bits_have_the_same_bits(
    swap_directory: Path, on_host: tuple[str, ...], has_device: bool
) -> None:
    def clip(number: int) -> float:
        return 1e-3 if number == 4 else 1e6

    expected, at_step = trained(swap_directory, "at_step", clip, on_host, has_device=has_device)
    found, counted = trained(swap_directory, "both_passes", clip, on_host, has_device=has_device)
    assert all(map(torch.equal, expected, found))
    assert not at_step.get("early_updates_kept")
    assert counted["early_updates_kept"] and counted["early_updates_undone"], counted
