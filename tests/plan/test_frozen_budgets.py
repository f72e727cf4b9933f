"""The plan of an adapter over a base in its own files beside the engine: budgets, and bytes read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.config import SwapConfig
from infinity.plan import Batch, Forecast, forecast
from infinity.plan.directory import read_directory
from infinity.plan.frozen import frozen_model
from infinity.testing.quantized import tiny_causal_lm, write_quantized
from tests.support.machines import ANY_MACHINE

SPARSE = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 6}
# Architecture, layout, changes of its configuration.
BASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bf16": ("llama", "bf16", {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1024}),
    "nf4": ("llama", "nf4", {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1024}),
    "int4": ("deepseek-v3", "int4", {**SPARSE, "n_routed_experts": 16}),
    "fp8": ("qwen3-moe", "fp8-bf16-scales", {**SPARSE, "num_experts": 16}),
}  # fmt: skip
LENGTH, NUM_STEPS = 16, 3


def table_of(base: Path, host_nbytes: int, tile: int | str) -> dict[str, Any]:
    return {
        "tiers": {
            "host": {"capacity": host_nbytes},
            "nvme": [{"path": str(base.parent / "swap")}],
        },
        "placement": dict.fromkeys(("master", "moments", "gradients"), "host"),
        "schedule": {"micro_batch": 1, "tile": tile},
        "precision": {"compute": "bfloat16"},
    }


def planned(base: Path, table: dict[str, Any]) -> Forecast:
    adapter = {"rank": 4, "alpha": 8, "targets": ["o_proj"]}
    settings = SwapConfig.load({**table, "adapter": adapter, "model": {"path": str(base)}})
    assert settings.adapter is not None
    directory = read_directory(base)
    model = frozen_model(directory.shape, directory.stored, settings.adapter, torch.bfloat16)
    return forecast(settings, model, ANY_MACHINE, Batch(2 * LENGTH, LENGTH))


def read_by_a_step(base: Path, table: dict[str, Any]) -> int:
    """Returns the bytes of the base that the last of some steps reads."""
    with infinity.init_empty_weights():
        config = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj"]))
    infinity.offload(model, table, weights=base)
    try:
        counters, optimizer = infinity.engine_of(model).counters, infinity.AdamW(model, lr=1e-3)
        for _ in range(NUM_STEPS):
            before = counters.snapshot().get("shard_read_nbytes", 0)
            infinity.forward_backward(
                model,
                lambda x: model(input_ids=x, labels=x, use_cache=False).loss,
                list(torch.arange(2 * LENGTH).view(2, 1, LENGTH)),
            )
            optimizer.step()
            optimizer.zero_grad()
        return int(counters.snapshot()["shard_read_nbytes"] - before)
    finally:
        infinity.close(model)


@pytest.mark.parametrize(
    ("name", "host_of_base", "tile", "within"),
    [
        ("bf16", 0.8, 0, 0.03), ("bf16", 1.2, 0, 0.03), ("nf4", 1.5, 0, 0.03),
        ("int4", 0.5, "auto", 0.1), ("int4", 0.8, "auto", 0.1), ("fp8", 0.5, "auto", 0.1),
    ],
)  # fmt: skip
def test_bytes_that_a_step_reads_of_a_base_in_place_are_those_of_a_run(
    tmp_path: Path, name: str, host_of_base: float, tile: int | str, within: float
) -> None:
    """Whole pages and holes in host memory are some percent of chunks as small as these."""
    base = tmp_path / "base"
    architecture, layout, changes = BASES[name]
    write_quantized(tiny_causal_lm(architecture, **changes), base, layout)
    table = table_of(base, int(host_of_base * read_directory(base).stored.nbytes) >> 12 << 12, tile)
    found = planned(base, table)
    assert found.placed_nbytes["base"].keys() == {"checkpoint"}
    ran = read_by_a_step(base, table)
    assert found.step.moved_nbytes["checkpoint_read"] == pytest.approx(ran, rel=within) and ran


@pytest.mark.parametrize("name", BASES)
def test_the_least_budget_over_a_base_in_place_is_that_of_the_engine(
    tmp_path: Path, name: str
) -> None:
    base = tmp_path / "base"
    architecture, layout, changes = BASES[name]
    write_quantized(tiny_causal_lm(architecture, **changes), base, layout)
    table = table_of(base, 1 << 18, 0)
    with pytest.raises(infinity.CapacityError) as by_plan:
        planned(base, table)
    with pytest.raises(infinity.CapacityError) as by_engine:
        read_by_a_step(base, table)
    needed = by_engine.value.needed_nbytes
    assert by_plan.value.needed_nbytes == pytest.approx(needed, rel=0.02)
    assert by_plan.value.key == by_engine.value.key == "tiers.host.capacity"
