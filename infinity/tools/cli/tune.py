"""`infinity tune`: the command around `infinity.tools.bench.tune`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.sizes import MIB
from infinity.tools.cli.bench import open_lab, parse_size, stopping_at_sigterm


def tune(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A configuration file: its paths."),
    ] = None,
    paths: Annotated[
        list[Path] | None,
        typer.Option("--path", metavar="DIR", help="A directory on a drive; may be repeated."),
    ] = None,
    limit_s: Annotated[
        float,
        typer.Option("--time", metavar="SECONDS", min=1, help="Limit of the search."),
    ] = 60.0,
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", help="Bytes of one timed transfer, 128MiB."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Also write the fragment to a file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all scores as JSON.")] = False,
) -> None:
    """Find the io settings that suit these drives, and print them as a fragment of TOML.

    The fragment also has the bandwidth of each path, which the schedule reads. Copy its lines into
    the configuration file. Among settings within 5 % of the fastest, the one with the fewest bytes
    in flight is chosen, so that a repeated search gives the same result within noise.
    """
    from rich.console import Console

    from infinity.config import SwapConfig
    from infinity.tools.bench import tune as tuning
    from infinity.tools.bench.lab import QUICK

    effort = replace(QUICK, nbytes=128 * MIB if size is None else parse_size(size))
    with stopping_at_sigterm(), open_lab(config, paths, effort, with_fio=False) as (lab, say):
        choice = tuning.search(replace(lab, on_step=say), limit_s=limit_s)
        directories = lab.directories
    names = [str(tier.path) for tier in SwapConfig.load(config).tiers.nvme]
    remark = (
        f"infinity tune, {datetime.datetime.now(datetime.UTC).date()}, kernel "
        f"{platform.release()}: {choice.rounds} rounds, extents of 16 MiB; GB/s are decimal"
    )
    fragment = tuning.to_toml(choice, names or list(map(str, directories)), remark)
    if write is not None:
        write.write_text(fragment)
    if as_json:
        scores = {str(who): round(score, 4) for who, score in choice.scores.items()}
        found = {
            "block_nbytes": choice.best.block_nbytes,
            "queue_depth": choice.best.depth,
            "rings": None if choice.rings is None else dataclasses.asdict(choice.rings),
            "rounds": choice.rounds,
            "cpu_s_per_gb": choice.cpu_s_per_gb,
            "scores": scores,
            "ring_scores": {str(who): round(score, 4) for who, score in choice.ring_scores.items()},
            "paths": [dataclasses.asdict(path) for path in choice.paths],
        }
        typer.echo(json.dumps(found, indent=1))
        return
    console = Console(stderr=True)
    tables: tuple[tuple[Mapping[Any, float], object], ...] = (
        (choice.scores, choice.best), (choice.ring_scores, choice.rings)
    )  # fmt: skip
    for of_choice, chosen in tables:
        for who, score in sorted(of_choice.items(), key=lambda item: -item[1]):
            mark = "  <- chosen" if who == chosen else ""
            console.print(f"  {who!s:<28} {score:6.1%} of the best{mark}", highlight=False)
    typer.echo(fragment, nl=False)
