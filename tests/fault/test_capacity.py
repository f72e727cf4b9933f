"""Budgets: the smallest one that an error names really trains, a page less is refused, and too
little disk is refused before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import CapacityError
from infinity.sizes import PAGE_NBYTES
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import assert_same
from tests.support.models import ALL

from .harness import (
    Named,
    loss_of,
    mlp,
    offload,
    offloaded_steps,
    plain_steps,
    swap_config,
    swap_files,
)

STEPS = 3

# The configuration itself asks for four chunks of the update, of 64 KiB here.
TOO_SMALL_NBYTES = 256 << 10

PLACEMENTS: dict[str, Any] = {
    "nvme": "nvme",
    "gradients-on-host": {"parameters": "nvme", "master": "nvme", "moments": "nvme"},
    "parameters-on-host": {"parameters": "host", "moments": "nvme", "gradients": "nvme"},
    "parameters-split": {"parameters": ["host", "nvme"], "moments": ["nvme"], "gradients": "nvme"},
    "moments-split": {"parameters": ["nvme"], "moments": ["host", "nvme"], "gradients": "nvme"},
    "host": "host",
    "device-then-host": {kind: ["device", "host"] for kind in ("parameters", "moments")},
}

# Wide enough that a unit is larger than the chunks of the update, or nested, shared, recomputed.
MODELS = ["Mlp", "TinyDecoder", "UsedTwice", "TiedAcross", "ParentReads", "Recursive", "Frozen",
          "NestedLists", "Checkpointed", "Conditional", "Attention", "OddShapes"]  # fmt: skip


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "wide":
        return mlp()
    return ALL[name]().train()


def smallest_nbytes(name: str, config: dict[str, Any], **options: Any) -> int:
    """The least budget, as the refusal of a budget that is far too small states it."""
    config["tiers"]["host"]["capacity"] = TOO_SMALL_NBYTES
    with pytest.raises(CapacityError) as refused:
        offload(build(name), config, **options)
    error = refused.value
    assert error.tier == "host" and error.available_nbytes == TOO_SMALL_NBYTES
    assert "tiers.host.capacity" in error.key
    return error.needed_nbytes


def train(name: str, config: dict[str, Any], **options: Any) -> Named:
    model = build(name)
    with offload(model, config, **options):
        return offloaded_steps(model, STEPS)


def check_smallest(name: str, config: dict[str, Any], **options: Any) -> None:
    smallest = smallest_nbytes(name, config, **options)
    config["tiers"]["host"]["capacity"] = smallest - PAGE_NBYTES
    with pytest.raises(CapacityError) as refused:
        offload(build(name), config, **options)
    assert refused.value.needed_nbytes == smallest
    config["tiers"]["host"]["capacity"] = smallest
    assert_same(plain_steps(build(name), STEPS), train(name, config, **options))


@pytest.mark.parametrize("name", ["wide", *MODELS])
def test_the_smallest_budget_trains_and_a_page_less_is_refused(
    name: str, swap_directory: Path
) -> None:
    check_smallest(name, swap_config(swap_directory))


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "nvme"])
def test_the_smallest_budget_of_every_placement(placement: str, swap_directory: Path) -> None:
    check_smallest("wide", swap_config(swap_directory, placement=PLACEMENTS[placement]))


@pytest.mark.parametrize("placement", ["nvme", "gradients-on-host"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_the_smallest_budget_with_a_device_of_its_own(
    placement: str, prefetch: bool, swap_directory: Path
) -> None:
    config = swap_config(swap_directory, placement=PLACEMENTS[placement], prefetch=prefetch)
    smallest = smallest_nbytes("wide", config, device=SimulatedDevice())
    config["tiers"]["host"]["capacity"] = smallest
    trained = train("wide", config, device=SimulatedDevice(2, delay_s=1e-4))
    assert_same(plain_steps(build("wide"), STEPS), trained)


def test_accumulation_and_reading_gradients_in_the_smallest_budget(swap_directory: Path) -> None:
    """Gradients are read back to be added to, and looked at by the user, in the same memory."""
    config = swap_config(swap_directory)
    config["tiers"]["host"]["capacity"] = smallest_nbytes("wide", config)
    model, plain = build("wide"), build("wide")
    with offload(model, config) as engine:
        for seed in range(3):
            loss_of(model, seed).backward()
            loss_of(plain, seed).backward()
            for name, parameter in plain.named_parameters():
                assert torch.equal(parameter.grad, engine.read_gradient(name))


class Words(nn.Module):
    """Rows of a table larger than all other parameters together."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2048, 128)
        self.layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
        self.head = nn.Linear(128, 2048, bias=False)

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.arange(8) + seed}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(ids)))


def test_the_ring_takes_what_weights_leave_wherever_they_lie(swap_directory: Path) -> None:
    """A chunk as large as fits, while the table's first tile lies where the backward has left it:
    the ring found space of its size, in two parts."""
    config = swap_config(swap_directory, compute="bfloat16", host_nbytes="2100KiB")
    del config["schedule"]["update_chunk"]
    model = Words()
    with offload(model, config):
        offloaded_steps(model, 2)


# -- What a refusal touches ------------------------------------------------------------------------


def untouched(model: nn.Module, config: dict[str, Any]) -> CapacityError:
    """Offloads, expects a refusal, and sees to it that the model is what it was."""
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    with pytest.raises(CapacityError) as refused:
        offload(model, config)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in before.items()
    }
    assert_same(values, {name: p.detach() for name, p in model.named_parameters()})
    loss_of(model, 0).backward()
    return refused.value


@pytest.mark.parametrize("nbytes", ["256KiB", "500KiB"])
def test_a_budget_that_is_too_small_touches_nothing(nbytes: str, swap_directory: Path) -> None:
    wide = dict.fromkeys(("moments", "gradients"), "host")
    untouched(mlp(), swap_config(swap_directory, placement=wide, host_nbytes=nbytes))
    assert not swap_directory.exists()


def test_a_drive_budget_too_small_is_refused_with_the_numbers(swap_directory: Path) -> None:
    error = untouched(mlp(), swap_config(swap_directory, nvme_nbytes="256KiB"))
    assert error.tier == "nvme" and "tiers.nvme" in error.key
    assert error.available_nbytes <= 256 << 10 < error.needed_nbytes
    assert swap_files(swap_directory) == []
