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
from infinity.plan.layout import PlannedModel
from infinity.plan.model import model_for
from infinity.tools.plan.advice import advise
from infinity.tools.plan.report import sentences
from tests.support.exhaustive import sampled
from tests.support.machines import ANY_MACHINE
from tests.support.quantized import tiny_causal_lm, write_quantized

SPARSE = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 6}
# Architecture, layout, changes of its configuration.
BASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bf16": ("llama", "bf16", {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1024}),
    "nf4": ("llama", "nf4", {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1024}),
    "int4": ("deepseek-v3", "int4", {**SPARSE, "n_routed_experts": 16}),
    "fp8": ("qwen3-moe", "fp8-bf16-scales", {**SPARSE, "num_experts": 16}),
    # Experts in a stack each of codes, scales and biases: a tile is four ranges of the files.
    "mxfp4": ("gpt-oss", "mxfp4", {
        "hidden_size": 256, "intermediate_size": 128, "num_local_experts": 16,
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    }),
}  # fmt: skip
NUM_STEPS = 3


def length_of(table: dict[str, Any]) -> int:
    """No byte depends on the number of tokens, but that each expert is chosen by some: one that is
    not stays where it is."""
    return 4 if table["schedule"]["tile"] == 0 else 16


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


def settled(base: Path, table: dict[str, Any]) -> tuple[SwapConfig, PlannedModel]:
    adapter = {"rank": 4, "alpha": 8, "targets": ["o_proj"]}
    settings = SwapConfig.load({**table, "adapter": adapter, "model": {"path": str(base)}})
    directory = read_directory(base)
    return settings, model_for(settings, directory.shape, directory.stored)


def planned(base: Path, table: dict[str, Any]) -> Forecast:
    length = length_of(table)
    return forecast(*settled(base, table), ANY_MACHINE, Batch(2 * length, length))


def read_by_a_step(base: Path, table: dict[str, Any], counter: str = "shard_read_nbytes") -> int:
    """Returns the bytes of the base that the last of some steps reads."""
    with infinity.init_empty_weights():
        config = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj"]))
    infinity.offload(model, table, weights=base)
    try:
        counters, optimizer = infinity.engine_of(model).counters, infinity.AdamW(model, lr=1e-3)
        length = length_of(table)
        for _ in range(NUM_STEPS):
            before = counters.snapshot().get(counter, 0)
            infinity.forward_backward(
                model,
                lambda x: model(input_ids=x, labels=x, use_cache=False).loss,
                list(torch.arange(2 * length).view(2, 1, length)),
            )
            optimizer.step()
            optimizer.zero_grad()
        return int(counters.snapshot()[counter] - before)
    finally:
        infinity.close(model)


@pytest.mark.parametrize(
    ("name", "host_of_base", "tile", "within"),
    sampled(
        [
            ("bf16", 0.8, 0, 0.01), ("bf16", 1.2, 0, 0.01), ("nf4", 1.5, 0, 0.01),
            ("nf4", 0.5, "auto", 0.01),  # Less than a block.
            ("int4", 0.8, "auto", 0.04), ("int4", 1.0, "auto", 0.01), ("fp8", 0.5, "auto", 0.06),
            ("mxfp4", 0.8, "auto", 0.01), ("mxfp4", 1.0, "auto", 0.01),
        ],
        lambda case: case[:2] in [("bf16", 1.2), ("nf4", 0.5), ("int4", 0.8), ("mxfp4", 1.0)],
    ),
)  # fmt: skip
def test_bytes_that_a_step_reads_of_a_base_in_place_are_those_of_a_run(
    tmp_path: Path, name: str, host_of_base: float, tile: int | str, within: float
) -> None:
    """The pages of every tile are counted, and holes of host memory. One tile of a base as small as
    these is some percent: weights that stay decoded where the sweep turns are not read again, which
    the plan does not have."""
    base = tmp_path / "base"
    architecture, layout, changes = BASES[name]
    write_quantized(tiny_causal_lm(architecture, **changes), base, layout)
    table = table_of(base, int(host_of_base * read_directory(base).stored.nbytes) >> 12 << 12, tile)
    found = planned(base, table)
    assert found.placed_nbytes["base"].keys() == {"checkpoint"}
    ran = read_by_a_step(base, table)
    assert found.step.moved_nbytes["checkpoint_read"] == pytest.approx(ran, rel=within) and ran


def test_a_budget_that_just_does_without_tiles_is_advised_to_take_some(tmp_path: Path) -> None:
    """More memory would read more: "auto" takes no tiles where the model fits without."""
    base = tmp_path / "base"
    architecture, layout, changes = BASES["fp8"]
    write_quantized(tiny_causal_lm(architecture, **changes), base, layout)
    tables = [
        table_of(base, int(share * read_directory(base).stored.nbytes) >> 12 << 12, "auto")
        for share in (0.7, 0.8)
    ]
    tiled, whole = (planned(base, table) for table in tables)
    assert whole.is_tight and not tiled.is_tight
    assert whole.step.moved_nbytes["checkpoint_read"] > tiled.step.moved_nbytes["checkpoint_read"]
    (advised,) = [
        advice
        for advice in advise(*settled(base, tables[1]), whole)
        if "schedule.tile" in advice.change
    ]
    assert advised.ratio > 1


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


def test_a_base_that_the_engine_copies_is_counted_decoded(tmp_path: Path) -> None:
    base = tmp_path / "base"
    architecture, layout, changes = BASES["nf4"]
    write_quantized(
        tiny_causal_lm(architecture, **{**changes, "num_hidden_layers": 2}), base, layout
    )
    stored_nbytes = read_directory(base).stored.nbytes
    table = table_of(base, 8 * stored_nbytes >> 12 << 12, 0)
    table["placement"] |= {"parameters": "nvme", "frozen": "copy"}
    found = planned(base, table)
    (placed,) = found.placed_nbytes["base"].items()
    assert placed[0] == "nvme" and placed[1] > 3 * stored_nbytes
    assert "checkpoint_read" not in found.step.moved_nbytes
    ran = read_by_a_step(base, table, "nvme_read_nbytes")
    assert found.step.moved_nbytes["nvme_read"] == pytest.approx(ran, rel=0.03) and ran
    assert "copied, decoded" in " ".join(sentences(found))
