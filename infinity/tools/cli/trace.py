"""`infinity trace`: summarises a trace of `infinity train --trace`, and shows it in a browser."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from infinity.errors import ConfigError
from infinity.observe import chrome
from infinity.observe.step_summary import Stall, StepSummary, summarize
from infinity.sizes import counted, format_nbytes
from infinity.tools.cli.options import arg, opt, reply
from infinity.tools.pictures.steps import choose, picture_of
from infinity.tools.pictures.timeline import milliseconds, paint, write_page

_LEAST_SHARE = 0.001  # Share of the step; shorter stalls are not listed.

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")


@app.callback()
def trace() -> None:
    """Summarise or show a trace of `infinity train --trace out.json`."""


@app.command()
def summary(
    file: Path = arg("FILE", "A trace, as JSON."),
    stalls: int = opt("N", "Largest stalls shown per step.", default=5, min=0),
    plot: Path | None = opt("FILE", "Draw one step as a Gantt picture (PNG, SVG)."),
    step: int | None = opt("N", "The step drawn; the last one."),
) -> None:
    """Name the largest stalls of each step, how busy every track was, and what bounds the step."""
    spans = chrome.read(file)
    steps = summarize(spans, num_stalls=stalls)
    if plot is not None:
        paint(plot, picture_of(spans, choose(steps, step)))
    lines = [line for step in steps for line in (*lines_of(step), "")]
    reply([dataclasses.asdict(step) for step in steps], "\n".join(lines))


@app.command()
def view(
    file: Path = arg("FILE", "A trace, as JSON."),
    out: Path | None = opt("HTML", "The page; FILE with the suffix .html.", "--output", "-o"),
) -> None:
    """Write a page for the browser: a timeline to zoom into, idle time by cause, bytes by link.

    The page is one file and loads nothing, so it can be sent to others.
    """
    spans = chrome.read(file)
    steps = summarize(spans, num_stalls=len(spans))
    if not steps:
        raise ConfigError(f"the trace {str(file)!r} is empty: no step was over when it was written")
    page = file.with_suffix(".html") if out is None else out
    least, most = (milliseconds(pick(step.length_s for step in steps)) for pick in (min, max))
    lengths = least if least == most else f"{least} to {most}"
    bounds = sorted({step.bound.name for step in steps if step.bound is not None})
    title = ", ".join((f"{file.name}: {counted(len(steps), 'steps')} of {lengths}", *bounds))
    write_page(page, title, [picture_of(spans, step) for step in steps])
    reply({"page": str(page), "steps": len(steps)}, f"wrote {page}; open it in a browser")


def lines_of(step: StepSummary) -> list[str]:
    """Returns the lines for one step."""
    lines = [
        f"{step.step}  {milliseconds(step.length_s)}, stalled {step.stall_s / step.length_s:.0%}"
    ]
    if step.bound is not None:
        lines[0] += f", {step.bound.name}: {step.bound.resource} busy {step.bound.share:.0%}"
    width = max(len(track) for track in ["other", *(use.track for use in step.tracks)])
    for use in step.tracks:
        moved = f"  {format_nbytes(use.nbytes)}" if use.nbytes else ""
        lines.append(
            f"  {use.track:<{width}}  {use.share:>4.0%}  {milliseconds(use.busy_s):>9}{moved}"
        )
    other_share = step.other_s / step.length_s
    lines.append(f"  {'other':<{width}}  {other_share:>4.0%}  {milliseconds(step.other_s):>9}")
    largest = [stall for stall in step.largest if stall.share >= _LEAST_SHARE]
    if largest:
        lines.append("  stalls by cause")
    lines += [
        f"    {milliseconds(cause.stall_s):>9}  {cause.count:>4} x  {cause.cause}"
        for cause in step.causes[: len(largest)]
    ]
    if largest:
        lines.append("  largest stalls")
    for stall in largest:
        lines.append(
            f"    {milliseconds(stall.stall_s):>9}  at {milliseconds(stall.start_s)}: {stall.cause}"
        )
        if stall.waits_for:
            lines.append(f"{'':15}waiting for {_transfers(stall)}")
    return lines


def _transfers(stall: Stall) -> str:
    text = ", ".join(dict.fromkeys(stall.waits_for))
    if stall.asked_before_s is not None:
        text += f"; asked for {milliseconds(stall.asked_before_s)} before"
    if stall.queued_s:
        text += f", then {milliseconds(stall.queued_s)} in the drive's queue"
    return text
