"""The C++ library on its own, under the sanitizers, and under a fuzzer."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path

import pybind11
import pytest

from tests.support.exhaustive import sampled

ROOT = Path(__file__).resolve().parents[2]


def find_tool(name: str) -> str:
    """A build tool from the environment of this interpreter, or from PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is missing: pip install cmake ninja, apt-get install g++"
    return found


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def build_in(name: str, *options: str, targets: Sequence[str]) -> tuple[Path, str]:
    """Returns the directory of the build, and the output of CMake. Built incrementally, kept
    between runs, by one test process at a time. All files of a target are compiled as one, which
    saves half of the time; one by one they were compiled for the package."""
    assert shutil.which("c++") or shutil.which("g++") or os.environ.get("CXX"), (
        "a C++ compiler is missing: apt-get install g++"
    )
    build = ROOT / "build" / name
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = run(
            find_tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}", "-DCMAKE_BUILD_TYPE=Debug",
            "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0",
            "-DINFINITY_BUILD_PYTHON=OFF", "-DINFINITY_BUILD_TESTS=ON", *options,
        )  # fmt: skip
        run(find_tool("cmake"), "--build", str(build), "--target", *targets)
    return build, said


# What runs under ThreadSanitizer is twice as fast with -O1; -g1 is enough for its reports.
SANITIZERS = {"address,undefined": "-O0 -g1", "thread": "-O1 -g1"}


BINDING = (
    "-DINFINITY_BUILD_PYTHON=ON",
    f"-DPython_EXECUTABLE={sys.executable}",
    f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
)


PROGRAMS = ("io_tests", "arena_test", "update_test")


@cache
def build_sanitized(sanitizers: str, *, targets: Sequence[str] = PROGRAMS) -> Path:
    """The C++ tests, and with AddressSanitizer the binding, under these sanitizers."""
    path, _ = build_in(
        f"native-tests-{sanitizers.split(',')[0]}", "-DINFINITY_WERROR=ON",
        f"-DINFINITY_SANITIZE={sanitizers}",
        f"-DCMAKE_CXX_FLAGS_DEBUG={SANITIZERS[sanitizers]}",
        *(BINDING if "address" in sanitizers else ()), targets=targets,
    )  # fmt: skip
    return path


SUBJECTS = [
    "arena_test", "block_queue_test", "block_test", "crc32c_test", "depth_control_test",
    "engine_test", "fault_test", "histogram_test", "order_test", "queue_test", "split_fuzz",
    "update_test",
]  # fmt: skip
# What is about threads. The others start an engine's threads at most, as engine_test does.
OF_THREADS = {"arena_test", "depth_control_test", "engine_test", "queue_test", "update_test"}


@pytest.mark.parametrize(
    ("sanitizers", "subject"),
    sampled(
        product(SANITIZERS, SUBJECTS), lambda case: case[0] != "thread" or case[1] in OF_THREADS
    ),
)
def test_native_suite_passes_under_sanitizers(sanitizers: str, subject: str) -> None:
    printed = run(
        find_tool("ctest"), "--output-on-failure", "--no-tests=error", "-R", f"^{subject}$",
        cwd=build_sanitized(sanitizers),
    )  # fmt: skip
    assert "100% tests passed" in printed


@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_every_native_test_is_run_here(sanitizers: str) -> None:
    listed = run(find_tool("ctest"), "--show-only", cwd=build_sanitized(sanitizers))
    assert f"Total Tests: {len(SUBJECTS)}" in listed, listed


def test_hostile_calls_of_the_binding_are_refused_under_sanitizers(tmp_path: Path) -> None:
    """Memory comes from malloc, so that AddressSanitizer knows its bounds. Leaks are not looked for:
    the interpreter leaves much behind."""
    (module,) = build_sanitized("address,undefined", targets=("_core",)).glob("_core*.so")
    runtimes = [
        run(os.environ.get("CXX", "c++"), f"-print-file-name={name}").strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    script = Path(__file__).with_name("hostile_calls.py")
    printed = run(
        "env", f"LD_PRELOAD={' '.join(runtimes)}", "PYTHONMALLOC=malloc",
        "ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1",
        sys.executable, str(script), str(module), str(tmp_path),
    )  # fmt: skip
    assert int(printed.split()[-3]) > 400


HAS_CLANG = shutil.which("clang++") is not None


@pytest.fixture(scope="module")
def without_uring() -> tuple[Path, str]:
    """A build as on a machine without liburing, for the fuzzer where there is clang."""
    for_fuzzer = [
        "-DCMAKE_CXX_COMPILER=clang++", "-DINFINITY_FUZZ=ON",
        "-DINFINITY_SANITIZE=address,undefined",
    ]  # fmt: skip
    return build_in(
        "native-without-uring", "-DINFINITY_URING=OFF", *(for_fuzzer if HAS_CLANG else []),
        targets=["io_tests", *(["split_fuzz"] if HAS_CLANG else [])],
    )  # fmt: skip


@pytest.mark.skipif(not HAS_CLANG, reason="libFuzzer needs clang++")
def test_fuzzer_finds_nothing_in_the_request_splitter(without_uring: tuple[Path, str]) -> None:
    """Five seconds, guided by coverage; the same target feeds itself in the suite above."""
    build, _ = without_uring
    corpus = build / "corpus"
    corpus.mkdir(exist_ok=True)
    # No limit of its own: what libFuzzer takes for its peak memory, getrusage(2), begins at that of
    # the process that started it.
    run(
        str(build / "io" / "tests" / "split_fuzz"), "-max_total_time=5", "-max_len=800",
        "-rss_limit_mb=0", f"-artifact_prefix={build}/", str(corpus),
    )  # fmt: skip


def test_build_without_liburing_says_so_and_works_with_threads(
    without_uring: tuple[Path, str],
) -> None:
    build, said = without_uring
    assert "io_uring engine: NO" in said
    assert "liburing-dev" in said
    run(find_tool("ctest"), "--output-on-failure", "--no-tests=error", "-R", "^engine", cwd=build)
