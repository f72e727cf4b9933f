"""Weights of shards that rest on a drive stay in memory that nobody else needs: they are not read,
and whatever else changes them, or takes the memory, the bits are those of the drive."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

import infinity
from infinity.distributed.kept_shards import KeptShards
from infinity.state.units import StateKind
from tests.support.bits import differences

from .processes import run_ranks
from .work import LR, Case, counted_in_a_step, offload_case, one_step, train_through_changes

ON_DRIVES = {"parameters": "nvme", "master": "nvme", "moments": "nvme", "gradients": "host"}
ONE_SIDED = Case(3, ON_DRIVES, model="wide", compute="bfloat16", capacity="192MiB")
BETWEEN_DEVICES = replace(ONE_SIDED, simulated=True, exchange="collective")
READ = "nvme_read_nbytes"


def _keep(keeps: bool) -> None:
    if not keeps:
        KeptShards.reserve = lambda *_, **__: None  # type: ignore[assignment, method-assign]


def _read_in_a_step(rank: int, case: Case, *, keeps: bool) -> dict[str, float]:
    """Bytes that this rank reads from its drive in a step, and those of its state without weights,
    which an update reads."""
    _keep(keeps)
    model = offload_case(case, Path(tempfile.gettempdir(), f"swap-{keeps}"))
    counted = counted_in_a_step(model, rank, case, [READ])
    engine = infinity.engine_of(model)
    shards = [shard.unit for shard in engine.ranks.partition.local]
    counted["state"] = sum(
        unit.nbytes(kind)
        for unit in shards
        for kind in (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
    )
    counted["weights"] = sum(unit.trainable_nbytes for unit in shards)
    engine.close()
    return counted


def _count(rank: int, case: Case) -> list[dict[str, float]]:
    kept = _read_in_a_step(rank, case, keeps=True)
    dist.barrier()
    return [kept, _read_in_a_step(rank, case, keeps=False)]


@pytest.mark.parametrize(
    "case",
    [replace(ONE_SIDED, updates="deferred"), replace(BETWEEN_DEVICES, updates="both_passes")],
    ids=["one-sided", "devices"],
)
def test_a_step_reads_no_weights_of_a_shard_where_memory_keeps_them(case: Case) -> None:
    for kept, read in run_ranks(2, _count, case):
        assert kept[READ] <= 1.05 * kept["state"]
        assert read[READ] >= kept[READ] + 1.9 * kept["weights"]


def _changed_otherwise(rank: int, directory: str, keeps: bool) -> list[dict[str, Tensor]]:
    _keep(keeps)
    swap = Path(directory, f"swap-{keeps}")
    model = offload_case(ONE_SIDED, swap, checkpoint={"keep": 1})  # A load restores its files.
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=LR)
    train = partial(one_step, model, optimizer, rank, ONE_SIDED)
    found = train_through_changes(model, optimizer, train, Path(directory, f"saved-{keeps}"))
    assert not keeps or engine.store.kept._copies
    infinity.close(model)
    return found


def test_what_is_kept_is_what_the_drive_has(tmp_path: Path) -> None:
    found, wanted = (run_ranks(2, _changed_otherwise, str(tmp_path), k) for k in (True, False))
    for on_rank, other in zip(found, wanted, strict=True):
        for weights, same in zip(on_rank, other, strict=True):
            assert not differences(weights, same)
