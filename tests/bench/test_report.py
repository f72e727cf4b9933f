"""Rows, JSON there and back, tables and plots; the environment of a run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from infinity.errors import UnsupportedError
from infinity.sizes import KIB, MIB
from infinity.storage.arena import Arena
from infinity.tools.bench import report
from infinity.tools.bench.measure import GB, Comparison, Contender, Measurement
from infinity.tools.bench.report import rows_of, to_json


def never() -> Measurement:
    raise NotImplementedError


def result(
    section: str, *, ok: bool = True, note: str = "", extent_nbytes: int = MIB, num_paths: int = 1
) -> Comparison:
    compared = Comparison(
        section,
        f"case of {extent_nbytes} on {num_paths}",
        [Contender("ours", never)],
        [Contender("slow ceiling", never), Contender("fast ceiling", never)],
        {"extent_nbytes": extent_nbytes, "paths": "/mnt", "num_paths": num_paths},
        note,
    )
    latency_s = {0.5: 0.001, 0.9: 0.002, 0.99: 0.005}
    samples = {
        "ours": [
            Measurement(GB, 0.5, 0.01, ok, latency_s),
            Measurement(GB, 1.0, 0.01, ok, latency_s),
        ],
        "slow ceiling": [Measurement(GB, 1.0, 0.02), Measurement(GB, 1.0, 0.02)],
        "fast ceiling": [Measurement(GB, 0.4, None, None, latency_s), Measurement(GB, 0.8, None)],
    }
    return replace(compared, samples=samples)


RESULTS = [
    result("nvme read"),
    result("fio search"),
    result("latency"),
    *[result("sweep read", extent_nbytes=size) for size in (64 * KIB, MIB)],
    *[result("stripes read", num_paths=count) for count in (1, 2)],
]


def text_of(results: list[Comparison]) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in report.parts(rows_of(results)):
        console.print(part)
    return console.export_text()


def test_row_holds_medians_shares_and_cpu() -> None:
    (row,) = rows_of([result("nvme read")])
    assert row.gb_per_s.median == pytest.approx(1.5) and row.cpu_s_per_gb == pytest.approx(0.01)
    fast, slow = row.ceilings
    assert (fast.name, slow.name) == ("fast ceiling", "slow ceiling")
    assert fast.share.median == pytest.approx(0.8) and fast.cpu_s_per_gb is None
    assert slow.share.median == pytest.approx(1.5)
    assert row.latency_s == {0.5: 0.001, 0.9: 0.002, 0.99: 0.005}
    assert fast.latency_s == {}  # Not every round took it.


def test_json_keeps_every_row_and_every_sample() -> None:
    document = json.loads(json.dumps(to_json(RESULTS, {"kernel": "6"})))
    assert document["format"] == 1
    assert document["rows"] == json.loads(json.dumps([asdict(row) for row in rows_of(RESULTS)]))
    assert document["environment"] == {"kernel": "6"}
    rounds = document["samples"][0]["rounds"]
    assert [each["seconds"] for each in rounds] == [0.5, 1.0]


def test_tables_show_figures_ceilings_and_verdicts() -> None:
    text = text_of(RESULTS)
    for wanted in ("nvme read", "1.50", "0.80", "fast ceiling", "equal", "64 KiB", "p99", "5.00"):
        assert wanted in text
    assert "fio search" not in text and "WRONG" not in text


def test_wrong_bytes_and_notes_stand_out() -> None:
    text = text_of([result("nvme read", ok=False, note="buffered: this is the page cache")])
    assert "WRONG BYTES: nvme read" in text
    assert "note: buffered" in text


def test_plots_are_written_for_what_is_there(tmp_path: Path) -> None:
    saved = report.save_plots(rows_of(RESULTS), tmp_path / "new" / "plots")
    assert [path.name for path in saved] == ["sizes.png", "stripes.png", "latency.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in saved)
    assert report.save_plots(rows_of([result("nvme read")]), tmp_path) == []


def test_without_matplotlib_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"infinity-offload\[plot\]"):
        report.save_plots([], tmp_path)


def test_drive_of_a_partition_is_its_parent(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    disk = tmp_path / "sys/devices/nvme0n1"
    (disk / "queue").mkdir(parents=True)
    (disk / "nvme0n1p1").mkdir()
    (disk / "queue/scheduler").write_text("[none] mq-deadline\n")
    (disk / "device").mkdir()
    (disk / "device/model").write_text("FAST 9000\n")
    link = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(disk / "nvme0n1p1")
    (disk / "nvme0n1p1/partition").write_text("1\n")
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.parent.mkdir(parents=True)
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / {tmp_path} rw,noatime - xfs /dev/b rw,noquota\n"
    )
    found = report.drive(tmp_path, tmp_path)
    assert (found["drive"], found["model"]) == ("nvme0n1", "FAST 9000")
    assert found["scheduler"] == "[none] mq-deadline"
    assert (found["file_system"], found["options"]) == ("xfs", "rw,noatime,noquota")


def test_a_fact_that_the_system_lacks_is_none(tmp_path: Path) -> None:
    found = report.drive(tmp_path, tmp_path)
    assert found["drive"] is None and found["file_system"] is None
    assert found["free_nbytes"] > 0


def test_description_of_this_machine_is_json(arena: Arena, tmp_path: Path) -> None:
    found = json.loads(json.dumps(report.environment_of([tmp_path], arena)))
    assert found["kernel"] == os.uname().release
    assert found["arena_nbytes"] == arena.capacity_nbytes
    assert found["paths"][0]["path"] == str(tmp_path)
    assert found["packages"]["torch"]
