"""Measurements of this machine that take a moment."""

from __future__ import annotations

import pytest

from infinity.tools.plan import measure, rehearsal


def measure_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens what `infinity plan` measures: ten seconds of every test that calls it in this process.
    For tests that are not about the precision of rates."""
    monkeypatch.setattr(measure, "_ARENA_NBYTES", 64 << 20)
    monkeypatch.setattr(measure, "_LEAST_S", 0.01)
    monkeypatch.setattr(measure, "_LONG_S", 0.1)
    monkeypatch.setattr(rehearsal, "_LEAST_S", 0.0)
    monkeypatch.setattr(rehearsal, "_LEAST_STEPS", 2)
