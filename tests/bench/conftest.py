"""A small lab on a real directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinity.config.schema.engine import Io
from infinity.sizes import KIB, MIB
from infinity.storage.arena import Arena
from infinity.tools.bench.measure import Comparison, Effort, IoSettings, Lab
from infinity.tools.bench.nvme import DriveSet, open_drives
from infinity.tools.bench.report import rows_of
from infinity.tools.bench.transfer import FileSet

SMALL = Effort(
    nbytes=32 * MIB,
    sweep_nbytes=4 * MIB,
    rounds=2,
    sweep_rounds=2,
    search_rounds=1,
    depths=(1, 2),
    extents_nbytes=(64 * KIB, 1 * MIB),
    num_latencies=2,
    fio_candidates=(IoSettings(1 * MIB, 2), IoSettings(4 * MIB, 1)),
)


NBYTES = 8 * MIB


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


@pytest.fixture(params=[1, 2])
def drives(request: pytest.FixtureRequest, make_lab: Callable[..., Lab]) -> Iterator[DriveSet]:
    """One path, and two striped ones."""
    lab = make_lab(request.param)
    with open_drives(lab, lab.directories) as drives:
        yield drives


@pytest.fixture
def files(drives: DriveSet) -> Iterator[FileSet]:
    with drives.files() as files:
        yield files


def all_equal(results: list[Comparison]) -> bool:
    rows = [row for row in rows_of(results) if row.section != "fio search"]
    return bool(rows) and all(row.ok is True for row in rows)
