"""What a configuration means for one of several ranks, and what is refused before training."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from infinity.config import SwapConfig
from infinity.config.schema.engine import Distributed
from infinity.distributed.collective.exchange import choose_round
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import (
    AgreedDevices,
    agree_on_exchange,
    config_of_rank,
    refuse_shared_devices,
)
from infinity.errors import ConfigError
from infinity.sizes import GIB, MIB

# Rank 1 of two, which are ranks 1 and 3 of a job of four on one machine.
GROUP = RankTopology(
    process_group=None, rank=1, count=2, job_rank=3, job_count=4, node_rank=3, node_count=4,
    machines=(),
)  # fmt: skip


def config(path: Path, **sections: Any) -> SwapConfig:
    tiers = {"host": {"capacity": "64MiB"}, "nvme": [{"path": str(path), "capacity": "1GiB"}]}
    return SwapConfig(tiers=tiers, **sections)


def test_capacities_are_the_nodes_and_directories_a_ranks_own(tmp_path: Path) -> None:
    mine = config_of_rank(config(tmp_path), GROUP)
    assert mine.tiers.host.capacity.nbytes == (64 << 20) // 4
    assert mine.tiers.nvme[0].capacity.nbytes == (1 << 30) // 4
    assert mine.tiers.nvme[0].path == tmp_path / "rank-3"


@pytest.mark.parametrize(("stage", "updates"), [(1, "at_step"), (2, "at_step"), (3, "auto")])
def test_updates_are_in_the_step_where_every_rank_keeps_the_weights(
    stage: int, updates: str, tmp_path: Path
) -> None:
    mine = config_of_rank(config(tmp_path, distributed={"zero_stage": stage}), GROUP)
    assert mine.schedule.updates == updates


@pytest.mark.parametrize(
    ("sections", "group", "message"),
    [
        (
            {"checkpoint": {"durability": "step"}},
            GROUP,
            "all 4 ranks of the job, and 2 hold this one",
        ),
        (
            {"checkpoint": {"durability": "step"}},
            replace(GROUP, node_count=1),
            "several machines",
        ),
    ],
)
def test_a_configuration_that_cannot_commit_is_refused(
    tmp_path: Path, sections: dict[str, Any], group: RankTopology, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of_rank(config(tmp_path, **sections), group)


def test_two_ranks_on_one_device_are_refused_by_name() -> None:
    refuse_shared_devices(["GPU-a", "GPU-b", "GPU-c"])
    refuse_shared_devices(["", "", ""])  # The device is the host.
    with pytest.raises(ConfigError, match="ranks 1 and 3 have one device, GPU-b"):
        refuse_shared_devices(["GPU-a", "GPU-b", "", "GPU-b"])


@pytest.mark.parametrize(
    ("device_nbytes", "round_nbytes"),
    [(None, 256 * MIB), (80 * GIB, 256 * MIB), (40 * GIB, 128 * MIB), (GIB, 32 * MIB)],
)
def test_a_round_is_the_largest_whose_buffers_take_a_64th_of_the_device(
    device_nbytes: int | None, round_nbytes: int
) -> None:
    buffers = choose_round(8, GIB, GIB, device_nbytes)
    assert buffers.round_nbytes == round_nbytes
    assert buffers.nbytes == (2 + 8 + 2 * 8) * round_nbytes // 8


def test_buffers_are_no_larger_than_the_largest_part_of_a_unit() -> None:
    small = choose_round(8, 3 * MIB, MIB, 80 * GIB)
    assert (small.part_nbytes, small.sum_part_nbytes) == (3 * MIB, MIB)
    frozen = choose_round(8, GIB, 512, 40 * GIB)
    assert frozen.round_nbytes == 256 * MIB, "buffers for sums take nothing, so rounds are larger"


class Links:
    """The links of a rank in a thread, of three."""

    meeting = threading.Barrier(3, timeout=60)
    contents: ClassVar[dict[int, Any]] = {}

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather_objects(self, tag: str, local: Any) -> list[Any]:
        self.contents[self.rank] = local
        self.meeting.wait()
        return [self.contents[rank] for rank in range(3)]

    def all_gather(self, tag: str, content: bytes) -> None:
        return None


def agree(rank: int, device_nbytes: int | None, stage: int = 3) -> AgreedDevices:
    return agree_on_exchange(
        Distributed(exchange="collective", zero_stage=stage),
        ("host",),
        replace(GROUP, rank=rank, count=3, links=Links(rank)),  # type: ignore[arg-type]
        has_own_memory=True,
        is_cuda=False,
        identity="",
        device_nbytes=device_nbytes,
    )


def test_ranks_whose_devices_differ_agree_on_the_least_one() -> None:
    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(agree, range(3), (80 * GIB, 24 * GIB, None)))
    assert found == [AgreedDevices(True, 24 * GIB)] * 3


def test_a_rank_of_another_stage_is_refused_by_all() -> None:
    def refusal(rank: int) -> str:
        with pytest.raises(ConfigError, match="zero_stage") as caught:
            agree(rank, None, 2 if rank == 1 else 3)
        return str(caught.value)

    with ThreadPoolExecutor(3) as ranks:
        assert all("rank 1" in text for text in ranks.map(refusal, range(3)))
