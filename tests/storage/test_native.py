"""The C++ library on its own, under the sanitizers, and under a fuzzer."""

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


def configure(name: str, *options: str) -> Path:
    """Configured once, built incrementally, kept between runs."""
    assert shutil.which("c++") or shutil.which("g++") or os.environ.get("CXX"), (
        "a C++ compiler is missing: apt-get install g++"
    )
    build = ROOT / "build" / name
    run(
        find_tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}", "-DCMAKE_BUILD_TYPE=Debug",
        "-DINFINITY_BUILD_PYTHON=OFF", "-DINFINITY_BUILD_TESTS=ON", "-DINFINITY_WERROR=ON",
        *options,
    )  # fmt: skip
    return build


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def build(request: pytest.FixtureRequest) -> Path:
    """The C++ tests under AddressSanitizer and UBSan, and under ThreadSanitizer."""
    name = f"native-tests-{request.param.split(',')[0]}"
    build = configure(name, f"-DINFINITY_SANITIZE={request.param}")
    run(find_tool("cmake"), "--build", str(build))
    return build


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "subject",
    [
        "arena_test", "block_queue_test", "block_test", "crc32c_test", "engine_test", "fault_test",
        "histogram_test", "order_test", "queue_test", "split_fuzz", "update_test",
    ],
)  # fmt: skip
def test_native_suite_passes_under_sanitizers(build: Path, subject: str) -> None:
    printed = run(
        find_tool("ctest"), "--output-on-failure", "--no-tests=error", "-R", f"^{subject}$",
        cwd=build,
    )  # fmt: skip
    assert "100% tests passed" in printed


def test_every_native_test_is_run_here(build: Path) -> None:
    listed = run(find_tool("ctest"), "--show-only", cwd=build)
    assert "Total Tests: 11" in listed, listed


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("clang++") is None, reason="libFuzzer needs clang++")
def test_fuzzer_finds_nothing_in_the_request_splitter() -> None:
    """Ten seconds, guided by coverage; the same target feeds itself in the suite above."""
    build = configure(
        "native-fuzz",
        "-DINFINITY_FUZZ=ON",
        "-DINFINITY_WERROR=OFF",
        "-DCMAKE_CXX_COMPILER=clang++",
        "-DINFINITY_SANITIZE=address,undefined",
    )
    run(find_tool("cmake"), "--build", str(build), "--target", "split_fuzz")
    corpus = build / "corpus"
    corpus.mkdir(exist_ok=True)
    # No limit of its own: what libFuzzer takes for its peak memory, getrusage(2), begins at that of
    # the process that started it.
    run(
        str(build / "io" / "tests" / "split_fuzz"), "-max_total_time=10", "-max_len=800",
        "-rss_limit_mb=0", f"-artifact_prefix={build}/", str(corpus),
    )  # fmt: skip


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
