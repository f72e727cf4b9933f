"""Idle time of a simulated step: every idle moment is counted once, for the link that binds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.simulate.clock import Operation, Timeline, simulate
from infinity.tools.cli import app
from infinity.tools.plan.report import EARLIER, idle_by_cause

RUNNER = CliRunner()


def pipeline(read_s: float, copy_s: float, compute_s: float, count: int = 20) -> Timeline:
    """Blocks that are read, copied and computed one after the other, two reads ahead."""
    operations: list[Operation] = []
    for block in range(count):
        room = (3 * block - 7,) if block > 2 else ()  # The compute of three blocks before.
        at = len(operations)
        operations += [
            Operation("nvme", f"forward: weights of {block}", read_s, room),
            Operation("h2d", f"forward: weights of {block}", copy_s, (at,)),
            Operation("compute", f"forward: {block}", compute_s, (at + 1,)),
        ]
    return simulate(operations)


def idle_of(timeline: Timeline) -> tuple[dict[tuple[str, str], float], float]:
    end_s = max(timeline.finish_s)
    found = dict(idle_by_cause(timeline, "compute", end_s))
    busy_s = sum(each.duration_s for each in timeline.operations if each.track == "compute")
    assert sum(found.values()) + busy_s == pytest.approx(end_s)
    return found, end_s


@pytest.mark.parametrize(
    ("read_s", "copy_s", "binding"), [(1.0, 0.6, "nvme"), (0.6, 1.0, "h2d"), (1.0, 0.1, "nvme")]
)
def test_the_slower_link_is_the_cause_though_the_faster_one_comes_last(
    read_s: float, copy_s: float, binding: str
) -> None:
    found, end_s = idle_of(pipeline(read_s, copy_s, 0.3))
    assert max(found, key=lambda cause: found[cause]) == (binding, "weights")
    # The first block waits for both links.
    assert found[binding, "weights"] > 0.85 * sum(found.values()) > 0.5 * end_s


def test_of_links_that_are_equally_busy_the_last_is_the_cause() -> None:
    """Many of them: an order by the hashes of names is another one in each process."""
    links = [f"link {number}" for number in range(20)]
    operations = [
        Operation(link, "forward: weights of 0", 1.0, (number - 1,) if number else ())
        for number, link in enumerate(links)
    ]
    operations.append(Operation("compute", "forward: 0", 1.0, (len(links) - 1,)))
    found, _ = idle_of(simulate(operations))
    assert found == {(links[-1], "weights"): len(links)}


def test_compute_that_waits_only_for_the_first_block_is_idle_only_then() -> None:
    found, _ = idle_of(pipeline(0.2, 0.1, 1.0))
    assert sum(found.values()) == pytest.approx(0.3)


def test_what_no_operation_of_the_step_precedes_is_counted_for_the_step_before() -> None:
    timeline = Timeline((Operation("compute", "forward: 0", 1.0),), (0.5,), (1.5,))
    assert idle_by_cause(timeline, "compute", 2.0) == {(EARLIER, ""): 1.0}


def test_the_page_of_a_plan_shows_its_step_and_its_bytes(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    one_way = ("--set", "schedule.updates=deferred", "--set", "schedule.update_on=host")
    arguments = ["plan", "--model", "gpt-10b", "--hardware", "rtx4090-desktop", *one_way, "--json"]
    done = RUNNER.invoke(app, [*arguments, "--html", str(page)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    text = page.read_text()
    (data,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    (view,) = json.loads(data)
    busy = {each["label"]: sum(bar[1] for bar in each["bars"]) for each in view["tracks"]}
    assert view["edges"] == [0.0, pytest.approx(found["step_s"])]
    assert busy["compute"] == pytest.approx(found["busy_s"]["compute"], rel=1e-4)
    assert busy["NVMe"] == pytest.approx(found["busy_s"]["nvme"], rel=1e-4)
    idle = re.search(r"Idle time of compute.*?</figure>", text, re.DOTALL)
    assert idle is not None
    shares = [float(each) / 100 for each in re.findall(r"<td>([\d.]+)%</td>", idle.group())]
    assert sum(shares) + found["busy_s"]["compute"] / found["step_s"] == pytest.approx(1, abs=0.01)
    assert "drives, read" in text and "drives, write" in text
