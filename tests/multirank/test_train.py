"""`infinity train` under torchrun."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.tools.training import program, replay
from infinity.tools.training.program import Run
from infinity.tools.training.ranks import job_rank
from infinity.tools.training.trainer import RunTrainer
from tests.support.exhaustive import sampled
from tests.train.jobs import GPT2, job_table, lines_of

from .processes import run_ranks, seem_on_node


def _table(directory: Path, name: str, accumulation: int, **more: Any) -> dict[str, Any]:
    table = job_table(
        directory,
        train={
            "steps": 3,
            "batch_size": 2,
            "gradient_accumulation_steps": accumulation,
            "eval_every": 3,
        },
        optimizer={"lr": 1e-2, "max_grad_norm": 0},
        output={"directory": str(directory / name)},
        **more,
    )
    table["tiers"]["host"]["capacity"] = "64MiB"
    return table


@pytest.fixture(autouse=True)
def _has_text(tmp_path: Path) -> None:
    """All ranks read it, and none writes it."""
    job_table(tmp_path)


def _train(rank: int, directory: str, name: str, accumulation: int) -> tuple[str, int]:
    """What a rank printed, and its exit code."""
    console = Console(file=io.StringIO(), width=200)
    table = _table(Path(directory), name, accumulation)
    _, exit_code = program.train(SwapConfig.load(table), console=console)
    return console.file.getvalue(), exit_code  # type: ignore[attr-defined]


def _train_stopped(rank: int, directory: str) -> int:
    """A run with checkpoints that one of the ranks is asked to end in its second step."""
    table = _table(Path(directory), "parts", 1, checkpoint={})
    begin = Run.begin_step

    def stop(run: Run) -> None:
        if rank == 1 and run.num_steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        begin(run)

    Run.begin_step = stop  # type: ignore[method-assign]
    _, exit_code = program.train(SwapConfig.load(table), console=Console(file=io.StringIO()))
    return exit_code


def test_two_ranks_train_on_what_twice_the_accumulation_would(tmp_path: Path) -> None:
    """The same sequences, summed in the same order: two ranks that see one batch each, or one that
    sees two. Halving is exact, so even the bits agree."""
    _train(0, str(tmp_path), "alone", 2)
    (first, code), (second, other_code) = run_ranks(2, _train, str(tmp_path), "both", 1)
    assert code == other_code == 0
    assert first.count("step 1/3") == 1
    assert second == "", "one rank prints"
    alone, both = lines_of(tmp_path / "alone"), lines_of(tmp_path / "both")
    for one, two in zip(alone, both, strict=True):
        for key in ("step", "loss", "held_out_loss", "num_tokens", "learning_rate"):
            assert one[key] == two[key], key
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("alone", "both")]
    assert all((weights[0][name] == tensor).all() for name, tensor in weights[1].items())
    assert list((tmp_path / "swap").iterdir()) == []


def test_one_rank_continues_a_run_of_two(tmp_path: Path) -> None:
    """Stopped on one of them, and with as many batches in a step as before: the uninterrupted run."""
    _train(0, str(tmp_path), "alone", 2)
    assert run_ranks(2, _train_stopped, str(tmp_path)) == [143, 143]
    table = _table(tmp_path, "parts", 1, checkpoint={})
    with pytest.raises(
        ConfigError, match="gradient_accumulation_steps times the number of ranks is 1 and was 2"
    ):
        program.train(SwapConfig.load(table), resume=True)
    table["train"]["gradient_accumulation_steps"] = 2
    summary, _ = program.train(SwapConfig.load(table), resume=True)
    assert summary.resumed_at == 2
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("alone", "parts")]
    assert all((weights[0][name] == tensor).all() for name, tensor in weights[1].items())


def _train_with_overflows(rank: int, directory: str, name: str, accumulation: int) -> int:
    """Skips two steps: a loss in the second and gradients in the fourth are not finite, each in one
    micro-batch of one rank."""
    table = _table(Path(directory), name, accumulation)
    table["train"] |= {"steps": 5, "nonfinite": "skip"}
    seen = [0, 0]

    def overflow(self: Any, *args: Any, **options: Any) -> Any:
        loss = super(RunTrainer, self).compute_loss(*args, **options)
        step = self.state.global_step
        if not self.model.training:
            return loss
        seen[:] = [step, seen[1] + 1 if seen[0] == step else 0]
        is_first = rank == 0 and seen[1] == 0
        if step == 1 and is_first:
            return loss * float("nan")
        if step == 3 and is_first:
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    with patch.object(RunTrainer, "compute_loss", overflow):
        _, exit_code = program.train(SwapConfig.load(table), console=Console(file=io.StringIO()))
    return exit_code


@pytest.mark.parametrize("accumulation", sampled([1, 2], (1).__eq__))
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(tmp_path: Path, accumulation: int) -> None:
    assert _train_with_overflows(0, str(tmp_path), "alone", 2 * accumulation) == 0
    assert run_ranks(2, _train_with_overflows, str(tmp_path), "both", accumulation) == [0, 0]
    for name in ("alone", "both"):
        skipped = [line["skipped"] is not None for line in lines_of(tmp_path / name)]
        assert skipped == [False, True, False, True, False]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("alone", "both")]
    assert all(tensor.isfinite().all() for tensor in weights[0].values())
    # Of two micro-batches on each of two ranks the sums have another order.
    tolerance = 0.0 if accumulation == 1 else 1e-4
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=tolerance, atol=tolerance)


def _train_spoilt(rank: int, directory: str) -> str:
    """The error of a run whose last block is not finite on rank 1, which is slow to find it."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    forward = GPT2Attention.forward

    def spoil(self: Any, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled() and self.layer_idx == 0:
            time.sleep(1)
        out, *rest = forward(self, *args, **options)
        return out * (math.nan if (rank, self.layer_idx) == (1, 5) else 1.0), *rest

    GPT2Attention.forward = spoil  # type: ignore[method-assign]
    table = _table(Path(directory), "spoilt", 1, distributed={"zero_stage": 3})
    table["tiers"]["host"]["capacity"] = "36MiB"  # Less than all weights: they come from rank 0.
    table["model"] = {"config": GPT2 | {"n_layer": 6, "n_embd": 256}}
    table["output"]["export"] = False
    try:
        program.train(SwapConfig.load(table), console=Console(file=io.StringIO()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        GPT2Attention.forward = forward  # type: ignore[method-assign]
    return ""


def test_the_module_of_a_rank_is_named_before_any_rank_closes(tmp_path: Path) -> None:
    other, own = run_ranks(2, _train_spoilt, str(tmp_path))
    said = "NonFiniteError: the loss (nan) is not finite at step 1, first produced by "
    assert own.startswith(f"{said}transformer.h.5.attn;")
    assert other.startswith(f"{said}a module on rank 1;")


def _replay(rank: int, directory: str, step: int, own_text: int, differing: int) -> dict[str, Any]:
    """Rank `own_text` has other data; rank `differing` finds a tensor that a checkpoint has not."""
    os.environ["RANK"] = str(rank)
    overrides = ["train.gradient_accumulation_steps=1"]
    if rank == own_text:
        overrides.append(f'data.paths=["{directory}/other.txt"]')
    if rank == differing:
        replay.first_difference = lambda path, model: "of this rank"  # type: ignore[assignment]
    console = Console(file=io.StringIO())
    return replay.replay(
        Path(directory, "alone"), step, overrides=overrides, begin="start", console=console
    )


def test_ranks_compare_a_run_of_one_and_tell_rank_0_what_differs(tmp_path: Path) -> None:
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "other.txt").write_text(text.replace("7 and 49", "7 and 48"))
    table = _table(tmp_path, "alone", 2, checkpoint={"every": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_DIGEST_SHARE", 1e12)  # A digest for each step.
        program.train(SwapConfig.load(table), console=Console(file=io.StringIO()))
    assert all("state" in line for line in lines_of(tmp_path / "alone")[1:])
    for step, own_text, differing, said in (
        (3, -1, -1, []), (3, 1, -1, [(None, "data")]), (3, -1, 1, [(2, "step-00000002")]),
    ):  # fmt: skip
        answers = run_ranks(2, _replay, str(tmp_path), step, own_text, differing)
        for found in answers:
            assert [(row["step"], row["what"]) for row in found["differences"]] == said
        assert {"model.safetensors", "step-00000002"} <= answers[0]["compared"].keys() or said
    assert not (tmp_path / "alone/.replay").exists() and not list((tmp_path / "swap").iterdir())


@pytest.mark.skipif(not os.environ.get("INFINITY_TORCHRUN"), reason="costs a minute of imports")
def test_the_command_runs_under_torchrun(tmp_path: Path) -> None:
    config = tmp_path / "swap.json"
    config.write_text(json.dumps(_table(tmp_path, "output", 1)))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "infinity", "train", str(config)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 1/3") == 1, "one rank prints"


def _local_rank(rank: int) -> str:
    """Ranks 0 and 1 are on one node, rank 2 on another; no variable of torchrun is set."""
    seem_on_node(rank // 2, address="127.0.0.1")
    os.environ.pop("LOCAL_RANK", None)
    with job_rank(SwapConfig(tiers={"host": {"capacity": "64MiB"}})):
        return os.environ["LOCAL_RANK"]


def test_a_rank_that_was_not_started_by_torchrun_is_counted_on_its_node() -> None:
    assert run_ranks(3, _local_rank) == ["0", "1", "0"]
