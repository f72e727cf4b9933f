"""How a rank of `infinity train` joins and leaves the job's process group, without devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.config import SwapConfig
from infinity.distributed.group import RankTopology
from infinity.distributed.wire.failures import RankFailures
from infinity.distributed.wire.protocol import Peer
from infinity.errors import ConfigError, RankError
from infinity.tools.training import ranks
from infinity.tools.training.ranks import JobRank, job_rank

CUDA = SwapConfig(tiers={"device": {"kind": "cuda"}, "host": {"capacity": "64MiB"}})


class Links:
    """Links over which no rank fails."""

    def __init__(self) -> None:
        self.failures = RankFailures(Peer(5, "here", 5, None, b""), 6, {}, silence_s=20.0)
        self.is_closed = False

    def check(self) -> None:
        return None

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What rank 5 of a job of two nodes calls, by name. Each process sees one device."""
    made: dict[str, Any] = {"links": Links()}

    def join(store: Any, rank: int, of_job: Any, timeout_s: float) -> RankTopology:
        return RankTopology(None, rank, len(of_job), rank, len(of_job), 2, 3, (), made["links"])

    def init_process_group(backend: str, **options: Any) -> None:
        made["init"] = backend, options

    def destroy_process_group() -> None:
        made["destroy"] = True

    def set_device(index: int) -> None:
        made["device"] = index

    monkeypatch.setattr(ranks, "_store_of_launcher", lambda timeout_s: None)
    monkeypatch.setattr(ranks, "join", join)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(dist, "destroy_process_group", destroy_process_group)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_RANK", "2")
    return made


def test_ranks_wait_for_one_that_tokenises_for_hours(calls: dict[str, Any]) -> None:
    with job_rank(CUDA) as rank:
        assert rank == JobRank(5, 6)
    backend, options = calls["init"]
    assert backend == "cpu:gloo,cuda:nccl"
    assert options["timeout"].total_seconds() >= 12 * 3600
    assert calls["destroy"] and calls["links"].is_closed


def test_after_an_error_no_group_is_waited_for(calls: dict[str, Any]) -> None:
    with pytest.raises(RankError), job_rank(CUDA):
        raise RankError(1, "rank 1 is gone")
    assert "destroy" not in calls and calls["links"].is_closed


def test_an_error_that_another_rank_has_caused_names_that_rank(calls: dict[str, Any]) -> None:
    with pytest.raises(RankError, match="rank 1 is gone") as caught, job_rank(CUDA):
        calls["links"].failures.first = RankError(1, "rank 1 is gone")
        try:
            dist.barrier()
        except ValueError as error:
            raise ConfigError("TRL refuses the run") from error
    assert isinstance(caught.value.__cause__, ConfigError)
    calls["links"].failures.first = None
    with pytest.raises(RuntimeError, match="of its own"), job_rank(CUDA):
        raise RuntimeError("of its own")


def test_a_process_that_sees_its_own_device_alone_takes_that(calls: dict[str, Any]) -> None:
    with job_rank(CUDA):
        assert calls["device"] == 0


def test_a_rank_without_the_variables_of_a_launcher_is_told_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT, RANK"), job_rank(CUDA):
        pass
