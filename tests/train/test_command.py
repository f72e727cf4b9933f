"""The `infinity train` process: its flags, exit codes, signals, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.config.source import override
from infinity.errors import ConfigError
from tests.support.forked import COMMAND, Script, run_script, wait_until

from .jobs import CONFIG, start, wait_for_steps, write_job


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, CONFIG + "steps = 1000000\n")


def run(job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(COMMAND, "train", job / "job.toml", *arguments)


def test_json_prints_the_summary_alone_on_stdout(job):
    options = "--json", "--set", "train.steps=2", "--set", "output.directory=elsewhere"
    done = run(job, *options)

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps_done"] == summary["steps_asked"] == 2
    assert (job / "elsewhere" / "config.json").is_file(), "relative to the file"
    assert "step 2/2" in done.stderr
    assert list((job / "swap").iterdir()) == []


def test_bad_input_is_one_line_and_exit_code_2(job):
    done = run(job, "--set", "data.paths=nowhere.txt")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: data.paths: ")


def test_missing_sections_are_named(job):
    (job / "job.toml").write_text("schema = 1\n")
    done = run(job)
    assert done.returncode == 2
    assert all(f"[{section}]" in done.stderr for section in ("model", "data", "train"))


def test_interrupt_finishes_the_step_exports_and_releases(job, processes):
    """As a user starts it. The others are forked from a process with all of it imported."""
    command = [sys.executable, "-c", COMMAND, "train", str(job / "job.toml")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes.append(process := subprocess.Popen(command, **pipes))
    wait_for_steps(job, 3, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()

    assert process.returncode == 130, err
    assert "stopping after this step" in err
    assert list((job / "swap").iterdir()) == []
    summary = json.loads((job / "output" / "summary.json").read_text())
    assert summary["interrupted_by"] == "SIGINT" and summary["steps_done"] >= 3
    metrics = (job / "output" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == summary["steps_done"]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(job / "output")
    assert "ended by SIGINT" in out


def test_terminate_ends_in_order_too(job, processes):
    processes.append(process := start(job))
    wait_for_steps(job, 1, process)
    process.terminate()
    _, err = process.communicate()

    assert process.returncode == 143, err
    assert (job / "output" / "model.safetensors").is_file()


TELLING = """
from infinity.tools.training.program import Run
begin = Run.begin_step

def tell(run):
    print("a step begins", flush=True)
    return begin(run)

Run.begin_step = tell
"""


def test_second_interrupt_ends_at_once_and_still_releases(job, processes):
    """One step is made to last, so that the second signal comes before the first has its way."""
    slow = "--set", "train.gradient_accumulation_steps=1000000", "--set", "train.batch_size=1"
    process = Script(TELLING + COMMAND, "train", job / "job.toml", *slow)
    processes.append(process)
    for output, said in (
        (process.stdout, "a step begins"),
        (process.stderr, "stopping after this step"),  # One signal may hide another.
    ):
        wait_until(lambda output=output, said=said: said in output.read_text(), process)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate()

    assert process.returncode == 130, err
    assert "nothing was exported" in err
    assert not list((job / "output").glob("*.safetensors"))
    assert list((job / "swap").iterdir()) == []


def test_second_run_on_a_held_swap_directory_is_refused_with_the_pid(job, processes):
    processes.append(process := start(job))
    wait_for_steps(job, 1, process)
    second = run(job, "--set", "output.directory=second")

    assert second.returncode == 2
    assert str(process.pid) in second.stderr
    assert process.poll() is None, "the first is not disturbed"
    process.kill()
    process.communicate()
    third = run(job, "--set", "train.steps=1")
    assert third.returncode == 0, third.stderr


def test_command_line_does_not_import_torch_to_refuse_a_file(job):
    code = (
        "import sys\n"
        "from infinity.tools.cli import app\n"
        f"sys.argv = ['infinity', 'train', {str(job / 'nowhere.toml')!r}]\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=os.environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps=5", {"train": {"steps": 5}}),
        ("optimizer.lr = 1e-3", {"optimizer": {"lr": 1e-3}}),
        ("placement.moments=['host', 'nvme']", {"placement": {"moments": ["host", "nvme"]}}),
        ("tiers.host.capacity=1GiB", {"tiers": {"host": {"capacity": "1GiB"}}}),
        ("data.shuffle=false", {"data": {"shuffle": False}}),
    ],
)
def test_override_reads_values_as_toml_and_words_as_text(text, expected):
    table: dict = {}
    override(table, text)
    assert table == expected


def test_override_reaches_into_lists():
    table = {"tiers": {"nvme": [{"path": "a"}]}}
    override(table, "tiers.nvme.0.path=b")
    assert table == {"tiers": {"nvme": [{"path": "b"}]}}


@pytest.mark.parametrize("text", ["train.steps", "=5", "a..b=1", "tiers.nvme.1.path=b", "x.y=1"])
def test_override_that_leads_nowhere_is_refused(text):
    with pytest.raises(ConfigError, match="--set"):
        override({"tiers": {"nvme": [{}]}, "x": 1}, text)
