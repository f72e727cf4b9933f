"""The search for [io] settings: candidates alternate, losers leave, the gentlest winner stays.

Note [What is chosen]
  A candidate's score is the mean, over read, write and mixed, of its share of the best bandwidth.
  Of all candidates within 5 % of the best score, the one with the fewest bytes in flight is taken:
  bytes in flight are latency, and a small window makes priorities work. This rule, not the highest
  number, makes two searches agree on a noisy machine.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from infinity.errors import StorageError
from infinity.sizes import MIB, write_size
from infinity.tools.bench.measure import (
    Comparison,
    Contender,
    IoSettings,
    Lab,
    Measurement,
    SampleSummary,
    bandwidth_of,
    cpu_s_per_gb,
    verdict,
)
from infinity.tools.bench.nvme import EXTENT_NBYTES, KINDS, DriveSet, open_drives
from infinity.tools.bench.transfer import FileSet, TransferKind, engine_transfer

TOLERANCE = 0.05
_HOPELESS = 0.2  # below the best, divided by the root of the rounds: gone
_MINIMUM_ROUNDS = 3  # A median of fewer does not see past one slow transfer.
_MAXIMUM_ROUNDS = 12
_BANDWIDTH_ROUNDS = 5
_MINIMUM_IN_FLIGHT_NBYTES = 4 * MIB
_MAXIMUM_IN_FLIGHT_NBYTES = 32 * MIB


CANDIDATES = tuple(
    IoSettings(block_mib * MIB, depth)
    for block_mib in (1, 2, 4, 8, 16)
    for depth in (2, 4, 8)  # 1 leaves the drive idle between two requests.
    if _MINIMUM_IN_FLIGHT_NBYTES <= block_mib * depth * MIB <= _MAXIMUM_IN_FLIGHT_NBYTES
)


# kind -> candidate -> GB/s, the i-th of each list from round i.
Rates = Mapping[TransferKind, Mapping[IoSettings, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class PathBandwidth:
    """Bandwidth of one directory's drive through the engine with the chosen settings, in GB/s."""

    path: str
    read: SampleSummary
    write: SampleSummary
    mixed: SampleSummary

    @property
    def combined_gb_per_s(self) -> float:
        """Bandwidth of reading and then writing the same bytes, as a step does with state."""
        return 2 / (1 / self.read.median + 1 / self.write.median)


@dataclass(frozen=True, slots=True)
class TunedSetting:
    """The outcome: settings, the scores they were chosen by, and each path's bandwidth."""

    best: IoSettings
    scores: Mapping[IoSettings, float]
    rounds: int
    cpu_s_per_gb: float | None
    paths: tuple[PathBandwidth, ...]

    def weights(self) -> list[float]:
        """Bandwidth of each path, the slowest 1.0: the values of `[[tiers.nvme]] weight`."""
        slowest = min(path.combined_gb_per_s for path in self.paths)
        return [round(path.combined_gb_per_s / slowest, 2) for path in self.paths]


def scores(rates: Rates) -> dict[IoSettings, float]:
    """The mean over kinds of a candidate's share of the best; 1.0 is best in everything.

    Rates are first divided by their round's median, so that a slow round weighs as much as a fast
    one. Only candidates that took part in every round are scored.
    """
    rounds = max(len(values) for of_kind in rates.values() for values in of_kind.values())
    shares: dict[IoSettings, list[float]] = {}
    for of_kind in rates.values():
        running = {setting: values for setting, values in of_kind.items() if len(values) == rounds}
        levels = [statistics.median(column) for column in zip(*running.values(), strict=True)]
        typical = {
            setting: statistics.median(
                value / level for value, level in zip(values, levels, strict=True)
            )
            for setting, values in running.items()
        }
        best = max(typical.values())
        for setting, value in typical.items():
            shares.setdefault(setting, []).append(value / best)
    return {setting: statistics.mean(values) for setting, values in shares.items()}


def survivors(found: Mapping[IoSettings, float], rounds: int) -> list[IoSettings]:
    """Returns the remaining candidates: the margin narrows with the number of rounds."""
    return _good(found, max(1.5 * TOLERANCE, _HOPELESS / math.sqrt(rounds)))


def choose(found: Mapping[IoSettings, float]) -> IoSettings:
    """The fewest bytes in flight within the tolerance of the best; of equals, the larger block:
    fewer requests cost less CPU."""
    return min(_good(found), key=lambda setting: (setting.in_flight_nbytes, -setting.block_nbytes))


def _good(found: Mapping[IoSettings, float], margin: float = TOLERANCE) -> list[IoSettings]:
    best = max(found.values())
    return [setting for setting, score in found.items() if score >= best - margin]


def search(lab: Lab, *, limit_s: float) -> TunedSetting:
    """Searches on all directories at once, then measures each alone.

    Stops when the limit is reached, or when the choice has held through enough rounds; three rounds
    are always run. Raises StorageError when bytes came back wrong.
    """
    deadline_s = time.monotonic() + limit_s
    with open_drives(lab, lab.directories) as drives:
        left, found, rounds = _search(drives, deadline_s)
        best = choose({setting: found[setting] for setting in left})
    paths, cpu = [], None
    for directory in lab.directories:
        with open_drives(lab, [directory]) as drives:
            bandwidth, cpu = _bandwidth(drives, best)
            paths.append(bandwidth)
    return TunedSetting(best, found, rounds, cpu, tuple(paths))


def _settled(setting: IoSettings) -> dict[str, int]:
    return {"block_nbytes": setting.block_nbytes, "queue_depth": setting.depth}


def _search(
    drives: DriveSet, deadline_s: float
) -> tuple[list[IoSettings], dict[IoSettings, float], int]:
    """Returns the remaining candidates, the scores of all, and the number of rounds."""
    rates: dict[TransferKind, dict[IoSettings, list[float]]] = {kind: {} for kind in KINDS}
    running = list(CANDIDATES)
    found: dict[IoSettings, float] = {}
    for rounds in range(1, _MAXIMUM_ROUNDS + 1):
        for kind in KINDS:
            for setting, sample in _turns(drives, kind, running, rounds):
                rates[kind].setdefault(setting, []).append(sample.gb_per_s)
        found |= scores(rates)
        if rounds >= _MINIMUM_ROUNDS:
            running = survivors({setting: found[setting] for setting in running}, rounds)
        is_late = time.monotonic() >= deadline_s
        if rounds >= _MINIMUM_ROUNDS and (is_late or len(running) == 1):
            break
    return running, found, rounds


def _turns(
    drives: DriveSet, kind: TransferKind, running: Sequence[IoSettings], rounds: int
) -> Iterator[tuple[IoSettings, Measurement]]:
    """One transfer of every candidate. The first candidate changes with the rounds."""
    lab = drives.lab
    turn = rounds % len(running)
    for setting in [*running[turn:], *running[:turn]]:
        lab.on_step(f"round {rounds}: {kind}, {len(running)} candidates left, now {setting}")
        with drives.files(**_settled(setting)) as files:
            sample = _transfer(drives, files, kind, str(setting)).run()
        _check([sample], f"{kind} with {setting}")
        yield setting, sample


def _bandwidth(drives: DriveSet, chosen: IoSettings) -> tuple[PathBandwidth, float | None]:
    """The chosen settings on one path, and the CPU seconds per GB over all kinds."""
    with drives.files(**_settled(chosen)) as files:
        subjects = [_transfer(drives, files, kind, kind) for kind in KINDS]
        compared = Comparison("bandwidth", drives.name, subjects)
        samples = drives.lab.measure(compared, _BANDWIDTH_ROUNDS).samples
    for kind in KINDS:
        _check(samples[kind], f"{kind} with {chosen}")
    summaries = {kind: bandwidth_of(samples[kind]) for kind in KINDS}
    cpu = cpu_s_per_gb([sample for kind in KINDS for sample in samples[kind]])
    return PathBandwidth(str(drives.scratch.directories[0]), **summaries), cpu


def _transfer(drives: DriveSet, files: FileSet, kind: TransferKind, name: str) -> Contender:
    nbytes = drives.lab.effort.nbytes
    return engine_transfer(name, files, kind, nbytes=nbytes, extent_nbytes=EXTENT_NBYTES)


def _check(samples: Sequence[Measurement], what: str) -> None:
    if verdict(samples) is False:
        raise StorageError(
            5,
            operation=what,
            path="the scratch files",
            detail="the bytes that came back are not those that were written; "
            "settings for such a drive are of no use. Run `infinity bench`, check the drive",
        )


def to_toml(choice: TunedSetting, paths: Sequence[str], remark: str) -> str:
    """The fragment: [io] and one [[tiers.nvme]] per path, as the configuration names it."""
    lines = [
        f"# {remark}",
        "",
        "[io]",
        f'block_size = "{write_size(choice.best.block_nbytes)}"',
        f"queue_depth = {choice.best.depth}",
    ]
    if len(paths) > 1:  # A stripe is one request: less would cut it, more would idle a drive.
        lines.append(f'stripe = "{write_size(choice.best.block_nbytes)}"')
    for path, weight, bandwidth in zip(paths, choice.weights(), choice.paths, strict=True):
        lines += ["", "[[tiers.nvme]]", f"path = {json.dumps(path, ensure_ascii=False)}"]
        if len(paths) > 1:
            lines.append(f"weight = {weight}")
        for kind in KINDS:
            summary: SampleSummary = getattr(bandwidth, kind)
            spread = f"{summary.low:.2f} - {summary.high:.2f} over {summary.count} rounds"
            lines.append(f"{kind}_gb_per_s = {summary.median:.2f}  # {spread}")
    return "\n".join(lines) + "\n"
