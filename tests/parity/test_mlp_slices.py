"""MLPs in slices of tokens: the bits of plain PyTorch with the same slices, wherever state rests."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.modules.accumulate.trial import why_forwards_differ
from infinity.modules.reading.configuration import mlps_of
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences
from tests.support.offloading import offloaded, swap_config

from .harness import Plan, Side, assert_same_run, plain_run, run
from .small_models import IDS, llama
from .test_layer_major import accumulated, plain
from .zoo import ZOO, Entry

SLICE = 5
PLAN = Plan(max_norm=0.5)


def sliced(name: str) -> Entry:
    def make(seed: int) -> nn.Module:
        model = ZOO[name].build(seed)
        infinity.slice_mlps(model, SLICE)
        return model

    return replace(ZOO[name], build=make)


NAMES = ["llama", "gpt2-dropout", "t5", "phi3", "deepseek_v3", "lora-all-linear-dropout"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_the_bits_of_plain_pytorch(
    name: str, checkpointing: bool, swap_directory: Path
) -> None:
    entry, plan = sliced(name), replace(PLAN, checkpointing=checkpointing)
    expected = plain_run(entry, plan)
    places: list[tuple[dict[str, Any], Any]] = [
        (swap_config(swap_directory, placement="nvme", updates="both_passes"), None),
        (swap_config(None, placement="host"), SimulatedDevice(seed=3, delay_s=1e-4)),
    ]
    for config, device in places:
        with offloaded(entry.build(0), config, device=device) as model:
            assert_same_run(expected, run(entry, Side(model), plan))


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v3"])
def test_a_layer_major_step_has_the_gradients_of_plain_accumulation(
    name: str, swap_directory: Path
) -> None:
    entry, seeds = sliced(name), (1, 2, 3)
    expected_losses, expected = plain(entry, seeds)
    losses, gradients = accumulated(entry, seeds, swap_config(swap_directory))
    assert all(map(torch.equal, expected_losses, losses))
    assert not differences(expected, gradients)


class Widest(TorchDispatchMode):
    """The most rows of a value of one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.num_rows = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 3 and out.shape[-1] == self.width:
            self.num_rows = max(self.num_rows, out.shape[:-1].numel())
        return out


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_no_value_of_an_mlp_has_more_rows_than_a_slice(
    placement: str, swap_directory: Path
) -> None:
    width, rows = 48, {}
    for num_tokens in (None, SLICE):
        model = llama()
        if num_tokens is not None:
            infinity.slice_mlps(model, num_tokens)
        config = swap_config(swap_directory, placement=placement)
        with offloaded(model, config) as model, Widest(width) as widest:
            model(input_ids=IDS, labels=IDS).loss.backward()
        rows[num_tokens] = widest.num_rows
    assert rows == {None: IDS.numel(), SLICE: SLICE}


def test_slices_agree_with_the_whole_to_rounding() -> None:
    torch.manual_seed(1)
    model = llama()
    expected = model(input_ids=IDS).logits
    infinity.slice_mlps(model, SLICE)
    assert why_forwards_differ(model) is None  # So layer-major order stays the default.
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)


def test_mlps_are_found_by_class_and_routed_experts_are_left() -> None:
    found = mlps_of(ZOO["deepseek_v3"].build(0))
    assert {re.sub(r"\d+", "N", name) for name in found} == {
        "model.layers.N.mlp", "model.layers.N.mlp.shared_experts",
    }  # fmt: skip
    assert not any(isinstance(mlp, nn.ModuleList) for mlp in found.values())
    assert not mlps_of(ZOO["gpt_oss"].build(0))  # Its MLP is the router and the experts.


class MixingMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(hidden) + hidden.mean(dim=-2, keepdim=True)


class ShiftedMLP(MixingMLP):
    def forward(self, hidden: Tensor, state: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.up(hidden)


def test_an_mlp_that_mixes_tokens_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), MixingMLP())
    infinity.slice_mlps(model, 2)
    model(torch.randn(1, 2, 8))  # Nothing is cut.
    with pytest.raises(UnsupportedError, match=r"1: tokens of a MixingMLP depend on each other"):
        model(torch.randn(1, 3, 8))
    with pytest.raises(UnsupportedError, match="its forward is replaced, perhaps by slices"):
        infinity.slice_mlps(model, 2)


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(8, 8)), ShiftedMLP()])
def test_a_model_without_an_mlp_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="has no MLP that is a module"):
        infinity.slice_mlps(model, 2)
    with pytest.raises(ConfigError, match="expected at least one token; got 0"):
        infinity.slice_mlps(model, 0)
