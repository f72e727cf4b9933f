"""One compute thread, and every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infinity.ops.native import SIMD_VARIABLE, instruction_sets


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=instruction_sets())
def simd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SIMD_VARIABLE, request.param)
    return request.param
