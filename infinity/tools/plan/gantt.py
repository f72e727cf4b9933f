"""Pictures of the simulated step: a row per track, a bar per operation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from infinity.plan.predict import Forecast
from infinity.simulate.log import CHECKPOINT_READ, READ, WRITE
from infinity.sizes import format_nbytes
from infinity.tools.pictures.timeline import (
    LINK_COLUMNS,
    Bars,
    PageRow,
    PageTable,
    TrackPicture,
    link_row,
    milliseconds,
    write_page,
)
from infinity.tools.plan.report import (
    TRACK_TITLES,
    decimal,
    duration,
    idle_of_compute,
    sentences,
)

_TRAFFIC_TITLES = {
    CHECKPOINT_READ: "drives, checkpoint read",
    READ: "drives, read",
    WRITE: "drives, write",
}
_COLORS = {
    "forward": "#1d6fa5",
    "backward": "#7b5ea7",
    "weights": "#2a7f62",
    "state": "#e09f3e",
    "gradients": "#c1121f",
    "other": "#8d99ae",
}


def save_page(forecast: Forecast, path: Path) -> None:
    """Writes the page of one simulated step. Raises ConfigError when it cannot be written."""
    first, *others = sentences(forecast)
    answer = PageTable("The plan", ("",), [((text,), None) for text in others])
    tables = (idle_table(forecast), link_table(forecast), answer)
    write_page(path, first, [replace(picture_of(forecast), tables=tables)])


def picture_of(forecast: Forecast) -> TrackPicture:
    """Returns the picture. Its title says what binds the step."""
    step, name = forecast.step, forecast.batch.name
    busy = [track for track in TRACK_TITLES if step.busy_s.get(track)]
    # Reads of the first units may begin long before the step, while it waits for something else.
    margin_s = 0.03 * step.step_s
    ranks = "" if forecast.num_ranks == 1 else f", one of {forecast.num_ranks} ranks"
    share = step.binding_share
    tracks = {track: _bars(forecast, track) for track in busy}
    shown = {bars.color for groups in tracks.values() for bars in groups}
    return TrackPicture(
        title=f"{forecast.model.name} on {forecast.hardware.name}{ranks}: a {name} of "
        f"{duration(step.step_s)},\n{TRACK_TITLES[step.binding]} busy {share:.0%} of it "
        f"(simulated; the {name} lies between the lines)",
        time_label="seconds from the optimizer's decision",
        tracks=[(TRACK_TITLES[track], groups) for track, groups in tracks.items()],
        edges=(0.0, step.step_s),
        legend={name: color for name, color in _COLORS.items() if color in shown},
        start=-margin_s,
        end=step.step_s + margin_s,
    )


def idle_table(forecast: Forecast) -> PageTable:
    """Returns what the track of compute waits for while it does nothing."""
    step_s = forecast.step.step_s
    rows: list[PageRow] = [
        ((cause, milliseconds(idle_s), f"{idle_s / step_s:.1%}"), idle_s / step_s)
        for cause, idle_s in idle_of_compute(forecast)
    ]
    note = "A moment without compute is counted once: for the link that held up the next operation."
    return PageTable(
        "Idle time of compute, by cause",
        ("cause", "time", "of the step"),
        rows,
        note if rows else "Compute never waits.",
    )


def link_table(forecast: Forecast) -> PageTable:
    """Returns bytes and busy time of each link, of one rank."""
    step = forecast.step
    rows = []
    for traffic, nbytes in step.moved_nbytes.items():
        busy_s = sum(
            operation.duration_s
            for operation in step.timeline.operations
            if operation.traffic == traffic
        )
        title = _TRAFFIC_TITLES.get(traffic, TRACK_TITLES.get(traffic, traffic))
        rate = f"{decimal(nbytes / busy_s)}/s" if busy_s else ""
        rows.append(link_row(title, nbytes, busy_s, busy_s / step.step_s, rate))
    return PageTable("Bytes by link", LINK_COLUMNS, rows)


def _bars(forecast: Forecast, track: str) -> list[Bars]:
    timeline = forecast.step.timeline
    bars: dict[str, list[tuple[float, float]]] = {}
    names: dict[str, list[str]] = {}
    for operation, start_s in zip(timeline.operations, timeline.start_s, strict=True):
        if operation.track == track and operation.duration_s:
            kind = kind_of(operation.name)
            bars.setdefault(kind, []).append((start_s, operation.duration_s))
            moved = f", {format_nbytes(operation.nbytes)}" if operation.nbytes else ""
            names.setdefault(kind, []).append(operation.name + moved)
    return [Bars(_COLORS[kind], group, names[kind]) for kind, group in bars.items()]


def kind_of(name: str) -> str:
    """Returns what an operation moves, or else its pass.

    "forward with update: state of block 3" moves "state".
    """
    before, _, what = name.partition(": ")
    word = what.split(" of ")[0]
    first = before.split()[0]
    return word if word in _COLORS else first if first in _COLORS else "other"
