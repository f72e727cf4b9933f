"""Adapters on the experts of a quantised base that rests in its own files, experts in tiles.

The comparison is the model with the decoded weights in memory and adapters as factors
(`infinity.factored_experts`), with `torch.optim.AdamW`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.modules.tiling.experts import TiledExperts
from tests.support.exhaustive import sampled
from tests.support.quantized import tiny_causal_lm, write_decoded, write_quantized

from .in_place import config_of, train

LAYOUTS = {"qwen3-moe": "fp8-bf16-scales", "deepseek-v3": "int4", "gpt-oss": "mxfp4"}


def adapted(model: Any) -> Any:
    model.set_experts_implementation("eager")
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=4, target_modules=["o_proj"], init_lora_weights=False,
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    return infinity.factored_experts(peft.get_peft_model(model, config))


@pytest.mark.parametrize("architecture", sampled(LAYOUTS, lambda name: name != "deepseek-v3"))
def test_experts_in_place_train_as_decoded_ones_in_memory(
    architecture: str, tmp_path: Path
) -> None:
    """Losses, gradients, adapters and moments: untiled and in tiles, layer-major and not."""
    quantized, decoded = tmp_path / "base", tmp_path / "decoded"
    write_quantized(tiny_causal_lm(architecture), quantized, LAYOUTS[architecture])
    write_decoded(quantized, decoded)
    plain = adapted(AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.bfloat16))
    start = {n: p.detach().clone() for n, p in plain.named_parameters() if p.requires_grad}
    trained = [each for each in plain.parameters() if each.requires_grad]
    expected = train(plain, torch.optim.AdamW(trained, lr=1e-2, fused=True))
    for tile, layer_major in ((0, True), ("128KiB", False), ("128KiB", True)):
        directory = tmp_path / f"{tile} {layer_major}"
        directory.mkdir()
        config = config_of(directory, schedule={"tile": tile})
        with infinity.init_empty_weights(config):
            settings = AutoConfig.from_pretrained(decoded, dtype=torch.bfloat16)
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
        model = infinity.offload(adapted(model), config, weights=quantized)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(start[name])
        assert any(isinstance(each, TiledExperts) for each in model.modules()) == bool(tile)
        found = train(model, infinity.AdamW(model, lr=1e-2), layer_major=layer_major)
        infinity.close(model)
        different = [name for name in expected if not torch.equal(expected[name], found[name])]
        assert not different, (tile, layer_major, different)
