"""Measures how fast the drives of a downloaded model read its files. Nothing is written."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path

from infinity.errors import ConfigError
from infinity.plan.hardware import Hardware, Nvme
from infinity.sizes import MIB, PAGE_NBYTES, align_down

_SLICE_NBYTES = 16 * MIB
_NUM_SLICES = 64  # Of all files together, each read once: 1 GiB.
_NUM_READERS = 8


def with_checkpoint_drives(machine: Hardware, files: Sequence[Path]) -> Hardware:
    """Returns the machine with the rate at which the drives of these files are read now.

    Reads up to 1 GiB with direct I/O, past the page cache. Raises ConfigError if a file cannot be
    read.
    """
    read = _read_gb_per_s(files)
    if machine.nvme is not None:
        nvme = machine.nvme.model_copy(update={"checkpoint_read_gb_per_s": read})
    else:  # No swap files: nothing is written.
        nvme = Nvme(
            drives=1, capacity=0, read_gb_per_s=read, write_gb_per_s=read,
            checkpoint_read_gb_per_s=read,
        )  # fmt: skip
    return machine.model_copy(update={"nvme": nvme})


def _read_gb_per_s(files: Sequence[Path]) -> float:
    begin_s = time.perf_counter()
    try:
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            nbytes = sum(pool.map(_read_slice, *zip(*_slices(files), strict=True)))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; expected a readable file") from None
    return max(nbytes / (time.perf_counter() - begin_s) / 1e9, 1e-3)


def _slices(files: Sequence[Path]) -> list[tuple[Path, int]]:
    """Returns files and offsets, file by file in turn, so that all drives are read at once."""
    sizes = {file: os.stat(file).st_size for file in files}
    found = []
    for turn, file in enumerate(islice(cycle(files), _NUM_SLICES)):
        offset = turn // len(files) * _SLICE_NBYTES
        if offset < sizes[file]:
            found.append((file, offset))
    return found


def _read_slice(file: Path, offset: int) -> int:
    fd = _open(file)
    try:
        with mmap.mmap(-1, _SLICE_NBYTES) as buffer:  # Starts at a page, as direct I/O needs.
            return os.preadv(fd, [buffer], align_down(offset, PAGE_NBYTES))
    finally:
        os.close(fd)


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:  # A file system without direct I/O.
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
