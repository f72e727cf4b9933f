"""Pictures of the simulated step: a row per track, a bar per operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from infinity.plan.predict import Forecast
from infinity.simulate.log import CHECKPOINT_READ, READ, WRITE
from infinity.sizes import format_nbytes
from infinity.tools.pictures.timeline import (
    COLORS,
    LINK_COLUMNS,
    PageRow,
    PageTable,
    TrackPicture,
    bars_of,
    kind_of_bytes,
    legend_of,
    link_row,
    milliseconds,
    write_page,
)
from infinity.tools.plan.report import (
    TIERS,
    TRACK_TITLES,
    decimal,
    duration,
    idle_of_compute,
    memory_by_tier,
    sentences,
)

_TRAFFIC_TITLES = {
    CHECKPOINT_READ: "drives, checkpoint read",
    READ: "drives, read",
    WRITE: "drives, write",
}


def save_page(forecast: Forecast, path: Path) -> None:
    """Writes the page of one simulated step. Raises ConfigError when it cannot be written."""
    first, *others = sentences(forecast)
    answer = PageTable("The plan", ("",), [((text,), None) for text in others])
    tables = (memory_table(forecast), idle_table(forecast), link_table(forecast), answer)
    write_page(path, first, [replace(picture_of(forecast), tables=tables)])


def picture_of(forecast: Forecast) -> TrackPicture:
    """Returns the picture. Its title says what binds the step."""
    step, name = forecast.step, forecast.batch.name
    busy = [track for track in TRACK_TITLES if step.busy_s.get(track)]
    # Reads of the first units may begin long before the step, while it waits for something else.
    margin_s = 0.03 * step.step_s
    ranks = "" if forecast.num_ranks == 1 else f", one of {forecast.num_ranks} ranks"
    share = step.binding_share
    tracks = [(TRACK_TITLES[track], bars_of(_named(forecast, track))) for track in busy]
    return TrackPicture(
        title=f"{forecast.model.name} on {forecast.hardware.name}{ranks}: a {name} of "
        f"{duration(step.step_s)},\n{TRACK_TITLES[step.binding]} busy {share:.0%} of it "
        f"(simulated; the {name} lies between the lines)",
        time_label="seconds from the optimizer's decision",
        tracks=tracks,
        edges=(0.0, step.step_s),
        legend=legend_of(tracks),
        start=-margin_s,
        end=step.step_s + margin_s,
    )


def memory_table(forecast: Forecast) -> PageTable:
    """Returns the bytes of each kind of state by tier, of one rank."""
    found = memory_by_tier(forecast)
    tiers = [tier for tier in TIERS if any(tier in places for places in found.values())]
    rows: list[PageRow] = [
        ((kind, *(format_nbytes(places[tier]) if tier in places else "" for tier in tiers)), None)
        for kind, places in found.items()
    ]
    return PageTable(
        "Memory by tier",
        ("state", *tiers),
        rows,
        "Layer inputs are the most at a time. Working memory holds weights that are in use, read "
        "ahead or kept.",
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


def _named(forecast: Forecast, track: str) -> Iterator[tuple[str, float, float, str]]:
    timeline = forecast.step.timeline
    for operation, start_s in zip(timeline.operations, timeline.start_s, strict=True):
        if operation.track == track and operation.duration_s:
            moved = f", {format_nbytes(operation.nbytes)}" if operation.nbytes else ""
            name = operation.name
            yield kind_of(name), start_s, operation.duration_s, name + moved


def kind_of(name: str) -> str:
    """Returns what an operation moves, or else its pass.

    "forward with update: state of block 3" moves "state".
    """
    before, _, what = name.partition(": ")
    kind = kind_of_bytes(what)
    return before.split()[0] if kind == "other" and before.split()[0] in COLORS else kind
