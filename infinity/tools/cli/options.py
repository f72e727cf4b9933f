"""The options of commands, and the bar of bytes on stderr."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Paths = Annotated[
    list[Path] | None,
    typer.Option("--path", metavar="DIR", help="A directory on a drive; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="NAME", help="A shipped machine, or a .toml. Default: this one."
    ),
]
_T = TypeVar("_T")


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


def with_quiet(command: Any) -> Any:
    """Returns the command, or the group of commands, with `--quiet` where a command has none.

    Exit code and written files are then the answer. JSON that was asked for is still printed.
    """
    for child in getattr(command, "commands", {}).values():
        with_quiet(child)
    is_group = hasattr(command, "commands")
    if is_group or any("--quiet" in param.opts for param in command.params):
        return command
    app = typer.Typer(add_completion=False)
    app.command()(_only_quiet)
    command.params.append(typer.main.get_command(app).params[0])
    call = command.callback

    def called(*, quiet: bool, **values: Any) -> Any:
        with ExitStack() as stack:
            if quiet:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stderr(nowhere))
                if not values.get("as_json"):
                    stack.enter_context(redirect_stdout(nowhere))
            return call(**values)

    command.callback = called
    return command


def _only_quiet(quiet: Quiet = False) -> None:
    """Has the option and nothing else."""


def with_options(options: type[_T]) -> Callable[[Callable[[_T], None]], Callable[..., None]]:
    """Gives a function of a dataclass the parameters that typer reads: its fields, as annotated."""
    hints = get_type_hints(options, include_extras=True)
    signature = inspect.signature(options)

    def decorate(run: Callable[[_T], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            run(options(**values))

        parameters = [
            parameter.replace(annotation=hints[name])
            for name, parameter in signature.parameters.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {name: hints[name] for name in signature.parameters}
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        return command

    return decorate
