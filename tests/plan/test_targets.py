"""The table of planned steps beside what is possible: of the present plan, and on the page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.plan_targets import CASES, row_of, to_markdown

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "bench/results/plan_targets.json").read_text())["rows"]


def test_the_page_has_the_table_of_the_figures() -> None:
    assert [row["case"] for row in ROWS] == [asdict(case) for case in CASES]
    assert to_markdown(ROWS) in (ROOT / "docs/PLAN.md").read_text()


@pytest.mark.parametrize(("model", "ranks", "nodes"), [("llama-3-8b", 1, 1), ("llama-3-70b", 8, 2)])
def test_the_figures_are_those_of_the_plan(model: str, ranks: int, nodes: int) -> None:
    index, case = next(
        (index, case)
        for index, case in enumerate(CASES)
        if (case.model, case.ranks, case.nodes) == (model, ranks, nodes)
    )
    found = row_of(case)
    assert not found.reason
    assert found.ratio == pytest.approx(ROWS[index]["ratio"], rel=0.01)
    assert found.step_s == pytest.approx(ROWS[index]["step_s"], rel=0.01)
    # Compute is busy or idle for a cause.
    assert found.busy_s["compute"] / found.step_s + sum(found.idle.values()) == pytest.approx(
        1, abs=0.01
    )
