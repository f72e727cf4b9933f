"""Every instruction set that this machine has."""

from __future__ import annotations

import pytest

from infinity.ops.optimizers import SIMD_VARIABLE, instruction_sets


@pytest.fixture(params=instruction_sets())
def simd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SIMD_VARIABLE, request.param)
    return request.param
