"""The table `[adapter]`: defaults, words that stand alone, what PEFT has no adapters for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.config import AdapterConfig, SwapConfig
from infinity.errors import ConfigError


def read(**table: Any) -> AdapterConfig:
    config = SwapConfig.load({"adapter": table})
    assert config.adapter is not None
    assert SwapConfig.load(config.to_dict()) == config
    return config.adapter


def test_no_adapter_without_the_table() -> None:
    config = SwapConfig.load({})
    assert config.adapter is None and SwapConfig.load(config.to_dict()).adapter is None


def test_an_empty_table_is_lora_of_attention_and_dense_layers() -> None:
    adapter = read()
    assert (adapter.method, adapter.rank, adapter.alpha) == ("lora", 16, 32.0)
    assert adapter.targets == ("auto",) and not adapter.experts and adapter.resume is None
    assert adapter.set_keys == {}


def test_a_target_may_stand_without_its_list() -> None:
    assert read(targets="all-linear").targets == ("all-linear",)
    assert read(targets=["q_proj", "v_proj"]).targets == ("q_proj", "v_proj")


def test_targets_may_be_empty_where_experts_are_adapted() -> None:
    assert read(targets=[], experts=True).targets == ()


def test_resume_is_absolute_and_set_keys_are_those_of_the_file(tmp_path: Path) -> None:
    adapter = read(resume=str(tmp_path), rank=4)
    assert adapter.resume == tmp_path
    assert adapter.set_keys == {"resume": tmp_path, "rank": 4}


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ({"method": "loha"}, "adapter.method"),
        ({"rank": 0}, "adapter.rank"),
        ({"alpha": 0}, "adapter.alpha"),
        ({"dropout": 1.0}, "adapter.dropout"),
        ({"targets": ["auto", "q_proj"]}, "adapter.targets"),
        ({"targets": []}, "adapter.targets"),
        ({"targets": [""]}, "adapter.targets[0]"),
        ({"experts": True, "dropout": 0.1}, "adapter.dropout"),
        ({"experts": True, "method": "dora"}, "adapter.method"),
        ({"ranks": 4}, "adapter.ranks"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(table: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError, match=f"config: {place.replace('[', '.').replace(']', '.')}: "):
        SwapConfig.load({"adapter": table})
