"""Packed experts run as tiles of some experts.

With the loop over experts ("eager"), tiled and untiled models are compared bit for bit. Other
implementations sum over tokens and choices in another order, as they do among themselves: losses
agree to rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import infinity
from infinity.checkpoint import export_safetensors
from infinity.checkpoint import load as load_checkpoint
from infinity.checkpoint import save as save_checkpoint
from infinity.errors import CapacityError
from infinity.modules.tiling.experts import TiledExperts
from infinity.modules.tiling.split import Tiling
from infinity.state.tiles import name_of_tiled
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences, same_bits
from tests.support.offloading import offloaded, swap_config

from .harness import Plan, Record, Side, assert_same_run, plain_run, run
from .zoo import DECODER, ZOO, Entry, configuration

EXPERT_NBYTES = 3 * 96 * 64 * 4
# Without clipping: the norm of a cut parameter is rounded otherwise.
PLAN = Plan(steps=3, accumulation=2, lr=1e-3)


def build(seed: int = 0) -> Any:
    options = {**DECODER, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    torch.manual_seed(seed)
    model = transformers.MixtralForCausalLM(
        configuration("mixtral", **options, num_local_experts=4, num_experts_per_tok=2)
    )
    model.set_experts_implementation("eager")
    return model.train()


MIXTRAL: Entry = replace(ZOO["mixtral"], build=build)


def cut(model: nn.Module, num_experts: int = 1) -> nn.Module:
    """The experts of a model as tiles of so many, without an engine; nothing else is tiled."""
    tiling = Tiling(model, lambda parameter: parameter.element_size())
    experts = [each for each in tiling._candidates if each.alignment == 1]
    tiling._candidates = experts
    rows = experts[0].rows(lambda parameter: parameter.element_size())
    tiling.cut(rows.row_nbytes * num_experts)
    return model


def collective_section(named: Mapping[str, Any]) -> dict[str, Any]:
    """Tiles, which come in order, as the tiled parameters that they belong to."""
    parts: dict[str, list[Any]] = {}
    for name, value in named.items():
        parts.setdefault(name_of_tiled(name), []).append(value)
    return {name: torch.cat(each) if len(each) > 1 else each[0] for name, each in parts.items()}


def by_whole(record: Record) -> Record:
    return replace(
        record,
        weights=collective_section(record.weights),
        gradients=[collective_section(each) for each in record.gradients],
    )


def gradients_of(model: nn.Module) -> dict[str, Any]:
    return collective_section(
        {name: parameter.grad for name, parameter in model.named_parameters()}
    )


# --- the operator -----------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3"])
def test_tiled_experts_have_the_numbers_of_untiled_ones(name: str, implementation: str) -> None:
    """Of experts with and without biases, transposed and not, beside shared ones. Qwen2-MoE reads
    the hidden states again behind its experts: autograd adds the experts' gradients to that one by
    one, a call adds their sum."""
    entry = ZOO[name]

    def build() -> Any:
        model: Any = entry.build(0)
        model.set_experts_implementation(implementation)
        return model

    whole = build()
    expected = entry.loss(whole, entry.batch(1))
    expected.backward()
    of_one: dict[str, Any] = {}
    for num_experts in (1, 2, 3):  # Four experts in each: tiles of equal and of different sizes.
        model = cut(build(), num_experts)
        tiled = [module for module in model.modules() if isinstance(module, TiledExperts)]
        assert tiled and all(len(each.tiles) == -(-4 // num_experts) for each in tiled)
        assert all(isinstance(each, type(tiled[0]).__mro__[2]) for each in tiled)
        actual = entry.loss(model, entry.batch(1))
        actual.backward()
        found, plain = gradients_of(model), gradients_of(whole)
        assert found.keys() == plain.keys()
        if implementation == "eager":
            assert same_bits(actual.detach(), expected.detach())
            of_one = of_one or found
            assert not differences(of_one if name == "qwen2_moe" else plain, found)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        for each, gradient in plain.items():
            torch.testing.assert_close(found[each], gradient, rtol=1e-4, atol=1e-7)


def test_experts_without_tokens_have_a_gradient_of_zero_or_are_left_out() -> None:
    model = cut(build())
    experts: Any = model.model.layers[0].mlp.experts  # type: ignore[union-attr]
    ran: list[int] = []
    for index, tile in enumerate(experts.tiles):
        tile.register_forward_hook(lambda *_, index=index: ran.append(index))
    indices = torch.tensor([[1, 3], [3, 1], [1, 3]])
    hidden = torch.randn(3, 64, requires_grad=True)
    out = experts(hidden, indices, torch.rand(3, 2))
    assert ran == [1, 3]
    out.sum().backward()
    assert ran == [1, 3, 3, 1]
    for tile, has_tokens in zip(experts.tiles, (False, True, False, True), strict=True):
        for parameter in tile.parameters():
            assert parameter.grad is not None and bool(parameter.grad.any()) is has_tokens
    ran.clear()
    with torch.no_grad():
        experts(hidden, indices, torch.rand(3, 2))
    assert ran == [1, 3]
    ran.clear()
    experts.requires_grad_(False)
    experts(hidden, indices, torch.rand(3, 2)).sum().backward()
    assert ran == [1, 3, 3, 1]
    # As ranks of expert parallelism have it: past the last expert there is nothing to do.
    assert not experts(hidden, torch.full((3, 2), 4), torch.rand(3, 2)).any()


# --- the engine -------------------------------------------------------------------------------


def config(directory: Path, **options: Any) -> Any:
    schedule = {"tile": EXPERT_NBYTES, **options.pop("schedule", {})}
    return swap_config(directory, schedule=schedule, **options)


@pytest.mark.parametrize(
    ("placement", "simulated", "updates"),
    [
        ("nvme", False, "deferred"),
        ("nvme", True, "at_step"),
        ({"parameters": ["host", "nvme"], "moments": ["nvme"]}, True, "deferred"),
    ],
)
def test_training_is_that_of_the_untiled_model(
    swap_directory: Path, placement: Any, simulated: bool, updates: str
) -> None:
    """Bit for bit: no sum has another order. AdamW decays all experts."""
    expected = plain_run(MIXTRAL, PLAN)
    options = config(swap_directory, placement=placement, updates=updates, host_nbytes="16MiB")
    device = SimulatedDevice(3) if simulated else None
    with offloaded(build(), options, device=device) as model:
        experts = [module for module in model.modules() if isinstance(module, TiledExperts)]
        assert [len(each.tiles) for each in experts] == [4, 4]
        actual = run(MIXTRAL, Side(model), PLAN)
    assert_same_run(expected, by_whole(actual))


def test_gradient_hooks_of_a_tile_see_and_change_its_gradient(swap_directory: Path) -> None:
    plain = build()
    name = "model.layers.1.mlp.experts.down_proj"
    MIXTRAL.loss(plain, MIXTRAL.batch(1)).backward()
    expected = plain.get_parameter(name).grad
    assert expected is not None
    with offloaded(build(), config(swap_directory, host_nbytes="16MiB")) as model:
        tiles = [
            parameter for each, parameter in model.named_parameters() if name_of_tiled(each) == name
        ]
        seen: list[torch.Tensor] = []
        for tile in tiles:
            tile.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
        MIXTRAL.loss(model, MIXTRAL.batch(1)).backward()
        assert same_bits(torch.cat(seen[::-1]), expected)
        found = infinity.engine_of(model).read_gradient(name)
        assert found is not None and same_bits(found, 2 * expected)


def test_a_backward_for_chosen_inputs_gives_tiles_no_gradient() -> None:
    model = cut(build())
    hidden = torch.randn(3, 64, requires_grad=True)
    experts: Any = model.model.layers[0].mlp.experts  # type: ignore[union-attr]
    arguments = torch.tensor([[0, 1], [1, 2], [3, 1]]), torch.rand(3, 2)
    (found,) = torch.autograd.grad(experts(hidden, *arguments).sum(), [hidden])
    assert all(parameter.grad is None for parameter in experts.parameters())
    experts(hidden, *arguments).sum().backward()
    assert hidden.grad is not None and same_bits(found, hidden.grad)
    assert all(parameter.grad is not None for parameter in experts.parameters())


def test_experts_four_times_the_window_train(swap_directory: Path) -> None:
    window_nbytes = EXPERT_NBYTES + (80 << 10)  # And what of a block is held beside a tile.
    device = SimulatedDevice(5)
    whole = config(swap_directory, device_nbytes=window_nbytes, schedule={"tile": 0})
    with pytest.raises(CapacityError, match=r"tiers\.device\.capacity"):
        infinity.offload(build(), whole, device=SimulatedDevice(5))
    with offloaded(
        build(), config(swap_directory, device_nbytes=window_nbytes), device=device
    ) as m:
        actual = run(MIXTRAL, Side(m), PLAN)
        assert 0 < device.attached_high_water_nbytes <= window_nbytes
    assert_same_run(plain_run(MIXTRAL, PLAN), by_whole(actual))


def test_names_export_and_checkpoints(swap_directory: Path, tmp_path: Path) -> None:
    """All of them the user's own; a checkpoint goes on with the experts untiled, and back."""
    plain = build()
    with offloaded(build(), config(swap_directory, host_nbytes="16MiB")) as model:
        assert list(model.state_dict()) == list(plain.state_dict())
        assert not differences(plain.state_dict(), model.state_dict())
        weight = model.model.layers[1].mlp.experts.down_proj  # type: ignore[union-attr]
        assert weight.shape == (4, 64, 96)
        with torch.no_grad():
            assert same_bits(weight[2].clone(), plain.model.layers[1].mlp.experts.down_proj[2])
        export_safetensors(model, tmp_path / "out")
        optimizer = infinity.AdamW(model, lr=1e-2)
        MIXTRAL.loss(model, MIXTRAL.batch(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(tmp_path / "run", model, optimizer)
        expected = MIXTRAL.loss(model, MIXTRAL.batch(2)).item()
    for number, tile in enumerate((0, EXPERT_NBYTES * 2)):
        options = config(swap_directory, host_nbytes="16MiB", schedule={"tile": tile})
        with offloaded(build(seed=1), options) as model:
            optimizer = infinity.AdamW(model, lr=1e-2)
            load_checkpoint(tmp_path / ("run" if number == 0 else "again"), model, optimizer)
            if number == 0:
                save_checkpoint(tmp_path / "again", model, optimizer)
            assert MIXTRAL.loss(model, MIXTRAL.batch(2)).item() == expected
    options = config(tmp_path / "swap", host_nbytes="16MiB")
    with infinity.init_empty_weights(options):
        empty = build(seed=1)
    with offloaded(empty, options, weights=tmp_path / "out") as model:
        assert isinstance(model.model.layers[0].mlp.experts, TiledExperts)  # type: ignore[union-attr]
        assert not differences(plain.state_dict(), model.state_dict())


def test_built_on_meta_they_are_initialised_by_the_model_s_rule(swap_directory: Path) -> None:
    options = config(swap_directory, host_nbytes="16MiB")
    with infinity.init_empty_weights(options):
        model = build()
    with offloaded(model, options, seed=3) as model:
        engine = infinity.engine_of(model)
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
            weight = engine.read_parameter(name)
            assert weight.std() == pytest.approx(model.config.initializer_range, rel=0.05)  # type: ignore[union-attr]
            assert len(weight.flatten(1).unique(dim=0)) == 4
