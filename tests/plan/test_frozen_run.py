"""Predicted bytes of an adapter's step beside the counters of the engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.config import SwapConfig
from infinity.plan import Batch, forecast
from infinity.plan.directory import read_directory
from infinity.plan.hardware import UNSURE, Device
from infinity.plan.model import model_for, model_of_module
from infinity.tools.plan import rehearsal
from infinity.tools.plan.advice import advise
from infinity.tools.plan.measure import measure
from tests.support.every_type import tiny_config
from tests.support.exhaustive import sampled
from tests.support.machines import ANY_MACHINE
from tests.support.quantized import tiny_causal_lm

SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=4,
)  # fmt: skip
LENGTH, NUM_STEPS = 4, 5  # No byte depends on the number of tokens.
LINKS = ("nvme_read", "nvme_write")


def build() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16)
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=8, target_modules=targets))


def moved_in_the_last_step(table: dict[str, Any], num_micro_batches: int) -> dict[str, int]:
    model = build()
    infinity.offload(model, table)
    engine = infinity.engine_of(model)
    optimizer = infinity.AdamW(model, lr=1e-3)
    ids = torch.randint(256, (num_micro_batches, 1, LENGTH))
    before: dict[str, float] = {}
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            before = engine.counters.snapshot()
        infinity.forward_backward(
            model, lambda x: model(input_ids=x, labels=x, use_cache=False).loss, list(ids)
        )
        optimizer.step()
        optimizer.zero_grad()
    after = engine.counters.snapshot()
    engine.close()
    return {
        link: int(after.get(f"{link}_nbytes", 0) - before.get(f"{link}_nbytes", 0))
        for link in LINKS
    }


CASES = [
    ("7MiB", 3, ["nvme"], 0.01), ("12MiB", 1, ["nvme"], 0.01), ("12MiB", 3, ["nvme"], 0.01),
    # A part of the base rests on the host, and saves what it has.
    ("10MiB", 2, ["host", "nvme"], 0.0), ("12MiB", 3, ["host", "nvme"], 0.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("host", "num_micro_batches", "parameters", "within"),
    sampled(CASES, lambda case: case is not CASES[2]),  # Others have its budget and its number.
)
def test_bytes_of_an_adapters_step_are_those_of_a_run(
    tmp_path: Path, host: str, num_micro_batches: int, parameters: list[str], within: float
) -> None:
    table = {
        "tiers": {
            "host": {"capacity": host},
            "nvme": [{"path": str(tmp_path / "swap"), "capacity": "256MiB"}],
        },
        "placement": dict.fromkeys(("master", "moments", "gradients"), "host")
        | {"parameters": parameters},
        "schedule": {"micro_batch": 1},
        "precision": {"compute": "bfloat16"},
    }
    ran = moved_in_the_last_step(table, num_micro_batches)
    settings = SwapConfig.load(table)
    model = model_of_module(build(), settings, SHAPE)
    batch = Batch(num_micro_batches * LENGTH, LENGTH)
    found = forecast(settings, model, ANY_MACHINE, batch).step.moved_nbytes
    assert found.get("nvme_write", 0) == ran["nvme_write"]
    assert found["nvme_read"] == pytest.approx(ran["nvme_read"], rel=within)
    frozen = sum(unit.weight_nbytes for unit in model.units if not unit.state_numel)
    assert 0 < ran["nvme_read"] < 2 * frozen


@pytest.mark.parametrize(("host", "num_reads"), [("7MiB", 1), ("24MiB", 0)])
def test_a_sweep_without_a_backward_reads_the_files_once_or_keeps_them(
    tmp_path: Path, host: str, num_reads: int
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).save_pretrained(tmp_path)
    table = {
        "tiers": {"host": {"capacity": host}},
        "schedule": {"micro_batch": 1},
        "precision": {"compute": "bfloat16"},
    }
    model = infinity.from_pretrained(tmp_path, table, is_frozen=True)
    engine, read_nbytes = infinity.engine_of(model), []
    for _ in range(2):
        ids = list(torch.randint(256, (2, 1, LENGTH)))
        infinity.forward(model, lambda x: model(input_ids=x, use_cache=False), ids)
        read_nbytes.append(int(engine.counters.snapshot()["nvme_read_nbytes"]))
    infinity.close(model)
    settings, directory = SwapConfig.load(table), read_directory(tmp_path)
    planned = model_for(settings, directory.shape, directory.stored, is_frozen=True)
    batch = Batch(2 * LENGTH, LENGTH, has_backward=False)
    moved = forecast(settings, planned, ANY_MACHINE, batch).step.moved_nbytes
    assert moved.get("checkpoint_read", 0) == read_nbytes[1] - read_nbytes[0]
    assert read_nbytes[1] - read_nbytes[0] == num_reads * read_nbytes[0]


@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe"])
def test_a_step_of_an_adapter_is_planned_as_long_as_its_rehearsal_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Not as long as a step of all weights, and each micro-batch by itself."""
    tiny_causal_lm(architecture, num_hidden_layers=2, vocab_size=256).save_pretrained(tmp_path)
    steps, seen = rehearsal._steps, []

    def in_a_second(own: Any, ids: torch.Tensor, micro_batch: int | None) -> Any:
        units = infinity.engine_of(own).store.units
        num_trained = sum(tensor.numel for unit in units for tensor in unit.trainable())
        seen.append((num_trained, tuple(ids.shape), micro_batch))
        found, shape = steps(own, ids, micro_batch)
        return {track: [1.0, 1.0, 1.0, 2.0] for track in found}, shape

    monkeypatch.setattr(rehearsal, "_steps", in_a_second)
    has_experts = architecture == "qwen3-moe"
    table = {
        "tiers": {"host": {"capacity": "64MiB"}},
        "schedule": {"micro_batch": 1},
        "precision": {"compute": "bfloat16"},
        "adapter": {"rank": 4, "experts": has_experts},
    }
    settings, directory = SwapConfig.load(table), read_directory(tmp_path)
    model, batch = model_for(settings, directory.shape, directory.stored), Batch(3 * 16, 16)
    found = rehearsal.rehearse(settings, model, batch, [])
    assert found is not None and model.frozen is not None
    assert seen == [(model.frozen.trained_params, (3, 16), 1)]
    machine = ANY_MACHINE.model_copy(update={"device": Device(count=1, tflops=found.flops / 1e12)})
    planned = forecast(settings, model, machine, batch).step
    assert planned.busy_s["compute"] == pytest.approx(1.0, rel=0.05)
    measured = measure(settings, model, (), batch)
    assert "computing" in measured.source.partition(UNSURE)[2]
    machine = measured.model_copy(update={"nvme": ANY_MACHINE.nvme})
    base = forecast(settings, model, machine, batch)
    told = {advice.change for advice in advise(settings, model, base)}
    assert "computing in fp32 (precision.compute)" in told


def test_a_slow_processor_rehearses_few_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in bf16 may take a hundred times as long as in fp32, and a plan ten minutes."""
    tiny_causal_lm("llama", num_hidden_layers=2, vocab_size=256).save_pretrained(tmp_path)
    steps, seen = rehearsal._steps, []
    monkeypatch.setattr(rehearsal, "_steps", lambda *args: seen.append(steps(*args)) or seen[-1])
    settings, directory = SwapConfig.load({"adapter": {"rank": 4}}), read_directory(tmp_path)
    model, batch = model_for(settings, directory.shape, directory.stored), Batch(16, 16)
    for long_s in (60.0, 0.0):
        monkeypatch.setattr(rehearsal, "_LONG_S", long_s)
        assert rehearsal.rehearse(settings, model, batch, [])
    assert [shape for _, shape in seen] == [(1, 16), (1, 8)]


@pytest.mark.parametrize("model_type", ["falcon_h1", "bamba", "lfm2"])
def test_blocks_are_made_where_a_configuration_computes_their_kinds(model_type: str) -> None:
    """Falcon-H1 and Bamba have a list of kinds that cannot be set."""
    config = tiny_config(model_type)
    config.num_hidden_layers = 4
    if model_type == "lfm2":
        config.layer_types = ["conv", "full_attention"] * 2
    model: Any = SimpleNamespace(hf_config=config, frozen=None)
    own = rehearsal._own_blocks(model, torch.float32)
    assert len(own.model.layers) == rehearsal._NUM_BLOCKS < 4
