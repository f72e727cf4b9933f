"""`infinity bench` and `infinity tune` as a user runs them."""

from __future__ import annotations

import json
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.tools.bench import tune as tuning
from tests.support.commands import run_command
from tests.support.forked import COMMAND, Script, wait_until

SMALL = ("--size", "64MiB", "--rounds", "1", "--no-fio")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file whose swap directory is not made yet."""
    path = tmp_path / "swap.toml"
    path.write_text('[io]\nqueue_depth = 3\n[[tiers.nvme]]\npath = "swap"\n')
    return path


def test_bench_prints_a_table_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_command("bench", "--path", tmp_path, "--only", "read,write", *SMALL)
    assert done.exit_code == 0, done.output
    for wanted in ("nvme read", "nvme write", "equal", "4 MiB x auto"):
        assert wanted in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_bench_takes_paths_and_settings_of_a_file(config: Path) -> None:
    done = run_command("bench", config, "--only", "read", "--json", *SMALL)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    (row,) = document["rows"]
    assert row["labels"]["depth"] == 3 and row["ok"] is True
    assert row["nbytes"] == 64 << 20
    assert document["environment"]["paths"][0]["path"] == str(config.parent / "swap")
    assert [path.name for path in config.parent.iterdir()] == ["swap.toml"]


def test_bench_saves_json_and_plots(tmp_path: Path) -> None:
    drive, out = tmp_path / "drive", tmp_path / "out"
    drive.mkdir()
    done = run_command(
        "bench", "--path", drive, "--only", "latency", "--save", tmp_path / "r.json",
        "--plot", out, *SMALL,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "r.json").read_text())["format"] == 1
    assert [path.name for path in out.iterdir()] == ["latency.png"]


@pytest.mark.parametrize("option", ["--save", "--plot", "--write"])
def test_what_was_measured_is_printed_where_a_file_cannot_be_written(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "CANDIDATES", tuning.CANDIDATES[:1])
    words = ("bench", "--only", "latency", *SMALL)
    if option == "--write":
        words = ("tune", "--time", "1", "--size", "64MiB")
    done = run_command(*words, "--path", tmp_path, option, "/dev/null/there", "--json")
    assert done.exit_code == 2 and json.loads(done.stdout), done.output


def test_wrong_bytes_end_with_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.tools.bench.transfer.compare", lambda *_: False)
    done = run_command("bench", "--path", tmp_path, "--only", "read", *SMALL)
    assert done.exit_code == 1
    assert "WRONG BYTES" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "reed"), "--only reed: expected some of"),
        (("--size", "1MiB"), "expected at least 64.0 MiB"),
        (("--size", "4G"), "unknown size unit"),
        (("--path", "/proc/nowhere"), "is no directory"),
    ],
)
def test_bad_words_are_one_line_and_code_2(words: tuple[str, str], message: str) -> None:
    done = run_command("bench", *words)
    assert done.exit_code == 2
    assert message in done.stderr and "Traceback" not in done.output


def test_config_and_path_at_once_are_refused(config: Path) -> None:
    done = run_command("bench", config, "--path", config.parent)
    assert done.exit_code == 2 and "leave one out" in done.stderr


def is_made(file: Path) -> bool:
    """A file that is still being made is nobody's when a signal comes."""
    return file.stat().st_size == 128 << 20


def test_sigterm_removes_the_files(tmp_path: Path) -> None:
    options = "--path", tmp_path, "--only", "read", "--size", "64MiB", "--rounds", "4000"
    running = Script(COMMAND, "bench", *options, "--no-fio")
    try:
        wait_until(lambda: any(is_made(path) for path in tmp_path.glob("*/*.swap")), running)
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        assert running.wait() == 128 + signal.SIGTERM
    finally:
        running.kill()
    assert list(tmp_path.iterdir()) == []


def test_tune_prints_a_fragment_for_the_named_paths(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four candidates instead of 11: test_tune.py has the search over all.
    monkeypatch.setattr(tuning, "CANDIDATES", tuning.CANDIDATES[::3])
    written = config.parent / "io.toml"
    done = run_command("tune", config, "--time", "1", "--size", "64MiB", "--write", written)
    assert done.exit_code == 0, done.output
    fragment = tomllib.loads(done.stdout)
    assert written.read_text() == done.stdout
    (tier,) = fragment["tiers"]["nvme"]
    assert tier["path"] == str(config.parent / "swap") and tier["read_gb_per_s"] > 0
    assert fragment["io"]["queue_depth"] >= 2
    assert "chosen" in done.stderr


def test_tune_refuses_a_drive_that_returns_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.tools.bench.transfer.compare", lambda *_: False)
    done = run_command("tune", "--path", tmp_path, "--time", "1", "--size", "64MiB")
    assert done.exit_code == 2 and "not those that were written" in done.stderr
    assert list(tmp_path.iterdir()) == []


# With the environment that torchrun makes, which holds the store itself.
RANK = """
import os, sys
rank, port = sys.argv[1:3]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
del sys.argv[1:3]
import runpy
runpy.run_path("bench/collectives.py", run_name="__main__")
"""


def test_collectives_of_two_ranks() -> None:
    """Two ranks on the CPU: every collective right, one report."""
    options = "--size", "64MiB", "--rounds", "1", "--json"
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Script(RANK, rank, store.port, *options) for rank in range(2)]
    (report, errors), (nothing, other_errors) = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors + other_errors
    assert nothing == ""
    document: dict[str, Any] = json.loads(report)
    subjects = {row["subject"] for row in document["rows"]}
    assert subjects == {"all-gather", "reduce-scatter", "all-reduce"}
    assert all(row["ok"] for row in document["rows"])
    assert document["environment"]["ranks"] == 2
