"""What a configuration means for one of several ranks, and what is refused before training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infinity.config import SwapConfig
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import config_of_rank, refuse_shared_devices
from infinity.errors import ConfigError

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
