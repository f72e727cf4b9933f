"""A small lab on a real directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.config.schema import Io
from infinity.sizes import KIB, MIB
from infinity.storage.arena import Arena
from infinity.tools.bench.fio import FioSettings
from infinity.tools.bench.lab import Effort, Lab

SMALL = Effort(
    nbytes=32 * MIB,
    sweep_nbytes=4 * MIB,
    rounds=2,
    sweep_rounds=2,
    search_rounds=1,
    depths=(1, 2),
    extents_nbytes=(64 * KIB, 1 * MIB),
    num_latencies=2,
    fio_candidates=(FioSettings(1 * MIB, 2), FioSettings(4 * MIB, 1)),
)


@pytest.fixture(scope="session")
def arena() -> Iterator[Arena]:
    with Arena(SMALL.nbytes) as arena:
        yield arena


@pytest.fixture
def make_lab(arena: Arena, tmp_path: Path) -> Callable[..., Lab]:
    """A lab over so many directories of one drive."""

    def make(num_paths: int = 1, *, with_fio: bool = False) -> Lab:
        directories = [tmp_path / f"drive{index}" for index in range(num_paths)]
        for directory in directories:
            directory.mkdir()
        weights = (1.0,) * num_paths
        return Lab(arena, tuple(directories), Io(), SMALL, with_fio, weights)

    return make
