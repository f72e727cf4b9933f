"""Adapters over a frozen base: sizes as published, hand arithmetic of a step, what does not fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from infinity.config import AdapterConfig, SwapConfig
from infinity.errors import CapacityError, ConfigError
from infinity.plan import Batch, Forecast, forecast, load_hardware
from infinity.plan.capacity import activations_nbytes
from infinity.plan.frozen_base import stored_nbytes, stored_of_shape
from infinity.plan.hardware import Device, Hardware
from infinity.plan.layout import PlannedModel
from infinity.plan.model import load_shape, model_of_shape
from infinity.plan.shapes import adapter_size, model_on_meta, shape_of_model
from infinity.simulate.log import COMPUTE
from infinity.simulate.order import Use
from infinity.simulate.spec import Rates
from infinity.sizes import MIB, format_nbytes
from infinity.tools.plan.report import answer, sentences

GB = 10**9
STATE = ("parameters", "master", "moments", "gradients")


@cache
def planned(name: str, **adapter: Any) -> PlannedModel:
    shape, settings = load_shape(name), AdapterConfig(**adapter)
    return model_of_shape(shape, torch.bfloat16, adapters=(settings,))


def config(host: str, device: str = "auto", **changes: Any) -> SwapConfig:
    """Trained state on the host; frozen weights in the checkpoint, kept as far as there is room."""
    placement = dict.fromkeys(STATE, "host") | {"parameters": "nvme", "activations": "device"}
    table = {
        "tiers": {
            "device": {"capacity": device},
            "host": {"capacity": host},
            "nvme": [{"path": "/n"}],
        },
        "placement": placement | changes.pop("placement", {}),
        "precision": {"compute": "bfloat16"},
        "schedule": {"micro_batch": 64, "update_on": "host"} | changes,
    }
    return SwapConfig.load(table)


def step_of(
    model: PlannedModel, settings: SwapConfig, hardware: Hardware | str, tokens: int, **options: Any
) -> Forecast:
    machine = load_hardware(hardware) if isinstance(hardware, str) else hardware
    return forecast(settings, model, machine, Batch(tokens, 256), **options)


# -- Sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_name", "rows", "columns", "nbytes"),
    [
        ("bf16", 3, 5, 30),
        # kv_a_proj of DeepSeek-V3: 576 rows are four blocks of 128 and a half one.
        ("fp8-128x128", 576, 7168, 576 * 7168 + 5 * 56 * 4),
        ("int4-g32", 2048, 7168, 2048 * (7168 // 2 + 2 * 7168 // 32)),
        ("mxfp4", 5760, 2880, 5760 * (2880 // 2 + 2880 // 32)),
        # Codes, scales and zeros in half, and the group of each column, if there are several.
        ("gptq-int4-g128-order", 64, 256, 64 * (256 // 2 + 2 * 2) + 2 * 64 // 2 + 4 * 256),
        ("gptq-int4-g-1-order", 64, 256, 64 * (256 // 2 + 2) + 64 // 2),
        # Behind codes, scales and scales of scales: two tables, of 16 and of 256 values.
        ("nf4", 1024, 1024, 2**19 + 2**14 + 4 * 2**6 + 4 * (16 + 256)),
    ],
)
def test_bytes_of_a_stored_matrix(format_name: str, rows: int, columns: int, nbytes: int) -> None:
    assert stored_nbytes(format_name, rows, columns) == nbytes


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match="one of bf16, fp32, mxfp4, nvfp4, nvfp4-g32, nf4, nf4-single, fp8-128x128, int4",
    ):
        stored_nbytes("gptq", 1, 1)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        # The sizes of the published repositories, in decimal GB. DeepSeek-V3's 688.6 hold the 14 B
        # parameters of a module that these shapes leave out, half of them in bf16.
        ("kimi-k2-int4", 594e9), ("kimi-k2", 1029e9), ("deepseek-v3", 688.6e9 - 14e9),
        ("gpt-oss-120b", 65.2e9), ("qwen3-235b", 470e9), ("qwen3-coder-480b", 960e9),
        ("llama-3-405b", 812e9), ("kimi-k3", 1560e9),
    ],
)  # fmt: skip
def test_a_checkpoint_is_as_large_as_the_published_one(name: str, nbytes: float) -> None:
    assert stored_of_shape(load_shape(name)).nbytes == pytest.approx(nbytes, rel=0.005)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("auto",), ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        (("q_proj", "down_proj"), ["q_proj", "down_proj"]),
    ],
)
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_dense_adapter_has_pefts_parameters(
    targets: tuple[str, ...], words: list[str], method: str
) -> None:
    peft = LoraConfig(r=8, target_modules=words, use_dora=method == "dora")
    settings = AdapterConfig(targets=targets, rank=8, method=method)
    small = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=16,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(small)
    shape = shape_of_model(model_on_meta(small, ""), "", "")
    trained = get_peft_model(model, peft).num_parameters(only_trainable=True)
    assert sum(adapter_size(block, settings)[0] for block in shape.blocks) == trained


def test_an_adapter_of_all_experts_has_pefts_parameters() -> None:
    small = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(small)
    shape = shape_of_model(model_on_meta(small, ""), "", "")
    peft = LoraConfig(
        r=4, target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    trained = get_peft_model(model, peft).num_parameters(only_trainable=True)
    sizes = [
        adapter_size(block, AdapterConfig(targets=("q_proj",), rank=4, experts=True))
        for block in shape.blocks
    ]
    assert sum(params for params, _ in sizes) == trained
    experts = sizes[0][0] - 4 * (64 + 64)
    assert sizes[0][1] == 4 * (64 + 64) + experts * 2 // 8

    own = AdapterConfig(targets=(), experts_full=("model.layers.1.mlp.experts.5",))
    in_full = [adapter_size(block, own, layer) for layer, block in enumerate(shape.blocks)]
    numel = 3 * 64 * 32  # Of one expert: gate, up and down.
    assert in_full == [(0, 0), (numel, numel * 2 // 8)]


def test_an_unknown_target_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="kv_a_proj_with_mqa, kv_b_proj, o_proj"):
        planned("kimi-k2", targets=("k_proj",))
    for targets in (("q_proj",), ("auto",)):
        with pytest.raises(ConfigError, match="no routed experts"):
            planned("llama-3-70b", targets=targets, experts=True)


# -- A step ----------------------------------------------------------------------------------------


def test_frozen_weights_take_six_flops_and_an_adapter_eight() -> None:
    model = planned("kimi-k2-int4", targets=("o_proj",))
    batch = 1000
    total = sum(
        (2 + work.gradient_ratio(0)) * work.forward_flops(batch, 0) for work in model.hooked_modules
    )
    active = model.active_params
    trained = sum(work.trained_params for work in model.hooked_modules)
    assert active == pytest.approx(31.69e9, rel=0.001)
    assert total == pytest.approx(batch * (6 * active + 8 * trained))


@pytest.mark.parametrize(
    ("host", "tokens", "by_hand", "within"),
    [
        # Kimi K2 in INT4, 400 TFLOPS, 28 GB/s: the larger of 2 x 594 GB / 28 GB/s = 42.4 s, less
        # what is kept, and of 6 x 31.7e9 FLOPs a token. Without a cache three blocks are still in
        # memory, the least to read ahead in, and the embedding is read once: 4 % fewer bytes. At
        # 65K tokens the backward computes for longer than it reads, and decoding adds 1.5 s.
        ("32GB", 8192, 193, 0.04), ("32GB", 16384, 386, 0.04), ("32GB", 65536, 1545, 0.07),
        ("32GB", 262144, 2100, 0.02),
        # 17 blocks of 9.81 GB, one of which is being read, beside embedding, head and dense block:
        # 162.7 GB are kept.
        ("180GB", 8192, 266, 0.02), ("180GB", 16384, 532, 0.02), ("180GB", 262144, 2100, 0.02),
        # Drives and compute take 30 s each. The forward reads half of the bytes and computes a
        # third of the FLOPs, so one waits for the other in each pass: 15 s + 20.8 s,
        # and 1.5 s of decoding.
        ("180GB", 65536, 65536 / (15.0 + 20.8 + 1.5), 0.04),
    ],
)  # fmt: skip
def test_a_step_of_kimi_k2_is_that_of_hand_arithmetic(
    host: str, tokens: int, by_hand: float, within: float
) -> None:
    model = planned("kimi-k2-int4", targets=("o_proj",))
    # Two decoded blocks of 34 GB, and what one of them is made of: the next is there in time.
    found = step_of(model, config(host, device="80GB"), "1xh200-4nvme", tokens)
    assert found.tokens_per_s == pytest.approx(by_hand, rel=within)


def test_a_kept_byte_saves_a_read_in_each_direction() -> None:
    model = planned("kimi-k2-int4", targets=("o_proj",))
    small, large = (
        step_of(model, config(host, device="56GB"), "1xh200-4nvme", 8192)
        for host in ("60GB", "120GB")
    )
    saved = small.step.moved_nbytes["checkpoint_read"] - large.step.moved_nbytes["checkpoint_read"]
    block = max(unit.weight_nbytes for unit in model.units)
    assert saved == pytest.approx(2 * 60 * GB, abs=2 * block)


def test_a_step_writes_layer_inputs_and_the_adapter_alone() -> None:
    model = planned("kimi-k2-int4", targets=("o_proj",))
    settings = config("120GB", device="56GB", placement={"activations": "nvme"})
    found = step_of(model, settings, "1xh200-4nvme", 16384)
    inputs = 61 * 16384 * 7168 * 2
    adapter = sum(unit.weight_nbytes for unit in model.units if unit.state_numel)
    assert found.step.moved_nbytes["nvme_write"] == inputs + adapter
    base = found.placed_nbytes["base"]
    assert base.keys() == {"checkpoint"} and base["checkpoint"] == pytest.approx(594.2e9, rel=1e-3)
    assert found.endurance_steps == pytest.approx(28000e12 / (inputs + adapter))


def test_bytes_do_not_depend_on_the_number_of_micro_batches() -> None:
    model = planned("kimi-k2-int4", targets=("o_proj",))
    few, many = (
        step_of(model, config("60GB", device="24GB", micro_batch=size), "1xh200-4nvme", 16384)
        for size in (32, 4)
    )
    assert many.job.num_fibers == 8 * few.job.num_fibers
    assert many.model.units != model.units, "experts are divided"
    assert many.step.moved_nbytes == few.step.moved_nbytes


def test_one_drive_takes_as_many_times_longer_as_there_are_drives() -> None:
    model, settings = planned("kimi-k2-int4", targets=("o_proj",)), config("60GB", device="56GB")
    spread = step_of(model, settings, "1xh200-4nvme", 8192)
    one = step_of(model, settings, "1xh200-4nvme", 8192, shard_drives=1)
    assert one.step.moved_nbytes == spread.step.moved_nbytes
    assert one.step.step_s == pytest.approx(4 * spread.step.step_s, rel=0.02)
    said = " ".join(sentences(replace(one, data_tokens=10**6, other=spread)))
    assert "on one drive; spread over 4 (infinity spread) a step takes" in said
    assert "1,000,000 tokens of data take" in said and "the drives bind" in said
    assert "routed experts" not in said
    processor = one.hardware.model_copy(update={"device": Device(count=1, tflops=0.2)})
    on_processor = replace(one, hardware=processor)
    assert "timed on a dense block" in sentences(on_processor)[-1]


def test_a_desktop_streams_experts_in_chunks() -> None:
    """A block of Kimi K2 has 34 GB in bf16; the card has 24 GB."""
    model = planned("kimi-k2-int4", targets=("o_proj",), experts=True, rank=4)
    settings = config("85%", placement=dict.fromkeys(STATE, ("host", "nvme")))
    found = step_of(model, settings, "rtx4090-1nvme", 65536)
    chunks = [work for work in found.model.hooked_modules if work.within is not None]
    assert len(chunks) % 60 == 0 and found.model.frozen is not None
    assert found.model.active_params == pytest.approx(31.69e9, rel=1e-3)
    decoded = [found.model.decoded_nbytes(unit) for unit in found.model.units]
    assert max(decoded) < 12 * GB
    assert found.placed_nbytes["base"].keys() == {"checkpoint"}
    read = found.step.moved_nbytes["checkpoint_read"] + 2 * found.job.weights_cache_nbytes
    assert read == pytest.approx(2 * 594e9, rel=0.03), "once in each direction, or kept"
    assert found.job.keeps_experts and found.step.step_s < 200


def test_decoded_weights_need_space_on_the_device() -> None:
    model = planned("kimi-k2-int4", targets=("o_proj",))
    with pytest.raises(CapacityError, match="as they are stored and .* decoded") as refused:
        step_of(model, config("60GB", device="40GB", tile=0), "1xh200-4nvme", 8192)
    assert refused.value.key == "tiers.device.capacity"
    encoded = model.held_nbytes
    assert encoded < 10 * GB, "as bf16 it would not have fitted before, either"


def test_decoding_takes_time_where_its_rate_is_known() -> None:
    model, settings = planned("kimi-k2-int4", targets=("o_proj",)), config("60GB", device="80GB")
    machine = load_hardware("1xh200-4nvme")
    device = machine.device.model_copy(update={"decode_gb_per_s": 10.0})
    slow = machine.model_copy(update={"device": device})
    assert model.frozen is not None
    decoded_nbytes = sum(model.decoded_nbytes(unit) for unit in model.units)
    assert decoded_nbytes == pytest.approx(2 * 1015e9, rel=0.01), "the experts, in bf16"
    step = step_of(model, settings, slow, 8192).step
    assert step.step_s == pytest.approx(0.9 * 2 * decoded_nbytes / 10e9, rel=0.05)
    assert step.moved_nbytes == step_of(model, settings, machine, 8192).step.moved_nbytes


def test_a_checkpoint_larger_than_its_drives_is_refused() -> None:
    machine = load_hardware("1xh200-4nvme")
    assert machine.nvme is not None
    small = machine.model_copy(
        update={"nvme": machine.nvme.model_copy(update={"capacity": 2000 * GB})}
    )
    model, settings = planned("kimi-k2-int4", targets=("o_proj",)), config("60GB", device="56GB")
    assert step_of(model, settings, small, 8192).step.step_s > 0
    with pytest.raises(CapacityError, match="does not fit 1 of 4 drives"):
        step_of(model, settings, small, 8192, shard_drives=1)
    without = machine.model_copy(update={"nvme": None})
    with pytest.raises(ConfigError, match=r"has no \[nvme\]"):
        step_of(model, settings, without, 8192)


def test_inputs_that_do_not_fit_are_named_in_the_answer() -> None:
    model = planned("kimi-k2-int4", targets=("o_proj",))
    settings = config("60GB", device="56GB", placement={"activations": "host"})
    full = step_of(model, settings, "1xh200-4nvme", 131072)
    said = answer(full)
    assert not said["fits"] and "layer inputs take 106.8 GiB" in said["obstacles"][0]
    assert sentences(full)[0].startswith("No: LoRA of rank 16")
    assert answer(step_of(model, settings, "1xh200-4nvme", 16384))["fits"]


@pytest.mark.parametrize(("micro_batch", "threads"), [(None, 2), (64, 3), (1, 66)])
def test_workspaces_of_cublas_are_no_space_for_activations(
    micro_batch: int | None, threads: int
) -> None:
    settings = config("60GB", device="56GB", micro_batch=micro_batch)
    machine, blas_nbytes = load_hardware("1xh200-4nvme"), threads * 32 * MIB
    free_nbytes = activations_nbytes(settings, machine, Batch(64 * 256, 256))
    assert free_nbytes == 141 * GB - 56 * GB - blas_nbytes
    # 61 blocks keep inputs of 7,168 values in 2 bytes for each token.
    most_tokens = free_nbytes // (61 * 7168 * 2) // 256 * 256
    if micro_batch is None:
        model = planned("kimi-k2-int4", targets=("o_proj",))
        assert not step_of(model, settings, machine, most_tokens).obstacles
        [obstacle] = step_of(model, settings, machine, most_tokens + 256).obstacles
        assert format_nbytes(free_nbytes) in obstacle


def test_an_adapter_is_sharded_over_ranks() -> None:
    model = planned("gpt-oss-120b", targets=("o_proj",))
    settings = config("60GB", placement={"parameters": ["host", "nvme"]})
    found = step_of(model, settings, "8xh200-4nvme", 16384, num_ranks=8)
    assert found.ranks is not None and found.ranks.count == 8
    assert found.tokens_per_s == pytest.approx(8 * 16384 / found.step.step_s)
    # Devices put stored bytes together, so eight ranks read as much as one that has all the memory.
    assert answer(found)["base_copy"] is None
    alone = step_of(model, settings, "8xh200-4nvme", 16384)
    assert 8 * sum(found.placed_nbytes["base"].values()) == pytest.approx(
        sum(alone.placed_nbytes["base"].values()), rel=0.01
    )
    of_rank, of_one = (each.step.moved_nbytes for each in (found, alone))
    assert 8 * of_rank["checkpoint_read"] == pytest.approx(of_one["checkpoint_read"], rel=0.1)
    assert 8 * of_rank["h2d"] == pytest.approx(of_one["h2d"], rel=0.1)
    assert of_rank["gather_received"] == pytest.approx(7 / 8 * of_one["h2d"], rel=0.1)
    one_sided = settings.model_copy(
        update={"distributed": settings.distributed.model_copy(update={"exchange": "one_sided"})}
    )
    each_all = step_of(model, one_sided, "8xh200-4nvme", 16384, num_ranks=8)
    assert each_all.placed_nbytes["base"] == alone.placed_nbytes["base"]
    assert each_all.step.moved_nbytes["checkpoint_read"] > 7 * of_rank["checkpoint_read"]


def test_a_base_in_sixteen_bits_needs_no_decoding() -> None:
    model = planned("qwen3-235b", targets=("q_proj",))
    assert not any(model.decoded_nbytes(unit) for unit in model.units)
    assert replace(model, frozen=None).num_params == pytest.approx(235.1e9, rel=0.001)


# -- Experts by rows -------------------------------------------------------------------------------


def test_products_of_few_rows_take_as_long_as_on_an_h200() -> None:
    """Grouped products of 96 experts, with 85 to 1,365 rows each."""
    results = Path(__file__).parents[2] / "bench/results/gpu.json"
    measured = json.loads(results.read_text())["seventh"]["expert_products"]["rows"]
    rates = Rates(flops=640e12, update=1.0, host=1.0, memory=3300e9)
    for row in measured:
        params = 96 * math.prod(map(int, row["matrix"].split("->")))
        flops = 2.0 * row["rows_per_expert"] * params
        use = Use((), flops, expert_flops=flops, expert_nbytes=2 * params)
        assert flops / rates.product_s(use, 1) == pytest.approx(
            1e12 * row["grouped_tflops"], rel=0.22
        )


def test_experts_are_read_for_each_micro_batch_and_by_grouped_tiles_once() -> None:
    """32 rows an expert in a micro-batch of 256 tokens, 2,048 in all of them together."""
    model, machine = planned("gpt-oss-20b"), load_hardware("1xh200-4nvme")
    device = machine.device.model_copy(update={"memory_gb_per_s": 3300.0})
    machine = machine.model_copy(update={"device": device})

    def computing_s(micro_batch: int, **changes: Any) -> float:
        settings = config("60GB", device="60GB", micro_batch=micro_batch, **changes)
        return step_of(model, settings, machine, 16384).step.busy_s[COMPUTE]

    nbytes = 2 * sum(t.multiplied * 32 / 4 for group in model.groups for t in group.experts)
    read_s = 64 * nbytes / 3300e9
    assert computing_s(1) - computing_s(64) > 2 * read_s, "there, back, and what is repeated"
    tiled, at_once = (computing_s(size, tile=256 * MIB) for size in (1, 64))
    assert tiled == pytest.approx(at_once, rel=0.01)
    apart = computing_s(1, tile=256 * MIB, experts="exact")
    assert apart - tiled > 2 * read_s
