"""Frozen weights that rest in a checkpoint's own files train as decoded weights in memory do.

The comparison is plain PyTorch: the same transformers model with the decoded weights in memory,
the same adapter (on experts as factors, `infinity.factored_experts`), `torch.optim.AdamW`. Losses,
gradients, adapters and moments have the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.streams import StreamDevice
from tests.support.bits import assert_same

from .in_place import STEPS, Base, at_least, batches, config_of, loss_of, over, train

FEW = ("deepseek-int4", "gpt-oss-mxfp4")  # Per-expert names and packed ones.


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(request.param, tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("base", FEW, indirect=True)
@pytest.mark.parametrize("frozen", ["checkpoint", "copy"])
def test_an_adapter_trains_as_over_decoded_weights_in_memory(
    base: Base, tmp_path: Path, frozen: str
) -> None:
    """With transformers' default kernel of experts; test_in_place_pairs.py has the other properties."""
    with over(base, config_of(tmp_path, placement={"frozen": frozen})) as (model, engine):
        units = [unit for unit in engine.store.units if not unit.state_numel]
        assert units and all((unit.stored is None) == (frozen == "copy") for unit in units)
        seen = train(model, infinity.AdamW(model, lr=1e-2))
    assert_same(base.expected, seen, is_ordered=False)


def one_decoded_block_of(base: Base, directory: Path) -> dict[str, Any]:
    """A device that has space for one decoded block, and for the stored bytes of the next."""
    tight = {"tiers": {"device": {"capacity": "least"}}, "schedule": {"tile": 0}}
    config = at_least(base, config_of(directory, **tight), True)
    config["tiers"]["device"]["capacity"] += 512 << 10
    return config


@pytest.mark.parametrize("base", FEW[:1], indirect=True)
def test_stored_bytes_wait_on_a_device_that_one_decoded_block_fills(
    base: Base, tmp_path: Path
) -> None:
    config = one_decoded_block_of(base, tmp_path)
    with over(base, config, device=SimulatedDevice(3)) as (model, engine):
        seen = train(model, infinity.AdamW(model, lr=1e-2))
        assert engine.counters.snapshot()["fetches_staged"] > 0
    assert_same(base.expected, seen, is_ordered=False)


@pytest.mark.parametrize("base", FEW[:1], indirect=True)
def test_a_unit_whose_staging_failed_is_not_made_of_the_bytes_of_another(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one_decoded_block_of(base, tmp_path)
    stage, calls = StreamDevice.stage, []

    def failing(device: StreamDevice, block: Any, memory: int) -> Any:
        calls.append(block)
        if len(calls) == 2:
            raise RuntimeError("a driver's error")
        return stage(device, block, memory)

    monkeypatch.setattr(StreamDevice, "stage", failing)
    with over(base, config, device=SimulatedDevice(3)) as (model, _):
        with pytest.raises(RuntimeError, match="driver"), torch.no_grad():
            for number in range(STEPS):
                loss_of(model, batches(number, 1)[0])
        seen = train(model, infinity.AdamW(model, lr=1e-2))
    assert len(calls) > 2
    assert_same(base.expected, seen, is_ordered=False)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("base", FEW[:1], indirect=True)
def test_a_unit_whose_decoding_had_no_memory_is_decoded_in_its_next_use(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    device, calls = SimulatedDevice(3), []
    run = device.streams.run

    def failing(*arguments: Any, **names: Any) -> Any:
        calls.append(None)
        if len(calls) in (number, number + 1):  # A fetch is tried once more without idle units.
            raise torch.OutOfMemoryError("simulated")
        return run(*arguments, **names)

    monkeypatch.setattr(device.streams, "run", failing)
    with over(base, one_decoded_block_of(base, tmp_path), device=device) as (model, _):
        with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
            loss_of(model, batches(0, 1)[0])
        seen = train(model, infinity.AdamW(model, lr=1e-2))
    assert len(calls) > number + 1
    assert_same(base.expected, seen, is_ordered=False)


@pytest.mark.parametrize("base", FEW, indirect=True)
def test_tiles_in_place_train_as_tiles_of_copied_weights(base: Base, tmp_path: Path) -> None:
    """Tiles round as tiles do (docs/design/0007-tiles.md); where they rest changes no bit."""
    seen = []
    for frozen in ("copy", "checkpoint"):
        config = config_of(tmp_path, placement={"frozen": frozen}, schedule={"tile": "64KiB"})
        with over(base, config) as (model, engine):
            assert engine.tiled_params
            stored = [unit for unit in engine.store.units if unit.stored is not None]
            assert bool(stored) == (frozen == "checkpoint")
            seen.append(train(model, infinity.AdamW(model, lr=1e-2)))
    assert_same(*seen, is_ordered=False)


@pytest.mark.parametrize("base", FEW[:1], indirect=True)
def test_memory_for_decoded_weights_is_given_up_while_they_are_in_use(
    base: Base, tmp_path: Path
) -> None:
    """As an allocation does that finds no other memory. No bit changes, and every block is freed."""
    with over(base, config_of(tmp_path)) as (model, engine):
        decoding = engine.weight_cache._moves.decoding
        assert decoding._zone is not None
        given_up: list[bool] = []
        mlp = model.get_submodule("base_model.model.model.layers.1.mlp")
        mlp.register_forward_pre_hook(
            lambda *_: given_up.append(engine.weight_cache.space.give_up_zone())
        )
        seen = train(model, infinity.AdamW(model, lr=1e-2))
        assert given_up[0] and not any(given_up[1:]) and decoding._zone is None
    assert_same(seen, base.expected)
