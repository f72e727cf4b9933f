"""fio: what it is asked, what its answer means, and a real run where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infinity.errors import UnsupportedError
from infinity.sizes import MIB
from infinity.storage.protocol import FileRange
from infinity.tools.bench import fio
from infinity.tools.bench.measure import Access, IoSettings, Lab
from infinity.tools.bench.nvme import KINDS, open_drives

needs_fio = pytest.mark.skipif(not fio.is_installed(), reason="fio is not installed")
SETTINGS = IoSettings(4 * MIB, 2)


def job(*, read: int = 0, write: int = 0, runtime_ms: int = 500, error: int = 0) -> dict[str, Any]:
    """The part of a job in fio's JSON that is looked at."""
    return {
        "jobname": "path0",
        "error": error,
        "job_runtime": runtime_ms,
        "usr_cpu": 1.0,
        "sys_cpu": 3.0,
        "read": {
            "io_bytes": read,
            "runtime": runtime_ms if read else 0,
            "lat_ns": {"percentile": {"50.000000": 2_000_000, "99.900000": 5_000_000}},
        },
        "write": {"io_bytes": write, "runtime": runtime_ms if write else 0},
    }


@pytest.mark.parametrize(("access", "rw"), [("strided", "read:65536"), ("random", "randread")])
def test_access_with_gaps_moves_half_of_the_range(access: Access, rw: str) -> None:
    settings = IoSettings(64 << 10, 8, access)
    words = fio.command([FileRange("/a/f", 0, 16 * MIB)], "read", settings, nbytes=4 * MIB)
    assert f"--rw={rw}" in words
    assert words[-2:] == [f"--size={4 * MIB}", f"--io_size={2 * MIB}"]
    assert str(settings) == f"64 KiB x 8, {access}"


def test_each_file_is_a_job_over_its_share() -> None:
    shares = [FileRange("/a/f", 8 * MIB, 16 * MIB), FileRange("/b/f", 0, 16 * MIB)]
    words = fio.command(shares, "write", SETTINGS)
    assert words[words.index("--name=path0") :] == [
        "--name=path0", "--filename=/a/f", f"--offset={8 * MIB}", f"--size={16 * MIB}",
        "--name=path1", "--filename=/b/f", "--offset=0", f"--size={16 * MIB}",
    ]  # fmt: skip
    for word in ("--direct=1", "--ioengine=io_uring", f"--bs={4 * MIB}", "--iodepth=2"):
        assert word in words
    assert "--rw=write" in words and "--readonly" not in words


def test_a_read_cannot_write_and_a_file_is_never_made() -> None:
    words = fio.command([FileRange("/a", 0, MIB)], "read", SETTINGS, nbytes=4096)
    assert "--readonly" in words and "--allow_file_create=0" in words and "--size=4096" in words


def test_pages_are_of_the_same_kind_as_the_arena() -> None:
    assert fio.environment(huge_pages=True)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert fio.environment(huge_pages=False)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"


def test_answer_of_a_mixed_job_adds_both_sides() -> None:
    sample = fio.parse({"jobs": [job(read=600, write=400)]})
    assert sample.nbytes == 1000 and sample.seconds == 0.5
    assert sample.cpu_s == pytest.approx(0.02)
    assert not sample.latency_s


def test_the_slowest_of_several_jobs_counts() -> None:
    jobs = [job(write=100, runtime_ms=400), job(write=100, runtime_ms=800)]
    sample = fio.parse({"jobs": jobs})
    assert sample.nbytes == 200 and sample.seconds == 0.8
    assert sample.cpu_s == pytest.approx(0.016 + 0.032)


def test_latency_of_a_single_reader_is_taken() -> None:
    sample = fio.parse({"jobs": [job(read=1000)]})
    assert sample.latency_s == {0.5: 0.002, 0.999: 0.005}


def test_an_error_in_a_job_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="errno 5"):
        fio.parse({"jobs": [job(read=1000, error=5)]})


@needs_fio
@pytest.mark.parametrize("kind", KINDS)
def test_fio_moves_all_bytes_of_the_region(make_lab: Callable[..., Lab], kind: str) -> None:
    lab = make_lab(2)
    with open_drives(lab, lab.directories) as drives:
        sample = drives.fio(kind, SETTINGS).run()
    assert sample.nbytes == lab.effort.nbytes
    assert sample.cpu_s is not None and sample.ok is None


@needs_fio
def test_fio_gets_huge_pages_where_the_arena_does(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    with open_drives(lab, lab.directories) as drives:
        words = fio.command(drives.scratch.shares("still"), "read", SETTINGS)
        # It runs so shortly that it may be over before it is looked at.
        assert not lab.arena.huge_page_nbytes or any(
            fio.huge_page_nbytes(words, huge_pages=True) for _ in range(20)
        )
        assert fio.huge_page_nbytes(words, huge_pages=False) == 0
    assert drives.note == ""


@needs_fio
def test_fio_that_fails_is_an_error_with_its_output() -> None:
    broken = fio.command([FileRange("/proc/nothing/here", 0, MIB)], "read", SETTINGS)
    with pytest.raises(UnsupportedError, match="--no-fio"):
        fio.run(broken)
