"""A checkpoint that several files of tests copy and damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import durable, run


@pytest.fixture(scope="session")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose state lies in two generations of swap files; not to be changed."""
    directory = tmp_path_factory.mktemp("linked")
    with run("frozen", directory / "swap", checkpoint=durable(directory / "c")) as each:
        each.steps(0, 2)
        each.save(directory / "c")
        each.steps(2, 3)
        return each.save(directory / "c")
