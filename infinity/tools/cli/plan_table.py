"""`infinity plan --table`: which model on which machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.plan.catalogue import Cell

_NOTE = (
    "A step has 16 sequences of 2,048 tokens on each device. Predicted, with the machines as their "
    "files describe them (infinity plan --list)."
)


def print_table(
    model: str | None, hardware: str | None, rank: int | None, write: Path | None, *, as_json: bool
) -> None:
    """Plans the shipped models on the shipped machines, or one of them, and prints or writes the
    table. `rank` is that of the adapter, None for all weights."""
    from rich.console import Console
    from rich.progress import track

    from infinity.plan.catalogue import plan_cell, published_models, to_dict
    from infinity.plan.hardware import load_hardware
    from infinity.plan.shipped import shipped_in

    if write is not None and write.suffix not in (".md", ".json"):
        raise ConfigError(f"--write {write}: expected a name that ends in .md or .json")
    if write is not None and write.exists():
        raise ConfigError(f"{write} is there already; give another name, or remove it")
    names = [model] if model is not None else published_models()
    machines = [hardware] if hardware is not None else shipped_in("hardware")
    found = {machine: load_hardware(machine) for machine in machines}
    wanted = [(name, machine) for name in names for machine in machines]
    cells = [
        plan_cell(name, machine, found[machine], rank)
        for name, machine in track(wanted, "planning", console=Console(stderr=True), transient=True)
    ]
    if as_json or (write is not None and write.suffix == ".json"):
        text = json.dumps(to_dict(cells), indent=1)
    else:
        text = _with_title(cells, rank, is_markdown=write is not None)
    if write is None:
        typer.echo(text)
    else:
        write.write_text(text + "\n", encoding="utf-8")
        typer.echo(f"wrote {write}", err=True)


def _with_title(cells: list[Cell], rank: int | None, *, is_markdown: bool) -> str:
    from infinity.plan.catalogue import title_of, to_markdown, to_text

    if is_markdown:
        return f"## {title_of(rank)}\n\n{to_markdown(cells)}\n\n{_NOTE}"
    return f"{title_of(rank)}\n\n{to_text(cells)}\n\n{_NOTE}"
