"""Long writes: the depth that the engine finds, fixed depths, and fio at several settings.

    python bench/write_depth.py --path /mnt/nvme0 --save bench/results/write_depth.json

Every contender writes the same number of bytes round and round over one file, one after the other
in each round; who begins moves on. The ceiling is the fio setting with the highest median: no
search before it picks one. Ratios are of the same round. Needs an idle machine, and fio.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import Results, arguments, move, say, spread

from infinity.sizes import GIB, MIB
from infinity.storage.arena import Arena
from infinity.storage.native_engine import open_engine
from infinity.storage.protocol import FileRange, Priority, Segment, StorageEngine, Ticket
from infinity.tools.bench import fio
from infinity.tools.bench.measure import IoSettings

_EXTENT_NBYTES = 16 * MIB
_PENDING = 16
_SETTINGS = (
    IoSettings(4 * MIB, 2), IoSettings(4 * MIB, 4), IoSettings(4 * MIB, 8),
    IoSettings(1 * MIB, 16),
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", type=int, default=8, help="GiB of one transfer")
    parser.add_argument("--file", type=int, default=4, help="GiB of the file")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit", type=float, default=220, help="seconds of all rounds")
    words = parser.parse_args()
    nbytes, file_nbytes = words.size * GIB, words.file * GIB
    with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-write-") as directory:
        path = Path(directory) / "file"
        fill(path, file_nbytes)
        with Arena(_PENDING * _EXTENT_NBYTES) as arena:
            rates = measure(arena, path, file_nbytes, nbytes, words.rounds, words.limit)
    results = Results(words.save, {"size": nbytes, "file": file_nbytes})
    for row in rows_of(rates):
        results.keep(row)
        say(
            f"{row['name']:<28}{row['gb_per_s']:6.2f} GB/s, {row['of_fio']:.2f} of the best fio "
            f"({row['of_fio_low']:.2f} - {row['of_fio_high']:.2f})"
        )


def fill(path: Path, nbytes: int) -> None:
    """Writes the file once: extents that were never written are slow to write."""
    piece = os.urandom(16 * MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())


def measure(
    arena: Arena, path: Path, file_nbytes: int, nbytes: int, rounds: int, limit_s: float
) -> dict[str, list[float]]:
    """GB/s of each contender, the i-th of each list from round i."""
    contenders: dict[str, Callable[[], float]] = {}
    for depth in ("auto", 2, 4, 8):
        contenders[f"engine 4 MiB x {depth}"] = lambda depth=depth: engine_gb_per_s(
            arena, path, file_nbytes, nbytes, depth
        )
    for settings in _SETTINGS:
        contenders[f"fio {settings}"] = lambda settings=settings: fio_gb_per_s(
            path, file_nbytes, nbytes, settings
        )
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    started_s = time.monotonic()
    names = list(contenders)
    for index in range(rounds):
        elapsed_s = time.monotonic() - started_s
        if index and elapsed_s * (index + 1) / index > limit_s:
            break  # The next round would not end in time.
        for name in names[index % len(names) :] + names[: index % len(names)]:
            rates[name].append(contenders[name]())
    return rates


def engine_gb_per_s(
    arena: Arena, path: Path, file_nbytes: int, nbytes: int, depth: object
) -> float:
    with open_engine("io_uring", arena=arena, queue_depth=depth) as engine:  # type: ignore[arg-type]
        file = engine.open(str(path), direct=True)
        start_s = time.perf_counter()
        write(engine, file, arena, file_nbytes, nbytes)
        return nbytes / (time.perf_counter() - start_s) / 1e9


def write(engine: StorageEngine, file: int, arena: Arena, file_nbytes: int, nbytes: int) -> None:
    def submit(index: int) -> Ticket:
        offset = index * _EXTENT_NBYTES % file_nbytes
        address = arena.address + index % _PENDING * _EXTENT_NBYTES
        segment = Segment(file, offset, address, _EXTENT_NBYTES)
        return engine.submit("write", [segment], Priority.WRITE_BACK)

    move((partial(submit, index) for index in range(nbytes // _EXTENT_NBYTES)), _PENDING)


def fio_gb_per_s(path: Path, file_nbytes: int, nbytes: int, settings: IoSettings) -> float:
    words = fio.command([FileRange(str(path), 0, file_nbytes)], "write", settings)
    return fio.run([*words, f"--io_size={nbytes}"]).gb_per_s


def rows_of(rates: dict[str, list[float]]) -> list[dict[str, object]]:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max((name for name in rates if name.startswith("fio")), key=medians.__getitem__)
    rows = []
    for name, values in rates.items():
        ratios = [own / other for own, other in zip(values, rates[best], strict=True)]
        row = {"name": name, "gb_per_s": medians[name], "rates": values, "ceiling": best}
        rows.append(row | spread(ratios, "of_fio"))
    return rows


if __name__ == "__main__":
    main()
