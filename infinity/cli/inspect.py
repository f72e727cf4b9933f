"""`infinity inspect`: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli import print_error
from infinity.sizes import format_nbytes

if TYPE_CHECKING:
    from infinity.checkpoint.state_inspect import Inspection


def inspect(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a directory of them.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and check its SHA-256.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Say what is in a checkpoint: the step, the space by kind, and whether it is whole.

    Without --verify only manifests, names and lengths are looked at. Ends with exit code 1 when
    something is damaged.
    """
    from infinity.checkpoint.state_inspect import inspect as examine

    found = examine(directory, verify=verify)
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in found], indent=2))
    else:
        for each in found:
            _print(each)
    if not all(each.is_whole for each in found):
        raise typer.Exit(1)


def _print(found: Inspection) -> None:
    manifest = found.manifest
    if manifest is not None:
        typer.echo(
            f"{found.path}: step {manifest.step}, {format_nbytes(manifest.nbytes)} in "
            f"{len(manifest.files)} files, {manifest.created}, {manifest.written_by}"
        )
        for kind, nbytes in sorted(manifest.nbytes_by_kind().items(), key=lambda row: -row[1]):
            typer.echo(f"  {kind:<12}{format_nbytes(nbytes)}")
    for fault in found.faults:
        print_error(f"  {fault}" if manifest is not None else f"{found.path}: {fault}")
    if found.is_whole:
        how = (
            "every byte verified" if found.is_verified else "names and lengths; --verify reads all"
        )
        typer.echo(f"  whole ({how})")
