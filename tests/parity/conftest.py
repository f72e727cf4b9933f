"""The storage engines that parity is shown with."""

from __future__ import annotations

import warnings

import pytest
import transformers

from infinity.errors import InfinityError

transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def io_engines() -> frozenset[str]:
    """The storage engines that open on this machine; io_uring is forbidden in many containers."""
    from infinity.storage.arena import Arena
    from infinity.storage.native_engine import open_engine

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
