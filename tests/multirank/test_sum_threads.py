"""Sums and copies of gradients and of early updates over ranks take the threads that updates have,
though torch has one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from infinity import _core  # noqa: TID251 (its calls are what is counted)
from infinity.config.machine import THREADS_VARIABLE, threads_here
from infinity.ops import host_sums

from .early_run import EarlyRun
from .processes import run_ranks
from .work import Case, Run, assert_same_run, expected, train

THREADS = 3
OF_RANKS = Case(
    3, model="wide", steps=4, accumulation=2, compute="bfloat16", capacity="256MiB",
    simulated=True, exchange="one_sided", updates="both_passes",
)  # fmt: skip
OF_A_RANK = replace(OF_RANKS, stage=1, updates="auto", steps=2)
# By the function that calls: sums and products of ranks' gradients, of a device's, and copies of
# early updates.
WANTED = {
    "_part_of_mean", "_combine", "put", "_give", "_end_oldest", "bring_home",
}  # fmt: skip


def _noting(kernel: Callable[..., None], used: set[tuple[str, int]]) -> Callable[..., None]:
    def call(*arguments: Any, num_threads: int, **options: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename == host_sums.__file__:
            frame = frame.f_back
        used.add((frame.f_code.co_name, num_threads))
        kernel(*arguments, num_threads=num_threads, **options)

    return call


def _train(rank: int) -> tuple[list[Run], set[tuple[str, int]]]:
    """The runs, and who has called native kernels with so many threads."""
    used: set[tuple[str, int]] = set()
    kernels = {
        name: _noting(getattr(_core.update, name), used) for name in ("add", "multiply", "copy")
    }
    host_sums._core = SimpleNamespace(  # type: ignore[assignment]
        update=SimpleNamespace(**kernels)
    )
    os.environ[THREADS_VARIABLE] = str(THREADS)  # Of this rank's process.
    threads_here.cache_clear()
    directory = Path(tempfile.gettempdir())
    runs = [EarlyRun(rank, OF_RANKS, directory).train(first=2)[0], train(rank, OF_A_RANK)]
    return runs, used


def test_sums_and_copies_over_ranks_take_the_threads_of_updates() -> None:
    of_ranks = run_ranks(2, _train)
    for case, at in ((OF_RANKS, 0), (OF_A_RANK, 1)):
        for rank, wanted in enumerate(expected(case, 2)):
            assert_same_run(of_ranks[rank][0][at], wanted, f"rank {rank}, {case}")
    for _, used in of_ranks:
        assert used == {(caller, THREADS) for caller in WANTED}
