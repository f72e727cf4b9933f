"""Ranks on NUMA nodes: which nodes a rank gets, and that all of its threads go there."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config.machine import bind_rank, cores_by_node, nodes_of_rank, read_ranges
from infinity.errors import ConfigError

TWO = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
FOUR = {node: frozenset({2 * node, 2 * node + 1}) for node in range(4)}


def test_a_kernel_list_is_read() -> None:
    assert read_ranges("0-2,8") == {0, 1, 2, 8}
    assert read_ranges(None) == read_ranges("") == frozenset()


@pytest.mark.parametrize(
    ("rank", "num_ranks", "allowed", "device_node", "expected"),
    [
        (0, 1, range(8), 1, ()),  # One rank has the whole machine.
        (0, 2, range(8), 1, (1,)),  # Beside its device.
        (3, 4, range(8), None, (1,)),  # In turn.
        (2, 4, range(8), None, (0,)),
        (0, 4, range(4), 1, ()),  # The user has bound the job to node 0.
        (1, 4, range(4), None, ()),
        (0, 2, (0, 4), 1, (1,)),  # As far as the affinity reaches.
        (0, 2, range(8), 7, ()),  # A node without cores, as one of memory alone.
    ],
)
def test_the_nodes_of_a_rank(
    rank: int, num_ranks: int, allowed: range, device_node: int | None, expected: tuple[int, ...]
) -> None:
    found = nodes_of_rank(
        TWO, set(allowed), rank=rank, num_ranks=num_ranks, device_node=device_node
    )
    assert found == expected


@given(num_ranks=st.integers(2, 9), allowed=st.sets(st.integers(0, 7), min_size=1))
def test_ranks_without_devices_use_all_allowed_nodes_equally(
    num_ranks: int, allowed: set[int]
) -> None:
    found = [
        nodes_of_rank(FOUR, allowed, rank=rank, num_ranks=num_ranks, device_node=None)
        for rank in range(num_ranks)
    ]
    here = {node for node, cores in FOUR.items() if cores & allowed}
    if len(here) == 1:
        assert found == [()] * num_ranks
        return
    assert {node for nodes in found for node in nodes} == here
    counts = [sum(node in nodes for nodes in found) for node in here]
    assert max(counts) - min(counts) <= 1
    assert max(map(len, found)) - min(map(len, found)) <= 1


def fake_machine(root: Path, *lists: str) -> Path:
    for node, text in enumerate(lists):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    return root


def test_all_threads_of_the_process_are_bound_and_later_ones_inherit_it(tmp_path: Path) -> None:
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        pytest.skip("one core cannot be divided")
    root = fake_machine(tmp_path, f"{own[0]}", ",".join(map(str, own[1:])))
    assert cores_by_node(root) == {0: {own[0]}, 1: set(own[1:])}
    with ThreadPoolExecutor(1) as before:
        before.submit(int).result()
        try:
            common = {"rank": 0, "num_ranks": 2, "root": root}
            unbound = {"INFINITY_NUMA_BINDING": "none"}
            assert bind_rank(**common, device_node=1, environment=unbound) == ()
            assert os.sched_getaffinity(0) == set(own)
            assert bind_rank(**common, device_node=1, environment={}) == (1,)
            assert before.submit(os.sched_getaffinity, 0).result() == set(own[1:])
            found: list[set[int]] = []
            later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
            later.start()
            later.join()
            assert found == [set(own[1:])]
        finally:
            for task in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task), own)
    with pytest.raises(ConfigError, match='INFINITY_NUMA_BINDING: expected "node" or "none"'):
        bind_rank(**common, device_node=1, environment={"INFINITY_NUMA_BINDING": "all"})
