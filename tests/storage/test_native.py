"""The C++ library on its own, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native-tests"


def find_tool(name: str) -> str:
    """A build tool from the environment of this interpreter, or from PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is missing: pip install cmake ninja, apt-get install g++"
    return found


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def build() -> Path:
    """Configured once, built incrementally, kept between runs."""
    assert shutil.which("c++") or shutil.which("g++") or os.environ.get("CXX"), (
        "a C++ compiler is missing: apt-get install g++"
    )
    cmake = find_tool("cmake")
    run(
        cmake, "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}", "-DCMAKE_BUILD_TYPE=Debug",
        "-DINFINITY_BUILD_PYTHON=OFF", "-DINFINITY_BUILD_TESTS=ON", "-DINFINITY_WERROR=ON",
        "-DINFINITY_SANITIZE=address,undefined",
    )  # fmt: skip
    run(cmake, "--build", str(BUILD))
    return BUILD


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "subject",
    ["block", "block_queue", "crc32c", "engine", "fault", "histogram", "order", "queue", "arena"],
)
def test_native_suite_passes_under_sanitizers(build: Path, subject: str) -> None:
    printed = run(
        find_tool("ctest"), "--output-on-failure", "--no-tests=error", "-R", f"^{subject}_test$",
        cwd=build,
    )  # fmt: skip
    assert "100% tests passed" in printed


@pytest.mark.timeout(300)
def test_build_without_liburing_says_so_and_works_with_threads() -> None:
    build = ROOT / "build" / "native-tests-no-uring"
    command = [
        find_tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}", "-DCMAKE_BUILD_TYPE=Debug",
        "-DINFINITY_URING=OFF", "-DINFINITY_BUILD_PYTHON=OFF", "-DINFINITY_BUILD_TESTS=ON",
    ]  # fmt: skip
    configured = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "io_uring engine: NO" in configured.stderr
    assert "liburing-dev" in configured.stderr
    run(find_tool("cmake"), "--build", str(build), "--target", "engine_test")
    run(find_tool("ctest"), "--output-on-failure", "--no-tests=error", "-R", "^engine", cwd=build)
