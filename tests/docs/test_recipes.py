"""recipes/, and the tables of its page and of README.md, are what `infinity new` decides today."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest

from infinity.config import SwapConfig
from infinity.plan.model import load_shape
from infinity.tools.plan.catalogue import cell_of
from tests.support.exhaustive import sampled

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import recipes  # noqa: E402

# One model on each machine, and every second one on the second.
KEPT = {("qwen3-30b-a3b", "rtx4090-1nvme"), ("kimi-k2-int4", "8xh100-8nvme")}


def is_kept(case: tuple[str, str]) -> bool:
    return case in KEPT or (case[1] == "1xh200-4nvme" and case[0] in [*recipes.MODELS][::2])


@pytest.mark.parametrize(
    ("model", "machine"), sampled(product(recipes.MODELS, recipes.MACHINES), is_kept)
)
def test_a_recipe_and_its_figures_are_what_new_decides(model: str, machine: str) -> None:
    text, forecast = recipes.recipe(model, machine)
    assert (recipes.RECIPES / machine / f"{model}.toml").read_text() == text, (
        "run scripts/recipes.py"
    )
    assert not forecast.obstacles
    cell = cell_of(model, machine, recipes.RANK, forecast)
    row = f"| {' | '.join(recipes.cells_of(cell, forecast))} |"
    assert row in (recipes.RECIPES / "README.md").read_text(), "run scripts/recipes.py"
    name = (load_shape(model).hub or "").rpartition("/")[2]
    (shown,) = [line for line in recipes.README.read_text().splitlines() if f"| {name} |" in line]
    column = 3 + recipes.MACHINES.index(machine)
    assert shown.split("|")[column].strip() == cell.text, "run scripts/recipes.py"


def test_every_recipe_is_a_file_for_train_with_paths_next_to_it() -> None:
    found = sorted(recipes.RECIPES.glob("*/*.toml"))
    assert len(found) == len(recipes.MODELS) * len(recipes.MACHINES)
    for path in found:
        config = SwapConfig.load(path)
        assert config.train is not None and config.model is not None
        assert config.model.path == path.parent / (load_shape(path.stem).hub or "")
        assert config.data is not None
        assert [each.path for each in config.data.paths] == [path.parent / "chat.jsonl"]
