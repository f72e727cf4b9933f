"""A bar of bytes on stderr, and the option that silences a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Advance = Callable[[str, int], None]


@contextmanager
def bytes_bar(
    title: str, total_nbytes: int, *, is_quiet: bool
) -> Iterator[Callable[[str, int], None]]:
    """Gives a function of (what moves, further bytes)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=is_quiet) as bar:
        task = bar.add_task(title, total=total_nbytes)

        def advance(name: str, nbytes: int) -> None:
            bar.update(task, advance=nbytes, description=name)

        yield advance
