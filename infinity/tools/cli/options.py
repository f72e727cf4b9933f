"""The options that commands share, `--push` among them, and how commands print: `--json` and
`--quiet` of every command, and the bar on stderr."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer

from infinity.errors import ConfigError, refusing


def arg(metavar: str, text: str, *, default: Any = ..., **more: Any) -> Any:
    """Returns `typer.Argument` of a parameter. It is required without a `default`."""
    return typer.Argument(default, metavar=metavar, help=text, **more)


def opt(metavar: str | None, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Returns `typer.Option` of a parameter with a value; named as the parameter, or by `names`.
    It is required with the `default` `...`."""
    return typer.Option(default, *names, metavar=metavar, help=text, **more)


def flag(name: str, text: str, *names: str, default: bool = False, **more: Any) -> Any:
    """Returns `typer.Option` of a parameter that is true or false."""
    return typer.Option(default, name, *names, help=text, **more)


QUIET = flag("--quiet", "Print nothing but errors.", "-q")
HARDWARE = opt("NAME", "A shipped machine, or a .toml. Default: this one.")
PUSH = opt(
    "OWNER/NAME", "Upload the result to this model of the hub, private if new; needs a token."
)
_T = TypeVar("_T")

# Of the command that runs: whether it was called with --json, and with --quiet.
_asked: ContextVar[tuple[bool, bool]] = ContextVar("asked", default=(False, False))


def wants_json() -> bool:
    """Whether the command that runs answers in JSON."""
    return _asked.get()[0]


def is_silent() -> bool:
    """Whether the command that runs prints no lines for people."""
    return any(_asked.get())


def reply(data: Any, text: str = "") -> None:
    """Prints the answer of a command: `data` as JSON with --json, nothing with --quiet, else the
    text, if there is one."""
    if wants_json():
        typer.echo(json.dumps(data, indent=2))
    elif text and not is_silent():
        typer.echo(text)


def note(text: str) -> None:
    """Prints a line on stderr, for people."""
    if not is_silent():
        typer.echo(text, err=True)


def pushing(name: str | None) -> Callable[[Path], None]:
    """Returns the function that uploads all files of a directory to a model of the hub, except
    those in folders and those by which a run describes itself. Without a name, and on other ranks
    than the first, it does nothing. Raises ConfigError for a malformed name, an owner that the
    token does not have and a token that only reads, before anything is computed; and where the
    upload fails."""
    if name is None or os.environ.get("RANK", "0") != "0":
        return lambda _: None
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    from infinity.config.paths import RUN_NAMES

    api = HfApi()
    with refusing(f"--push {name}", Exception):
        validate_repo_id(name)
        who = api.whoami()
    owners = [who["name"], *(org["name"] for org in who.get("orgs", ()))]
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if name.partition("/")[0] not in owners or role == "read":
        raise ConfigError(
            f"--push {name}: expected OWNER/NAME and a token that writes for OWNER, got one of "
            f"{', '.join(owners)} with the role {role}"
        )

    def upload(directory: Path) -> None:
        again = f"; {directory} is complete: hf upload {name} {shlex.quote(str(directory))}"
        with refusing(f"--push {name}", Exception, remedy=again):
            url = api.create_repo(name, private=True, exist_ok=True)
            skipped = [*RUN_NAMES, ".*", "*/*"]
            api.upload_folder(repo_id=name, folder_path=directory, ignore_patterns=skipped)
        note(f"pushed to {url}")

    return upload


@contextmanager
def progress_bar(
    title: str, total: float | None = None, *, has_bytes: bool = False
) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr, with bytes and their rate if it has them. Gives
    `rich.progress.Progress.update` of it, of `description`, `total`, `completed` and `advance`."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = Progress.get_default_columns()
    if has_bytes:
        columns += (DownloadColumn(binary_units=True), TransferSpeedColumn())
    console = Console(stderr=True)
    is_off = is_silent() or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_off) as bar:
        yield partial(bar.update, bar.add_task(title, total=total))


def with_output(command: Any) -> Any:
    """Returns the command, or the group of commands, with `--json` and `--quiet` where a command
    has none; its functions print by `reply` and `note`.

    With `--quiet`, exit code and written files are the answer. JSON that was asked for is still
    printed.
    """
    for child in getattr(command, "commands", {}).values():
        with_output(child)
    if hasattr(command, "commands"):
        return command
    app = typer.Typer(add_completion=False)
    app.command()(_only_output)
    has = {param.name for param in command.params}
    added = [p for p in typer.main.get_command(app).params[:2] if p.name not in has]
    names = {param.name for param in added}
    command.params += added
    call = command.callback

    def called(**values: Any) -> Any:
        as_json, quiet = values["as_json"], values["quiet"]
        with ExitStack() as stack:
            stack.callback(_asked.reset, _asked.set((as_json, quiet)))
            if quiet and not as_json and "quiet" in names:
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(nowhere))
            return call(**{name: value for name, value in values.items() if name not in names})

    command.callback = called
    return command


def _only_output(
    as_json: bool = flag("--json", "Print JSON, and nothing else."), quiet: bool = QUIET
) -> None:
    """Has the two options and nothing else."""


def with_options(options: type[_T]) -> Callable[[Callable[[_T], None]], Callable[..., None]]:
    """Gives a function of a dataclass the parameters that typer reads, its fields. It may be called
    with some of them, too."""
    hints, parameters = get_type_hints(options), inspect.signature(options).parameters
    defaults = {name: parameter.default.default for name, parameter in parameters.items()}

    def decorate(run: Callable[[_T], None]) -> Callable[..., None]:
        @wraps(run)
        def command(**values: Any) -> None:
            run(options(**(defaults | values)))

        command.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
        command.__annotations__ = {name: hints[name] for name in parameters}
        return command

    return decorate
