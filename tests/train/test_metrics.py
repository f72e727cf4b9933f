"""metrics.jsonl and the output directory: damage, full disks, crashes, a second run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from infinity.config import JobConfig, SwapConfig
from infinity.errors import ConfigError, StorageError
from infinity.tools.training import metrics as metrics_module
from infinity.tools.training.metrics import MetricsFile
from infinity.tools.training.output import LOCK_NAME, MARKER_NAME, OutputDirectory
from tests.support.file_systems import failing


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


def test_half_a_line_that_could_not_be_removed_is_removed_before_the_next_one(
    tmp_path, monkeypatch
):
    """The file system turned read-only in the middle of a line."""
    path, said, write = tmp_path / "metrics.jsonl", [], os.write
    metrics = MetricsFile(path, say=said.append)
    metrics.append(1, line(1))

    def refused(*arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def full(fd: int, content: memoryview) -> int:
        return write(fd, content[:12]) if len(content) == len(line(2)) + 1 else refused()

    monkeypatch.setattr(metrics_module.os, "write", full)
    monkeypatch.setattr(metrics_module.os, "ftruncate", refused)
    metrics.append(2, line(2))
    metrics.append(3, line(3))
    assert path.read_text() == line(1) + "\n" + line(2)[:12]
    monkeypatch.undo()
    metrics.append(4, line(4))
    assert steps_in(path) == [1, 2, 3, 4] and len(said) == 2


def test_every_failing_call_costs_no_line_and_no_half_of_one(tmp_path, monkeypatch):
    """Each call that changes the file fails once, in turn, in a resumed run."""
    for rung in range(1, 40):
        path, said = written(tmp_path / f"{rung}.jsonl", 1, 2), []
        with monkeypatch.context() as patch:
            names = ("write", "fsync", "fdatasync", "open", "replace", "fstat", "stat")
            has_failed = failing(patch, names, rung, errno.EIO)
            metrics = MetricsFile(path, resumed_at=2, say=said.append)
            for step in range(3, 6):
                metrics.append(step, line(step))
                metrics.sync()
        metrics.close()
        assert steps_in(path) == [1, 2, 3, 4, 5], (rung, said)
        assert len(said) in (0, 2) and metrics.lost is None
        if not has_failed():
            break
    assert rung > 10 and not said


def test_lines_that_are_lost_are_counted_at_the_end(tmp_path, monkeypatch):
    path, said = tmp_path / "metrics.jsonl", []
    metrics = MetricsFile(path, say=said.append)
    metrics.append(1, line(1))

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics_module.os, "write", full)
    for step in (2, 3, 4):
        metrics.append(step, line(step))
    metrics.close()
    metrics.close()
    assert steps_in(path) == [1] and len(said) == 2
    assert said[1] == f"lost: 3 lines of {path}, from step 2 on: No space left on device"


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


def config_of(tmp_path: Path, **output: str) -> JobConfig:
    table = {
        "output": {"directory": str(tmp_path / "output"), **output},
        "model": {"config": {"model_type": "gpt2"}},
        "data": {"paths": [str(tmp_path / "text.txt")], "sequence_length": 8},
        "train": {"batch_size": 1, "steps": 1},
    }
    return JobConfig.of(SwapConfig.load(table))


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "Config.JSON", "generation_config.json", "adapter_config.json", "adapter_model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt",
        "chat_template.jinja", "README.md", "infinity_base.json", "summary.json", MARKER_NAME,
        LOCK_NAME, "best", "best/metrics.jsonl", "checkpoints/x", ".metrics.jsonl.partial",
        "/etc/passwd", "../metrics.jsonl", "a/../../b", "a\0b", "x" * 201, "é" * 101, ".", "",
    ],
)  # fmt: skip
def test_metrics_under_the_name_of_another_file_of_a_run_are_refused(tmp_path, name):
    table = {"output": {"directory": str(tmp_path / "output"), "metrics": name}}
    with pytest.raises(ConfigError, match=r"output\.metrics: expected a file name"):
        SwapConfig.load(table)
    assert not (tmp_path / "output").exists()


def test_metrics_in_a_place_that_has_another_use_are_refused(tmp_path):
    output, base = tmp_path / "output", tmp_path / "base"
    base.mkdir()
    (base / "model.jsonl").write_text("weights")
    (tmp_path / "text.jsonl").write_text(line(1) + "\n")
    table = {
        "train": {"steps": 1, "batch_size": 1},
        "tiers": {"nvme": [{"path": str(output / "swap")}]},
        "model": {"path": str(base)},
        "checkpoint": {"directory": str(output / "state" / "steps")},
        "data": {"paths": [str(tmp_path / "text.jsonl")]},
    }

    def refused(name: str, match: str) -> None:
        own = {"output": {"directory": str(output), "metrics": name}}
        with pytest.raises(ConfigError, match=rf"output\.metrics: .*{name}.*{match}"):
            OutputDirectory(SwapConfig.load(table | own))

    for name in ("swap", "swap/lines.jsonl"):
        refused(name, r"tiers\.nvme\[0\]\.path")
    for name in ("state", "state/steps", "state/steps/lines.jsonl"):
        refused(name, r"checkpoint\.directory")
    assert not output.exists()
    output.mkdir()
    (output / MARKER_NAME).touch()
    (output / "to-base").symlink_to(base)
    (output / "to-text").symlink_to(tmp_path / "text.jsonl")
    (output / "notes.txt").write_text("what I learned\n")
    (output / "directory").mkdir()
    refused("to-base/new.jsonl", r"model\.path")
    refused("to-text", "which data names")
    for name in ("notes.txt", "directory"):
        refused(name, "has no lines of metrics; expected the name of a new file")
    assert (output / "notes.txt").read_text() == "what I learned\n"
    assert sorted(os.listdir(output)) == sorted(
        [MARKER_NAME, "to-base", "to-text", "notes.txt", "directory"]
    )


def test_metrics_in_a_directory_of_their_own_replace_those_of_an_earlier_run(tmp_path):
    config = config_of(tmp_path, metrics="logs/lines.jsonl")
    for _ in range(2):
        output = OutputDirectory(config)
        output.mark()
        metrics = MetricsFile(config.output.metrics_path)
        metrics.append(1, line(1))
        metrics.close()
        output.close()
        assert steps_in(tmp_path / "output" / "logs" / "lines.jsonl") == [1]


def test_a_second_run_in_one_output_directory_is_refused_with_the_process(tmp_path):
    config = config_of(tmp_path)
    first = OutputDirectory(config)
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .*its own output"):
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
