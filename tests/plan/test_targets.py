"""The table of planned steps beside what is possible: of the present plan, and on the page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.plan_targets import CASES, Case, row_of, to_markdown
from infinity.plan.hardware import load_hardware

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


def test_automatic_updates_in_both_passes_leave_the_weights_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 B parameters in bf16: 16 bytes a parameter rest, 12 of them once more, and 2 stay free."""
    machine = load_hardware("1xh200-4nvme")
    case = Case("llama-3-8b", machine.name, 8 << 10, "nvme", micro_batch=8)
    num_spares = []
    for nbytes_per_parameter in (29, 31):
        drive = machine.nvme.model_copy(update={"capacity": int(8.03e9 * nbytes_per_parameter)})
        smaller = machine.model_copy(update={"nvme": drive})
        monkeypatch.setattr("bench.plan_targets.load_hardware", {machine.name: smaller}.get)
        num_spares.append(case.plan().num_spares)
    assert num_spares == [0, 1]
