"""`infinity spread`: the shards of a checkpoint over several drives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.errors import ConfigError
from infinity.sizes import format_nbytes
from infinity.tools.cli.progress import Quiet, bytes_bar

if TYPE_CHECKING:
    from infinity.checkpoint.convert.spread import SpreadPlan


def spread(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with *.safetensors.")
    ],
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="MORE", help="Further directories of --over.")
    ] = None,
    over: Annotated[
        list[Path] | None,
        typer.Option("--over", metavar="A B C", help="One directory on each drive."),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option(
            "--copy/--move",
            help="Keep the shards, in DIR/.infinity-originals, or move them (default).",
        ),
    ] = False,
    gather: Annotated[
        bool, typer.Option("--gather", help="Undo: make the shards files of DIR again.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be done, and do nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Lay the shards of a checkpoint over several drives, so that all of them are read at once.

    `infinity spread DIR --over /nvme0 /nvme1 /nvme2`. Consecutive shards go to different drives;
    DIR keeps links, and programs open it as before. What is interrupted, by a power cut too, loads
    as it is, and goes on when it is repeated.
    """
    from infinity.config.paths import refuse_no_directory

    places = [*(over or []), *(folders or [])]
    if gather and (places or copy):
        raise ConfigError("--gather takes DIR alone: the record in it names the drives")
    if not gather and not over:
        raise ConfigError("expected --over and the directories of the drives, or --gather")
    refuse_no_directory(directory)
    from infinity.checkpoint.convert.spread import (
        plan_gather,
        plan_spread,
        run_gather,
        run_spread,
    )

    if gather:
        plan = plan_gather(directory)
    else:
        plan = plan_spread(directory, places, "copy" if copy else "move")
    if not as_json and not quiet:
        _tell(plan, is_dry=dry_run)
    if not dry_run:
        name, nbytes = plan.directory.name, plan.moved_nbytes
        with bytes_bar(name, nbytes, is_quiet=as_json or quiet) as progress:
            (run_gather if gather else run_spread)(plan, progress)
    if as_json:
        typer.echo(json.dumps(plan.to_dict() | {"is_done": not dry_run}, indent=2))


def _tell(plan: SpreadPlan, *, is_dry: bool) -> None:
    for move in plan.moves:
        how = "stays" if move.is_done else "moves" if move.moved_nbytes else "is linked"
        typer.echo(f"{move.name}  {format_nbytes(move.nbytes)}  {how}  {move.place.parent}")
    verb = "would be written" if is_dry else "to write"
    shards = "1 shard" if len(plan.moves) == 1 else f"{len(plan.moves)} shards"
    typer.echo(f"{shards}, {format_nbytes(plan.moved_nbytes)} {verb}")
