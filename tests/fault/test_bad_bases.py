"""A base that is damaged or unknown is refused by name when it is opened, and nothing is touched."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.errors import InfinityError
from tests.support.quantized import CONFIG_NAME, tiny_causal_lm, write_quantized

SCALE = "model.layers.1.mlp.experts.0.up_proj.weight_scale"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "base"
    write_quantized(tiny_causal_lm("kimi-k2"), path, "int4", num_shards=1)
    return path


def shard_of(base: Path) -> Path:
    (path,) = base.glob("*.safetensors")
    return path


def is_truncated(base: Path) -> None:
    shard = shard_of(base)
    shard.write_bytes(shard.read_bytes()[:-1])


def is_absent(base: Path) -> None:
    shard_of(base).unlink()


def lacks_a_scale(base: Path) -> None:
    content = shard_of(base).read_bytes()
    (nbytes,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + nbytes].replace(
        SCALE.encode(), SCALE.replace("scale", "other").encode()
    )
    shard_of(base).write_bytes(content[:8] + header + content[8 + nbytes :])
    index = base / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(SCALE, SCALE.replace("scale", "other")))


def has(**changes: Any) -> Callable[[Path], None]:
    def change(base: Path) -> None:
        file = base / CONFIG_NAME
        config = json.loads(file.read_text())
        table = config["quantization_config"]
        if "group_size" in changes:
            table["config_groups"]["group_0"]["weights"] |= changes
        else:
            table |= changes
        file.write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (is_truncated, r"model-00001-of-00001\.safetensors"),
        (is_absent, r"model-00001-of-00001\.safetensors"),
        (lacks_a_scale, r"layers\.1\.mlp\.experts\.0\.up_proj"),
        (has(group_size=64), r"group"),
        (has(quant_method="awq"), "awq"),
    ],
    ids=["truncated", "absent", "no scale", "wrong groups", "unknown format"],
)
def test_a_bad_base_is_named_and_nothing_is_touched(
    damage: Callable[[Path], None], named: str, base: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "base"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with infinity.init_empty_weights():
        config = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    damage(copy)
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    swap = tmp_path / "swap"
    table = {"tiers": {"host": {"capacity": "32MiB"}, "nvme": [{"path": str(swap)}]}}
    with pytest.raises(InfinityError, match=named) as refused:
        infinity.offload(model, table, weights=copy)
    assert str(copy) in str(refused.value)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    assert not swap.exists() or not any(swap.iterdir())
    infinity.offload(model, table, weights=base)  # The model is as it was.
    infinity.close(model)
