"""What `[model]` accepts, and the versions that it needs."""

from __future__ import annotations

import json
import logging
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from infinity.checkpoint import weight_source
from infinity.config import Model
from infinity.config.extras import TRIED, require_release
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import BEHIND_PADDING, positions_of
from infinity.tools.training.model import plan_model

MOE = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4}


def hf_config(**keys: Any) -> Any:
    return plan_model(Model(config=MOE | keys)).hf_config


def test_a_key_that_only_the_code_of_the_model_reads_is_accepted() -> None:
    assert hf_config(head_dim=32).head_dim == 32


def test_a_key_that_nearly_is_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="hiden_size.*did you mean 'hidden_size'"):
        hf_config(hiden_size=32)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "dynamic", "factor": 3.0}, 192),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}, 64),
    ],
)  # fmt: skip
def test_positions_are_those_that_the_rotary_embedding_stretches_to(
    rope: dict[str, Any], positions: int
) -> None:
    table = MOE | {"max_position_embeddings": 64, "sliding_window": 16}
    found = Model(config=table | ({"rope_parameters": {"rope_theta": 1e4, **rope}} if rope else {}))
    assert positions_of(plan_model(found).hf_config) == positions
    for kind in ("mamba", "xlnet"):
        assert positions_of(plan_model(Model(config={"model_type": kind})).hf_config) is None


@pytest.mark.parametrize(
    "kind", sorted(BEHIND_PADDING - {"layoutlmv3", "lilt", "xmod"})
)  # They ask for more.
def test_positions_behind_the_padding_token_are_those_that_the_model_embeds(kind: str) -> None:
    config = AutoConfig.for_model(
        kind, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        vocab_size=16, entity_vocab_size=4, max_position_embeddings=12, attention_window=[4],
    )  # fmt: skip
    model, positions = AutoModel.from_config(config).eval(), positions_of(config)
    assert positions is not None
    model(input_ids=torch.full((1, positions), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, positions + 1), 5))


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
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="it has no file$"):
        weight_source(tmp_path)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("infinity.config.extras.version", version)
    with pytest.raises(ConfigError, match=r"infinity train needs .*infinity-offload\[hf\]"):
        require_release("transformers", "infinity train")


@pytest.mark.parametrize(
    ("found", "is_fit"),
    [("4.57.1", False), ("5.15.9", False), ("5.16.0", True), ("5.24.0.dev0", True),
     ("6.0.0", False)],
)  # fmt: skip
def test_a_version_out_of_bounds_is_named(
    found: str, is_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.config.extras.version", lambda name: found)
    if is_fit:
        require_release("transformers", "infinity train")
        return
    with pytest.raises(ConfigError, match=f">=5.16,<6, got {found} .*no older.*pip install"):
        require_release("transformers", "infinity train")


@pytest.mark.parametrize("package", list(TRIED))
def test_a_newer_minor_release_is_used_and_warned_of_once(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    major, minor = TRIED[package].newest
    found = f"{major}.{minor + 1}.0"
    monkeypatch.setattr("infinity.config.extras.version", lambda name: found)
    with caplog.at_level(logging.WARNING, logger="infinity"):
        for _ in range(2):
            require_release(package, "infinity")
    assert caplog.text.count(f"{package} {found} is newer than all that were tried") == 1
    assert f"pip install '{package}<{major}.{minor + 1}'" in caplog.text


@pytest.mark.parametrize("package", list(TRIED))
def test_a_release_older_than_all_tried_ones_is_refused_with_the_reason_and_the_command(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = TRIED[package].oldest
    found = f"{major}.{minor - 1}.4"
    monkeypatch.setattr("infinity.config.extras.version", lambda name: found)
    says = rf"got {found} \(it uses parts that are not public.*pip install '{package}>={major}\.{minor},"
    with pytest.raises(ConfigError, match=says):
        require_release(package, "infinity")


def test_the_bounds_are_those_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = {*project["dependencies"], *project["optional-dependencies"]["hf"]}
    assert {f"{package}{tried.wanted}" for package, tried in TRIED.items()} <= asked
