"""The page of a timeline: one file that loads nothing, with the numbers of the summary."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infinity.errors import ConfigError
from infinity.observe import Span, Track, chrome
from infinity.observe.step_summary import summarize
from infinity.tools.cli import app
from infinity.tools.pictures.steps import by_link, idle_by_cause, kind_of, picture_of
from infinity.tools.pictures.timeline import (
    Bars,
    PageTable,
    TrackPicture,
    page_of,
    write_page,
)

RUNNER = CliRunner()
MS = 1_000_000
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Elements(HTMLParser):
    """The elements of a page with their attributes; raises for tags that do not nest."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.found)


def data_of(page: str) -> list[dict]:
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


def recording() -> list[Span]:
    """Two steps of 100 ms: the thread waits 30 ms for state of two units, 10 ms for a write."""
    spans = []
    for step, at in ((1, 0), (2, 100 * MS)):
        for number, unit in enumerate(("h.1", "h.10")):
            start = at + (10 + 40 * number) * MS
            spans += [
                Span(
                    Track.STALLS,
                    f"update of {unit} needs its state",
                    start,
                    start + 15 * MS,
                    {"waits_for": [f"master of {unit}"], "transfers": [step * 10 + number]},
                ),
                Span(
                    "reads /swap",
                    f"master of base_model.model.{unit}.base_layer",
                    start,
                    start + 15 * MS,
                    {"nbytes": 30 << 20, "issued_ns": start + 5 * MS},
                    step * 10 + number,
                ),
                Span(Track.COMPUTE, unit, start + 15 * MS, start + 35 * MS),
            ]
        spans += [
            Span(Track.STALLS, "updated state must be written", at + 88 * MS, at + 98 * MS),
            Span(Track.STEPS, f"step {step}", at, at + 100 * MS),
            Span(Track.PHASES, "forward (train)", at, at + 60 * MS),
        ]
    return spans  # fmt: skip


def recorded_page() -> str:
    spans = recording()
    return page_of(
        "two steps", [picture_of(spans, step) for step in summarize(spans, num_stalls=len(spans))]
    )


def test_the_page_is_whole_html_that_names_no_other_file() -> None:
    page = recorded_page()
    elements = Elements(page)
    assert elements.count("section") == 2 and elements.count("table") == 4
    assert not any({"src", "href"} & attributes.keys() for _, attributes in elements.found)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|import\(", page)
    policy = [a["content"] for tag, a in elements.found if tag == "meta" and "http-equiv" in a]
    assert policy and "default-src 'none'" in policy[0]
    assert "{{" not in page


def test_bars_are_the_spans_of_the_step_from_its_start() -> None:
    first, second = data_of(recorded_page())
    assert (first["name"], second["name"]) == ("step 1", "step 2")
    assert first["tracks"] == second["tracks"], "both steps are alike"
    assert first["end"] == 100 and first["unit"] == 1e-3
    assert first["stretches"] == [[0, 60, "forward (train)"]]
    tracks = {track["label"]: track for track in first["tracks"]}
    assert [label.split("  ")[0] for label in tracks] == ["compute", "stalls", "reads /swap"]
    reads = tracks["reads /swap  20%"]
    assert [bar[:2] for bar in reads["bars"]] == [[15, 10], [55, 10]], "from the time of issue"
    assert [reads["names"][bar[3]] for bar in reads["bars"]] == [
        "master of h.1, 30.0 MiB", "master of h.10, 30.0 MiB"
    ]  # fmt: skip


def test_idle_time_is_grouped_by_cause_and_adds_up() -> None:
    spans = recording()
    step = summarize(spans, num_stalls=len(spans))[0]
    table = idle_by_cause(step)
    assert [tuple(cells) for cells, _ in table.rows] == [
        ("update of a unit needs its state", "2", "30.0 ms", "30.0%"),
        ("updated state must be written", "1", "10.0 ms", "10.0%"),
    ]
    assert sum(share or 0 for _, share in table.rows) == pytest.approx(step.stall_s / step.length_s)
    (link,) = by_link(step).rows
    assert tuple(link[0]) == ("reads /swap", "60.0 MiB", "20.0 ms", "20%", "3.15 GB/s")


def test_waits_of_different_units_are_one_cause_also_without_a_transfer() -> None:
    units = ("model.layers.0", "model.layers.0 (stored)", "model.layers.1.mlp.experts.tiles.2")
    spans = [
        Span(Track.STALLS, f"parameters of {unit} are decoded", number * MS, (number + 1) * MS)
        for number, unit in enumerate(units)
    ]
    (row,) = idle_by_cause(summarize(spans, num_stalls=3)[0]).rows
    assert row[0][:3] == ("parameters of a unit are decoded", "3", "3.0 ms")


def test_causes_beyond_the_list_are_summed_in_its_last_row() -> None:
    spans = [
        Span(Track.STALLS, f"cause {number}", number * MS, (number + 1) * MS)
        for number in range(20)
    ]
    step = summarize(spans, num_stalls=len(spans))[0]
    table = idle_by_cause(step)
    assert len(table.rows) == 13 and table.rows[-1][0][:3] == ("other causes", "8", "8.0 ms")
    assert sum(share or 0 for _, share in table.rows) == pytest.approx(1)


def test_only_a_whole_name_is_replaced_in_a_cause() -> None:
    units = {"h.1", "h.10", "its"}
    assert kind_of("update of h.10 needs state", units) == "update of a unit needs state"
    assert kind_of("h.1 needs its parameters", {"h.1"}) == "a unit needs its parameters"
    assert kind_of("update of h.100 needs state", units) == "update of h.100 needs state"


def test_text_of_a_trace_cannot_become_markup() -> None:
    evil = '</script><script>alert("x")</script>{{views}}'
    picture = TrackPicture(
        evil,
        evil,
        [(evil, [Bars("#000000", [(0, 1)], [evil])])],
        [Bars("#ffffff", [(0, 1)], [evil])],
    )
    table = PageTable(evil, [evil], [([evil], 2.0)], evil)
    view = replace(picture, name=evil, tables=[table])
    page = page_of(evil, [view])
    assert Elements(page).count("script") == 2
    assert page.index("<section") > page.index("<body>") and page.count("<section") == 1
    assert data_of(page)[0]["tracks"][0]["names"] == [evil]
    assert "--share:100.00%" in page


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(ConfigError, match="cannot write the page"):
        write_page(tmp_path / "page.html", "title", [])
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_the_command_writes_the_page_beside_the_trace(tmp_path: Path) -> None:
    chrome.write(tmp_path / "out.json", recording(), [])
    done = RUNNER.invoke(app, ["trace", "view", str(tmp_path / "out.json")])
    assert done.exit_code == 0 and "out.html" in done.output, done.output
    steps = data_of((tmp_path / "out.html").read_text())
    assert [step["name"] for step in steps] == ["step 1", "step 2"]
    chrome.write(tmp_path / "out.json", [], [])
    empty = RUNNER.invoke(
        app, ["trace", "view", str(tmp_path / "out.json"), "-o", str(tmp_path / "e")]
    )
    assert empty.exit_code == 2 and "empty" in empty.output and not (tmp_path / "e").exists()


def opened(page: Path, script: str) -> dict[str, str | None]:
    """The attributes of the canvas after the script has run in a browser."""
    assert BROWSER is not None
    page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,800",
         "--virtual-time-budget=3000", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom",
         page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return next(dict(each) for tag, each in Elements(done.stdout).found if tag == "canvas")


@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
def test_a_browser_draws_the_timeline_and_zooms_into_it(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(recorded_page())
    whole = opened(page, "")
    assert whole["data-drawn"] == "7" and (whole["data-from"], whole["data-to"]) == ("0", "100")
    wheel = "new WheelEvent('wheel', {deltaY: -120, clientX: x(50) + canvas.getBoundingClientRect().left})"
    near = opened(page, f"for (let i = 0; i < 12; i++) canvas.dispatchEvent({wheel});")
    start, end = float(near["data-from"] or "nan"), float(near["data-to"] or "nan")
    assert 40 < start < 50 < end < 60, "around the pointer"
    assert int(near["data-drawn"] or 0) < 7
    key = "canvas.dispatchEvent(new KeyboardEvent('keydown', {key: '0'}));"
    again = opened(page, key)
    assert (again["data-from"], again["data-to"]) == ("0", "100")
