"""A run outlives whoever reads what it prints, and ends in order on every signal."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from infinity.tools.training import process
from infinity.tools.training.process import Interrupt, lost_streams, outliving_streams
from tests.support.forked import COMMAND, Script

from .jobs import CONFIG, wait_for_steps, write_job

CHECKPOINT = "[checkpoint]\nevery = 0\n"
# Both streams are a pipe that nobody reads: its reader died, as tee does of Ctrl-C.
UNREAD = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
read, write = os.pipe()
os.dup2(write, 1), os.dup2(write, 2), os.close(read), os.close(write)
"""
# Started as a daemon is: without descriptors, so that files get their numbers.
CLOSED = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
for number in range(3):
    os.close(number)
sys.stdout = sys.stderr = None
"""


@pytest.fixture(autouse=True)
def no_signal_is_ignored():
    """A process under nohup, or behind a shell's `&`, inherits ignored signals, and keeps them."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    former = {number: signal.getsignal(number) for number in numbers}
    for number, handler in former.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, CONFIG + "steps = 1000000\n" + CHECKPOINT)


def ended(job: Path, script: Script, *signals: int) -> tuple[int, dict[str, object]]:
    """The exit code and the summary, after the signals came one by one."""
    wait_for_steps(job, 3, script)
    for number in signals:
        script.send_signal(number)
    code = script.wait()
    summary = json.loads((job / "output" / "summary.json").read_text())
    step = summary["resumed_at"] + summary["steps_done"]
    assert summary["checkpoint"].endswith(f"step-{step:08d}"), summary
    assert len((job / "output" / "metrics.jsonl").read_text().splitlines()) == step
    return code, summary


def test_a_run_outlives_its_log_and_ctrl_c_still_ends_in_a_checkpoint(job, processes):
    processes.append(script := Script(UNREAD + COMMAND, "train", job / "job.toml"))
    code, summary = ended(job, script, signal.SIGINT)
    assert code == 130 and summary["interrupted_by"] == "SIGINT"
    assert len(summary["lost"]) == 2 and "Broken pipe" in summary["lost"][0]


def test_notices_end_in_a_checkpoint_however_often_they_come(job, processes):
    """Without descriptors 0 to 2, and the message of the signal is in no file of the run's."""
    processes.append(script := Script(CLOSED + COMMAND, "train", job / "job.toml", "--resume"))
    code, summary = ended(job, script, signal.SIGHUP, signal.SIGHUP, signal.SIGUSR1)
    assert code == 129 and summary["interrupted_by"] == "SIGHUP" and summary["lost"] == []
    for path in filter(Path.is_file, (job / "output").iterdir()):
        assert b"stopping after" not in path.read_bytes(), path


def test_a_stream_of_text_refuses_bytes_even_none() -> None:
    """As click finds out whether it may write bytes."""
    with outliving_streams(), pytest.raises(TypeError, match="expected text, got bytes"):
        sys.stdout.write(b"")


def test_streams_that_fail_are_reported_once_on_the_other_and_at_the_end(monkeypatch):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    other = io.StringIO()
    monkeypatch.setattr(sys, "stdout", full := Full())
    monkeypatch.setattr(sys, "stderr", other)
    with outliving_streams():
        print("first")
        print("second")
        assert lost_streams() == ["some of what was printed on stdout: No space left on device"]
    assert sys.stdout is full
    assert other.getvalue().count("the run goes on without") == 1


def test_a_reader_that_stops_reading_is_not_waited_for_and_may_go_on(monkeypatch):
    read, write = os.pipe()
    other = io.StringIO()
    monkeypatch.setattr(process, "_PATIENCE_S", 0.05)
    with os.fdopen(write, "w") as full, os.fdopen(read, "rb") as reader:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", other)
        with outliving_streams():
            print("first", "x" * 300_000)  # More than a pipe holds.
            print("lost")
            assert lost_streams() == [
                "some of what was printed on stdout: its reader read nothing for 0 s"
            ]
            assert len(reader.read1(1 << 20)) >= 4096
            print("last")
            assert reader.read1(1 << 20) == b"last\n"
    assert other.getvalue().count("the run goes on without") == 1


def test_characters_that_a_stream_cannot_write_end_no_run(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    with outliving_streams():
        print("caf\u00e9", flush=True)
        assert lost_streams() == []
    assert narrow.buffer.getvalue() == b"caf?\n"


@pytest.mark.parametrize("number", [1, 2, 3, 10, 12, 15, 24], ids=lambda n: signal.Signals(n).name)
def test_every_signal_asks_for_an_end_and_gives_its_exit_code(number):
    former = signal.getsignal(number)
    with Interrupt() as interrupt:
        signal.raise_signal(number)
        assert interrupt.received == number and interrupt.exit_code == 128 + number
        signal.raise_signal(signal.SIGUSR1)  # Another notice changes nothing.
    assert interrupt.received == number and signal.getsignal(number) is former


def test_the_second_that_means_it_ends_at_once_and_a_warning_before_it_does_not_count():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)  # As Slurm does, some time after its warning.
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert interrupt.received == signal.SIGUSR1


def test_a_signal_that_is_ignored_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
        assert interrupt.received is None
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_signal_that_torchrun_forwards_does_not_count_as_a_second(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert interrupt.received == signal.SIGINT
