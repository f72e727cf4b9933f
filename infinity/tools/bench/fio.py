"""fio as a ceiling: the same file ranges, direct I/O, io_uring, the same kind of pages.

fio(1). Command and answer are pure functions; `run` makes one of the other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.config.machine import read_nbytes
from infinity.errors import UnsupportedError
from infinity.storage.protocol import FileRange
from infinity.tools.bench.measure import IoSettings, Measurement
from infinity.tools.bench.transfer import QUANTILES, TransferKind

_RW: dict[TransferKind, str] = {"read": "read", "write": "write", "mixed": "rw"}


def is_installed() -> bool:
    """Whether the program fio is on the path."""
    return shutil.which("fio") is not None


def version() -> str | None:
    """Returns the version that fio reports; None without fio."""
    if not is_installed():
        return None
    return subprocess.run(["fio", "--version"], stdout=subprocess.PIPE, text=True).stdout.strip()


def command(
    shares: Sequence[FileRange],
    kind: TransferKind,
    settings: IoSettings,
    *,
    direct: bool = True,
    nbytes: int | None = None,
) -> list[str]:
    """One job per file over its share of the region, or over the first `nbytes` of it. Access that
    is not sequential moves half of that range's bytes.

    No file is made or laid out. Buffers are not altered between writes, which would cost fio CPU
    time that the engine does not spend.
    """
    access = _RW[kind]
    if settings.access == "random":
        access = f"rand{access}"
    elif settings.access == "strided":  # Skips so many bytes behind each block.
        access = f"{access}:{settings.block_nbytes}"
    words = [
        "fio", "--output-format=json", "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1",
        f"--direct={int(direct)}", f"--bs={settings.block_nbytes}", f"--iodepth={settings.depth}",
        f"--rw={access}", "--mem=malloc", "--scramble_buffers=0",
        "--allow_file_create=0", "--thread", "--lat_percentiles=1",
        "--percentile_list=" + ":".join(f"{100 * point:g}" for point in QUANTILES),
    ]  # fmt: skip
    if kind == "read":
        words.append("--readonly")
    for index, share in enumerate(shares):
        range_nbytes = min(share.nbytes, nbytes or share.nbytes)
        words += [
            f"--name=path{index}", f"--filename={share.path}", f"--offset={share.offset_nbytes}",
            f"--size={range_nbytes}",
        ]  # fmt: skip
        if settings.access != "sequential":
            words.append(f"--io_size={range_nbytes // 2}")
    return words


def environment(*, huge_pages: bool) -> dict[str, str]:
    """Returns an environment in which fio's malloc asks for huge pages, as the arena does.

    Source: glibc 2.35, glibc.malloc.hugetlb.
    """
    word = f"glibc.malloc.hugetlb={int(huge_pages)}"
    return {**os.environ, "GLIBC_TUNABLES": word}


def parse(answer: Mapping[str, Any]) -> Measurement:
    """The sample in fio's JSON: jobs ran at once, so the slowest one's time counts.

    Raises UnsupportedError when a job reports an error.
    """
    jobs = answer["jobs"]
    for job in jobs:
        if job["error"]:
            raise UnsupportedError(f"fio failed with errno {job['error']} in job {job['jobname']}")
    sides = [job[side] for job in jobs for side in ("read", "write")]
    nbytes = sum(side["io_bytes"] for side in sides)
    seconds = max(side["runtime"] for side in sides) / 1e3
    cpu_s = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs)
    latency_s = {}
    if len(jobs) == 1 and jobs[0]["read"]["io_bytes"] == nbytes:
        found = jobs[0]["read"]["lat_ns"].get("percentile", {})
        latency_s = {round(float(key) / 100, 6): value / 1e9 for key, value in found.items()}
    return Measurement(nbytes, seconds, cpu_s, latency_s=latency_s)


def run(words: Sequence[str], *, huge_pages: bool = True) -> Measurement:
    """Runs such a command. Raises UnsupportedError with fio's message if it fails."""
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment(huge_pages=huge_pages)
    )
    if done.returncode != 0:
        raise UnsupportedError(
            f"fio ended with code {done.returncode}: {(done.stderr or done.stdout).strip()}; "
            "leave it out with --no-fio"
        )
    # A warning may stand before the JSON.
    return parse(json.loads(done.stdout[done.stdout.index("{") :]))


def huge_page_nbytes(words: Sequence[str], *, huge_pages: bool = True) -> int:
    """The most transparent-huge-page memory of the process, seen while the command runs once."""
    nowhere = subprocess.DEVNULL
    running = subprocess.Popen(
        words, stdout=nowhere, stderr=nowhere, env=environment(huge_pages=huge_pages)
    )
    most_nbytes = 0
    while running.poll() is None:
        found_nbytes = read_nbytes(Path(f"/proc/{running.pid}/smaps_rollup"), "AnonHugePages")
        most_nbytes = max(most_nbytes, found_nbytes or 0)
        time.sleep(0.01)
    return most_nbytes
