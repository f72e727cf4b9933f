"""Processes that end with their test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.forked import Script


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str] | Script]]:
    started: list[subprocess.Popen[str] | Script] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
