"""The table of planned steps beside what is possible: of the present plan, and on the page."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.plan_targets import CASES, END, Case, _cells, bound_s, row_of, to_markdown
from infinity.plan.hardware import load_hardware
from tests.support.exhaustive import sampled

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "bench/results/README.md"
ROWS = json.loads((ROOT / "bench/results/plan_targets.json").read_text())["rows"]

# Rows that are planned again, in ten seconds of a core: some of each tier, machine and number of nodes,
# and all that are above their target.
AGAIN = (0, 1, 2, 3, 9, 12, 17, 19, 20, 21, 23)


def named_on_the_page() -> set[str]:
    """The rows that the page names as above their target, each with a reason."""
    page = PAGE.read_text().split(END)[1].split("\n## ")[0]
    named = re.findall(r"^\* \*(.+) on (.+?)\.\* \w+", page, re.MULTILINE)
    return {f"{what} on {machine}" for what, machines in named for machine in machines.split(", ")}


def name_of(row: dict[str, Any]) -> str:
    """The first cells of a row of the table."""
    what, machine, tokens = itertools.islice(_cells(row), 3)
    return f"{what}, {tokens} on {machine}"


def test_the_page_has_the_table_of_the_figures() -> None:
    assert [row["case"] for row in ROWS] == [asdict(case) for case in CASES]
    assert to_markdown(ROWS) in PAGE.read_text()


def test_every_row_is_within_its_target_or_named_on_the_page_with_a_reason() -> None:
    assert all(row["step_s"] > 0 and not row["reason"] for row in ROWS), "every row has a plan"
    assert all(row["case"]["target"] >= 1 for row in ROWS)
    above = [index for index, row in enumerate(ROWS) if row["ratio"] > row["case"]["target"]]
    assert {name_of(ROWS[index]) for index in above} == named_on_the_page()
    assert set(above) <= set(AGAIN)


def test_the_ratios_are_those_of_the_seconds() -> None:
    for row in ROWS:
        assert row["ratio"] == row["step_s"] / bound_s(row["busy_s"]), name_of(row)


@pytest.mark.parametrize("index", sampled(AGAIN, AGAIN[::2].__contains__))
def test_the_figures_are_those_of_the_plan(index: int) -> None:
    found = row_of(CASES[index])
    row, wanted = asdict(found), ROWS[index]
    assert row.keys() == wanted.keys()
    for name, value in row.items():  # To rounding: sums of floats are another in another Python.
        is_number = name in ("step_s", "busy_s", "idle", "ratio")
        assert value == (pytest.approx(wanted[name], rel=1e-9) if is_number else wanted[name]), name
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
