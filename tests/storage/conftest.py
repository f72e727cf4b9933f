"""Engines under test, memory for them, and helpers that need another process or a mount."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from infinity.sizes import MIB
from infinity.storage.arena import Arena
from infinity.storage.native_engine import open_engine
from infinity.storage.probe import explain_missing_uring
from infinity.storage.protocol import StorageEngine
from infinity.testing.faulty_engine import FaultyEngine

BLOCK_NBYTES = 64 << 10
ENGINE_NAMES = ("io_uring", "threads")

OpenEngine = Callable[..., StorageEngine]


@pytest.fixture(scope="session")
def arena() -> Iterator[Arena]:
    with Arena(64 * MIB) as arena:
        yield arena


@pytest.fixture(params=[*ENGINE_NAMES, "faulty"])
def engine_name(request: pytest.FixtureRequest) -> str:
    """Every engine that the conformance suite covers."""
    return request.param


@pytest.fixture(params=ENGINE_NAMES)
def native_name(request: pytest.FixtureRequest) -> str:
    """The two engines that talk to the kernel."""
    return request.param


@pytest.fixture
def open_any(arena: Arena) -> Iterator[OpenEngine]:
    """Opens engines by name, with small blocks so that requests are split, and closes them
    after."""
    with ExitStack() as stack:

        def open_one(name: str, **options: object) -> StorageEngine:
            if name == "io_uring" and (cause := explain_missing_uring()) is not None:
                pytest.skip(f"io_uring does not work here: {cause}")
            wanted = {"block_nbytes": BLOCK_NBYTES, "queue_depth": 4, "num_threads": 2, **options}
            engine = open_engine(
                "threads" if name == "faulty" else name,
                arena=wanted.pop("arena", arena),
                **wanted,
            )
            if name == "faulty":
                engine = FaultyEngine(engine)
            stack.callback(engine.close)
            return engine

        yield open_one


@pytest.fixture
def engine(engine_name: str, open_any: OpenEngine) -> StorageEngine:
    return open_any(engine_name)


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[..., str]:
    """Makes a file of so many zeros, or with the given bytes."""

    def make(content: int | bytes, name: str = "data") -> str:
        path = tmp_path / name
        data = bytes(content) if isinstance(content, int) else content
        path.write_bytes(data)
        return str(path)

    return make


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs a script in a fresh interpreter and returns what it printed; fails when it fails."""

    def run(script: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small file system on a fresh directory. Needs root."""
    with ExitStack() as stack:

        def mount_one(file_system: str, options: str = "rw") -> Path:
            point = tmp_path / f"mount-{file_system}"
            point.mkdir()
            command = ["mount", "-t", file_system, "-o", options, "none", str(point)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"needs the right to mount, run as root: {done.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "-l", str(point)], check=True)
            return point

        yield mount_one
