"""`infinity bench`, `tune` and `doctor`: what this machine can do, and what it lacks."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from infinity.errors import ConfigError, refusing
from infinity.sizes import MIB, align_down, format_nbytes, parse_nbytes
from infinity.tools.cli.options import arg, flag, is_silent, note, opt, reply, wants_json

if TYPE_CHECKING:
    from infinity.tools.bench.measure import Comparison, Effort, Lab
    from infinity.tools.bench.report import Row
    from infinity.tools.doctor import Finding

_MINIMUM_NBYTES = 64 * MIB
_PIPE_WIDTH = 100
_STYLES = {"ok": "green", "degraded": "yellow", "missing": "bold red"}
_FINDING_WIDTH = 1000

_CONFIG = arg("CONFIG", "A configuration file: its paths and [io].", default=None)
_PATHS = opt("DIR", "A directory on a drive; may be repeated.", "--path")


def bench(
    config: Path | None = _CONFIG,
    paths: list[Path] | None = _PATHS,
    quick: bool = flag("--quick", "About 20 seconds."),
    only: str | None = opt(
        "A,B",
        "Some of: read, write, mixed, sweep, latency, stripes, host, optimizer, device, pipeline.",
    ),
    size: str | None = opt(
        "SIZE",
        "Bytes of one timed transfer, 1GiB by default. Twice that is written to each drive, "
        "and that much memory is taken.",
    ),
    rounds: int | None = opt("N", "Interleaved rounds; 7 by default.", min=1),
    save: Path | None = opt("FILE", "Write the same JSON to a file."),
    plot: Path | None = opt("DIR", "Write plots as PNG files."),
    no_fio: bool = flag("--no-fio", "Skip fio, even if it is installed."),
) -> None:
    """Measure drives, host memory and device, each with a ceiling measured in the same run.

    Without CONFIG and --path, the drive of the working directory is measured. Exit code 1 means
    that wrong bytes were read.
    """
    from infinity.tools.bench import suite
    from infinity.tools.bench.measure import QUICK, Effort
    from infinity.tools.bench.report import environment_of, rows_of, save_plots

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "expected one process, got several ranks that would measure the same drives at once; "
            "run bench/collectives.py of a checkout under torchrun to measure links between ranks"
        )
    effort = QUICK if quick else Effort()
    effort = replace(effort, rounds=rounds or effort.rounds)
    if size is not None:
        effort = replace(effort, nbytes=parse_size(size))
    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    sections = suite.check_sections(names, quick=quick)
    if plot is not None:
        from infinity.tools.pictures.timeline import find_pyplot

        find_pyplot()  # Before minutes are spent.
    with stopping_at_sigterm(), open_lab(config, paths, effort, with_fio=not no_fio) as lab:
        environment = environment_of(lab.directories, lab.arena)
        results = list(suite.run(lab, sections))
    try:
        tell(results, environment, as_json=wants_json(), save=save)
    finally:  # Behind the tables: a plot that cannot be written costs nothing else.
        for path in [] if plot is None else save_plots(rows_of(results), plot):
            note(f"wrote {path}")


def tell(
    results: Sequence[Comparison],
    environment: Mapping[str, Any],
    *,
    as_json: bool = False,
    save: Path | None = None,
) -> None:
    """Prints the results, and saves them as JSON. Raises typer.Exit(1) for wrong bytes."""
    from infinity.tools.bench.report import rows_of, to_json

    rows, document = rows_of(results), json.dumps(to_json(results, environment), indent=1)
    if as_json:
        typer.echo(document)
    else:
        print_tables(rows)
    if save is not None:
        save.write_text(document + "\n")
    if any(row.ok is False for row in rows):
        raise typer.Exit(1)


@contextmanager
def open_lab(
    config: Path | None, paths: list[Path] | None, effort: Effort, *, with_fio: bool
) -> Iterator[Lab]:
    """Returns the lab for CONFIG or --path, whose steps show as one line of progress on stderr.

    Raises ConfigError for both together, and for a missing directory.
    """
    from rich.console import Console

    from infinity.config import SwapConfig
    from infinity.storage.arena import Arena
    from infinity.tools.bench import fio
    from infinity.tools.bench.measure import Lab

    if config is not None and paths:
        raise ConfigError("expected CONFIG or --path, got both; leave one out")
    loaded = SwapConfig.load(config)
    tiers = loaded.tiers.nvme
    if config is not None and not tiers:
        raise ConfigError(f"{config} names no [[tiers.nvme]] path; name one with --path instead")
    directories = [tier.path for tier in tiers] or paths or [Path.cwd()]
    for directory in directories:
        # A configured directory may be missing; its parent must exist.
        if not directory.is_dir() and not (tiers and directory.parent.is_dir()):
            raise ConfigError(f"{str(directory)!r} is no directory; name one on the drive")
    has_fio = with_fio and fio.is_installed()
    console = Console(stderr=True, quiet=is_silent())
    if with_fio and not has_fio:
        console.print("fio is not installed: its column stays empty (apt install fio)")
    with (
        _made(directories),
        Arena(effort.nbytes, huge_pages=loaded.tiers.host.huge_pages) as arena,
        console.status("starting") as status,
    ):
        yield Lab(
            arena,
            tuple(directory.resolve() for directory in directories),
            loaded.io,
            effort,
            has_fio,
            weights=tuple(1.0 if tier.weight == "auto" else tier.weight for tier in tiers)
            or (1.0,) * len(directories),
            huge_pages=loaded.tiers.host.huge_pages,
            on_step=status.update,
        )


@contextmanager
def stopping_at_sigterm() -> Iterator[None]:
    """Ends at SIGTERM as at Ctrl-C, so that the scratch files are removed."""

    def stop(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped; the files were removed", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def print_tables(rows: Sequence[Row]) -> None:
    """Prints to stdout. In a pipe, whose width is unknown, the tables have their natural width."""
    from rich.console import Console

    from infinity.tools.bench.report import parts

    console = Console()
    console = console if console.is_terminal else Console(width=_PIPE_WIDTH)
    for part in parts(rows):
        console.print(part)


def parse_size(text: str) -> int:
    """Returns the bytes of --size, in full MiB. Raises ConfigError for less than 64 MiB and for bad
    text."""
    with refusing("--size", ValueError):
        nbytes = align_down(parse_nbytes(int(text) if text.isdigit() else text), 2 * MIB)
    if nbytes < _MINIMUM_NBYTES:
        least = format_nbytes(_MINIMUM_NBYTES)
        raise ConfigError(f"--size {text}: expected at least {least}, less measures a start-up")
    return nbytes


@contextmanager
def _made(directories: Sequence[Path]) -> Iterator[None]:
    """Makes missing directories, and removes those that stayed empty."""
    missing = [directory for directory in directories if not directory.is_dir()]
    try:
        for directory in missing:
            directory.mkdir(mode=0o700)
        yield
    finally:
        for directory in missing:
            with suppress(OSError):
                directory.rmdir()


# -- Tune ------------------------------------------------------------------------------------------


def tune(
    config: Path | None = _CONFIG,
    paths: list[Path] | None = _PATHS,
    limit_s: float = opt("SECONDS", "Limit of the search.", "--time", default=60.0, min=1),
    size: str | None = opt("SIZE", "Bytes of one timed transfer, 128MiB."),
    write: Path | None = opt("FILE", "Also write the fragment to a file."),
) -> None:
    """Find the io settings that suit these drives, and print them as a fragment of TOML.

    The fragment also has the bandwidth of each path, which the schedule reads. Copy its lines into
    the configuration file. Among settings within 5 % of the fastest, the one with the fewest bytes
    in flight is chosen, so that a repeated search gives the same result within noise.
    """
    from rich.console import Console

    from infinity.config import SwapConfig
    from infinity.tools.bench import tune as tuning
    from infinity.tools.bench.measure import QUICK

    effort = replace(QUICK, nbytes=128 * MIB if size is None else parse_size(size))
    with stopping_at_sigterm(), open_lab(config, paths, effort, with_fio=False) as lab:
        choice = tuning.search(lab, limit_s=limit_s)
        directories = lab.directories
    names = [str(tier.path) for tier in SwapConfig.load(config).tiers.nvme]
    remark = (
        f"infinity tune, {datetime.datetime.now(datetime.UTC).date()}, kernel "
        f"{platform.release()}: {choice.rounds} rounds, extents of 16 MiB; GB/s are decimal"
    )
    fragment = tuning.to_toml(choice, names or list(map(str, directories)), remark)
    if wants_json():
        scores = {str(who): round(score, 4) for who, score in choice.scores.items()}
        found = {
            "block_nbytes": choice.best.block_nbytes,
            "queue_depth": choice.best.depth,
            "rounds": choice.rounds,
            "cpu_s_per_gb": choice.cpu_s_per_gb,
            "scores": scores,
            "paths": [dataclasses.asdict(path) for path in choice.paths],
        }
        reply(found)
    else:
        console = Console(stderr=True, quiet=is_silent())
        for who, score in sorted(choice.scores.items(), key=lambda item: -item[1]):
            mark = "  <- chosen" if who == choice.best else ""
            console.print(f"  {who!s:<28} {score:6.1%} of the best{mark}", highlight=False)
        typer.echo(fragment, nl=False)
    if write is not None:
        write.write_text(fragment)


# -- Doctor ----------------------------------------------------------------------------------------


def doctor(
    config: Path | None = arg(
        "CONFIG", "A configuration file; its needs are checked.", default=None
    ),
    paths: list[Path] | None = opt(
        "DIR",
        "A directory for swap files, instead of CONFIG; may be repeated. "
        "Default: the current directory.",
        "--path",
    ),
) -> None:
    """List what this machine lacks for offloading, with its cost and the remedy.

    The exit code is 1 if a need of CONFIG is missing. The command needs no privileges.
    """
    from infinity.config import SwapConfig

    if config is not None and paths:
        raise typer.BadParameter("give CONFIG or --path, not both", param_hint="--path")
    loaded = SwapConfig.load(
        config
        if config is not None
        else {"tiers": {"nvme": [{"path": str(path)} for path in paths or [Path()]]}}
    )
    from infinity.tools.cli.config import fault_of_model
    from infinity.tools.doctor import Finding, examine, worst  # Slow to import.

    findings: list[Finding] = []
    fault = fault_of_model(loaded)
    of_model = [Finding("model", fault).missing("`infinity train` refuses it")] if fault else []
    for finding in chain(of_model, examine(loaded)):
        findings.append(finding)
        if not is_silent():
            _print(finding)
    status = worst(findings)
    reply({"status": status, "findings": [dataclasses.asdict(finding) for finding in findings]})
    if status == "missing":
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    """Prints one line, with cost and remedy below it; wrapped on a terminal, not in a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(finding.status.ljust(len("degraded")), _STYLES[finding.status]),
        Text.assemble((finding.subject, "bold"), ": ", finding.found),
    )
    for label, text in (("cost", finding.cost), ("remedy", finding.remedy)):
        if text:
            grid.add_row("", Text.assemble((label, "dim"), ": ", text))
    Console(width=None if sys.stdout.isatty() else _FINDING_WIDTH).print(grid)
