"""Rates of this machine, for plans that name no other."""

from __future__ import annotations

import pytest

from tests.support.measuring import measure_briefly


@pytest.fixture(autouse=True)
def brief_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_briefly(monkeypatch)
