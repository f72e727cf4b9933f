"""`infinity train` with [checkpoint]: stopped in any way and resumed, it is the same run."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.checkpoint.run import save as state_save
from infinity.checkpoint.run.copy import Saving, copy_checkpoint
from infinity.checkpoint.run.load import read_program
from infinity.config import JobConfig, SwapConfig
from infinity.config.source import override, read_file
from infinity.errors import ConfigError, CorruptionError, StorageError
from infinity.tools.training import program
from infinity.tools.training.checkpoints import identity_of, is_of_run
from infinity.tools.training.output import config_of_run, receipts_of_run
from infinity.tools.training.program import Run
from infinity.tools.training.report import Summary
from tests.support.file_systems import seem_elsewhere
from tests.support.forked import COMMAND, TIME_LIMIT_S, run_script

from .jobs import CONFIG, lines_of, start, wait_for_steps, write_job

RUN = """steps = 60
gradient_accumulation_steps = 2
schedule = "cosine"
warmup_steps = 3
eval_every = 20
eval_batches = 1
"""
EVERY_TENTH = """[checkpoint]
every = 10
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path, CONFIG + RUN + EVERY_TENTH)


def run(job: Path, *overrides: str, **options: Any) -> Summary:
    """The same in this process, which has imported everything already."""
    table, source = read_file(job / "job.toml")
    for text in overrides:
        override(table, text)
    console = Console(file=io.StringIO())
    config = SwapConfig.from_table(table, source)
    summary, code = program.train(config, console=console, **options)
    assert code == 0
    return summary


def metrics(job: Path, output: str = "output") -> list[tuple[object, ...]]:
    """What must be the same of every step, in order."""
    keys = "step", "loss", "grad_norm", "learning_rate", "held_out_loss", "num_tokens"
    return [tuple(line[key] for key in keys) for line in lines_of(job / output)]


def test_killed_terminated_and_resumed_elsewhere_it_is_the_same_run(job, processes):
    """kill -9, then SIGTERM, then to the end on other tiers: metrics and exported weights."""
    run(job, "output.directory=whole")

    first = start(job, "--resume", at_most=40)  # Nothing is there yet: it begins.
    processes.append(first)
    wait_for_steps(job, 14, first)
    first.kill()
    first.wait()
    assert list((job / "output" / "checkpoints").glob("step-*"))

    with pytest.raises(ConfigError, match="--resume"):
        run(job)  # Never begins beside checkpoints of another run.
    with pytest.raises(ConfigError, match=r"optimizer\.lr is.*train\.batch_size is 3 and was 2"):
        run(job, "train.batch_size=3", "optimizer.lr=1.0", resume=True)

    reached = len(metrics(job)) + 4
    second = start(job, "--resume", "--set", "placement.moments=host", at_most=59)
    processes.append(second)
    wait_for_steps(job, reached, second)
    second.send_signal(signal.SIGTERM)
    out, err = second.communicate()
    assert second.returncode == 143, err
    assert "then writing a checkpoint" in err
    summary = json.loads((job / "output" / "summary.json").read_text())
    stopped_at = summary["resumed_at"] + summary["steps_done"]
    assert summary["checkpoint"].endswith(f"step-{stopped_at:08d}")
    assert summary["export_directory"] is None and f"{stopped_at} of 60" in out
    assert len(metrics(job)) == stopped_at < 60
    assert list((job / "swap").iterdir()) == []

    run(job, "schedule.updates=at_step", "placement.parameters=host", resume=True)
    assert metrics(job) == metrics(job, "whole")
    weights = [(job / name / "model.safetensors").read_bytes() for name in ("output", "whole")]
    assert weights[0] == weights[1]
    names = sorted(path.name for path in (job / "output" / "checkpoints").iterdir())
    assert names == ["step-00000050", "step-00000060"]

    older = job / "output" / "checkpoints" / "step-00000050"
    with pytest.raises(ConfigError, match="step-00000060"):
        run(job, resume_from=older)  # What is newer would be in the way.
    run(job, "output.directory=branch", resume_from=older)
    assert metrics(job, "branch") == metrics(job, "whole")[50:]


def test_a_copy_to_another_file_system_is_given_up_in_time_and_taken_up_again(job, monkeypatch):
    """SIGTERM comes while one is on its way; the next one does not end within `grace`."""
    begin, is_asked = Run.begin_step, threading.Event()
    far = job / "far"
    seem_elsewhere(far, monkeypatch.setattr)
    options = "train.steps=12", "checkpoint.every=4"
    run(job, "output.directory=whole", *options)
    table, source = read_file(job / "job.toml")
    for text in (*options, f"checkpoint.directory={far}", "checkpoint.grace_s=1"):
        override(table, text)
    config = SwapConfig.from_table(table, source)
    asked = []

    def interrupted(run: Run) -> None:
        if run.num_steps == 5:
            assert is_asked.wait(TIME_LIMIT_S)
            os.kill(os.getpid(), signal.SIGTERM)
        begin(run)

    def slow(source: Path, directory: Path, storage: Any, *, saving: Saving) -> Path:
        asked.append(source)
        is_asked.set()
        saving.stop_order.wait()
        return copy_checkpoint(source, directory, storage, saving=saving)

    def full(source: Path, directory: Path, storage: Any, *, saving: Saving) -> Path:
        raise StorageError(errno.ENOSPC, operation="write", path=str(directory))

    console = Console(file=io.StringIO())
    monkeypatch.setattr(state_save, "copy_checkpoint", slow)
    monkeypatch.setattr(Run, "begin_step", interrupted)
    summary, code = program.train(config, console=console)
    assert (code, len(asked), len(summary.steps_s)) == (143, 2, 6)
    monkeypatch.setattr(Run, "begin_step", begin)
    assert summary.checkpoint == str(asked[1]) == str(*(job / "swap" / "copying").glob("step-*"))
    assert "gave up copying" in console.file.getvalue() and list(far.iterdir()) == []

    monkeypatch.setattr(state_save, "copy_checkpoint", full)
    with pytest.raises(StorageError, match="No space left"):
        program.train(config, console=console, resume=True)
    monkeypatch.undo()
    seem_elsewhere(far, monkeypatch.setattr)
    summary, code = program.train(config, console=console, resume=True)
    assert code == 0 and summary.checkpoint == str(far / "step-00000012")
    assert metrics(job) == metrics(job, "whole")
    assert [path.name for path in sorted(far.iterdir())] == ["step-00000008", "step-00000012"]
    assert list((job / "swap").iterdir()) == []


def test_a_full_drive_of_checkpoints_alone_is_named_before_the_first_step(job, monkeypatch):
    far = job / "far"
    far.mkdir()
    seem_elsewhere(far, monkeypatch.setattr)
    real = os.statvfs

    def full(path: Path) -> os.statvfs_result:
        stats = list(real(path))
        stats[4] *= not Path(path).is_relative_to(far)  # f_bavail
        return os.statvfs_result(stats)

    monkeypatch.setattr(os, "statvfs", full)
    for steps, needs in ((12, "3 checkpoints need"), (4, "a checkpoint needs")):
        with pytest.raises(StorageError, match=rf"far' .*{needs} .* free space"):
            run(job, f"train.steps={steps}", "checkpoint.every=4", f"checkpoint.directory={far}")
    assert not (job / "output" / "metrics.jsonl").exists()


def test_a_damaged_newest_checkpoint_is_named_and_is_in_nobodys_way(job):
    options = "train.steps=6", "checkpoint.every=2", "train.schedule='constant'"
    run(job, *options)
    directory = job / "output" / "checkpoints"
    newest, older = directory / "step-00000006", directory / "step-00000004"
    expected = metrics(job)
    content = bytearray((newest / "linked.crc32c").read_bytes())
    content[-1] ^= 1
    (newest / "linked.crc32c").write_bytes(content)
    with pytest.raises(CorruptionError, match=rf"{newest.name}.*--resume-from {older}"):
        run(job, *options, resume=True)
    summary = run(job, *options, resume_from=older)
    assert summary.resumed_at == 4
    assert metrics(job) == expected
    assert (directory / f"{newest.name}.damaged").is_dir()
    assert newest.is_dir(), "and there is a whole one again"
    with pytest.raises(ConfigError, match=rf"{newest.name} already exists and is whole"):
        run(job, *options, resume_from=older)


def test_other_text_is_another_run(job):
    short = "train.steps=2", "train.warmup_steps=0"
    run(job, *short)
    (job / "text.txt").write_text((job / "text.txt").read_text().replace("squared", "Squared"))
    with pytest.raises(ConfigError, match="tokens"):
        run(job, *short, resume=True)


def test_a_step_that_another_run_has_committed_is_not_continued(job):
    """Named with what differs, though a checkpoint of the run itself is there; no replay takes it."""
    short, name = ("train.steps=2", "train.warmup_steps=0"), "step-00000002"
    run(job, *short)
    run(job, *short, "model.seed=9", "output.directory=other")
    theirs = job / "swap" / "commits" / name
    shutil.copytree(job / "other" / "checkpoints" / name, theirs)
    with pytest.raises(
        ConfigError, match=rf"{theirs} .*model\.seed is 0 and was 9.*--remove-stale"
    ):
        run(job, *short, resume=True)
    output = job / "output"
    identity = identity_of(config_of_run(output), receipts_of_run(output)[-1])
    assert is_of_run(output / "checkpoints" / name, identity) and not is_of_run(theirs, identity)


def test_the_identity_of_a_run_has_base_and_noise_and_no_place():
    diffusion = {"resolution": 64}

    def identity(model: str = "a", samples: str = "s", **options: Any) -> dict[str, Any]:
        train = {"method": "diffusion", "steps": 4, "batch_size": 1}
        table = {"model": {"path": model}, "data": {"paths": ["images"]}}
        table["train"] = train | {"diffusion": diffusion | options}
        receipt = {"base": {"table_sha256": "t", "samples_sha256": samples}}
        return identity_of(JobConfig.of(SwapConfig.load(table)), receipt)

    assert identity() == identity(model="b") == identity(cache="c")
    assert identity() != identity(samples="x") and identity() != identity(guidance=9.0)


def test_a_longer_run_with_another_learning_rate_goes_on_where_it_is_asked_for(job):
    """Refused first, with the way; then said, and the same run as its own uninterrupted resume."""
    short = "train.steps=6", "checkpoint.every=2"
    run(job, *short)
    more = "train.steps=10", "checkpoint.every=2", "optimizer.lr=0.002"
    with pytest.raises(ConfigError, match=r"train\.steps is 10 and was 6.*--accept-changes"):
        run(job, *more, resume=True)
    for other, said in (
        (("train.epochs=1", "train.steps=0"), "train.epochs is 1.0 and was not set; train.steps is "
         "not set and was 6"),
        (("train.schedule=constant",), ": train.schedule is 'constant' and was 'cosine'. To go on"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=re.escape(said)):
            run(job, *short, *other, resume=True)
    with pytest.raises(ConfigError, match=r"train\.batch_size is 3"):
        run(job, *more, "train.batch_size=3", resume=True, accept_changes=True)
    console = Console(file=io.StringIO(), width=400)
    table, source = read_file(job / "job.toml")
    for text in (*more, "output.directory=longer", "checkpoint.directory=longer/checkpoints"):
        override(table, text)
    config = SwapConfig.from_table(table, source)
    newest = job / "output" / "checkpoints" / "step-00000006"
    program.train(config, console=console, resume_from=newest, accept_changes=True)
    printed = console.file.getvalue()
    assert "accepted since step-00000006: optimizer.lr is 0.002 and was" in printed
    lines = metrics(job, "longer")
    rates = [line[3] for line in lines]
    # Cosine over 10 steps, 3 of them warm-up, from its seventh step on.
    expected = [0.002 * (1 + math.cos(math.pi * (step - 3) / 7)) / 2 for step in range(6, 10)]
    assert rates == pytest.approx(expected)
    older = job / "longer" / "checkpoints" / "step-00000008"
    run(job, *more, "output.directory=again", resume_from=older)
    assert metrics(job, "again") == lines[2:]
    rest = run(job, *more, resume=True, accept_changes=True)
    card, whole = (job / "output" / "README.md").read_text(), lines_of(job / "output")
    assert "| 10 of " in card and f"; {sum(line['num_tokens'] for line in whole):,} tokens" in card
    assert f"| loss | {whole[0]['loss']:.3f} to " in card and rest.losses[0] != whole[0]["loss"]


def test_losses_of_other_held_out_data_are_not_compared(job):
    """Refused first; then the first of them is the lowest, and patience begins anew."""
    held_out, easy = job / "held-out.txt", "the " * 400
    held_out.write_text(easy)
    data = f"data.eval_paths={held_out}", "data.held_out=0", "checkpoint.every=2"
    options = (*data, "train.eval_every=2", "train.keep_best=true", "train.schedule=constant")
    run(job, *options, "train.steps=4", "train.early_stopping_patience=2")
    newest = job / "output" / "checkpoints" / "step-00000004"
    assert read_program(newest).extra["trainer"]["best_metric"] is not None
    held_out.write_text("Zq8#" * 400)
    more = (*options, "train.steps=6", "train.early_stopping_patience=2")
    with pytest.raises(ConfigError, match="the SHA-256 of the held-out data is .*--accept-changes"):
        run(job, *more, resume=True)
    summary = run(job, *more, resume=True, accept_changes=True)
    assert summary.best_step == 6
    held_out.write_text(easy)
    run(job, *more, "train.eval_every=0", "train.steps=7", "train.keep_best=false",
        "train.early_stopping_patience=0", resume=True)  # fmt: skip


def test_resume_needs_the_section(job):
    write_job(job, CONFIG + RUN)
    with pytest.raises(ConfigError, match=r"\[checkpoint\]"):
        run(job, resume=True)


# Steps that are committed.

EVERY_STEP = """[checkpoint]
durability = "step"
keep = 1
"""


def test_every_step_survives_kill_9(job, processes):
    """No checkpoint before the end: the run goes on from the last step that was taken."""
    write_job(job, CONFIG + RUN.replace("steps = 60", "steps = 24") + EVERY_STEP)
    run(job, "output.directory=whole", "checkpoint.durability=none")

    processes.append(first := start(job, at_most=20))
    wait_for_steps(job, 7, first)
    first.kill()
    first.wait()
    taken = len(metrics(job))
    commit = newest_commit(job)
    assert int(commit.name.removeprefix("step-")) in (taken - 1, taken)
    assert not (job / "output" / "checkpoints").exists()

    with pytest.raises(ConfigError, match="--remove-stale"):
        run(job)  # Never begins over a committed step.
    summary = run(job, "placement.moments=host", resume=True)
    assert summary.resumed_at == int(commit.name.removeprefix("step-"))
    assert metrics(job) == metrics(job, "whole")
    weights = [(job / name / "model.safetensors").read_bytes() for name in ("output", "whole")]
    assert weights[0] == weights[1]
    names = [path.name for path in (job / "output" / "checkpoints").iterdir()]
    assert names == ["step-00000024"]
    assert list((job / "swap").iterdir()) == [], "the checkpoint has taken the commit's place"


def test_swap_directory_is_inspected_and_removed_on_demand_only(job, processes):
    write_job(job, CONFIG + RUN.replace("steps = 60", "steps = 6001") + EVERY_STEP)
    processes.append(first := start(job, at_most=6000))
    wait_for_steps(job, 3, first)
    held = inspect(job / "swap")
    assert held.returncode == 0 and f"in use by process {first.pid}" in held.stdout
    refused = inspect(job / "swap", "--remove-stale")
    assert refused.returncode == 2 and str(first.pid) in refused.stderr
    first.kill()
    first.wait()

    stale = inspect(job / "swap", "--verify")
    assert stale.returncode == 0, stale.stderr
    assert f"stale: left by process {first.pid}" in stale.stdout
    assert "every byte verified" in stale.stdout and "moments" in stale.stdout
    answer = json.loads(inspect(job / "swap", "--json").stdout)
    assert not answer["swap"]["is_held"] and answer["commits"][0]["is_intact"]
    assert answer["commits"][-1]["linked_nbytes"] > 0

    commit = newest_commit(job)
    state = next(commit.glob("*.swap"))
    with state.open("r+b") as file:  # The last page that the table names is in this or the other.
        content = bytearray(file.read())
        file.seek(0)
        file.write(bytes(byte ^ 1 for byte in content))
    damaged = inspect(job / "swap", "--verify")
    assert damaged.returncode == 1 and state.name in damaged.stderr
    removed = json.loads(inspect(job / "swap", "--remove-stale", "--json").stdout)
    assert removed["swap"] == str(job / "swap") and "commits" in removed["removed"]
    assert list((job / "swap").iterdir()) == []
    emptied = inspect(job / "swap")
    assert emptied.returncode == 0 and "empty" in emptied.stdout
    foreign = inspect(job, "--remove-stale")
    assert foreign.returncode == 2 and "no swap directory" in foreign.stderr


def newest_commit(job: Path) -> Path:
    """A kill between a commit and the end of the one before leaves both, each of them whole."""
    commits = sorted((job / "swap" / "commits").glob("step-*"))
    assert 1 <= len(commits) <= 2
    return commits[-1]


def inspect(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_script(COMMAND, "inspect", *arguments)
