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


def fill(directory: Path, *, but_nbytes: int = 0) -> Path:
    """Takes the free space of a file system, but for so many bytes; returns the file to remove."""
    stats, file = os.statvfs(directory), directory / ".filling"
    nbytes = stats.f_bavail * stats.f_frsize - but_nbytes
    file.write_bytes(bytes(max(nbytes, 0)))
    return file


@contextmanager
def small_tmpfs(point: Path, nbytes: int) -> Iterator[Path]:
    """A file system in memory that has so many bytes."""
    with _mounted(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(point)], at=point):
        yield point


@contextmanager
def ext4_on_loop(image: Path, point: Path, nbytes: int) -> Iterator[Path]:
    """A freshly made ext4 without a journal on a loop device over a sparse image."""
    image.write_bytes(b"")
    os.truncate(image, nbytes)
    with _mounted(
        ["mkfs.ext4", "-q", "-O", "^has_journal", str(image)],
        ["mount", "-o", "loop", str(image), str(point)],
        at=point,
    ):
        yield point


@contextmanager
def _mounted(*steps: list[str], at: Path) -> Iterator[None]:
    at.mkdir()
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"needs {step[0]}: apt-get install e2fsprogs")
        if done.returncode != 0:
            pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def failing(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], rung: int, code: int
) -> Callable[[], bool]:
    """Makes the `rung`-th of these calls fail. Returns a function that says whether it did."""
    calls = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == rung:
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)

        return counted

    for name in names:
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))
    return lambda: calls >= rung
