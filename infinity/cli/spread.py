"""`infinity spread`: the shards of a checkpoint over several drives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.errors import ConfigError
from infinity.sizes import format_nbytes

if TYPE_CHECKING:
    from infinity.checkpoint.convert.spread import Progress, SpreadPlan


def spread(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with *.safetensors.")
    ],
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="", help="Further directories of --over.")
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
) -> None:
    """Lay the shards of a checkpoint over several drives, so that all of them are read at once.

    `infinity spread DIR --over /nvme0 /nvme1 /nvme2`. Consecutive shards go to different drives;
    DIR keeps links, and programs open it as before. What is interrupted, by a power cut too, loads
    as it is, and goes on when it is repeated.
    """
    from infinity.checkpoint.convert.spread import (
        plan_gather,
        plan_spread,
        run_gather,
        run_spread,
    )

    places = [*(over or []), *(folders or [])]
    if gather:
        if places or copy:
            raise ConfigError("--gather takes DIR alone: the record in it names the drives")
        plan = plan_gather(directory)
    else:
        if not over:
            raise ConfigError("expected --over and the directories of the drives, or --gather")
        plan = plan_spread(directory, places, "copy" if copy else "move")
    if not as_json:
        _tell(plan, is_dry=dry_run)
    if not dry_run:
        with _shown(plan, is_quiet=as_json) as progress:
            (run_gather if gather else run_spread)(plan, progress)
    if as_json:
        typer.echo(json.dumps(plan.to_dict() | {"is_done": not dry_run}, indent=2))


def _tell(plan: SpreadPlan, *, is_dry: bool) -> None:
    for move in plan.moves:
        how = "stays" if move.is_done else "moves" if move.moved_nbytes else "is linked"
        typer.echo(f"{move.name}  {format_nbytes(move.nbytes)}  {how}  {move.place.parent}")
    verb = "would be written" if is_dry else "to write"
    typer.echo(f"{len(plan.moves)} shards, {format_nbytes(plan.moved_nbytes)} {verb}")


@contextmanager
def _shown(plan: SpreadPlan, *, is_quiet: bool) -> Iterator[Progress]:
    """Gives a function that shows the bytes that were written, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Bar(
        *columns, TransferSpeedColumn(), console=Console(stderr=True), disable=is_quiet
    ) as bar:
        task = bar.add_task(plan.directory.name, total=plan.moved_nbytes)

        def advance(name: str, nbytes: int) -> None:
            bar.update(task, advance=nbytes, description=name)

        yield advance
