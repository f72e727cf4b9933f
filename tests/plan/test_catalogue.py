"""`infinity plan --table`, `--list` and `--write`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import SwapConfig
from infinity.plan.files import shipped_in
from infinity.plan.hardware import load_hardware
from infinity.plan.model import load_model
from infinity.tools.plan.catalogue import Cell, plan_cell, published_models, to_markdown, to_text
from tests.support.commands import imported_by, run_command


def plan(*arguments: object) -> Any:
    return run_command("plan", *arguments)


def test_a_cell_is_the_plan_of_the_file_that_new_writes() -> None:
    found = plan_cell("qwen3-8b", "rtx4090-1nvme", load_hardware("rtx4090-1nvme"), 16)
    assert found.tokens_per_s and found.tokens_per_step == 16 * 2048
    assert found.tokens_per_s == pytest.approx(found.tokens_per_step / (found.step_s or 0))
    assert found.reason == "" and found.text == f"{found.tokens_per_s:,.0f} compute"


def test_a_machine_of_several_devices_has_a_rank_on_each() -> None:
    found = plan_cell("llama-3-8b", "8xh100-8nvme", load_hardware("8xh100-8nvme"), 16)
    assert found.tokens_per_step == 8 * 16 * 2048


def test_a_cell_that_does_not_fit_says_what_is_too_small(tmp_path: Path) -> None:
    small = load_hardware("rtx4090-1nvme")
    assert small.nvme is not None
    full = small.model_copy(update={"nvme": small.nvme.model_copy(update={"capacity": 10**9})})
    found = plan_cell("qwen3-8b", "small", full, 16)
    assert found.tokens_per_s is None and found.text == "no: drives"


def test_every_shipped_model_and_machine_loads_and_models_of_the_hub_are_listed_by_size() -> None:
    """In one process: the shapes of all models take twenty seconds, once."""
    for name in shipped_in("models"):
        assert load_model(name, torch.float32).units
    for name in shipped_in("hardware"):
        hardware = load_hardware(name)
        assert hardware.source and hardware.rates().flops > 0
    names = published_models()
    assert names.index("qwen3-8b") < names.index("qwen3-30b-a3b") < names.index("deepseek-v3")
    assert "gpt-1t" not in names


def test_a_table_has_a_row_for_each_model_and_a_column_for_each_machine(tmp_path: Path) -> None:
    cells = [
        Cell("qwen3-8b", machine, 16, rate, 1.0, 1, "compute", "" if rate else "drives: too small")
        for machine, rate in (("rtx4090-1nvme", 1234.0), ("1xh100-4nvme", None))
    ]
    head, row = to_text(cells).splitlines()
    assert head.split() == ["model", "size", "rtx4090-1nvme", "1xh100-4nvme"]
    assert "1,234" in row and row.endswith("no: drives")
    assert to_markdown(cells).count("\n") == 2
    file = tmp_path / "table.md"
    options = ("--table", "--model", "qwen3-8b", "--hardware", "rtx4090-1nvme")
    assert plan(*options, "--write", file).exit_code == 0
    assert "| qwen3-8b | " in file.read_text()
    again = plan(*options, "--write", file)
    assert again.exit_code == 2 and "already exists" in again.stderr
    (only,) = json.loads(plan(*options, "--json").stdout)
    assert only["model"] == "qwen3-8b" and only["binding"]


def test_other_options_beside_the_table_are_refused() -> None:
    for options in (("--table", "--params", "1B"), ("--table", "--tokens", 5), ("--full",)):
        assert plan(*options).exit_code == 2


def test_write_makes_the_file_of_a_directory_only(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    result = plan("--model", "deepseek-v3", "--lora", 8, "--write", file)
    assert result.exit_code == 2 and "directory of a model" in result.stderr
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    }))  # fmt: skip
    options = ("--model", directory, "--lora", 8, "--hardware", "rtx4090-1nvme")
    assert plan(*options, "--write", file).exit_code == 0
    written = SwapConfig.load(file)
    assert written.adapter is not None and written.adapter.rank == 8
    assert written.model is not None and written.model.path == directory


def test_list_imports_no_torch_and_no_module_of_the_configuration() -> None:
    names = ("torch", "numpy", "transformers", "infinity.config")
    found, printed = imported_by(
        "from infinity.tools.cli import app; app(['plan', '--list'])", names
    )
    assert not found and printed.startswith("hardware: ")
    assert json.loads(plan("--list", "--json").stdout)["models"]
