"""metrics.jsonl and the output directory: damage, full disks, crashes, a second run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from infinity.config import SwapConfig
from infinity.errors import ConfigError, StorageError
from infinity.training import metrics as metrics_module
from infinity.training.metrics import MetricsFile
from infinity.training.output import LOCK_NAME, MARKER_NAME, OutputDirectory


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": 0.5})


def steps_in(path: Path) -> list[int]:
    return [json.loads(each)["step"] for each in path.read_text().splitlines()]


def written(path: Path, *steps: int) -> Path:
    path.write_text("".join(line(step) + "\n" for step in steps))
    return path


def test_a_resumed_run_continues_after_its_step_in_a_new_file(tmp_path):
    path = written(tmp_path / "metrics.jsonl", 1, 2, 3, 4)
    with path.open("a") as file:
        file.write(line(5)[:9])  # A crash has cut it short.
    before = os.stat(path).st_ino
    said: list[str] = []
    metrics = MetricsFile(path, resumed_at=3, say=said.append)
    metrics.append(4, line(4))
    metrics.close()
    assert steps_in(path) == [1, 2, 3, 4] and os.stat(path).st_ino != before
    assert said == [] and metrics.lost is None, "a torn last line is no damage"


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_while_a_resumed_run_begins_leaves_the_old_lines(tmp_path, monkeypatch, moment):
    path = written(tmp_path / "metrics.jsonl", *range(1, 21))

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics_module.os, moment, killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, resumed_at=10)
    assert steps_in(path) == list(range(1, 21))


@pytest.mark.parametrize(
    "damage",
    [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"\0" * 4096 + b"\n", b'{"step": "x"}\n', b"7\n"],
)
def test_damaged_metrics_are_moved_aside_and_the_run_continues(tmp_path, damage):
    path = written(tmp_path / "metrics.jsonl", 1, 2)
    path.write_bytes(path.read_bytes() + damage + line(3).encode() + b"\n")
    content, said = path.read_bytes(), []
    MetricsFile(path, resumed_at=3, say=said.append).close()
    assert steps_in(path) == [1, 2, 3]
    assert (tmp_path / "metrics.jsonl.damaged-1").read_bytes() == content
    assert len(said) == 1 and "the first is line 3" in said[0] and "damaged-1" in said[0]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_metrics_that_are_no_file_are_moved_aside_and_the_run_continues(tmp_path, make):
    path, said = tmp_path / "metrics.jsonl", []
    make(path)
    metrics = MetricsFile(path, resumed_at=3, say=said.append)
    metrics.append(4, line(4))
    metrics.close()
    assert steps_in(path) == [4] and "damaged-1" in said[0]


def test_lines_wait_while_the_disk_is_full_and_are_written_then(tmp_path, monkeypatch):
    """The first lines fit in part: nothing of a line is there that is not whole."""
    path, said, write = tmp_path / "metrics.jsonl", [], os.write
    metrics = MetricsFile(path, say=said.append)
    metrics.append(1, line(1))

    def full(fd: int, content: memoryview) -> int:
        if len(content) < 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content[:12])

    monkeypatch.setattr(metrics_module.os, "write", full)
    for step in (2, 3):
        metrics.append(step, line(step))
    assert steps_in(path) == [1]
    assert metrics.lost is not None and "2 lines" in metrics.lost and "step 2" in metrics.lost
    monkeypatch.undo()
    metrics.append(4, line(4))
    assert steps_in(path) == [1, 2, 3, 4] and metrics.lost is None
    assert len(said) == 2 and "No space left" in said[0] and "nothing of it is lost" in said[1]


def test_a_file_that_is_removed_is_written_again_with_all_its_lines(tmp_path):
    path, said = tmp_path / "output" / "metrics.jsonl", []
    path.parent.mkdir()
    metrics = MetricsFile(path, say=said.append)
    metrics.append(1, line(1))
    path.unlink()
    path.parent.rmdir()
    metrics.append(2, line(2))
    metrics.close()
    assert steps_in(path) == [1, 2] and "removed" in said[0]


# The output directory.


def config_of(tmp_path: Path) -> SwapConfig:
    return SwapConfig.load({"output": {"directory": str(tmp_path / "output")}})


def test_a_second_run_in_one_output_directory_is_refused_with_the_process(tmp_path):
    config = config_of(tmp_path)
    first = OutputDirectory(config)
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .*of its own"):
        OutputDirectory(config)
    first.close()
    assert os.listdir(tmp_path / "output") == []
    (tmp_path / "output" / LOCK_NAME).touch()  # A crash has left it.
    OutputDirectory(config).close()


def test_a_lost_mark_is_named_and_a_checkpoint_inside_stands_for_it(tmp_path):
    config, output = config_of(tmp_path), tmp_path / "output"
    checkpoint = output / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"no {MARKER_NAME}.*touch .*{MARKER_NAME}"):
        OutputDirectory(config)
    claimed = OutputDirectory(config, resumed=checkpoint)
    assert claimed.is_unmarked
    claimed.close()
    (output / MARKER_NAME).touch()
    OutputDirectory(config).close()


def test_a_directory_that_is_removed_is_made_again_and_still_locked(tmp_path):
    config, output = config_of(tmp_path), tmp_path / "output"
    claimed = OutputDirectory(config)
    claimed.mark()
    assert not claimed.restore()
    for name in (MARKER_NAME, LOCK_NAME):
        (output / name).unlink()
    output.rmdir()
    assert claimed.restore() and (output / MARKER_NAME).is_file()
    with pytest.raises(ConfigError, match="in use by"):
        OutputDirectory(config)
    claimed.close()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    config, other = config_of(tmp_path), tmp_path / "precious"
    other.write_text("content")
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / LOCK_NAME).symlink_to(other)
    with pytest.raises(StorageError, match=LOCK_NAME):
        OutputDirectory(config)
    assert other.read_text() == "content"
