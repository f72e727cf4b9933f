"""A rank that is done stays as long as other ranks may need its shards."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
import weakref
from pathlib import Path

import torch

import infinity
from infinity.distributed.wire import failures, transport

from .processes import Ranks, run_ranks
from .work import Case, build, offload_case, read_weights

LINGER_S = 0.3


def _read_late(rank: int) -> bool:
    """Rank 0 closes at once, and rank 1 reads weights later than a dropped rank would wait."""
    transport.LINGER_S = LINGER_S
    model = offload_case(Case(3), Path("unused"))
    if rank == 1:
        time.sleep(4 * LINGER_S)
        given = dict(build(Case(3)).named_parameters())
        assert all(torch.equal(given[name], found) for name, found in read_weights(model).items())
    infinity.close(model)
    return True


def test_a_rank_that_has_closed_serves_the_others_until_they_close() -> None:
    assert all(run_ranks(3, _read_late))


def _die(rank: int) -> float:
    """Rank 1 is killed while rank 0 waits for it."""
    model = offload_case(Case(3), Path("unused"))
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begun_s = time.monotonic()
    infinity.close(model)
    return time.monotonic() - begun_s


def test_a_rank_that_dies_ends_the_wait_for_it() -> None:
    with Ranks(2, _die) as ranks:
        [(waited_s, error)] = ranks.outcomes({0}).values()
    assert error is None and waited_s < transport.SILENCE_S


def _drop(rank: int) -> bool:
    """Rank 0 drops its model, and rank 1 keeps it until the collection of rank 0 is over."""
    model = offload_case(Case(3), Path("unused"))
    is_collected = Path(tempfile.gettempdir(), "collected")
    if rank == 0:
        engine = weakref.ref(infinity.engine_of(model))
        del model
        gc.unfreeze()
        gc.collect()
        is_collected.touch()
        failures._await_beside()  # As the end of the interpreter does.
        return engine() is None
    deadline_s = time.monotonic() + 120
    while not is_collected.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    is_first = is_collected.exists()
    infinity.close(model)
    return is_first


def test_a_garbage_collection_does_not_wait_for_that_of_another_rank() -> None:
    with Ranks(2, _drop) as ranks:
        assert ranks.outcomes({0, 1}) == {0: (True, None), 1: (True, None)}
