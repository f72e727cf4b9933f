"""Every instruction set that this machine has."""

from __future__ import annotations

import pytest

from infinity.config.machine import SIMD_VARIABLE
from infinity.ops.optimizers import instruction_sets


@pytest.fixture(params=instruction_sets())
def simd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SIMD_VARIABLE, request.param)
    return request.param
