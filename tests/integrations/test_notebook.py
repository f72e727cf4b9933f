"""A cell that offloads a model is run again: the new model takes the place of the old one."""

from __future__ import annotations

import gc
import linecache
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError, SwapLockedError
from tests.support.offloading import small_tiers

CELL = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
infinity.offload(model, config)
optimizer = infinity.AdamW(model, lr=0.1)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""
HELPER = """
def make():
    model = nn.Sequential(nn.Linear(8, 8))
    return infinity.offload(model, config)
"""


class Notebook:
    """What a kernel does with cells: each has a name of its own, Out keeps what they gave."""

    def __init__(self, directory: Path) -> None:
        config = {"tiers": small_tiers(directory / "swap")}
        self.out: dict[int, Any] = {}
        self.names: dict[str, Any] = {
            "torch": torch, "nn": nn, "infinity": infinity, "config": config,
            "Out": self.out,
        }  # fmt: skip

    def run(self, cell: str) -> Any:
        count = len(self.out) + 1
        name = f"<ipython-input-{count}-0123abcd>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), self.names)
        self.out[count] = self.names.get("model")
        return self.out[count]


def test_a_cell_that_is_run_again_takes_over_its_swap_directory(tmp_path: Path) -> None:
    """Out and the old optimizer keep the old model, which no name leads to any more."""
    notebook = Notebook(tmp_path)
    first = notebook.run(CELL)
    with pytest.warns(UserWarning, match="Sequential that was offloaded here before is replaced"):
        second = notebook.run(CELL)
    engine = infinity.engine_of(second)
    again = engine.read_parameter("0.weight")
    with pytest.raises(InfinityError, match="not offloaded"):
        infinity.engine_of(first)
    engine.close()
    notebook.out.clear()
    third = notebook.run(CELL)
    assert torch.equal(infinity.engine_of(third).read_parameter("0.weight"), again)
    infinity.engine_of(third).close()


def test_a_call_in_a_function_is_the_same_where_its_result_gets_the_same_name(
    tmp_path: Path,
) -> None:
    notebook = Notebook(tmp_path)
    notebook.run(HELPER)
    notebook.run("model = make()")
    with pytest.warns(UserWarning, match="replaced"):
        notebook.run("model = make()")
    with pytest.raises(SwapLockedError, match=r"engine_of\(model\)\.close\(\)") as refused:
        notebook.run("reference = make()")
    assert refused.value.pid == os.getpid()
    infinity.engine_of(notebook.names["model"]).close()


def test_a_model_that_is_in_use_is_not_replaced(tmp_path: Path) -> None:
    """Two models by one call: the first has a name that stays its own."""
    notebook = Notebook(tmp_path)
    notebook.run("policy, reference = nn.Linear(8, 8), nn.Linear(8, 8)")
    with pytest.raises(SwapLockedError, match=r"the Linear that .*engine_of\(policy\)"):
        notebook.run("for each in (policy, reference):\n    infinity.offload(each, config)")
    infinity.engine_of(notebook.names["policy"]).close()


def test_a_model_that_is_garbage_is_closed_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    notebook = Notebook(tmp_path)
    gc.disable()
    try:
        notebook.run(CELL)
        notebook.out.clear()
        notebook.names["optimizer"] = notebook.names["model"] = None
        notebook.run(CELL)
    finally:
        gc.enable()
    assert not [each for each in recwarn if "replaced" in str(each.message)]
    infinity.engine_of(notebook.names["model"]).close()
