"""Every host budget that is accepted over a base in its own files trains, for each codec."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.sizes import KIB, align_up
from tests.support.exhaustive import sampled
from tests.support.offloading import small_tiers
from tests.support.quantized import tiny_causal_lm, write_quantized

LAYOUTS = {
    "llama": "nf4", "deepseek-v3": "int4", "gpt-oss": "mxfp4", "qwen3-moe": "fp8-bf16-scales",
}  # fmt: skip
# Times the least budget. At 1.4 and 2.0 blocks in use once divided what was free.
ABOVE = (1.0, 1.2, 1.4, 2.0)


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_quantized(tiny_causal_lm(request.param), tmp_path / "base", LAYOUTS[request.param])
    return tmp_path / "base"


def train_a_step(base: Path, capacity: int, tile: int | str) -> torch.Tensor:
    """Returns the trained adapter of one layer-major step."""
    table: dict[str, Any] = {
        "tiers": small_tiers(base.parent / "swap", capacity),
        "placement": dict.fromkeys(("master", "moments", "gradients"), "host"),
        "precision": {"compute": "bfloat16"},
        "schedule": {"tile": tile},
    }
    with infinity.init_empty_weights():
        config = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(7)
    lora = peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, lora)
    infinity.offload(model, table, weights=base)
    try:
        optimizer = infinity.AdamW(model, lr=1e-2)
        ids = torch.arange(24).view(2, 1, 12)
        infinity.forward_backward(
            model, lambda x: model(input_ids=x, labels=x, use_cache=False).loss, list(ids)
        )
        optimizer.step()
        optimizer.zero_grad()
        trained = [each.detach().clone() for each in model.parameters() if each.requires_grad]
        return torch.cat([each.flatten() for each in trained])
    finally:
        infinity.close(model)


@pytest.mark.parametrize(
    ("base", "tile"),
    sampled(
        product(LAYOUTS, [0, "auto"]),
        lambda case: case in [("gpt-oss", 0), ("deepseek-v3", "auto")],
    ),
    indirect=["base"],
)
def test_every_accepted_budget_over_a_quantised_base_trains(base: Path, tile: int | str) -> None:
    """From the least, which the refusal of a smaller one names. Without tiles, to the same bits."""
    with pytest.raises(infinity.CapacityError) as refused:
        train_a_step(base, 64 * KIB, tile)
    least = align_up(refused.value.needed_nbytes, 4 * KIB)
    with pytest.raises(infinity.CapacityError, match="the smallest host budget that works"):
        train_a_step(base, least - 4 * KIB, tile)
    trained = [train_a_step(base, int(least * factor), tile) for factor in ABOVE]
    assert all(each.isfinite().all() for each in trained)
    assert tile != 0 or all(torch.equal(each, trained[0]) for each in trained)
