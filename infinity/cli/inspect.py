"""`infinity inspect`: what is in a checkpoint or a swap directory, and whether it is whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli import print_error
from infinity.sizes import format_nbytes

if TYPE_CHECKING:
    from infinity.checkpoint.state_inspect import Inspection
    from infinity.storage.swap_inspect import SwapContents

COMMITS_NAME = "commits"


def inspect(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A checkpoint, a directory of them, or a swap directory."
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and check its digest.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove-stale",
            help="Of a swap directory: remove what a job that is gone has left, its committed step "
            "included.",
        ),
    ] = False,
) -> None:
    """Say what is in a checkpoint or a swap directory: the step, the space by kind, and whether it
    is whole.

    Without --verify only manifests, names and lengths are looked at. Ends with exit code 1 when
    something is damaged.
    """
    from infinity.checkpoint.state_directory import list_checkpoints
    from infinity.checkpoint.state_inspect import inspect as examine
    from infinity.checkpoint.state_manifest import MANIFEST_NAME
    from infinity.errors import ConfigError
    from infinity.storage.swap_inspect import examine as examine_swap

    swap = None
    if directory.is_dir() and not (directory / MANIFEST_NAME).exists():
        swap = examine_swap(str(directory))
    commits = directory / COMMITS_NAME
    has_commits = bool(list_checkpoints(commits))
    if remove:
        if swap is None and not has_commits:
            raise ConfigError(f"{directory} is no swap directory, so nothing in it is removed")
        _remove(directory)
        return
    is_swap = swap is not None or has_commits
    found = (
        []
        if is_swap and not has_commits
        else examine(commits if is_swap else directory, verify=verify)
    )
    if as_json:
        rows = [each.to_dict() for each in found]
        answer = {"swap": swap.to_dict() if swap else None, "commits": rows} if is_swap else rows
        typer.echo(json.dumps(answer, indent=2))
    else:
        if swap is not None:
            _print_swap(swap, has_commits=has_commits)
        for each in found:
            _print(each)
    if not all(each.is_whole for each in found):
        raise typer.Exit(1)


def _remove(directory: Path) -> None:
    from infinity.storage.swap_inspect import remove_stale

    removed = remove_stale(str(directory))  # First: it refuses while the directory is in use.
    commits = directory / COMMITS_NAME
    if commits.is_dir():
        shutil.rmtree(commits)
        removed.append(COMMITS_NAME)
    typer.echo(f"removed from {directory}: {', '.join(removed) or 'nothing but the lock'}")


def _print_swap(swap: SwapContents, *, has_commits: bool) -> None:
    holder = swap.holder
    who = f"process {holder.get('pid')} on {holder.get('host')}, job {holder.get('job')}"
    if swap.is_newer:
        state = "left by a newer infinity, whose format is not known here"
    elif swap.is_held:
        state = f"in use by {who}"
    elif swap.files:
        state = f"stale: left by {who}"
    else:
        state = "not in use"
    typer.echo(f"{swap.path}: swap directory, {state}")
    for file in swap.files:
        shared = " (shared with commits or checkpoints)" if file.num_links > 1 else ""
        typer.echo(
            f"  {file.name}  {format_nbytes(file.nbytes)}, "
            f"{format_nbytes(file.taken_nbytes)} on the drive{shared}"
        )
    if not has_commits:
        typer.echo("  no committed step")
    if swap.files and not swap.is_held:
        typer.echo(
            "  a resumed run goes on in these files if it can, another one removes them; "
            "--remove-stale removes them and the committed step"
        )


def _print(found: Inspection) -> None:
    manifest = found.manifest
    if manifest is not None:
        typer.echo(
            f"{found.path}: step {manifest.step}, {format_nbytes(found.nbytes)} in "
            f"{len(manifest.files)} files, {manifest.created}, {manifest.written_by}"
        )
        if found.linked is not None:
            nbytes = format_nbytes(found.linked.nbytes)
            typer.echo(f"  {nbytes} of it in files shared with the swap directory")
        for kind, nbytes in sorted(found.nbytes_by_kind().items(), key=lambda row: -row[1]):
            typer.echo(f"  {kind:<12}{format_nbytes(nbytes)}")
    for fault in found.faults:
        print_error(f"  {fault}" if manifest is not None else f"{found.path}: {fault}")
    if found.is_whole:
        how = (
            "every byte verified" if found.is_verified else "names and lengths; --verify reads all"
        )
        typer.echo(f"  whole ({how})")
