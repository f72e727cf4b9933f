"""What ranks do in `test_train_methods`. A rank imports this file alone, and of the helpers of other
tests those that it needs: to import all of them takes as long as many runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.config import JobConfig, SwapConfig
from infinity.errors import ConfigError
from infinity.testing import SimulatedDevice
from infinity.tools.training import program


def train(rank: int, config: SwapConfig | JobConfig, resume: bool = False) -> None:
    program.train(config, resume=resume)


def train_beside_a_device(rank: int, config: SwapConfig) -> None:
    offload: Any = infinity.offload

    def on_device(*args: Any, **options: Any) -> None:
        offload(*args, device=SimulatedDevice(rank), **options)

    infinity.offload = on_device  # type: ignore[assignment]
    program.train(config)


def train_each_alone(rank: int, configs: list[SwapConfig]) -> None:
    for config in configs:
        program.train(config)


def train_stopped(rank: int, config: SwapConfig) -> int:
    """Rank 1 is asked to end in its second step."""
    begin = program.Run.begin_step

    def stop(run: program.Run) -> None:
        if rank == 1 and run.num_steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        begin(run)

    program.Run.begin_step = stop  # type: ignore[method-assign]
    return program.train(config)[1]


def refused(rank: int, config: SwapConfig) -> str:
    with pytest.raises(ConfigError) as refusal:
        program.train(config)
    return str(refusal.value)


# -- Beside it, trainers without infinity ----------------------------------------------------------


def _seem_launched(rank: int) -> None:
    """Gives a program that does not use infinity the variables of torchrun."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}


def embed_in_memory(rank: int, table: Any, rows: list[Any]) -> tuple[list[float], Any]:
    from tests.train import test_embed as embedding

    _seem_launched(rank)
    model, trainer = embedding.in_memory(table, rows)
    return [loss for loss, *_ in embedding.steps(trainer)], model.state_dict()


def rewarded_in_memory(rank: int, base: Path, method: str, beta: float, directory: Path) -> Any:
    from tests.train import test_grpo as rewarded

    _seem_launched(rank)
    rows = rewarded.rows_of(is_chat=False)
    return rewarded.plain(
        base, method, rows, rewarded.num_ones, lora=True, beta=beta, directory=directory, rank=rank
    )
