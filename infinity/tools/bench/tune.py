"""The search for [io] settings: candidates alternate, losers leave, the gentlest winner stays.

Note [What is chosen]
  A candidate's score is the mean, over read, write and mixed, of its share of the best bandwidth.
  Of all candidates within 5 % of the best score, the one with the fewest bytes in flight is taken:
  bytes in flight are latency, and a small window makes priorities work. This rule, not the highest
  number, makes two searches agree on a noisy machine.
  With that block size and depth, ring setups alternate in the same way with the default of the
  engine. Another setup must be more than 5 % faster in the median of all pairs, and faster in 85 %
  of them. Of those that are about equal, the one with the fewest rings is taken.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from infinity.errors import StorageError
from infinity.sizes import MIB, write_size
from infinity.storage.native_engine import RingFlags
from infinity.storage.probe import grants_ring_flags
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

Setting = TypeVar("Setting", bound=Hashable)  # IoSettings or a RingSetup

TOLERANCE = 0.05
_HOPELESS = 0.2  # below the best, divided by the root of the rounds: gone
_MINIMUM_ROUNDS = 3  # A median of fewer does not see past one slow transfer.
_MAXIMUM_ROUNDS = 12
_BANDWIDTH_ROUNDS = 5
_MINIMUM_IN_FLIGHT_NBYTES = 4 * MIB
_MAXIMUM_IN_FLIGHT_NBYTES = 32 * MIB
_SHARE_OF_RINGS = 0.35  # of the time
_WINS = 0.85  # of all pairs: among so many setups, chance wins three of four for one of them


CANDIDATES = tuple(
    IoSettings(block_mib * MIB, depth)
    for block_mib in (1, 2, 4, 8, 16)
    for depth in (2, 4, 8)  # 1 leaves the drive idle between two requests.
    if _MINIMUM_IN_FLIGHT_NBYTES <= block_mib * depth * MIB <= _MAXIMUM_IN_FLIGHT_NBYTES
)


@dataclass(frozen=True, slots=True)
class RingSetup:
    """The rings of the io_uring engine on one drive: `num_rings` rings with these flags."""

    num_rings: int
    flags: RingFlags

    def __str__(self) -> str:
        return f"{self.num_rings} ring{'s' if self.num_rings > 1 else ''}, flags {self.flags}"


# The gentlest first.
RING_SETUPS = tuple(
    RingSetup(num_rings, flags)
    for num_rings in (1, 2, 4)
    for flags in ("auto", "coop_taskrun", "none")
)

# kind -> candidate -> GB/s, the i-th of each list from round i.
Rates = Mapping[TransferKind, Mapping[Setting, Sequence[float]]]


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
    """The outcome: settings, the scores they were chosen by, and each path's bandwidth.

    `rings` is None, and `ring_scores` empty, where the thread engine was searched. `rounds` are
    those of the search for `best`.
    """

    best: IoSettings
    scores: Mapping[IoSettings, float]
    rings: RingSetup | None
    ring_scores: Mapping[RingSetup, float]
    rounds: int
    cpu_s_per_gb: float | None
    paths: tuple[PathBandwidth, ...]

    def weights(self) -> list[float]:
        """Bandwidth of each path, the slowest 1.0: the values of `[[tiers.nvme]] weight`."""
        slowest = min(path.combined_gb_per_s for path in self.paths)
        return [round(path.combined_gb_per_s / slowest, 2) for path in self.paths]


def scores(rates: Rates[Setting]) -> dict[Setting, float]:
    """The mean over kinds of a candidate's share of the best; 1.0 is best in everything.

    Rates are first divided by their round's median, so that a slow round weighs as much as a fast
    one. Only candidates that took part in every round are scored.
    """
    rounds = max(len(values) for of_kind in rates.values() for values in of_kind.values())
    shares: dict[Setting, list[float]] = {}
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


def survivors(found: Mapping[Setting, float], rounds: int) -> list[Setting]:
    """Returns the remaining candidates: the margin narrows with the number of rounds."""
    return _good(found, max(1.5 * TOLERANCE, _HOPELESS / math.sqrt(rounds)))


def choose(found: Mapping[IoSettings, float]) -> IoSettings:
    """The fewest bytes in flight within the tolerance of the best; of equals, the larger block:
    fewer requests cost less CPU."""
    return min(_good(found), key=lambda setting: (setting.in_flight_nbytes, -setting.block_nbytes))


def choose_rings(rates: Rates[RingSetup], default: RingSetup) -> RingSetup:
    """Returns the gentlest setup that beats the default, or the default, which took part in all
    rounds.
    """
    gains = {}
    for setting in {setting for of_kind in rates.values() for setting in of_kind} - {default}:
        ratios = [
            here / there
            for of_kind in rates.values()
            for here, there in zip(of_kind[setting], of_kind[default], strict=False)
        ]
        num_wins = sum(ratio > 1 for ratio in ratios)
        if num_wins >= _WINS * len(ratios) and statistics.median(ratios) > 1 + TOLERANCE:
            gains[setting] = statistics.median(ratios)
    return min(_good(gains), key=RING_SETUPS.index) if gains else default


def _good(found: Mapping[Setting, float], margin: float = TOLERANCE) -> list[Setting]:
    best = max(found.values())
    return [setting for setting, score in found.items() if score >= best - margin]


def ring_setups(grants: Callable[[RingFlags], bool]) -> list[RingSetup]:
    """Those that differ on this kernel: "auto" is the first that it grants."""
    granted = [flags for flags in ("defer_taskrun", "coop_taskrun", "none") if grants(flags)]
    return [setup for setup in RING_SETUPS if setup.flags == "auto" or setup.flags in granted[1:]]


def search(lab: Lab, *, limit_s: float) -> TunedSetting:
    """Searches on all directories at once, then measures each alone.

    Stops when the limit is reached, or when the choice has held through enough rounds; three rounds
    are always run. Raises StorageError when bytes came back wrong.
    """
    start_s = time.monotonic()
    with lab.engine() as engine:
        has_rings = engine.name == "io_uring"
    share = 1 - _SHARE_OF_RINGS if has_rings else 1.0
    rings: RingSetup | None = None
    ring_scores: dict[RingSetup, float] = {}

    def settle(setting: IoSettings) -> dict[str, Any]:
        return {"block_nbytes": setting.block_nbytes, "queue_depth": setting.depth}

    def set_up(setting: RingSetup) -> dict[str, Any]:
        return {**settle(best), "num_rings": setting.num_rings, "ring_flags": setting.flags}

    with open_drives(lab, lab.directories) as drives:
        left, found, rounds = _search(drives, CANDIDATES, settle, start_s + limit_s * share)
        best = choose({setting: found[setting] for setting in left[KINDS[0]]})
        if has_rings:
            setups = ring_setups(grants_ring_flags)
            default = setups[0]
            ring_rates, ring_scores, _ = _search(
                drives, setups, set_up, start_s + limit_s, stays=default
            )
            rings = choose_rings(ring_rates, default)
    settings = settle(best) if rings is None else set_up(rings)
    paths, cpu = [], None
    for directory in lab.directories:
        with open_drives(lab, [directory]) as drives:
            bandwidth, cpu = _bandwidth(drives, settings)
            paths.append(bandwidth)
    return TunedSetting(best, found, rings, ring_scores, rounds, cpu, tuple(paths))


def _search(
    drives: DriveSet,
    candidates: Sequence[Setting],
    settings_of: Callable[[Setting], dict[str, Any]],
    deadline_s: float,
    *,
    stays: Setting | None = None,
) -> tuple[Rates[Setting], dict[Setting, float], int]:
    """Returns the rates of the remaining candidates, the scores of all, and the number of rounds.

    `stays` remains to the end.
    """
    rates: dict[TransferKind, dict[Setting, list[float]]] = {kind: {} for kind in KINDS}
    running = list(candidates)
    found: dict[Setting, float] = {}
    for rounds in range(1, _MAXIMUM_ROUNDS + 1):
        for kind in KINDS:
            for setting, sample in _turns(drives, kind, running, settings_of, rounds):
                rates[kind].setdefault(setting, []).append(sample.gb_per_s)
        found |= scores(rates)
        if rounds >= _MINIMUM_ROUNDS:
            good = survivors({setting: found[setting] for setting in running}, rounds)
            running = [setting for setting in running if setting in good or setting == stays]
        is_late = time.monotonic() >= deadline_s
        if rounds >= _MINIMUM_ROUNDS and (is_late or len(running) == 1):
            break
    left = {
        kind: {setting: of_kind[setting] for setting in running} for kind, of_kind in rates.items()
    }
    return left, found, rounds


def _turns(
    drives: DriveSet,
    kind: TransferKind,
    running: Sequence[Setting],
    settings_of: Callable[[Setting], dict[str, Any]],
    rounds: int,
) -> Iterator[tuple[Setting, Measurement]]:
    """One transfer of every candidate. The first candidate changes with the rounds."""
    lab = drives.lab
    turn = rounds % len(running)
    for setting in [*running[turn:], *running[:turn]]:
        lab.on_step(f"round {rounds}: {kind}, {len(running)} candidates left, now {setting}")
        with drives.files(**settings_of(setting)) as files:
            sample = _transfer(drives, files, kind, str(setting)).run()
        _check([sample], f"{kind} with {setting}")
        yield setting, sample


def _bandwidth(drives: DriveSet, settings: Mapping[str, Any]) -> tuple[PathBandwidth, float | None]:
    """The chosen settings on one path, and the CPU seconds per GB over all kinds."""
    with drives.files(**settings) as files:
        subjects = [_transfer(drives, files, kind, kind) for kind in KINDS]
        compared = Comparison("bandwidth", drives.name, subjects)
        samples = drives.lab.measure(compared, _BANDWIDTH_ROUNDS).samples
    for kind in KINDS:
        _check(samples[kind], f"{kind} with {settings}")
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
    if choice.rings is not None:
        lines.append(f"rings = {choice.rings.num_rings}")
        lines.append(f'flags = "{choice.rings.flags}"')
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
