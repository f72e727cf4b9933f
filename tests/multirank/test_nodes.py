"""Two machines of two ranks: network namespaces with a link between them, and boots of their own.

Ranks of a machine share memory, and a loopback interface that leads nowhere else.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from infinity.distributed import group
from infinity.engine import build

from .processes import run_ranks, seem_on_node
from .work import NVME, Case, assert_same_run, expected, train

PER_NODE = 2
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of unshare(2), setns(2).
_LINK = "link0"


def _can_make_networks() -> bool:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    made = ["unshare", "-n", "ip", "link", "add", "a0", "type", "veth", "peer", "name", "a1"]
    return subprocess.run(made, capture_output=True, check=False).returncode == 0


def _call(*words: str) -> None:
    subprocess.run(words, check=True)


def _await(path: Path) -> str:
    deadline_s = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path.name} does not come"
        time.sleep(0.01)
    return path.read_text()


def _tell(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _enter(rank: int) -> str:
    """Moves this process to the network of its node, and the first one of each node makes it."""
    place, node = Path(tempfile.gettempdir()), rank // PER_NODE
    libc = ctypes.CDLL(None, use_errno=True)
    if rank % PER_NODE == 0:
        assert libc.unshare(_NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        _call("ip", "link", "set", "lo", "up")
        _tell(place / f"node-{node}", str(os.getpid()))
    if rank == 0:
        other = _await(place / "node-1")
        _call("ip", "link", "add", _LINK, "type", "veth", "peer", "name", _LINK, "netns", other)
        for number, before in ((1, ()), (2, ("nsenter", "-t", other, "-n"))):
            _call(*before, "ip", "address", "add", f"10.77.0.{number}/24", "dev", _LINK)
            _call(*before, "ip", "link", "set", _LINK, "up")
        _tell(place / "linked", "")
    _await(place / "linked")
    if rank % PER_NODE:
        with open(f"/proc/{_await(place / f'node-{node}')}/ns/net") as network:
            assert libc.setns(network.fileno(), _NEW_NETWORK) == 0
    os.environ["GLOO_SOCKET_IFNAME"] = _LINK
    return "10.77.0.1"


def _train(rank: int, cases: list[Case]) -> list[tuple[Any, str, int]]:
    """Of each case the run, the address that this rank announced, and its node's ranks."""
    seem_on_node(rank // PER_NODE)
    found: list[tuple[str, int]] = []
    find = group.find_group

    def noted(*arguments: Any, **options: Any) -> Any:
        topology = find(*arguments, **options)
        assert topology is not None
        found.append((topology.links.peers[rank].address[0], topology.node_count))
        return topology

    build.find_group = noted
    return [(train(rank, case), *found[index]) for index, case in enumerate(cases)]


CASES = [
    Case(3, NVME, compute="bfloat16", accumulation=2, steps=2),
    Case(3, simulated=True, exchange="collective", shard_over="node", lazy_ranks=(3,), steps=4),
    Case(1, skips=True, lazy_ranks=(3,), steps=2),
]


@pytest.mark.skipif(not _can_make_networks(), reason="needs root, ip(8) and veth(4)")
def test_ranks_of_two_machines_have_the_bits_of_one() -> None:
    count = 2 * PER_NODE
    answers = run_ranks(count, _train, CASES, enter=_enter)
    for index, case in enumerate(CASES):
        for rank, wanted in enumerate(expected(case, count)):
            run, address, node_count = answers[rank][index]
            assert (address, node_count) == (f"10.77.0.{1 + rank // PER_NODE}", PER_NODE)
            assert_same_run(run, wanted, f"rank {rank}, {case}")
            if case.shard_over == "node" and rank in case.lazy_ranks:
                assert run.counters["ranks_stand_ins"] > 0, "it gave its parts of frozen weights"
