"""The picture of README.md shows what the planner says today; a colour has one meaning."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from infinity.observe import Span, Track
from infinity.observe.step_summary import summarize
from infinity.tools.pictures import steps
from infinity.tools.pictures.timeline import COLORS
from infinity.tools.plan import gantt

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import pictures  # noqa: E402

MS = 1_000_000


def test_figures_in_the_picture_of_the_readme_are_those_of_the_planner() -> None:
    image = pytest.importorskip("PIL.Image", reason="pip install matplotlib")
    drawn = [line for each in pictures.step_pictures() for line in each.title.splitlines()]
    with image.open(pictures.PICTURES / "step.png") as file:
        assert file.info["Description"].splitlines() == drawn, "run scripts/pictures.py"
    readme = (ROOT / "README.md").read_text()
    (alternative,) = re.findall(r"!\[([^\]]*)\]\(docs/pictures/step.png\)", readme)
    for title in drawn:
        (seconds,) = re.findall(r"[\d.]+ s\b", title)
        assert seconds in alternative, f"README.md: expected {seconds}"


def test_a_colour_means_the_same_in_a_trace_and_in_a_plan() -> None:
    assert len(set(COLORS.values())) == len(COLORS)
    for name, kind in {
        "backward: gradients of block 3": "gradients",
        "backward: norms of block 3": "gradients",
        "forward with update: state of head": "state",
        "forward: input of block 3": "layer inputs",
        "forward: weights of block 3": "weights",
        "backward: block 3": "backward",
    }.items():
        assert gantt.kind_of(name) == kind
    spans = [
        Span(Track.STEPS, "step 1", 0, 100 * MS),
        Span(Track.PHASES, "forward (train)", 0, 40 * MS),
        Span(Track.PHASES, "backward", 40 * MS, 90 * MS),
        Span(Track.COMPUTE, "h.1", 1 * MS, 39 * MS),
        Span(Track.COMPUTE, "h.1", 41 * MS, 80 * MS),
        Span(Track.UPDATES, "h.1", 90 * MS, 95 * MS),
        Span(Track.STALLS, "h.1 needs its state", 80 * MS, 85 * MS),
        Span(
            "reads /swap", "exp_avg of h.1", 2 * MS, 8 * MS, {"nbytes": 1, "issued_ns": 2 * MS}, 1
        ),
        Span(
            "writes /swap",
            "gradients of h.1",
            50 * MS,
            58 * MS,
            {"nbytes": 1, "issued_ns": 50 * MS},
            2,
        ),
        Span(
            Track.COPIES_IN,
            "parameters of h.1",
            3 * MS,
            5 * MS,
            {"nbytes": 1, "issued_ns": 3 * MS},
            3,
        ),
    ]
    (step,) = summarize(spans)
    picture = steps.picture_of(spans, step)
    shown = {
        label.split("  ")[0]: [bars.color for bars in groups] for label, groups in picture.tracks
    }
    assert shown == {
        "compute": [COLORS["forward"], COLORS["backward"]],
        "updates": [COLORS["state"]],
        "stalls": [COLORS["waiting"]],
        "reads /swap": [COLORS["state"]],
        "writes /swap": [COLORS["gradients"]],
        "copies in": [COLORS["weights"]],
    }
    assert dict(picture.legend) == {
        kind: color for kind, color in COLORS.items() if kind not in ("layer inputs", "other")
    }


def test_memory_of_a_planned_page_adds_up_to_the_memory_of_the_host() -> None:
    from infinity.plan.hardware import load_hardware
    from infinity.tools.plan.catalogue import plan_shipped
    from infinity.tools.plan.report import memory_by_tier

    *_, forecast = plan_shipped("gpt-oss-20b", load_hardware("rtx4090-1nvme"), 16)
    found = memory_by_tier(forecast)
    assert sum(places.get("host", 0) for places in found.values()) == forecast.host_nbytes
    table = gantt.memory_table(forecast)
    assert table.columns[0] == "state" and "checkpoint" in table.columns
    assert [cells[0] for cells, _ in table.rows] == list(found)
