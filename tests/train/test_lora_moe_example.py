"""Files of examples on small models: the commands that their first lines name."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

from infinity.config import SwapConfig
from tests.support.forked import COMMAND, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


RUN_FILE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run(code: str, *arguments: str | Path) -> str:
    done = run_script(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_trains_over_quantised_files_that_it_does_not_change(tmp_path: Path) -> None:
    for name in ("make_moe.py", "lora-moe.toml", "chat.jsonl"):
        shutil.copy(EXAMPLES / name, tmp_path)
    made = run(RUN_FILE, tmp_path / "make_moe.py", "--layers", "1", "--experts", "4")
    assert "in INT4" in made and "before training:\n<|im_start|>user\nWhere do" in made
    base = tmp_path / "run" / "moe"
    shards = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in base.iterdir()}
    assert "quantization_config" in json.loads((base / "config.json").read_text())

    # Products in bfloat16 take most of the time, where a processor has none: in proportion to tokens.
    short = ["train.steps=4", "train.warmup_steps=1", "train.batch_size=1"]
    options = [word for change in short for word in ("--set", change)]
    printed = run(COMMAND, "train", tmp_path / "lora-moe.toml", *options, "--json")
    summary = json.loads(printed)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "run" / "lora" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5
    assert summary["sample"].startswith("<|im_start|>user\nWhere do frozen weights rest?")
    assert (tmp_path / "run" / "lora" / "adapter_model.safetensors").stat().st_size > 0
    for file, (content, mtime_ns) in shards.items():
        assert (file.read_bytes(), file.stat().st_mtime_ns) == (content, mtime_ns)


def test_the_model_of_the_example_is_larger_than_its_host_budget() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from make_moe import RECIPE
    finally:
        sys.path.remove(str(EXAMPLES))
    table = tomllib.loads((EXAMPLES / "lora-moe.toml").read_text())
    config = SwapConfig.load(table)
    assert config.adapter is not None and config.adapter.experts
    expert = 3 * RECIPE["hidden_size"] * RECIPE["moe_intermediate_size"]
    weights = RECIPE["num_hidden_layers"] * RECIPE["num_experts"] * expert
    capacity = int(table["tiers"]["host"]["capacity"].removesuffix("MiB")) << 20
    assert weights * 4.5 / 8 > capacity


def test_the_student_of_the_example_learns_what_its_teacher_said(tmp_path: Path) -> None:
    for name in ("make_model.py", "distill.toml", "chat.jsonl"):
        shutil.copy(EXAMPLES / name, tmp_path)
    file = tmp_path / "distill.toml"
    commands = [line[1:].strip() for line in file.read_text().splitlines() if line[:4] == "#   "]
    made, scored, trained = map(shlex.split, commands)
    run(f"import os; os.chdir({str(tmp_path)!r}); import sys; sys.path[0] = ''; {made[2]}")
    for _, command, *arguments in (scored, trained):
        paths = [tmp_path / word if "." in word or "/" in word else word for word in arguments]
        run(COMMAND, command, *paths)
    lines = (tmp_path / "run" / "distilled" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 8 and losses[-1] < losses[0] / 2
