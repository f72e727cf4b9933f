"""`infinity export`: a checkpoint of a run, read by the programs it was written for."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from transformers import AutoModelForCausalLM

from infinity.checkpoint.reader import CheckpointSource
from infinity.config import SwapConfig
from infinity.tools.training import program
from tests.support.bits import assert_same
from tests.support.commands import run_command

from .jobs import CONFIG, write_job

RUN = """steps = 3
[precision]
compute = "bfloat16"
[checkpoint]
every = 2
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with checkpoints and the export of `infinity train` itself."""
    directory = write_job(tmp_path_factory.mktemp("job"), CONFIG + RUN)
    console = Console(file=io.StringIO())
    _, code = program.train(SwapConfig.load(directory / "job.toml"), console=console)
    assert code == 0
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_hf_is_what_the_run_itself_exported(job: Path, tmp_path: Path) -> None:
    checkpoints = job / "output" / "checkpoints"
    result = run_command("export", checkpoints, tmp_path / "hf", "--max-shard", "8KiB")
    assert result.exit_code == 0 and "step-00000003" in result.stdout, result.stderr
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert_same(weights(job / "output"), weights(tmp_path / "hf"))
    again = run_command("export", checkpoints / "step-00000002", tmp_path / "older")
    assert again.exit_code == 0
    older, newer = weights(tmp_path / "older"), weights(tmp_path / "hf")
    assert any(not torch.equal(older[name], newer[name]) for name in newer)


def test_fp32_is_the_master(job: Path, tmp_path: Path) -> None:
    """Rounded half up, as the master splits, it gives the weight; it is more than the weight."""
    result = run_command(
        "export", job / "output" / "checkpoints", tmp_path / "fp32", "--to", "fp32"
    )
    assert result.exit_code == 0, result.stderr
    wide, narrow = weights(tmp_path / "fp32"), weights(job / "output")
    assert {value.dtype for value in wide.values()} == {torch.float32}
    with CheckpointSource(job / "output" / "checkpoints") as source:
        masters = {i.name: source.tensor(i) for i in source.infos if i.kind == "master"}
    assert_same(masters, wide)
    for name, value in wide.items():
        half_up = (value.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
        assert torch.equal(half_up, narrow[name]), name
    assert any(not torch.equal(value, narrow[name].float()) for name, value in wide.items())


def test_dcp_loads_into_plain_pytorch(job: Path, tmp_path: Path) -> None:
    result = run_command("export", job / "output" / "checkpoints", tmp_path / "dcp", "--to", "dcp")
    assert result.exit_code == 0, result.stderr
    plain = AutoModelForCausalLM.from_pretrained(job / "output")
    expected = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    decayed = [p for n, p in plain.named_parameters() if "bias" not in n and "norm" not in n]
    rest = [p for n, p in plain.named_parameters() if "bias" in n or "norm" in n]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest}])
    state = {
        "model": get_model_state_dict(plain),
        "optimizer": get_optimizer_state_dict(plain, optimizer),
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    plain.load_state_dict(state["model"])
    assert_same(expected, dict(plain.named_parameters()))
    steps = {entry["step"].item() for entry in state["optimizer"]["state"].values()}
    assert steps == {3.0}


def test_away_from_its_run_the_architecture_is_asked_for(job: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "step-00000003"
    shutil.copytree(job / "output" / "checkpoints" / "step-00000003", alone)
    result = run_command("export", alone, tmp_path / "hf")
    assert result.exit_code == 2 and "--config FILE" in result.stderr
    assert run_command("export", alone, tmp_path / "dcp", "--to", "dcp").exit_code == 0
    result = run_command("export", alone, tmp_path / "hf", "--config", job / "job.toml")
    assert result.exit_code == 0, result.stderr
    assert_same(weights(job / "output"), weights(tmp_path / "hf"))
    other = (CONFIG + RUN).replace("n_embd = 16", "n_embd = 32")
    (tmp_path / "other.toml").write_text(other)
    result = run_command("export", alone, tmp_path / "no", "--config", tmp_path / "other.toml")
    assert result.exit_code == 2 and "another model" in result.stderr
    assert not (tmp_path / "no").exists()
    result = run_command("export", tmp_path, tmp_path / "no")
    assert result.exit_code == 2 and "no checkpoint" in result.stderr
