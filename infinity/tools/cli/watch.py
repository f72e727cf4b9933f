"""`infinity watch`: a run of `infinity train` on one screen, from its metrics.jsonl and, when it is
over, its summary.json."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError, refusing
from infinity.sizes import clock_of, format_nbytes, parse_nbytes
from infinity.tools.cli.options import arg, is_silent, opt, reply

if TYPE_CHECKING:
    from rich.console import Group

    from infinity.tools.training.metrics import MetricsReader
    from infinity.tools.training.report import Line

_CURVE_ROWS = 8
_CURVE_MARGIN = 12  # Columns before the curve.
_LATE = 10  # Steps' times without a new step: the run has ended, or stands still.
_LONGEST_EXPORT_S = 3600  # After the last step.
_AT_THE_END = ("checkpoint", "export_directory", "interrupted_by", "stopped_early", "best_step",
               "sample", "lost")  # fmt: skip
_OTHER = {"drives": ("read_wait_s", "write_wait_s"), "link": ("copy_wait_s",),
          "other ranks": ("ranks_wait_s",), "data": ("data_wait_s",),
          "update": ("update_s",)}  # fmt: skip


def watch(
    run: Path = arg("OUT", "The output directory of a run or of several adapters, or metrics."),
    every: float = opt("SECONDS", "Between two looks.", default=2.0, min=0.1),
    endurance: str = opt("SIZE", "TBW of all drives, to show what a run uses.", default="0B"),
) -> None:
    """Show a run: losses, time left, where the time goes, memory, drives, the last checkpoint.

    Reads the files of metrics and of the summary alone, so the run may be on another machine whose
    directory is mounted here. On a terminal the screen follows the run from before its first step
    until its results are written or Ctrl-C; elsewhere it is printed once. Several adapters have a
    row each.
    """
    from rich.console import Console
    from rich.live import Live

    from infinity.bounded import MalformedError
    from infinity.config.paths import RUN_NAMES, runs_in

    console, trouble = Console(), ""
    with refusing("--endurance", ValueError):
        life_nbytes = parse_nbytes(endurance)
    remedy = "; expected the output.directory of a run of infinity train"
    readers = _readers_of(run, {})
    # A run that has just been started makes its directory first.
    place = run / RUN_NAMES[0] if run.is_dir() else run.absolute().parent
    has_begun, can_wait = any(file.exists() for file in readers), runs_in(run) or place.exists()
    if not is_silent() and console.is_terminal and not has_begun and can_wait:
        trouble = "waiting for the first step, Ctrl-C ends"
    else:
        _read(run, readers, remedy)

    def shown() -> Group:
        lines = {file: reader.lines for file, reader in readers.items()}
        if not _are_of_adapters(run, readers):
            ((file, found),) = lines.items()
            return screen(found, file, console.width, time.time(), trouble, life_nbytes)
        return _screen_of_several(lines, console.width, time.time(), trouble, life_nbytes)

    numbers = {}
    for file, reader in readers.items():
        with refusing(str(file), MalformedError, remedy=remedy):
            numbers[file.parent.name] = numbers_of(reader.lines, time.time(), file)
    is_several = _are_of_adapters(run, readers)
    reply({"adapters": numbers} if is_several else numbers.popitem()[1])
    if is_silent():
        return
    if not console.is_terminal:
        console.print(shown())
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            has_ended = all(
                reader.lines and _has_ended(file, reader.lines[-1], time.time())
                for file, reader in readers.items()
            )
            live.update(shown(), refresh=True)
            if has_ended:
                break
            time.sleep(every)
            readers, told = _readers_of(run, readers), ""
            for reader in readers.values():
                try:
                    reader.read()
                except OSError as error:  # A mount that is away comes back.
                    told = f"cannot be read now ({error.strerror})" if reader.lines else trouble
            trouble = told


def _readers_of(run: Path, known: Mapping[Path, MetricsReader]) -> dict[Path, MetricsReader]:
    """Returns the reader of a run, or those of the runs in a directory that is none itself, by file
    of metrics. A sweep makes their directories one after the other."""
    from infinity.config.paths import RUN_NAMES, runs_in
    from infinity.tools.training.metrics import MetricsReader

    is_file = not run.is_dir() and (run.is_file() or run.suffix == ".jsonl")
    file = run if is_file else run / RUN_NAMES[2]
    places = [] if is_file or file.exists() else runs_in(run)
    files = [place / RUN_NAMES[2] for place in places] or [file]
    return {file: known.get(file) or MetricsReader(file) for file in files}


def _are_of_adapters(run: Path, readers: Mapping[Path, MetricsReader]) -> bool:
    return run not in readers and all(file.parent != run for file in readers)


def _read(run: Path, readers: Mapping[Path, MetricsReader], remedy: str) -> None:
    """Reads the lines for the first time. Raises ConfigError for files that have none, and for runs
    that do not share a process, as those of several adapters do."""
    from infinity.config.paths import runs_remedy
    from infinity.tools.training.metrics import is_metrics

    is_several = _are_of_adapters(run, readers)
    for file, reader in readers.items():
        if is_several and not file.exists():
            continue  # It has made no step yet.
        with refusing(str(file), OSError, remedy=remedy):
            reader.read()
        if not reader.lines and not is_metrics(file):
            raise ConfigError(f"{file} has no lines of metrics{remedy}")
        if is_several and reader.lines and not reader.lines[0].get("adapter"):
            raise ConfigError(f"{run} is no output directory of a run{runs_remedy(run)}")


def numbers_of(lines: Sequence[Line], now_s: float, file: Path | None = None) -> dict[str, Any]:
    """Returns what the screen shows, for programs: the summary of the steps so far, the newest
    line, its age at `now_s` (seconds since 1970), the seconds left, and the bytes that all steps
    together write. Of a run that is over, the summary beside `file` says what came after its last
    line."""
    from infinity.tools.training.report import summary_of

    if not lines:
        return {"steps_done": 0, "newest": None}
    summary, last = summary_of(lines), lines[-1]
    written, done = summary.totals["nvme_write_nbytes"], len(lines)
    steps = last.get("steps") or last["step"]
    found = summary.to_dict()
    del found["num_parameters"]  # No line has it.
    return {
        **found,
        "peak_rss_nbytes": last["peak_rss_nbytes"],
        "newest": last,
        "left_s": summary.left_s,
        "age_s": max(now_s - last["ended_s"], 0.0) if "ended_s" in last else None,
        "nvme_write_nbytes_of_all_steps": round(written / done * steps),
        "checkpoint": last.get("checkpoint"),
        **({} if file is None else _end_of(file, last)),
    }


def _end_of(file: Path, last: Line) -> dict[str, Any]:
    """Returns the end of a run from the summary beside its metrics; nothing while it runs, when
    there is none or that of a run before."""
    from infinity.config.paths import RUN_NAMES
    from infinity.tools.training.report import read_summary

    place = file.with_name(RUN_NAMES[1])
    with suppress(OSError):
        # A mount may have times in whole seconds, as SFTP does.
        if place.stat().st_mtime + 2.0 >= last.get("ended_s", math.inf):
            done, said = read_summary(place)
            return {key: said[key] for key in _AT_THE_END if done == last["step"] and key in said}
    return {}


def _has_ended(file: Path, last: Line, now_s: float) -> bool:
    """Whether the steps are done or were stopped early, and the results written or lost meanwhile.
    An interrupted run may go on."""
    end = _end_of(file, last)
    is_late = now_s - last.get("ended_s", 0.0) > _LONGEST_EXPORT_S
    return bool(end.get("stopped_early")) or (_is_over(last) and (is_late or bool(end)))


def screen(
    lines: Sequence[Line], file: Path, width: int, now_s: float, trouble: str = "",
    life_nbytes: int = 0,
) -> Group:  # fmt: skip
    """Returns the screen at `now_s` (seconds since 1970): at most 24 rows of `width` columns.
    `trouble` says why the file cannot be read, `life_nbytes` what drives may write in their life.
    """
    from infinity.tools.training.report import bars, least_of

    if not lines:
        return _group([f"{trouble or 'no step is over yet'}: {file}"])
    numbers, last = numbers_of(lines, now_s, file), lines[-1]
    rows = [_heading(numbers, last), trouble]
    rows += _curve("loss", [line["loss"] for line in lines], width)
    held_out = [(loss["step"], loss["loss"]) for loss in numbers["held_out_losses"]]
    if said := least_of(held_out)[1]:
        marks = bars([loss for _, loss in held_out], max(width - _CURVE_MARGIN - 36, 8))
        rows.append(f"{'held-out':<{_CURVE_MARGIN}}{marks}  {said}")
    return _group([*rows, "", *_facts(numbers, last, life_nbytes)], width)


def _screen_of_several(
    lines: Mapping[Path, Sequence[Line]], width: int, now_s: float, trouble: str, life_nbytes: int
) -> Group:
    """Returns a row for each adapter, and below them the run of one that goes on: all have one
    process, one base and one pace."""
    from infinity.tools.training.report import compared, summary_of

    begun = {file: found for file, found in lines.items() if found}
    if not begun:
        return _group([f"{trouble or 'no step is over yet'}: {len(lines)} adapters"])
    last_of = {file: found[-1] for file, found in begun.items()}
    file = max(begun, key=lambda f: (not _is_over(last_of[f]), last_of[f].get("ended_s", 0.0)))
    last = last_of[file]
    numbers = numbers_of(begun[file], now_s, file)
    rows = [f"{len(lines)} adapters: {_heading(numbers, last)}", trouble]
    rows += compared({file.parent.name: summary_of(found) for file, found in begun.items()})
    return _group([*rows, "", *_facts(numbers, last, life_nbytes)], width)


def _group(rows: Sequence[str], width: int | None = None) -> Group:
    from rich.console import Group
    from rich.text import Text

    return Group(*(Text(row[:width], no_wrap=True) for row in rows))


def _heading(numbers: dict[str, Any], last: Line) -> str:
    parts = [f"step {last['step']:,}" + (f" of {last['steps']:,}" if "steps" in last else "")]
    age_s, pace_s = numbers["age_s"], numbers["step_median_s"] or 0.0
    if _is_over(last):
        parts.append("all steps are done")
    elif numbers["interrupted_by"] or numbers["stopped_early"]:  # Said at the end, by the summary.
        parts.append("ended early")
    elif age_s is not None and age_s > max(_LATE * pace_s, 60.0):
        parts.append(f"no step for {clock_of(age_s)}: ended, or standing still")
        age_s = None  # Is said.
    elif numbers["left_s"] is not None:
        parts.append(f"ETA {clock_of(numbers['left_s'])}")
    parts.append(f"{last['tokens_per_s']:,.0f} tokens/s")
    if age_s is not None and not _is_over(last):
        parts.append(f"{clock_of(age_s)} ago")
    return ", ".join(parts)


def _facts(numbers: dict[str, Any], last: Line, life_nbytes: int) -> list[str]:
    times, links = numbers["time"], numbers["links"]
    total_s = times["steps_s"] or 1.0
    shares = {"compute": times["compute_s"] / total_s} | {
        name: sum(times[key] for key in keys) / total_s for name, keys in _OTHER.items()
    }
    spent = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005]
    norm = last["grad_norm"]
    memory = [f"host {format_nbytes(last['host_in_use_nbytes'])}"]
    memory.append(f"process {format_nbytes(last['peak_rss_nbytes'])} at most")
    if last.get("peak_device_nbytes"):
        memory.append(f"device {format_nbytes(last['peak_device_nbytes'])} at most")
    read, written = links["nvme_read_nbytes"], links["nvme_write_nbytes"]
    drives = [f"read {format_nbytes(read['nbytes'])}"]
    drives.append(f"written {format_nbytes(written['nbytes'])}")
    by_the_end = numbers["nvme_write_nbytes_of_all_steps"]
    drives.append(f"{format_nbytes(by_the_end)} by the end")
    wear = "--endurance SIZE (TBW of all drives) shows the share of their life"
    if life_nbytes:
        wear = (
            f"{written['nbytes'] / life_nbytes:.2%} of the drives' life so far, "
            f"{by_the_end / life_nbytes:.2%} by the end"
        )
    rows = [
        ("learning", f"rate {last['learning_rate']:.2e}" + (f", norm {norm:.3g}" if norm else "")),
        ("time", ", ".join(spent)),
        ("memory", ", ".join(memory)),
        ("drives", ", ".join(drives)),
        ("wear", wear if by_the_end else ""),
        ("checkpoint", str(numbers["checkpoint"] or "none yet")),
        ("sample", " ".join((numbers.get("sample") or "").split())),
    ]
    return [f"{name:<{_CURVE_MARGIN}}{text}" for name, text in rows if text]


def _curve(name: str, values: Sequence[float], width: int) -> list[str]:
    """Returns rows of a curve of means, with its ends on the left."""
    from infinity.tools.training.report import bars, means

    columns = means(values, max(width - _CURVE_MARGIN - 1, 8))
    if not columns:
        return [f"{name:<{_CURVE_MARGIN}}not finite"]
    columns = [value for value in columns for _ in range(width // 2 // len(columns) or 1)]
    rows = bars(columns, len(columns), _CURVE_ROWS).split("\n")
    ends = {0: f"{name} {max(columns):.3f}", _CURVE_ROWS - 1: f"{min(columns):.3f}"}
    return [f"{ends.get(row, ''):<{_CURVE_MARGIN}}{marks}" for row, marks in enumerate(rows)]


def _is_over(last: Line) -> bool:
    return bool(last.get("steps")) and last["step"] >= last["steps"]
