"""The adapter of accelerators on a device of PyTorch's own hooks for devices of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.accelerator import build


@pytest.mark.timeout(280)
def test_training_on_a_registered_device_has_the_bits_of_pytorch_there_and_needs_its_waits(
    tmp_path: Path,
) -> None:
    """In a process of its own, because a registered device is for the whole process."""
    command = [sys.executable, "-m", "tests.parity.accelerated_run", build(), tmp_path]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "host is equal", "nvme is equal", "device is equal",
        "an update there is equal",
        "order_without_wait is seen", "keep_nothing is seen",
    ]  # fmt: skip
