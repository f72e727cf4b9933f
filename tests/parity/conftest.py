"""Settings under which two runs of one model can be expected to give the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers

from infinity.errors import InfinityError


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_steady() -> Iterator[None]:
    """One compute thread: the models are tiny, and a parallel region costs more than their sums.

    Equality with several threads is shown by the placement tests, which set them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def io_engines() -> frozenset[str]:
    """The storage engines that open on this machine; io_uring is forbidden in many containers."""
    from infinity.storage.arena import Arena
    from infinity.storage.engine import open_engine

    names = ["threads"]
    arena = Arena(1 << 20, huge_pages=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            open_engine(
                "io_uring", arena=arena, block_nbytes=1 << 16, queue_depth=2, num_threads=1
            ).close()
        names.append("io_uring")
    except (InfinityError, OSError):
        pass
    finally:
        arena.close()
    return frozenset(names)
