"""Content of checkpoints and swap directories: `infinity inspect` shows it, and `infinity clean`
removes what ended jobs have left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from infinity.errors import ConfigError
from infinity.sizes import format_nbytes
from infinity.tools.cli import print_error
from infinity.tools.cli.options import arg, flag, reply, wants_json

if TYPE_CHECKING:
    from infinity.checkpoint.run.inspection import Inspection
    from infinity.storage.swap_directory import SwapContents


def inspect(
    directory: Path = arg(
        "DIR", "A checkpoint, a directory of them, a run's output, or a swap directory."
    ),
    verify: bool = flag("--verify", "Read every byte and check its digest."),
    remove: bool = flag(
        "--remove-stale",
        "Remove what an ended job left in a swap directory, its committed step included.",
    ),
) -> None:
    """Describe a checkpoint or a swap directory: the step, the space by kind, and its integrity.

    Without --verify, only manifests, names and lengths are checked. The exit code is 1 if something
    is damaged.
    """
    from infinity.checkpoint.run.directory import list_checkpoints, place_of_checkpoints
    from infinity.checkpoint.run.inspection import inspect as examine

    directory = place_of_checkpoints(directory)
    swaps = swap_contents(directory)
    places = filter(Path.is_dir, commit_places(directory))
    commits = list(filter(list_checkpoints, places))
    is_swap = bool(swaps or commits)
    if remove:
        if not is_swap:
            raise ConfigError(f"{directory} is no swap directory, so nothing in it is removed")
        removed = remove_contents(directory, swaps)
        text = f"removed from {directory}: {', '.join(removed) or 'nothing but the lock'}"
        reply({"swap": str(directory), "removed": removed}, text)
        return
    if not is_swap and directory.is_dir() and not any(directory.iterdir()):
        reply(
            {"swap": None, "ranks": [], "commits": []},
            f"{directory}: empty. There is no checkpoint; of a swap directory nothing else is "
            "to be expected, as a job that ends well leaves nothing in it",
        )
        return
    found = [
        inspection
        for place in (commits if is_swap else [directory])
        for inspection in examine(place, verify=verify)
    ]
    if wants_json():
        rows = [inspection.to_dict() for inspection in found]
        by_path = {swap.path: swap.to_dict() for swap in swaps}
        own = by_path.pop(str(directory), None)
        reply({"swap": own, "ranks": [*by_path.values()], "commits": rows} if is_swap else rows)
    else:
        for swap in swaps:
            _print_swap(swap)
        if swaps and not commits:
            typer.echo("  no committed step")
        for inspection in found:
            _print(inspection)
    has_faults = any(contents.faults for contents in swaps)
    if has_faults or not all(inspection.is_intact for inspection in found):
        raise typer.Exit(1)


def swap_contents(directory: Path) -> list[SwapContents]:
    """Returns the contents of a swap directory and of those of ranks in it; none of a checkpoint,
    and of a directory without a lock and swap files."""
    from infinity.checkpoint.run.format import MANIFEST_NAME
    from infinity.storage.swap_directory import examine

    if not directory.is_dir() or (directory / MANIFEST_NAME).exists():
        return []
    places = [directory, *sorted(directory.glob("rank-*"))]  # Every rank has its own directory.
    examined = [examine(str(place)) for place in places if place.is_dir()]
    return [contents for contents in examined if contents is not None]


def commit_places(directory: Path) -> list[Path]:
    """Returns the places where a swap directory may have committed steps."""
    from infinity.config.swap import COMMITS_NAME, COPYING_NAME

    return [directory / COMMITS_NAME, directory / COPYING_NAME]


def remove_contents(directory: Path, swaps: list[SwapContents]) -> list[str]:
    """Removes the swap files and committed steps of jobs that are gone. Returns what was removed.

    Raises SwapLockedError before anything is removed if a living job holds the directory.
    """
    from infinity.checkpoint.run.directory import remove_own
    from infinity.storage.swap_directory import remove_stale

    # First those in use, which refuse; commits belong to all ranks.
    removed = [
        name
        for swap in sorted(swaps, key=lambda swap: not swap.is_held)
        for name in remove_stale(swap.path)
    ]
    for path in (Path(swap.path) for swap in swaps):
        if path != directory and not any(path.iterdir()):
            path.rmdir()
    stays: list[Path] = []
    for commits in filter(Path.is_dir, commit_places(directory)):
        stays += remove_own(commits)
        removed.append(f"what is ours in {commits.name}" if commits.exists() else commits.name)
    for path in stays:
        print_error(f"{path} stays: it is not of this package")
    return removed


def _print_swap(swap: SwapContents) -> None:
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
    for fault in swap.faults:
        print_error(f"  {fault}")
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
        if manifest.ranks:
            typer.echo(f"  of {len(manifest.ranks)} ranks")
        if found.shared_nbytes:
            shared = format_nbytes(found.shared_nbytes)
            typer.echo(f"  {shared} of it in files shared with the swap directory")
        for kind, nbytes in sorted(found.nbytes_by_kind().items(), key=lambda row: -row[1]):
            typer.echo(f"  {kind:<12}{format_nbytes(nbytes)}")
    for fault in found.faults:
        print_error(f"  {fault}" if manifest is not None else f"{found.path}: {fault}")
    if found.is_intact and found.is_verified:
        typer.echo("  intact (every byte verified)")
    elif found.is_intact:
        typer.echo("  intact (names and lengths; --verify reads all)")


# -- Clean -----------------------------------------------------------------------------------------


def clean(
    places: list[Path] = arg("PLACE", "Swap directories, or configuration files that name them."),
    commits: bool = flag(
        "--commits", "Remove committed steps, too: the run cannot be resumed from them."
    ),
    dry_run: bool = flag("--dry-run", "Tell what would be removed, and remove nothing."),
) -> None:
    """Remove the swap files and locks of jobs that are gone.

    A directory that a living job holds is left alone, and the exit code is 1. So is one with a
    committed step, from which a run can be resumed, without --commits. Files of other programs are
    never touched.
    """
    found, lines = [], []
    for directory in _directories(places):
        found.append(left := _clean(directory, commits=commits, dry_run=dry_run))
        space = f", {format_nbytes(left['nbytes'])}" if left["nbytes"] else ""
        detail = f"; {left['detail']}" if left["detail"] else ""
        lines.append(f"{left['path']}: {left['state']}{space}{detail}")
    reply(found, "\n".join(lines))
    if any(left["state"] == "in use" for left in found):
        raise typer.Exit(1)


def _directories(places: list[Path]) -> list[Path]:
    """Returns the swap directories of all places, each once. Raises ConfigError for what is neither
    a directory nor a configuration file."""
    from infinity.config import SwapConfig
    from infinity.config.source import FORMATS

    found: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            found[place] = None
        elif place.suffix.lower() in FORMATS:
            found.update(dict.fromkeys(tier.path for tier in SwapConfig.load(place).tiers.nvme))
        else:
            raise ConfigError(
                f"{place}: expected a swap directory, or a configuration file: {', '.join(FORMATS)}"
            )
    return list(found)


def _clean(directory: Path, *, commits: bool, dry_run: bool) -> dict[str, Any]:
    """Returns what one swap directory holds. `state`: "clean", "removed", "stale" (with --dry-run),
    "in use" by a living job, or "kept" because a run can be resumed from it."""
    from infinity.checkpoint.run.directory import list_checkpoints

    swaps = swap_contents(directory)
    steps = [step for place in commit_places(directory) for step in list_checkpoints(place)]
    nbytes = sum(file.taken_nbytes for swap in swaps for file in swap.files)

    def left(state: str, detail: str = "") -> dict[str, Any]:
        return {"path": str(directory), "state": state, "nbytes": nbytes, "detail": detail}

    if not swaps and not steps:
        return left("clean")
    held = next((swap for swap in swaps if swap.is_held), None)
    if held is not None:
        return left("in use", f"process {held.holder.get('pid')} on {held.holder.get('host')}")
    if steps and not commits:
        return left("kept", "a run can be resumed from it; --commits removes it")
    if dry_run:
        return left("stale", ", ".join(file.name for s in swaps for file in s.files))
    return left("removed", ", ".join(remove_contents(directory, swaps)))
