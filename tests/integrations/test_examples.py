"""Every program in examples/ runs as it is printed, over the model that make_model.py makes.

In one process, because the libraries take longer to import than the programs to run.
"""

from __future__ import annotations

import gc
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import infinity

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "EXAMPLES.md"
MAKERS = ("make_model", "make_moe")  # They make models; the others train one.
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in MAKERS)
MAX_LINES = 30  # Of code, with imports; an example is read in a minute.


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model and the data that the programs name."""
    directory = tmp_path_factory.mktemp("examples")
    make: dict[str, Callable[..., Any]] = runpy.run_path(str(EXAMPLES / "make_model.py"))
    make["make"](str(directory / "model"), width=32, layers=2)
    make["write_text"](str(directory / "text.txt"))
    for name in ("chat.jsonl", "pairs.jsonl"):
        shutil.copy(EXAMPLES / name, directory)
    return directory


def values_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def test_there_are_examples_of_every_library() -> None:
    assert set(PROGRAMS) == {
        "trainer", "sft", "dpo", "grpo", "reward", "accelerate_loop", "lightning_fit", "lora"
    }  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_an_example_runs_and_changes_what_it_trains(
    name: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    base = values_of(tmp_path / "model")
    shards = {file: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    torch.manual_seed(0)
    ran = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    trained = values_of(tmp_path / "out")
    assert trained and all(torch.isfinite(value).all() for value in trained.values())
    adapters = {key for key in trained if "lora_B" in key}
    assert all(trained[key].any() for key in adapters), "B begins at zero"
    changed = [key for key in base.keys() & trained.keys() if not trained[key].equal(base[key])]
    assert adapters or len(changed) > len(base) / 2
    assert shards == {file: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    infinity.engine_of(ran["model"]).close()
    ran.clear()
    gc.collect()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_is_short_and_on_its_page(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= MAX_LINES
    assert f"\n[{name}.py](../examples/{name}.py)\n" in PAGE.read_text()


def test_the_pairs_are_those_of_the_conversations() -> None:
    chats = [json.loads(line)["messages"] for line in (EXAMPLES / "chat.jsonl").open()]
    pairs = [json.loads(line) for line in (EXAMPLES / "pairs.jsonl").open()]
    answers = {chat[0]["content"] + "\n": chat[1]["content"] for chat in chats}
    assert [answers[pair["prompt"]] for pair in pairs] == [pair["chosen"] for pair in pairs]
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)
