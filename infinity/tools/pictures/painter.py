"""Pictures of bars on tracks over time, and their painting by matplotlib.

`infinity trace --plot` paints a recorded step, `infinity plan --plot` a simulated one.
`infinity.tools.pictures.page` shows the same pictures in a browser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError, UnsupportedError

_BAR_HEIGHT = 0.8
_LEAST_NAMED_SHARE = 0.06  # Of the width; the name of a shorter interval does not fit.


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one color on one track: (start, length) in the unit of the time axis.

    `color` is "#rrggbb". `names`, if any, has a text for each bar, which a page shows.
    """

    color: str
    bars: Sequence[tuple[float, float]]
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NamedInterval:
    """A interval of the row above the tracks, with its name where the name fits."""

    name: str
    start: float
    length: float
    color: str


@dataclass(frozen=True, slots=True)
class TrackPicture:
    """A picture of tracks over time, from the top down.

    `tracks` are (label, bars). `intervals`, if any, make a row above the tracks. `edges` are
    vertical lines. `legend` gives the meaning of colors. The time axis goes from `start` to `end`;
    without `end` it shows every bar. `unit_s` is the length of its unit in seconds.
    """

    title: str
    time_label: str
    tracks: Sequence[tuple[str, Sequence[Bars]]]
    intervals: Sequence[NamedInterval] = ()
    edges: Sequence[float] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    start: float = 0.0
    end: float | None = None
    unit_s: float = 1.0


def find_pyplot() -> Any:
    """Returns pyplot, set to paint files. Raises UnsupportedError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib, which is not installed: pip install 'infinity-offload[plot]'"
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def paint(path: Path, *pictures: TrackPicture) -> None:
    """Writes the pictures, one below the other, in the format of the suffix of `path`.

    Raises UnsupportedError without matplotlib, ConfigError when the file cannot be written.
    """
    pyplot = find_pyplot()
    heights = [1.1 + 0.45 * _num_rows(picture) for picture in pictures]
    figure, axes = pyplot.subplots(
        len(pictures), figsize=(12, sum(heights)), squeeze=False, height_ratios=heights
    )
    for picture, axis in zip(pictures, axes[:, 0], strict=True):
        _paint_tracks(axis, picture)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {str(path)!r}: {error}") from None
    finally:
        pyplot.close(figure)


def _num_rows(picture: TrackPicture) -> int:
    return len(picture.tracks) + (1 if picture.intervals else 0)


def _paint_tracks(axis: Any, picture: TrackPicture) -> None:
    first = 1 if picture.intervals else 0
    num_rows = _num_rows(picture)
    for interval in picture.intervals:
        _paint_interval(axis, interval, _length_of(picture))
    for row, (_, groups) in enumerate(picture.tracks, start=first):
        for group in groups:
            place = (row - _BAR_HEIGHT / 2, _BAR_HEIGHT)
            axis.broken_barh(group.bars, place, color=group.color, linewidth=0)
    axis.set_yticks(range(first, num_rows), [label for label, _ in picture.tracks])
    axis.set_ylim(num_rows - 0.5, -0.6)
    if picture.end is not None:
        axis.set_xlim(picture.start, picture.end)
    for edge in picture.edges:
        axis.axvline(edge, color="black", linewidth=0.8)
    axis.set_xlabel(picture.time_label)
    axis.set_title(picture.title, loc="left")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    if picture.legend:
        _paint_legend(axis, picture.legend)


def _length_of(picture: TrackPicture) -> float:
    if picture.end is not None:
        return picture.end
    return max((interval.start + interval.length for interval in picture.intervals), default=0.0)


def _paint_interval(axis: Any, interval: NamedInterval, width: float) -> None:
    bar = (interval.start, interval.length)
    axis.broken_barh([bar], (-_BAR_HEIGHT / 2, _BAR_HEIGHT), color=interval.color, linewidth=0)
    if interval.length > _LEAST_NAMED_SHARE * width:
        middle = interval.start + interval.length / 2
        axis.text(middle, 0, interval.name, ha="center", va="center", fontsize=8, clip_on=True)


def _paint_legend(axis: Any, legend: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=label) for label, color in legend.items()]
    axis.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
