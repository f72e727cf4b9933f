"""A rank that refuses the exchange between devices ends the set-up of all ranks."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from infinity.errors import ConfigError

from .processes import run_ranks
from .work import Case, offload_case

SECONDS_OF_A_WAIT = 600  # As ranks wait for one that does not come.


def _refuse(rank: int) -> tuple[str, float]:
    """Only rank 1 was started with a setting under which it cannot take part."""
    if rank == 1:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    begun_s, said = time.monotonic(), ""
    try:
        offload_case(Case(3, simulated=True, exchange="collective"), Path("unused"))
    except ConfigError as error:
        said = str(error)
    return said, time.monotonic() - begun_s


def test_a_rank_that_refuses_the_exchange_lets_no_other_rank_wait() -> None:
    found = run_ranks(3, _refuse)
    assert found[1][0].startswith("TORCH_DISTRIBUTED_DEBUG=DETAIL")
    for rank in (0, 2):
        assert "rank 1 would exchange otherwise than rank 0" in found[rank][0]
        assert found[rank][1] < SECONDS_OF_A_WAIT / 2
