"""GPU tests are always collected, and skipped with a reason where there is no CUDA device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The models and the loop are those of the parity tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

# Must be set before CUDA starts: cuBLAS is reproducible only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch


@pytest.fixture(scope="session", autouse=True)
def _cuda() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; none is visible to this PyTorch")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(before)
