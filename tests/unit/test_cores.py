"""Threads by affinity: whose number counts, and what torchrun's default is worth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.config.machine import (
    cpu_quota,
    last_cache_nbytes,
    node_of_device,
    own_threads,
    usable_cores,
)

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}


def test_a_cgroup_s_quota_lowers_the_cores(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path) == 0.5
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("torch_threads", "cores", "node_cores", "environment", "expected"),
    [
        (8, 8, 8, {}, 8),
        (8, 2, 8, {}, 2),  # torch counts the machine's cores, a container has fewer.
        (1, 8, 8, {}, 1),  # The user's own number.
        (1, 8, 8, {"OMP_NUM_THREADS": "1"}, 1),
        (1, 96, 96, TORCHRUN, 12),  # Eight ranks share the node.
        (1, 24, 96, TORCHRUN, 12),  # Two ranks share a NUMA node of four.
        (1, 12, 96, TORCHRUN, 12),  # Each rank has its cores.
        (1, 4, 4, TORCHRUN, 1),
        (4, 96, 96, TORCHRUN, 4),  # `train.threads`, or torch.set_num_threads.
        (1, 96, 96, TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 1),
        (1, 96, 96, TORCHRUN | {"OMP_NUM_THREADS": "3"}, 1),
        (1, 96, 96, TORCHRUN | {"INFINITY_THREADS": "5"}, 5),
        (8, 8, 8, {"INFINITY_THREADS": "many"}, 8),
    ],
)
def test_threads_of_the_engine(
    torch_threads: int,
    cores: int,
    node_cores: int,
    environment: dict[str, str],
    expected: int,
) -> None:
    found = own_threads(torch_threads, cores=cores, node_cores=node_cores, environment=environment)
    assert found == expected


@pytest.mark.parametrize(
    ("num_nodes", "said", "expected"), [(2, "1", 1), (2, "-1", None), (1, "0", None), (2, "", None)]
)
def test_the_node_of_a_device_is_what_sysfs_says(
    num_nodes: int, said: str, expected: int | None, tmp_path: Path
) -> None:
    for node in range(num_nodes):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    if said:
        (folder / "numa_node").write_text(said + "\n")
    assert node_of_device("0000:1b:00.0", tmp_path) == expected
    assert node_of_device("", tmp_path) is None


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    assert last_cache_nbytes(tmp_path) == 0
    caches = tmp_path / "sys/devices/system/cpu/cpu0/cache"
    for index, size in enumerate(["48K", "32K", "2048K", "300M", "?"]):
        (caches / f"index{index}").mkdir(parents=True)
        (caches / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache_nbytes(tmp_path) == 300 << 20
