"""Frozen weights that rest in a checkpoint's own files train as decoded weights in memory do.

The comparison is plain PyTorch: the same transformers model with the decoded weights in memory,
the same adapter (on experts as factors, `infinity.factored_experts`), `torch.optim.AdamW`. Losses,
gradients, adapters and moments have the same bits.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.streams import StreamDevice
from tests.support.bits import assert_same
from tests.support.quantized import tiny_causal_lm, write_quantized

from .in_place import MICRO_BATCHES, STEPS, Base, at_least, batches, config_of, loss_of, over, train

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
        if len(calls) == number:
            raise torch.OutOfMemoryError("simulated")
        return run(*arguments, **names)

    monkeypatch.setattr(device.streams, "run", failing)
    with over(base, one_decoded_block_of(base, tmp_path), device=device) as (model, _):
        with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
            loss_of(model, batches(0, 1)[0])
        seen = train(model, infinity.AdamW(model, lr=1e-2))
    assert len(calls) > number
    assert_same(base.expected, seen, is_ordered=False)


@pytest.mark.parametrize("base", FEW, indirect=True)
def test_tiles_in_place_train_as_tiles_of_copied_weights(base: Base, tmp_path: Path) -> None:
    """Tiles round as tiles do (docs/design/0007-tiling.md); where they rest changes no bit."""
    seen = []
    for frozen in ("copy", "checkpoint"):
        config = config_of(tmp_path, placement={"frozen": frozen}, schedule={"tile": "64KiB"})
        with over(base, config) as (model, engine):
            assert engine.tiled_params
            stored = [unit for unit in engine.store.units if unit.stored is not None]
            assert bool(stored) == (frozen == "checkpoint")
            seen.append(train(model, infinity.AdamW(model, lr=1e-2)))
    assert_same(*seen, is_ordered=False)


@pytest.mark.parametrize("base", FEW, indirect=True)
def test_layer_major_reads_the_base_twice_however_many_micro_batches(
    base: Base, tmp_path: Path
) -> None:
    """And gives the bits of layer-major over copied weights, whose sums have an order of their own."""
    with over(base, config_of(tmp_path, placement={"frozen": "copy"})) as (model, _):
        expected = train(model, infinity.AdamW(model, lr=1e-2), layer_major=True)
    with over(base, config_of(tmp_path)) as (model, engine):
        seen = train(model, infinity.AdamW(model, lr=1e-2), layer_major=True)
        num_fetches = engine.counters.snapshot()["fetches"]
        num_units = len(engine.store.units)
    assert_same(expected, seen, is_ordered=False)
    assert num_fetches <= STEPS * (2 * num_units + 2 * MICRO_BATCHES * 8)


@pytest.mark.parametrize("base", FEW, indirect=True)
def test_no_byte_of_the_base_is_written_or_saved(base: Base, tmp_path: Path) -> None:
    with over(base, config_of(tmp_path)) as (model, engine):
        assert engine.counters.snapshot().get("shard_read_nbytes", 0) == 0, (
            "start-up reads headers only"
        )
        optimizer = infinity.AdamW(model, lr=1e-2)
        train(model, optimizer)
        before = engine.counters.snapshot().get("shard_read_nbytes", 0)
        saved = infinity.checkpoint.save(tmp_path / "runs", model, optimizer)
        model.save_pretrained(tmp_path / "adapter")
        assert engine.counters.snapshot().get("shard_read_nbytes", 0) == before
    assert sum(path.stat().st_size for path in saved.iterdir()) < base.nbytes
    loaded = AutoModelForCausalLM.from_pretrained(base.decoded, dtype=torch.bfloat16)
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter", is_trainable=True)
    for name, parameter in loaded.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, base.expected[name]), name


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


@pytest.mark.parametrize("num_blocks", [9, 13])
def test_memory_saves_the_reads_of_what_it_keeps(num_blocks: int, tmp_path: Path) -> None:
    """A sweep there and back over 16 blocks: what remains of the budget beside one block as stored
    and one as decoded is not read, in either direction."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "b")
    with infinity.init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(model, lora)
    base_nbytes = (tmp_path / "b" / "model.safetensors").stat().st_size
    settings = config_of(tmp_path, tiers={"host": {"capacity": num_blocks * base_nbytes // 16}})
    infinity.offload(model, settings, weights=tmp_path / "b")
    try:
        engine = infinity.engine_of(model)
        unit_nbytes = max(unit.stored.nbytes for unit in engine.store.units if unit.stored)
        kept_nbytes = engine.weight_cache._window_nbytes
        assert kept_nbytes >= (num_blocks - 5) * unit_nbytes
        ids = torch.arange(8).view(1, -1)
        for _ in range(3):
            before = engine.counters.snapshot().get("shard_read_nbytes", 0)
            infinity.forward_backward(model, lambda each: loss_of(model, each), [ids])
        read_nbytes = engine.counters.snapshot()["shard_read_nbytes"] - before
        saved_nbytes = 2 * base_nbytes - read_nbytes
        assert saved_nbytes >= 2 * (kept_nbytes - unit_nbytes)
    finally:
        infinity.close(model)


def kernel_read_nbytes() -> int:
    """Bytes that the kernel has fetched from drives for this process (proc(5))."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def test_every_step_over_tiled_experts_reads_the_base_twice_less_what_is_kept(
    tmp_path: Path,
) -> None:
    """In a budget of a third of the base, for one micro-batch and for two. Tiles are read ahead
    in all but the first step, and a tile that is read ahead is not evicted for a decoded one."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 256}
    base = tmp_path / "base"
    plain = tiny_causal_lm("deepseek-v3", n_routed_experts=32, **sizes)
    write_quantized(plain, base, "int4")
    base_nbytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    budget_nbytes = base_nbytes // 3
    reads: list[list[int]] = []
    for num_micro_batches in (1, 2):
        with infinity.init_empty_weights():
            architecture = AutoConfig.from_pretrained(base)
            model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
        lora = peft.LoraConfig(r=2, target_modules=["o_proj"])
        model = peft.get_peft_model(model, lora)
        config = config_of(
            tmp_path,
            tiers={"host": {"capacity": budget_nbytes}}, schedule={"tile": "512KiB"},
            placement=dict.fromkeys(("master", "moments", "gradients", "activations"), "host"),
        )  # fmt: skip
        infinity.offload(model, config, weights=base)
        try:
            engine = infinity.engine_of(model)
            ids = torch.arange(48).view(1, -1)
            counts, by_kernel = [0], kernel_read_nbytes()
            for _ in range(3):
                infinity.forward_backward(model, partial(loss_of, model), [ids] * num_micro_batches)
                counts.append(int(engine.counters.snapshot()["shard_read_nbytes"]))
            kept_nbytes = engine.weight_cache._window_nbytes
            by_kernel = kernel_read_nbytes() - by_kernel
        finally:
            infinity.close(model)
        if by_kernel:  # A file system in memory has no drive.
            assert by_kernel == pytest.approx(counts[-1], rel=0.01)
        reads.append([after - before for before, after in pairwise(counts)])
    assert kept_nbytes > base_nbytes // 10
    # At least half of what could be kept is kept, in each direction.
    assert max(reads[0]) <= 2 * base_nbytes - kept_nbytes, reads
    assert reads[0] == pytest.approx(reads[1], rel=0.01), "whatever the number of micro-batches"
