"""What was published of models, and what a plan says of them before their download.

data/published.json has the config.json of each (less keys that no size depends on), where it was
found, the numbers of its index, and the size of its files if that is known. `not_counted`: bytes of
the files of which config.json says nothing, and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from infinity.errors import ConfigError
from infinity.plan.directory import ModelDirectory, read_directory
from infinity.plan.shapes import numel_of
from tests.support.exhaustive import first_of_each

FILE = Path(__file__).parent / "data/published.json"
PUBLISHED: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())
NAMES_OF_MLX = ["language_model.lm_head.weight", "vision_tower.pos_embed.weight"]


def planned(facts: dict[str, Any], directory: Path, names: list[str]) -> ModelDirectory:
    (directory / "config.json").write_text(json.dumps(facts["config"]))
    metadata = {"total_size": facts.get("total_size")}
    index = {"metadata": metadata, "weight_map": dict.fromkeys(names, "1.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return read_directory(directory)


def kind_of(facts: dict[str, Any]) -> tuple[object, ...]:
    """What a size follows from: the architecture, and the format of the weights."""
    config = facts["config"]
    quantised = config.get("quantization_config", {})
    return config["model_type"], quantised.get("quant_method"), "quantization" in config


@pytest.mark.parametrize(
    "facts", first_of_each(PUBLISHED["counted"], kind_of), ids=lambda facts: facts["name"]
)
def test_a_plan_has_the_published_size(facts: dict[str, Any], tmp_path: Path) -> None:
    plain = {k: v for k, v in facts["config"].items() if "quantization" not in k}
    kind = getattr(transformers, facts.get("class", plain["architectures"][0]))
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**plain))
    found = planned(facts, tmp_path, list(model.state_dict()))
    num_params = found.shape.num_params + numel_of(found.shape.tower)
    assert num_params == sum(parameter.numel() for parameter in model.parameters())
    otherwise = num_params + facts.get("parameters_counted_otherwise", 0)
    assert facts.get("total_parameters") in (None, otherwise, found.shape.num_params)
    tower, others = found.stored.part("tower").nbytes, facts.get("not_counted", 0)
    nbytes = found.stored.nbytes + tower + others
    assert nbytes == facts.get("total_size", nbytes), facts.get("because")
    if "files_size" in facts:
        assert 40 < (facts["files_size"] - nbytes) / facts["tensors"] < 200  # Of headers.


@pytest.mark.parametrize("facts", PUBLISHED["refused"], ids=lambda f: f["config"]["model_type"])
def test_a_model_without_a_class_is_refused(facts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=facts["config"]["model_type"]):
        planned(facts, tmp_path, [])


def test_an_index_with_names_of_another_writer_is_refused(tmp_path: Path) -> None:
    [facts] = [facts for facts in PUBLISHED["counted"] if facts["name"] == "fast_qwen"]
    with pytest.raises(ConfigError, match="lacks .*visual.*MLX stores layers of some classes"):
        planned(facts, tmp_path, NAMES_OF_MLX)
