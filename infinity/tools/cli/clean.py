"""`infinity clean`: removes what ended jobs have left in swap directories."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.errors import ConfigError
from infinity.sizes import format_nbytes
from infinity.tools.cli.inspect import commit_places, remove_contents, swap_contents
from infinity.tools.cli.progress import Quiet

if TYPE_CHECKING:
    from infinity.storage.swap_inspect import SwapContents

_FORMATS = (".toml", ".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Left:
    """What one swap directory holds. `state`: "clean", "removed", "stale" (with --dry-run), "in
    use" by a living job, or "kept" because a run can be resumed from it."""

    path: str
    state: str
    nbytes: int
    detail: str


def clean(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLACE", help="Swap directories, or configuration files that name them."
        ),
    ],
    commits: Annotated[
        bool,
        typer.Option(
            "--commits", help="Remove committed steps, too: the run cannot be resumed from them."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be removed, and remove nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    quiet: Quiet = False,
) -> None:
    """Remove the swap files and locks of jobs that are gone.

    A directory that a living job holds is left alone, and the exit code is 1. So is one with a
    committed step, from which a run can be resumed, without --commits. Files of other programs are
    never touched.
    """
    found = [
        _clean(directory, commits=commits, dry_run=dry_run) for directory in _directories(places)
    ]
    if as_json:
        typer.echo(json.dumps([asdict(left) for left in found], indent=2))
    elif not quiet:
        for left in found:
            space = f", {format_nbytes(left.nbytes)}" if left.nbytes else ""
            typer.echo(f"{left.path}: {left.state}{space}{left.detail and '; ' + left.detail}")
    if any(left.state == "in use" for left in found):
        raise typer.Exit(1)


def _directories(places: list[Path]) -> list[Path]:
    """Returns the swap directories of all places, each once. Raises ConfigError for what is neither
    a directory nor a configuration file."""
    found: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            found[place] = None
        elif place.suffix.lower() in _FORMATS:
            from infinity.config import SwapConfig

            found.update(dict.fromkeys(tier.path for tier in SwapConfig.load(place).tiers.nvme))
        else:
            formats = ", ".join(_FORMATS)
            raise ConfigError(
                f"{place}: expected a swap directory, or a configuration file: {formats}"
            )
    return list(found)


def _clean(directory: Path, *, commits: bool, dry_run: bool) -> Left:
    from infinity.checkpoint.run.directory import list_checkpoints

    path, swaps = str(directory), swap_contents(directory)
    steps = [step for place in commit_places(directory) for step in list_checkpoints(place)]
    nbytes = sum(file.taken_nbytes for swap in swaps for file in swap.files)
    if not swaps and not steps:
        return Left(path, "clean", 0, "")
    held = next((swap for swap in swaps if swap.is_held), None)
    if held is not None:
        return Left(path, "in use", nbytes, _holder(held))
    if steps and not commits:
        return Left(path, "kept", nbytes, "a run can be resumed from it; --commits removes it")
    if dry_run:
        return Left(path, "stale", nbytes, ", ".join(file.name for s in swaps for file in s.files))
    return Left(path, "removed", nbytes, ", ".join(remove_contents(directory, swaps)))


def _holder(swap: SwapContents) -> str:
    return f"process {swap.holder.get('pid')} on {swap.holder.get('host')}"
