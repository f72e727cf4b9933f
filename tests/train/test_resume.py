"""`infinity train` with [checkpoint]: stopped in any way and resumed, it is the same run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CONFIG = """
[tiers.host]
capacity = "64MiB"
[[tiers.nvme]]
path = "swap"
[model.config]
model_type = "gpt2"
n_layer = 2
n_embd = 16
n_head = 2
n_positions = 64
vocab_size = 256
bos_token_id = 0
eos_token_id = 0
[data]
paths = ["text.txt"]
sequence_length = 32
[train]
steps = 60
batch_size = 2
accumulation = 2
schedule = "cosine"
warmup_steps = 3
eval_every = 20
eval_batches = 1
[output]
directory = "output"
[checkpoint]
every = 10
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(800)))
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def start(job: Path, *arguments: str) -> subprocess.Popen[str]:
    code = "from infinity.cli import main; main()"
    command = [sys.executable, "-c", code, "train", str(job / "job.toml"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(job: Path, *arguments: str) -> tuple[int, str]:
    process = start(job, *arguments)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def metrics(job: Path, output: str = "output") -> list[tuple[object, ...]]:
    """What must be the same of every step, in order."""
    lines = (job / output / "metrics.jsonl").read_text().splitlines()
    keys = "step", "loss", "grad_norm", "learning_rate", "held_out_loss", "num_tokens"
    return [tuple(json.loads(line)[key] for key in keys) for line in lines]


def wait_for_steps(job: Path, count: int, process: subprocess.Popen[str]) -> None:
    path = job / "output" / "metrics.jsonl"
    deadline_s = time.monotonic() + 90
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "no steps were taken"
        time.sleep(0.005)


def test_killed_terminated_and_resumed_elsewhere_it_is_the_same_run(job, processes):
    """kill -9, then SIGTERM, then to the end on other tiers: metrics and exported weights."""
    code, err = run(job, "--set", "output.directory=whole")
    assert code == 0, err

    processes.append(first := start(job, "--resume"))  # Nothing is there yet: it begins.
    wait_for_steps(job, 14, first)
    first.kill()
    first.wait()
    assert list((job / "output" / "checkpoints").glob("step-*"))

    code, err = run(job)
    assert code == 2 and "--resume" in err, "never begins beside checkpoints of another run"
    code, err = run(job, "--resume", "--set", "train.batch_size=3", "--set", "optimizer.lr=1.0")
    assert code == 2 and "train.batch_size is 3 and was 2" in err and "optimizer.lr" in err

    processes.append(second := start(job, "--resume", "--set", "placement.moments=host"))
    reached = len(metrics(job)) + 4
    wait_for_steps(job, reached, second)
    second.send_signal(signal.SIGTERM)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 143, err
    assert "then writing a checkpoint" in err
    summary = json.loads((job / "output" / "summary.json").read_text())
    stopped_at = summary["resumed_at"] + summary["steps_done"]
    assert summary["checkpoint"].endswith(f"step-{stopped_at:08d}")
    assert summary["export_directory"] is None and f"{stopped_at} of 60" in out
    assert len(metrics(job)) == stopped_at < 60
    assert list((job / "swap").iterdir()) == []

    code, err = run(job, "--resume", "--set", "schedule.updates=at_step",
                    "--set", "placement.parameters=host")  # fmt: skip
    assert code == 0, err
    assert metrics(job) == metrics(job, "whole")
    weights = [(job / name / "model.safetensors").read_bytes() for name in ("output", "whole")]
    assert weights[0] == weights[1]
    names = sorted(path.name for path in (job / "output" / "checkpoints").iterdir())
    assert names == ["step-00000050", "step-00000060"]

    code, err = run(job, "--resume-from", str(job / "output/checkpoints/step-00000050"))
    assert code == 2 and "step-00000060" in err, "what is newer would be in the way"
    code, err = run(job, "--resume-from", str(job / "output/checkpoints/step-00000050"),
                    "--set", "output.directory=branch")  # fmt: skip
    assert code == 0, err
    assert metrics(job, "branch") == metrics(job, "whole")[50:]


def test_other_text_is_another_run(job):
    code, err = run(job, "--set", "train.steps=2", "--set", "train.warmup_steps=0")
    assert code == 0, err
    (job / "text.txt").write_text((job / "text.txt").read_text().replace("squared", "Squared"))
    arguments = "--set", "train.steps=2", "--set", "train.warmup_steps=0"
    code, err = run(job, "--resume", *arguments)
    assert code == 2 and "tokens" in err


def test_resume_needs_the_section(job):
    (job / "job.toml").write_text(CONFIG.partition("[checkpoint]")[0])
    code, err = run(job, "--resume")
    assert code == 2 and "[checkpoint]" in err
