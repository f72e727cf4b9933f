"""The output of a run: a line per step, metrics.jsonl, and the summary at the end.

The numbers are differences of the engine's counters; the module decides nothing. GB/s is 10^9 bytes
per second. Key names end in their unit; `*_nbytes` and `*_bytes_per_s` are plain bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from infinity.bounded import MalformedError, integer, read_json, table_of
from infinity.bounded import field as field_of
from infinity.checkpoint.durable import replace_file
from infinity.config.machine import read_nbytes
from infinity.errors import ConfigError
from infinity.observe import Tracer, chrome
from infinity.sizes import GIB, clock_of, format_nbytes
from infinity.tools.training.metrics import MetricsFile
from infinity.tools.training.process import lost_streams

# Counter of the bytes -> the usual name of the link.
LINKS = {
    "nvme_read_nbytes": "NVMe read",
    "nvme_write_nbytes": "NVMe write",
    "device_in_nbytes": "host to device",
    "device_out_nbytes": "device to host",
}
WAITS = ("read_wait_s", "write_wait_s", "copy_wait_s", "ranks_wait_s", "data_wait_s")
_SUMMED = (*LINKS, *WAITS, "update_s", "num_tokens")
_NUMBERS = {*_SUMMED, "elapsed_s", "tokens_per_s", "learning_rate", "host_in_use_nbytes",
            "peak_rss_nbytes", "steps"}  # fmt: skip
_OF_STEP = ("loss", "held_out_loss", "learning_rate", "epoch", "grad_norm", "num_tokens", "skipped",
            "rows", "gradients", "random")  # fmt: skip
# Facts of a run that its summary says as they are.
_OF_RUN = ("resumed_at", "interrupted_by", "stopped_early", "best_step", "num_parameters",
           "update_on", "host_in_use_max_nbytes", "checkpoint", "export_directory", "sample",
           "lost")  # fmt: skip
_OR_NULL = {"loss", "grad_norm", "held_out_loss"}
# The stalls of the steps and the phases of a run, each with the title of its line.
_STEP_TIMES = {
    "compute_s": "compute",
    "read_wait_s": "waiting for reads",
    "update_s": "update",
    "write_wait_s": "writes",
    "copy_wait_s": "copies",
    "ranks_wait_s": "waiting for other ranks",
    "data_wait_s": "making batches",
}
_PHASES = (
    "setup_s", "steps_s", "evaluation_s", "commit_s", "checkpoint_s", "export_s", "sample_s",
)  # fmt: skip
_NUM_LAST_STEPS = 5
_NUM_PACED = 50  # Steps.
_PLATEAU = 5  # Evaluations.
_BAR_WIDTH = 12
_LEAST_WIDTH = 96  # Of a console with a bar: all that is watched fits beside it.
# What is written shorter where the width is too small.
_SHORTER = {" tokens/s": " tok/s", "held-out": "eval", "step ": "", "ETA ": ""}
_BARS = " ▁▂▃▄▅▆▇█"

Snapshot = Mapping[str, float]
Line = dict[str, Any]  # Of metrics.jsonl.


@dataclass(slots=True, kw_only=True)
class Step:
    """One optimizer step, which the trainer makes and its run reports.

    `number` counts from 1. `loss` is the mean over the step's learned tokens on all ranks, before
    the update. `learning_rate` is that of the update.
    """

    number: int = 0
    loss: float = math.nan
    grad_norm: float | None = None  # None: no norm was computed.
    learning_rate: float = 0.0
    num_tokens: int = 0  # Of this rank, and when the step has ended of all.
    skipped: str | None = None  # The reason why the weights did not change.
    epoch: float | None = None  # Passes over the training data after the step.
    held_out_loss: float | None = None  # Of an evaluation after the step.
    numbers: dict[str, float] = field(default_factory=dict)  # For trackers.
    measured: Callable[[], dict[str, float]] = dict  # Means of what TRL has measured in it.
    # Of the micro-batches of this rank: their losses, the sum of these in float32, and the
    # arguments of the first loss that is not finite.
    losses: list[float] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)  # Digests of the batches' rows.
    gradients: str | None = None  # A digest of the norms of all gradients.
    random: str | None = None  # A digest of the generators, before an evaluation.
    total: Any = 0.0
    spoilt: tuple[Any, Any] | None = None
    before: Step | None = None  # The step before, whose evaluation may still come.

    def last_ended(self) -> Step:
        """Returns this step, or the one before while this one is made."""
        return self if self.number or self.before is None else self.before


def line_of(step: Step, before: Snapshot, after: Snapshot, elapsed_s: float) -> Line:
    """Returns the line of metrics.jsonl: the outcome of a step, and the traffic and stalls between
    two snapshots around it."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    moved = {name: int(grown(name)) for name in LINKS}
    waited_s = {name: grown(name) for name in WAITS}
    return {
        **step.measured(),  # First: a reward may log any name.
        "step": step.number,
        **{name: getattr(step, name) for name in _OF_STEP},
        "elapsed_s": elapsed_s,
        "tokens_per_s": step.num_tokens / elapsed_s,  # Of all ranks.
        **moved,
        **{
            name.replace("_nbytes", "_bytes_per_s"): nbytes / elapsed_s
            for name, nbytes in moved.items()
        },
        **waited_s,
        "update_s": grown("update_s"),
        # The part in which the training thread waited for a transfer or for other ranks.
        "stall_share": min(sum(waited_s.values()) / elapsed_s, 1.0),
        "host_in_use_nbytes": int(after.get("host_in_use_nbytes", 0)),
        "peak_rss_nbytes": peak_rss_nbytes(),
        "peak_device_nbytes": _peak_device_nbytes(),
        "ended_s": time.time(),  # Since 1970.
    }


def tracked(line: Line) -> dict[str, float]:
    """Returns the numbers of a step that trackers get beside TRL's own."""
    norm = line["grad_norm"]
    return ({} if norm is None else {"grad_norm": norm}) | {
        "tokens_per_s": line["tokens_per_s"],
        "step_s": line["elapsed_s"],
        "read_gb_per_s": line["nvme_read_bytes_per_s"] / 1e9,
        "write_gb_per_s": line["nvme_write_bytes_per_s"] / 1e9,
        "stall_share": line["stall_share"],
        "host_in_use_gib": line["host_in_use_nbytes"] / GIB,
    }


def shown(line: Line, held_out_loss: float | None, left_s: float | None, width: int) -> str:
    """Returns what is printed of a step, as much as `width` characters hold, whole words only.
    `held_out_loss` is the last known, `left_s` the time until the last step."""
    norm = line["grad_norm"]
    watched = [
        f"step {line['step']}/{line['steps']}" if "steps" in line else f"step {line['step']}",
        "" if line["skipped"] is None else "SKIPPED",
        "" if left_s is None else f"ETA {clock_of(left_s)}",
        f"loss {line['loss']:.3f}",
        f"reward {line['reward']:.3f}" if "reward" in line else "",
        "" if held_out_loss is None else f"held-out {held_out_loss:.3f}",
        f"lr {line['learning_rate']:.1e}",
        "" if norm is None else f"norm {norm:.3g}",
        f"{line['tokens_per_s']:,.0f} tokens/s",
    ]
    said = "  ".join(filter(None, watched))
    for long, short in _SHORTER.items():
        said = said if len(said) <= width else said.replace(long, short)
    gap = "  " if len(said) <= width else " "
    parts = [
        *said.split("  "),
        "" if line["epoch"] is None else f"epoch {line['epoch']:.2f}",
        *(  # Rates of drives, where drives are used.
            f"{direction} {line[f'nvme_{direction}_bytes_per_s'] / 1e9:.2f} GB/s"
            for direction in ("read", "write")
            if line[f"nvme_{direction}_nbytes"]
        ),
        f"stall {line['stall_share']:.0%}",
        f"host {format_nbytes(line['host_in_use_nbytes'])}",
    ]
    text = ""
    for part in filter(None, parts):
        longer = f"{text}{gap}{part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text


@dataclass(kw_only=True)
class Summary:
    """The whole run in numbers. Phases that did not happen stay zero or None.

    `resumed_at` is the number of steps before a resumed run; the other numbers begin there.
    """

    steps: int
    num_parameters: int
    # Of the steps: their seconds, the losses of those that were not skipped, sums of the numbers of
    # their lines, and the most of the host tier that was in use.
    steps_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0))
    host_in_use_max_nbytes: int = 0
    held_out_losses: list[tuple[int, float]] = field(default_factory=list)
    ends: list[tuple[int, float]] = field(default_factory=list)  # Steps, and when they ended.
    phases_s: dict[str, float] = field(default_factory=dict)
    export_directory: str | None = None
    sample: str | None = None
    interrupted_by: str | None = None
    stopped_early: bool = False
    best_step: int | None = None  # The step of the weights in `best`.
    resumed_at: int = 0
    checkpoint: str | None = None
    update_on: str = "host"
    # Outputs that could not be written, except weights.
    lost: list[str] = field(default_factory=list)
    others: dict[str, Summary] = field(default_factory=dict)  # Of further adapters.
    notified: set[str] = field(default_factory=set)  # Events of which the user was told.

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of a `with` block as part of a phase of the run."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - start_s
            self.phases_s[name] = self.phases_s.get(name, 0.0) + spent_s

    def add(self, line: Line) -> None:
        """Counts a step."""
        self.steps_s.append(line["elapsed_s"])
        if line["skipped"] is None and line["loss"] is not None:
            self.losses.append(line["loss"])
        if line["held_out_loss"] is not None:
            self.held_out_losses.append((line["step"], line["held_out_loss"]))
        for name in _SUMMED:
            self.totals[name] += line[name]
        self.host_in_use_max_nbytes = max(self.host_in_use_max_nbytes, line["host_in_use_nbytes"])
        if "ended_s" in line:
            self.ends.append((line["step"], line["ended_s"]))

    @property
    def left_s(self) -> float | None:
        """The time until the last step at the pace of the newest ones, with what is done between
        them; None before the second step of this run."""
        paced = self.ends[-_NUM_PACED:]
        if len(paced) < 2:
            return None
        (first, begun_s), (last, ended_s) = paced[0], paced[-1]
        return max(self.steps - last, 0) * max(ended_s - begun_s, 0.0) / max(last - first, 1)

    @property
    def is_on_plateau(self) -> bool:
        """Whether none of the newest evaluations was below the earlier ones."""
        losses = [loss for _, loss in self.held_out_losses]
        return len(losses) > _PLATEAU and min(losses[-_PLATEAU:]) >= min(losses[:-_PLATEAU])

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary for JSON."""
        losses, num_steps = self.losses, len(self.steps_s)
        last = losses[-_NUM_LAST_STEPS:]
        last_mean = sum(last) / len(last) if last else None
        elapsed_s, num_tokens = sum(self.steps_s), self.totals["num_tokens"]
        waits, update_s = {name: self.totals[name] for name in WAITS}, self.totals["update_s"]
        return {
            "steps_asked": self.steps,
            "steps_done": num_steps,
            "steps_skipped": num_steps - len(losses),
            "num_tokens": num_tokens,
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "loss_last_mean": last_mean,
            "loss_fall_share": (
                None
                if last_mean is None or min(last_mean, losses[0]) <= 0
                else 1 - last_mean / losses[0]
            ),
            "held_out_losses": [{"step": s, "loss": loss} for s, loss in self.held_out_losses],
            "tokens_per_s": num_tokens / elapsed_s if elapsed_s else None,
            "step_median_s": statistics.median(self.steps_s) if num_steps else None,
            "links": {name: self._link(name, elapsed_s) for name in LINKS},
            "time": {
                "steps_s": elapsed_s,
                "compute_s": max(elapsed_s - update_s - sum(waits.values()), 0.0),
                **waits,
                "update_s": update_s,
                **self.phases_s,
            },
            "peak_rss_nbytes": peak_rss_nbytes(),
            **{name: getattr(self, name) for name in _OF_RUN},
            **({"others": {n: o.to_dict() for n, o in self.others.items()}} if self.others else {}),
        }

    def _link(self, name: str, elapsed_s: float) -> dict[str, float | None]:
        nbytes, parameter_steps = self.totals[name], self.num_parameters * len(self.steps_s)
        return {
            "nbytes": nbytes,
            "bytes_per_parameter_and_step": nbytes / parameter_steps if parameter_steps else None,
            "bytes_per_s": nbytes / elapsed_s if elapsed_s else None,
        }


def summary_of(lines: Sequence[Line]) -> Summary:
    """Returns the summary of a run's lines; the pace is that of the newest start. Raises
    MalformedError for a line of another program."""
    lines = [{"data_wait_s": 0.0} | line for line in lines]  # It came later than other waits.
    last: Line = lines[-1] if lines else {}
    for line in lines:
        known = {"steps": 0, **line, **{key: 0 for key in _OR_NULL if line.get(key, 0) is None}}
        wrong = [k for k in _NUMBERS | _OR_NULL if not isinstance(known.get(k), int | float)]
        if wrong or "skipped" not in line:
            name = min(wrong, default="skipped")
            raise MalformedError(f"the line of step {line['step']} has no {name!r}")
    found = Summary(steps=last.get("steps", 0), num_parameters=0)
    found.resumed_at = last["step"] - len(lines) if lines else 0  # Of lines that are lost.
    for line in lines:
        found.add(line)
    begun = last.get("resumed_at", 0)
    found.ends = [(step, ended_s) for step, ended_s in found.ends if step > begun]
    return found


def compared(summaries: Mapping[str, Summary]) -> list[str]:
    """Returns a row for each of several adapters: steps and losses. That with the least held-out
    loss comes first, and those without one last."""
    rows = []
    for name, summary in summaries.items():
        numbers = summary.to_dict()
        least, held_out = least_of(summary.held_out_losses)
        loss, row = numbers["loss_last_mean"], f"step {summary.resumed_at + len(summary.steps_s):,}"
        row += "" if loss is None else f"  loss {loss:.3f}"
        row += f"  held-out {held_out}" if held_out else ""
        rows.append((not held_out, least if held_out or loss is None else loss, name, row))
    width = max(map(len, summaries))
    return [f"{name:<{width}}  {row}" for *_, name, row in sorted(rows)]


def least_of(losses: Sequence[tuple[int, float]]) -> tuple[float, str]:
    """Returns the least finite one of held-out losses by steps, infinity where none is, and the
    words for it and the last one."""
    known = [pair for pair in losses if math.isfinite(pair[1])]
    step, least = min(known, key=itemgetter(1), default=(0, math.inf))
    return least, f"{known[-1][1]:.3f}, least {least:.3f} at step {step:,}" if known else ""


def bars(values: Sequence[float], width: int, num_rows: int = 1) -> str:
    """Returns a curve of so many rows, of which the lowest has a mark for every mean."""
    columns = means(values, width)
    low, high = min(columns, default=0.0), max(columns, default=1.0)
    steps = (8 * num_rows - 1) / ((high - low) or 1)
    levels = [1 + round((value - low) * steps) for value in columns]
    return "\n".join(
        "".join(_BARS[min(max(level - 8 * row, 0), 8)] for level in levels)
        for row in reversed(range(num_rows))
    )


def means(values: Sequence[float], count: int) -> list[float]:
    """Returns at most `count` means of neighbours, of what is finite."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    size = max(1, math.ceil(len(finite) / count))
    parts = (finite[at : at + size] for at in range(0, len(finite), size))
    return [sum(part) / len(part) for part in parts]


class Reporter:
    """Writes metrics.jsonl and prints to the terminal; close it.

    On a terminal it keeps a line, with a bar if there is space, otherwise it prints one plain line
    per `log_every` steps. Both fit the width of the console, 80 columns in a log.
    `start` replaces the metrics of an earlier run, or keeps those up to the resumed step; before
    `start` only `note` may be called. Without a path there are no metrics. A run with a `name`,
    one of several in the process, begins each line with it and has no bar.
    """

    def __init__(self, console: Console, *, steps: int, log_every: int, name: str = "") -> None:
        self._console, self._name = console, name
        self._steps = steps
        self._log_every = log_every
        self._metrics: MetricsFile | None = None
        self._bar: tuple[Progress, TaskID] | None = None
        self._held_out_loss: float | None = None

    def start(self, metrics_path: Path | None, *, resumed_at: int = 0) -> None:
        """Opens the metrics file; lines after step `resumed_at` of an earlier run are dropped."""
        if metrics_path is not None:
            self._metrics = MetricsFile(metrics_path, resumed_at=resumed_at, say=self.note)

    def note(self, text: str, *, of_all: bool = False) -> None:
        """Prints a line above the bar, with the adapter's name unless it is `of_all`."""
        text = f"{self._name}: {text}" if self._name and not of_all else text
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, line: Line, left_s: float | None = None) -> None:
        """Records one step. `left_s`: the time until the last one."""
        step = line["step"]
        if self._metrics is not None:
            self._metrics.append(step, json.dumps(finite(line)))
        if line["held_out_loss"] is not None:
            self._held_out_loss = line["held_out_loss"]
        line, width = {"steps": self._steps, **line}, self._console.width
        if self._console.is_terminal and not self._name:  # A terminal has one bar.
            width -= _BAR_WIDTH + 2 if width >= _LEAST_WIDTH else 0
            self._show(step, shown(line, self._held_out_loss, left_s, width))
        elif step % self._log_every == 0 or step in (1, self._steps):
            width -= len(self._name) + 2 if self._name else 0
            self.note(shown(line, self._held_out_loss, left_s, width))
        if line["skipped"] is not None:
            self.note(f"step {step} is skipped: {line['skipped']}")

    def sync(self) -> None:
        """Makes the metrics of every step so far durable, before a checkpoint."""
        if self._metrics is not None:
            self._metrics.sync()

    def lost(self) -> list[str]:
        """Describes the output that could not be written or printed so far."""
        metrics = self._metrics.lost if self._metrics is not None else None
        return [*([metrics] if metrics else []), *lost_streams()]

    def end_of_steps(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def summary(self, summary: Summary) -> None:
        """Prints the summary, as a table on a terminal."""
        rows = _summary_rows(summary.to_dict())
        if not self._console.is_terminal:
            for title, value in rows:
                self.note(f"{title:<18}{value}")
            return
        table = Table(show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    def close(self) -> None:
        """Ends the progress line and closes the metrics file."""
        self.end_of_steps()
        if self._metrics is not None:
            self._metrics.close()

    def _show(self, step: int, text: str) -> None:
        if self._bar is None:
            is_wide = self._console.width >= _LEAST_WIDTH
            columns = [BarColumn(_BAR_WIDTH)] * is_wide + [TextColumn("{task.description}")]
            bar = Progress(*columns, console=self._console, auto_refresh=False)
            self._bar = bar, bar.add_task(text, total=self._steps, completed=step)
            bar.start()
        progress, task = self._bar
        progress.update(task, completed=step, description=text, refresh=True)


def peak_rss_nbytes() -> int:
    """Returns the most memory that was resident in this process (VmHWM)."""
    return read_nbytes(Path("/proc/self/status"), "VmHWM") or 0


def _peak_device_nbytes() -> int:
    """Returns the most device memory that tensors of this process have had."""
    torch = sys.modules.get("torch")  # `infinity watch` reads without it.
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated())


def write_summary(path: Path, summary: Summary) -> None:
    """Writes summary.json completely or not at all. Raises OSError."""
    replace_file(path, json.dumps(finite(summary.to_dict()), indent=2) + "\n")


def read_summary(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns the last step of a run, and its summary; 0 and an empty one where none can be
    read."""
    try:
        found = table_of(read_json(path), "it")
        done = [integer(field_of(found, key), key) for key in ("resumed_at", "steps_done")]
        return sum(done), found
    except (OSError, MalformedError):
        return 0, {}


def _summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    done, asked = summary["steps_done"], summary["steps_asked"]
    interrupted = f", ended by {summary['interrupted_by']}" if summary["interrupted_by"] else ""
    if summary["stopped_early"]:
        interrupted = ", ended as the held-out loss fell no more"
    before = summary["resumed_at"]
    resumed = f", {before} of them before this run" if before else ""
    rows = [
        ("steps", f"{before + done} of {asked}{resumed}{interrupted}"),
        ("parameters", f"{summary['num_parameters']:,}"),
    ]
    if summary["steps_skipped"]:
        skipped = f"{summary['steps_skipped']}, whose loss or gradients were not finite"
        rows.append(("steps skipped", skipped))
    if summary["loss_first"] is not None:
        num_last = min(done - summary["steps_skipped"], _NUM_LAST_STEPS)
        last = "the last step" if num_last == 1 else f"the mean of {num_last} steps"
        held_out = ", ".join(f"{e['loss']:.3f} at {e['step']}" for e in summary["held_out_losses"])
        losses = f"{summary['loss_first']:.3f} -> {summary['loss_last_mean']:.3f}"
        # Rewards make a loss 0 or less, of which there is no share, or almost 0.
        share = summary["loss_fall_share"]
        fall = "" if share is None or share < -10 else f"{-share:+.1%}; "
        speed = f"{summary['tokens_per_s']:,.0f} tokens/s"
        rows += [
            ("loss", f"{losses} ({fall}the second is {last})"),
            *([("held-out loss", held_out)] if held_out else []),
            ("speed", f"{speed}, {summary['step_median_s']:.2f} s a step (median)"),
        ]
    if summary["best_step"]:
        rows.append(("best", f"the weights of step {summary['best_step']}, in best"))
    for name, title in LINKS.items():
        link = summary["links"][name]
        if link["nbytes"]:
            nbytes = link["bytes_per_parameter_and_step"]
            speed = link["bytes_per_s"] / 1e9
            rows.append((title, f"{nbytes:.1f} bytes per parameter and step, {speed:.2f} GB/s"))
    rows += [
        ("peak RSS", format_nbytes(summary["peak_rss_nbytes"])),
        ("host tier", f"{format_nbytes(summary['host_in_use_max_nbytes'])} in use at most"),
    ]
    times = summary["time"]
    for name, title in _STEP_TIMES.items():
        if times[name] or name == "compute_s":
            share = times[name] / (times["steps_s"] or 1.0)
            rows.append((title, f"{times[name]:.1f} s, {share:.0%} of the steps"))
    phases = [
        f"{name.removesuffix('_s')} {times[name]:.1f} s" for name in _PHASES if times.get(name)
    ]
    rows.append(("time in all", ", ".join(phases)))
    if summary["checkpoint"]:
        rows.append(("checkpoint", summary["checkpoint"]))
    if summary["export_directory"]:
        rows.append(("export", summary["export_directory"]))
    rows += [("LOST", line) for line in summary["lost"]]
    return rows


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, with null."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value


# -- A timeline of some steps: `--trace` -----------------------------------------------------------


class Tracing:
    """Turns the tracer on and off around some steps, counted from 1, and writes the file once.

    The file is written after the last of them, as soon as its transfers have ended, so that it can
    be read during the run.
    """

    def __init__(self, path: Path, first_step: int, last_step: int) -> None:
        self._path = path
        self._first_step = first_step
        self._last_step = last_step
        self._tracer: Tracer | None = None
        self._say: Callable[[str], None] = print
        self._is_written = False

    def check(self, *, num_steps: int) -> None:
        """Raises ConfigError for faults that would otherwise appear after hours of training."""
        if not 1 <= self._first_step <= min(self._last_step, num_steps):
            raise ConfigError(
                f"trace steps {self._first_step}:{self._last_step}: expected 1 <= FIRST <= LAST, "
                f"and FIRST at most train.steps, {num_steps}"
            )
        if self._path.is_dir() or not os.access(self._path.absolute().parent, os.W_OK | os.X_OK):
            raise ConfigError(
                f"the trace cannot be written to {str(self._path)!r}; expected a file in a "
                "directory that exists and may be written to"
            )

    def follow(self, tracer: Tracer, say: Callable[[str], None]) -> None:
        """Takes the tracer of the engine. `say` is called with the path of the written file, or
        with the reason for a failure, which does not end the run."""
        self._tracer, self._say = tracer, say

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds optimizer step `number`."""
        assert self._tracer is not None
        if number == self._first_step:
            self._tracer.start()
        with self._tracer.step(number):
            yield
        if number == self._last_step:
            self._tracer.stop()
        if number >= self._last_step and self._tracer.is_settled:
            self._write(self._tracer)

    def finish(self) -> None:
        """Ends tracing after the run, when nothing is in flight. Idempotent."""
        if self._tracer is not None:
            self._tracer.stop()
            self._write(self._tracer)

    def _write(self, tracer: Tracer) -> None:
        if self._is_written:
            return
        self._is_written = True
        try:
            chrome.write(self._path, tracer.spans(), tracer.counts())
            self._say(f"wrote the trace to {self._path}")
        except OSError as error:
            self._say(f"the trace was not written: {error}")
        tracer.forget()
