"""How a rank of `infinity train` joins and leaves the job's process group, without devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.config import SwapConfig
from infinity.errors import RankError
from infinity.training.ranks import JobRank, job_rank

CUDA = SwapConfig(tiers={"device": {"kind": "cuda"}, "host": {"capacity": "64MiB"}})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What rank 5 of a job of two nodes calls, by name. Each process sees one device."""
    made: dict[str, Any] = {}

    def init_process_group(backend: str, **options: Any) -> None:
        made["init"] = backend, options

    def destroy_process_group() -> None:
        made["destroy"] = True

    def set_device(index: int) -> None:
        made["device"] = index

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "destroy_process_group", destroy_process_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_RANK", "2")
    return made


def test_ranks_wait_for_one_that_tokenises_for_hours(calls: dict[str, Any]) -> None:
    with job_rank(CUDA) as rank:
        assert rank == JobRank(5, 6)
    backend, options = calls["init"]
    assert backend == "cpu:gloo,cuda:nccl"
    assert options["timeout"].total_seconds() >= 12 * 3600
    assert calls["destroy"]


def test_after_an_error_no_group_is_waited_for(calls: dict[str, Any]) -> None:
    with pytest.raises(RankError), job_rank(CUDA):
        raise RankError(1, "rank 1 is gone")
    assert "destroy" not in calls


def test_a_process_that_sees_its_own_device_alone_takes_that(calls: dict[str, Any]) -> None:
    with job_rank(CUDA):
        assert calls["device"] == 0
