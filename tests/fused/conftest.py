"""Triton's interpreter, which runs kernels on tensors of the CPU, and its compiler, which needs no
device."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy
import pytest

import infinity.fused

KERNELS = (
    "number_kernels",
    "decode_kernels",
    "update_kernels",
    "sum_kernels",
)


def forget() -> None:
    """Makes the next import define the kernels anew."""
    for name in KERNELS:
        sys.modules.pop(f"infinity.fused.{name}", None)
        vars(infinity.fused).pop(name, None)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that are launched are interpreted: Triton looks at the variable at their import."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    forget()
    with numpy.errstate(all="ignore"):
        yield
    forget()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    """Kernels that are imported can be compiled."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    forget()
    yield
    forget()
