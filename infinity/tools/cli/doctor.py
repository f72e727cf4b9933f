"""`infinity doctor`: prints what `infinity.tools.doctor` finds about this machine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.tools.cli.options import arg, is_silent, opt, reply

if TYPE_CHECKING:
    from infinity.tools.doctor import Finding

_STYLES = {"ok": "green", "degraded": "yellow", "missing": "bold red"}
_PIPE_WIDTH = 1000


def doctor(
    config: Annotated[
        Path | None, arg("CONFIG", "A configuration file; its needs are checked.")
    ] = None,
    paths: Annotated[
        list[Path] | None,
        opt(
            "DIR",
            "A directory for swap files, instead of CONFIG; may be repeated. "
            "Default: the current directory.",
            "--path",
        ),
    ] = None,
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
    from infinity.tools.doctor import examine, worst  # Slow to import.

    findings: list[Finding] = []
    for finding in examine(loaded):
        findings.append(finding)
        if not is_silent():
            _print(finding)
    status = worst(findings)
    rows = [dataclasses.asdict(finding) for finding in findings]
    reply({"status": status, "findings": rows})
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
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(grid)
