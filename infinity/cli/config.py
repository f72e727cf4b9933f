"""`infinity config check|show|schema`: the swap-tier file without running anything."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli import print_error
from infinity.config import InvalidConfigError, SwapConfig
from infinity.errors import ConfigError
from infinity.sizes import format_nbytes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Check, show and describe swap-tier files.",
)

_File = Annotated[str, typer.Argument(metavar="FILE", help="A .toml, .yaml, .yml or .json file.")]


@app.command()
def check(file: _File) -> None:
    """Print "ok", or every fault with its place; exit 1 when there is one."""
    try:
        SwapConfig.load(file)
    except ConfigError as error:
        faults = (
            [problem.line(error.name) for problem in error.problems]
            if isinstance(error, InvalidConfigError)
            else [str(error)]
        )
        for line in faults:
            print_error(line)
        raise typer.Exit(1) from None
    typer.echo(f"{file}: ok")


@app.command()
def show(
    file: _File,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON: the whole configuration, and the origins by key.")
    ] = False,
) -> None:
    """Print every value and where it came from, as TOML that can be used as it is."""
    from infinity.config import render

    config = SwapConfig.load(file)
    if as_json:
        origins = {value.key: value.origin for value in config.resolved()}
        typer.echo(json.dumps({"config": config.to_dict(), "origins": origins}, indent=2))
        return
    typer.echo(render.to_toml(config, _on_this_machine(config)), nl=False)


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The reference as Markdown: docs/CONFIG.md.")
    ] = False,
) -> None:
    """Print the JSON Schema of a swap-tier file."""
    from infinity.config import render

    if markdown:
        typer.echo(render.to_markdown(), nl=False)
    else:
        typer.echo(json.dumps(render.json_schema(), indent=2))


def _on_this_machine(config: SwapConfig) -> dict[str, str]:
    """What "auto" and shares come to here and now, by dotted key. Device memory needs torch."""
    from infinity.config.machine import available_memory_nbytes

    notes = {}
    if config.tiers.host.capacity.nbytes is None:
        available = available_memory_nbytes()
        budget = format_nbytes(config.tiers.host.budget_nbytes(available))
        notes["tiers.host.capacity"] = f"{budget} of the {format_nbytes(available)} available now"
    for index, entry in enumerate(config.tiers.nvme):
        if entry.capacity.nbytes is None:
            free = _free_nbytes(entry.path)
            share = format_nbytes(entry.capacity.resolve(free))
            notes[f"tiers.nvme[{index}].capacity"] = f"at most {share} free now"
    return notes


def _free_nbytes(path: Path) -> int:
    """Free bytes of the file system that holds `path`, or will hold it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
