"""The report of a run, from given numbers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from infinity.tools.training.report import (
    Line,
    Reporter,
    Step,
    Summary,
    line_of,
    shown,
    write_summary,
)

BEFORE = {"nvme_read_nbytes": 1e9, "read_wait_s": 5.0}
AFTER = {
    "nvme_read_nbytes": 4e9, "nvme_write_nbytes": 1e9, "read_wait_s": 5.5, "write_wait_s": 0.1,
    "ranks_wait_s": 0.25, "update_s": 0.4, "host_in_use_nbytes": 1 << 20, "device_in_nbytes": 0.0,
}  # fmt: skip


def line(number: int = 1, loss: float = 2.0, **more: Any) -> Line:
    step = Step(number=number, loss=loss, grad_norm=1.0, num_tokens=1000, **more)
    return line_of(step, BEFORE, AFTER, 2.0)


def test_record_is_the_difference_of_two_snapshots():
    found = line()

    assert found["nvme_read_nbytes"] == 3e9 and found["nvme_read_bytes_per_s"] == 1.5e9
    assert found["stall_share"] == (0.5 + 0.1 + 0.25) / 2 and found["ranks_wait_s"] == 0.25
    assert found["tokens_per_s"] == 500 and found["update_s"] == 0.4
    assert found["host_in_use_nbytes"] == 1 << 20 and found["copy_wait_s"] == 0


def test_what_a_reward_logs_is_not_taken_for_a_number_of_the_run():
    found = line(measured=lambda: {"loss": 9.0, "nvme_read_nbytes": 9.0, "reward": 9.0})
    assert (found["loss"], found["nvme_read_nbytes"], found["reward"]) == (2.0, 3e9, 9.0)


QUIET = AFTER | {"nvme_read_nbytes": BEFORE["nvme_read_nbytes"]}


@pytest.mark.parametrize(
    ("after", "more", "held_out_loss", "expected"),
    [
        (AFTER, {"grad_norm": 0.5}, 1.25,
         "step 3  ETA 1:02:05  loss 2.000  held-out 1.250  lr 1.0e-04  norm 0.5  500 tokens/s  "
         "read 1.50 GB/s  write 0.50 GB/s"),
        (QUIET, {}, None,
         "step 3  ETA 1:02:05  loss 2.000  lr 1.0e-04  500 tokens/s  write 0.50 GB/s"),
        (QUIET, {"epoch": 1.25, "skipped": "it is not finite"}, None,
         "step 3  SKIPPED  ETA 1:02:05  loss 2.000  lr 1.0e-04  500 tokens/s  epoch 1.25  "
         "write 0.50 GB/s"),
    ],
    ids=["all", "no reads and no evaluation", "a skipped step of an epoch"],
)  # fmt: skip
def test_line_shows_what_a_person_watches(after, more, held_out_loss, expected):
    step = Step(number=3, loss=2.0, num_tokens=1000, learning_rate=1e-4, **more)
    found = line_of(step, BEFORE, after, 2.0)
    whole = f"{expected}  stall 42%  host 1.0 MiB"
    assert shown(found, held_out_loss, 3725, 200) == whole
    narrow = shown(found, held_out_loss, 3725, 80)
    parts = narrow.replace("tok/s", "tokens/s").split("  ")
    assert 60 < len(narrow) <= 80 and {*parts} <= {*whole.split("  ")}, "whole words only"


def test_eighty_columns_have_all_that_is_watched():
    step = Step(number=1234, loss=2.0, grad_norm=0.0512, num_tokens=24690, learning_rate=1e-4)
    found = {"steps": 5000, **line_of(step, BEFORE, AFTER, 2.0)}
    assert (
        shown(found, 1.25, 3725, 80)
        == "1234/5000 1:02:05 loss 2.000 eval 1.250 lr 1.0e-04 norm 0.0512 12,345 tok/s"
    )


def report(tmp_path, *, terminal: bool, log_every: int = 1) -> tuple[str, list[dict]]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    reporter = Reporter(console, steps=5, log_every=log_every)
    reporter.start(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        reporter.step(line(step, held_out_loss=1.5 if step == 2 else None), 5 - step)
    reporter.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    return console.file.getvalue(), [json.loads(line) for line in lines]


def test_without_a_terminal_lines_are_plain_and_as_rare_as_asked(tmp_path):
    printed, lines = report(tmp_path, terminal=False, log_every=2)

    shown = [line.split()[1] for line in printed.splitlines()]
    assert shown == ["1/5", "2/5", "4/5", "5/5"]
    assert "\x1b" not in printed
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5], "metrics hold every step"
    assert "held-out 1.500" in printed.splitlines()[-1], "the last known"


def test_on_a_terminal_a_bar_with_the_time_that_is_left_is_drawn_over(tmp_path):
    printed, _ = report(tmp_path, terminal=True)

    assert "5/5" in printed and "ETA" in printed and "loss 2.000" in printed
    assert printed.count("\n") < 5 and "\x1b[" in printed


def test_summary_divides_bytes_by_parameters_and_steps(tmp_path):
    summary = Summary(steps=2, num_parameters=10**9)
    for number, loss in ((1, 4.0), (2, 1.0)):
        summary.add(line(number, loss))
    content = summary.to_dict()

    assert content["links"]["nvme_read_nbytes"]["bytes_per_parameter_and_step"] == 3.0
    assert content["links"]["nvme_read_nbytes"]["bytes_per_s"] == 1.5e9
    assert content["time"]["compute_s"] == 4.0 - 2 * 0.4 - 2 * (0.5 + 0.1 + 0.25)
    assert content["loss_last_mean"] == 2.5 and content["loss_fall_share"] == 1 - 2.5 / 4

    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == content


def test_summary_of_a_run_without_steps_is_whole():
    assert Summary(steps=3, num_parameters=7).to_dict()["loss_first"] is None
    Reporter(Console(file=io.StringIO()), steps=3, log_every=1).summary(
        Summary(steps=3, num_parameters=7)
    )


def test_json_has_null_where_a_number_is_not_finite(tmp_path):
    summary = Summary(steps=1, num_parameters=7)
    summary.add(line(1, loss=float("nan")))
    write_summary(tmp_path / "summary.json", summary)

    assert json.loads((tmp_path / "summary.json").read_text())["loss_last"] is None
