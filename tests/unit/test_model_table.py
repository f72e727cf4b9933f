"""What `[model]` accepts, and the versions that it needs."""

from __future__ import annotations

import json
import logging
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from infinity.config import Model
from infinity.config.extras import TRANSFORMERS, require_transformers
from infinity.errors import ConfigError
from infinity.training.model import plan_model

MOE = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4}


def hf_config(**keys: Any) -> Any:
    return plan_model(Model(config=MOE | keys)).hf_config


def test_a_key_that_only_the_code_of_the_model_reads_is_accepted() -> None:
    assert hf_config(head_dim=32).head_dim == 32


def test_a_key_that_nearly_is_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="hiden_size.*did you mean 'hidden_size'"):
        hf_config(hiden_size=32)


def test_a_key_that_nothing_reads_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="infinity"):
        hf_config(zzyx=1)
    assert "model.config.zzyx: nothing of qwen3_moe is known to read it" in caplog.text


def test_a_model_is_planned_from_its_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE | {"head_dim": 32}))
    plan = plan_model(Model(path=tmp_path), reads_weights=False)
    assert plan.hf_config.head_dim == 32 and plan.weights is None
    with pytest.raises(ConfigError, match="neither model.safetensors"):
        plan_model(Model(path=tmp_path))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("infinity.config.extras.version", version)
    with pytest.raises(ConfigError, match=r"infinity train needs .*infinity-offload\[hf\]"):
        require_transformers("infinity train")


@pytest.mark.parametrize(
    ("found", "is_fit"),
    [("4.57.1", False), ("5.22.9", False), ("5.23.0", True), ("5.30.0.dev0", True),
     ("6.0.0", False)],
)  # fmt: skip
def test_a_version_out_of_bounds_is_named(
    found: str, is_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.config.extras.version", lambda name: found)
    if is_fit:
        require_transformers("infinity train")
        return
    with pytest.raises(ConfigError, match=f">=5.23,<6, got {found}"):
        require_transformers("infinity train")


def test_the_bounds_are_those_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lowest, beyond = (".".join(map(str, bound)) for bound in TRANSFORMERS)
    assert f"transformers>={lowest},<{beyond}" in project["optional-dependencies"]["hf"]
