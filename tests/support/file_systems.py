"""File systems of a test's own: one that is made for it, and one that is only claimed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infinity.state import spare_generations


def seem_elsewhere(directory: Path, setattr_: Callable[..., None] = setattr) -> None:
    """Makes the engine take `directory` for another file system than that of all other paths."""
    real = spare_generations._file_systems

    def found(paths: Any) -> set[int]:
        paths = list(paths)
        near = [path for path in paths if not path.is_relative_to(directory)]
        return real(near) | ({-1} if len(near) < len(paths) else set())

    setattr_(spare_generations, "_file_systems", found)


@contextmanager
def ext4_on_loop(image: Path, point: Path, nbytes: int) -> Iterator[Path]:
    """A freshly made ext4 without a journal on a loop device over a sparse image."""
    point.mkdir()
    image.write_bytes(b"")
    os.truncate(image, nbytes)
    steps = (
        ["mkfs.ext4", "-q", "-O", "^has_journal", str(image)],
        ["mount", "-o", "loop", str(image), str(point)],
    )
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"needs {step[0]}: apt-get install e2fsprogs")
        if done.returncode != 0:
            pytest.skip(f"needs the right to mount a loop device: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)
