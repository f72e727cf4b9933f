"""Recorded steps as views of a page: the timeline, idle time by cause, bytes by link. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from infinity.observe.step_summary import Stall, StepSummary
from infinity.observe.tracer import Span
from infinity.sizes import format_nbytes
from infinity.tools.pictures.page import PageRow, PageTable, PageView
from infinity.tools.pictures.timeline_plot import named_picture_of

_MAX_CAUSES = 12
_DOTTED_NAME = re.compile(r"(?<!\S)\w+(?:\.\w+)+(?: \(\w+\))?(?!\S)")


def views_of(spans: Sequence[Span], steps: Iterable[StepSummary]) -> list[PageView]:
    """Returns a view per step. A summary must list every stall: `summarize(num_stalls=...)`."""
    return [
        PageView(step.step, named_picture_of(spans, step), (idle_by_cause(step), by_link(step)))
        for step in steps
    ]


def idle_by_cause(step: StepSummary) -> PageTable:
    """Returns the waits of the training thread, those that differ in the unit alone as one."""
    units = {
        transfer.partition(" of ")[2] for stall in step.largest for transfer in stall.waits_for
    } - {""}
    # A wait may end without a transfer of its unit, so dotted names in causes count as units.
    units |= {word for stall in step.largest for word in _DOTTED_NAME.findall(stall.cause)}
    groups: dict[str, list[Stall]] = {}
    for stall in step.largest:
        groups.setdefault(kind_of(stall.cause, units), []).append(stall)
    ordered = sorted(groups.items(), key=lambda group: -_sum_s(group[1]))
    rows = [
        PageRow(
            (
                kind,
                str(len(stalls)),
                milliseconds(_sum_s(stalls)),
                f"{_sum_s(stalls) / step.length_s:.1%}",
            ),
            _sum_s(stalls) / step.length_s,
        )
        for kind, stalls in ordered[:_MAX_CAUSES]
    ]
    rest = [stall for _, stalls in ordered[_MAX_CAUSES:] for stall in stalls]
    if rest:
        share = _sum_s(rest) / step.length_s
        cells = ("other causes", str(len(rest)), milliseconds(_sum_s(rest)), f"{share:.1%}")
        rows.append(PageRow(cells, share))
    return PageTable(
        "Idle time of the training thread, by cause",
        ("cause", "waits", "time", "of the step"),
        rows,
        f"Outside the tracks (data, loss, norms, logging): {milliseconds(step.other_s)}, "
        f"{step.other_s / step.length_s:.1%}."
        if rows
        else "The training thread did not wait.",
    )


def kind_of(cause: str, units: Iterable[str]) -> str:
    """Returns the cause with "a unit" in the place of a unit's name, the longest that is in it."""
    for unit in sorted(units, key=len, reverse=True):
        if f" {unit} " in f" {cause} ":
            return f" {cause} ".replace(f" {unit} ", " a unit ").strip()
    return cause


def by_link(step: StepSummary) -> PageTable:
    """Returns the bytes of each track that moved any, and their rate while the track was busy."""
    rows = [
        PageRow(
            (
                use.track,
                format_nbytes(use.nbytes),
                milliseconds(use.busy_s),
                f"{use.share:.0%}",
                f"{use.nbytes / use.busy_s / 1e9:.2f} GB/s" if use.busy_s else "",
            ),
            use.share,
        )
        for use in step.tracks
        if use.nbytes
    ]
    return PageTable(
        "Bytes by link",
        ("link", "bytes", "busy", "of the step", "while busy"),
        rows,
        "Bytes are those of transfers that began in the step."
        if rows
        else "Nothing moved between tiers.",
    )


def milliseconds(seconds: float) -> str:
    """Returns a time in seconds from one second on, in milliseconds below."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _sum_s(stalls: Iterable[Stall]) -> float:
    return sum(stall.stall_s for stall in stalls)
