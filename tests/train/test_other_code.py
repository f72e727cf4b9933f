"""Directories with code of their own, and with layers that the class does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig
from typer.testing import CliRunner

from infinity.checkpoint import weight_source
from infinity.errors import ConfigError
from infinity.tools.cli import app
from tests.support.forked import COMMAND, run_script

from .test_text_of_images import DEEPSEEK, TEXT

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
KINDS = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}


def test_code_of_a_directory_runs_only_where_the_file_says_so(tmp_path: Path) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(LlamaConfig(**TEXT)).save_pretrained(base)
    table = json.loads((base / "config.json").read_text())
    own = {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": KINDS}
    (base / "config.json").write_text(json.dumps(table | own))
    (base / "own.py").write_text(CODE)
    (tmp_path / "text.txt").write_text("one and one are two\n" * 99)
    file = tmp_path / "run.toml"
    file.write_text(
        'model.path = "base"\noutput.directory = "out"\nadapter.rank = 2\ntrain.steps = 2\n'
        'train.batch_size = 2\ndata = {paths = ["text.txt"], sequence_length = 32}\n'
        'tiers.host.capacity = "24MiB"\nplacement.parameters = "host"\n'
    )
    trusted = ("--set", "model.trust_remote_code=true")
    for command in ("plan", "train"):
        refused = run_script(COMMAND, command, file)
        assert refused.returncode == 2 and "own_llama" in refused.stderr, refused.stderr
        done = run_script(COMMAND, command, file, *trusted)
        assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    result = CliRunner().invoke(app, ["new", str(base)])
    assert result.exit_code == 2 and "own_llama" in result.output


@pytest.mark.parametrize("prefix", ["model.layers.2.", "mtp.layers.0."])
def test_layers_for_multi_token_prediction_are_left_out(prefix: str, tmp_path: Path) -> None:
    config = DeepseekV3Config(**DEEPSEEK, num_nextn_predict_layers=1)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {f"{prefix}mlp.up_proj.weight": torch.zeros(4)}, file)
    assert weight_source(tmp_path).plan(model).groups
    save_file(weights | {"model.layers.3.mlp.up_proj.weight": torch.zeros(4)}, file)
    with pytest.raises(ConfigError, match="no place for.*layers.3"):
        weight_source(tmp_path).plan(model)
