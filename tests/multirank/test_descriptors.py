"""The limit of open files: ranks raise it as far as they may, or say what they need."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import infinity
from infinity.errors import ConfigError

from .processes import run_ranks
from .work import Case, offload_case, read_weights


def _offload(rank: int, hard: int) -> tuple[str, int, int]:
    """The limit of rank 1 is what it has open. Returns what is said, and the limit before, and then."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if rank == 1:
        soft = len(os.listdir("/proc/self/fd")) + 32
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, max(soft, hard)))
    said = ""
    try:
        model = offload_case(Case(3), Path("unused"))
        read_weights(model)
        infinity.close(model)
    except ConfigError as error:
        said = str(error)
    return said, soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_ranks_raise_the_limit_of_open_files() -> None:
    found = run_ranks(2, _offload, 4096)
    assert [said for said, _, _ in found] == ["", ""]
    assert found[1][1:] == (found[1][1], 4096) and found[1][1] < 4096
    assert found[0][1] == found[0][2], "it sufficed"


def test_too_low_a_limit_is_refused_by_all_with_the_number_that_is_needed() -> None:
    for said, soft, after in run_ranks(3, _offload, 0):
        assert said.startswith("on rank 1: 3 ranks have 4 sockets between two of them"), said
        assert "it needs " in said and "ulimit -n" in said and soft == after
