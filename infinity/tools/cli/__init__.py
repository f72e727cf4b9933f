"""The `infinity` command. Subcommands are imported when they are called, torch with them."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from infinity.errors import InfinityError, storage_error
from infinity.tools.cli.options import flag, with_output

# name -> (module of this package, attribute, one line of help). A Typer is a group, a function one
# command.
_COMMANDS = {
    "bench": ("bench", "bench", "Measure drives, memory and device."),
    "chat": ("chat", "chat", "Talk to a trained model."),
    "clean": ("inspect", "clean", "Remove what ended jobs have left in swap directories."),
    "config": ("config", "app", "Check, show and describe configuration files."),
    "convert": ("convert", "convert", "Make safetensors of GGUF or pickled weights."),
    "doctor": ("bench", "doctor", "List what this machine lacks, with cost and remedy."),
    "export": ("convert", "export", "Convert a checkpoint to a format of other programs."),
    "export-adapter": ("convert", "export_adapter", "Write an adapter for a server, and a sheet."),
    "generate": ("chat", "generate", "Let a trained model continue a text."),
    "inspect": ("inspect", "inspect", "Describe a checkpoint and check its integrity."),
    "merge": ("convert", "merge", "Merge an adapter into its base, as a checkpoint."),
    "new": ("new", "new", "Write a file for `infinity train` that suits this machine."),
    "plan": ("plan", "plan", "Predict a step: placement, bytes, seconds, bottleneck."),
    "quantize": ("convert", "quantize", "Quantise the linear layers of a checkpoint."),
    "replay": ("train", "replay", "Compute steps of a run again, and compare their bits."),
    "run": ("train", "run_app", "Run a program for transformers with its models offloaded."),
    "score": ("chat", "score", "Write the log-probabilities of texts under a model."),
    "spread": ("convert", "spread", "Lay the shards of a checkpoint over several drives."),
    "trace": ("trace", "app", "Find what bounds the steps of a traced run."),
    "train": ("train", "train", "Fine-tune a model as a configuration file describes."),
    "tune": ("bench", "tune", "Find the io settings that suit these drives."),
    "verify-served": ("convert", "verify_served", "Compare a served adapter with its sheet."),
    "watch": ("watch", "watch", "Show how a run of `infinity train` is going."),
}


class _LazyGroup(TyperGroup):
    """Lists every subcommand by name and imports a subcommand when it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (_, _, line) in _COMMANDS.items():
            self.commands[name] = typer.main.get_command(_alone(name, line, lambda: None))

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_bool_flag", False):
                param.metavar = ""
        return params

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _import_command(args[0]), rest

    def invoke(self, ctx: Any) -> Any:
        """Turns the package's errors, and OSErrors about a file, into one line and exit code 2."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # Of `infinity.__main__`.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except (InfinityError, OSError) as error:
            # A closed pipe ends the output silently, as in other programs.
            if ctx.params.get("traceback") or isinstance(error, BrokenPipeError):
                raise
            named = error if isinstance(error, InfinityError) else storage_error(error)
            print_error(f"error: {named or error}")
            raise typer.Exit(2) from None
        except ValueError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # Pydantic wraps that of a writer.
                raise error.__cause__ from None
            raise


def print_error(text: str) -> None:
    """Prints to stderr, in red on a terminal. Follows https://no-color.org."""
    from infinity.tools.training.process import discard

    color = False if os.environ.get("NO_COLOR") else None
    try:
        typer.secho(text, fg=typer.colors.RED, err=True, color=color)
    except OSError:  # The message cannot be shown; the exit code stays.
        discard(sys.stderr)


def _alone(name: str, text: str, function: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command(name, help=text)(function)
    return app


def _import_command(name: str) -> Any:
    module, attribute, line = _COMMANDS[name]
    target = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    if not isinstance(target, typer.Typer):
        target = _alone(name, target.__doc__ or line, target)
    return _without_python_types(with_output(typer.main.get_command(target)))


def _without_python_types(command: Any) -> Any:
    """Returns the command whose help says no type of a flag, which takes no value, and none of an
    argument, whose name and sentence say it."""
    for child in getattr(command, "commands", {}).values():
        _without_python_types(child)
    for param in command.get_params(typer.Context(command)):
        if getattr(param, "is_bool_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.display_type_rich = _no_type
    return command


def _no_type(ctx: Any) -> None:
    """Takes the place of typer's name of a type, which is Python's."""


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from infinity.config.extras import installed

        # No release: run from a source tree that is not installed.
        typer.echo(f"infinity {installed('infinity-offload') or '0+unknown'}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = flag("--version", "Print the version.", callback=_print_version, is_eager=True),
    traceback: bool = flag(
        "--traceback",
        "Show where an error was raised, not just its message.",
        envvar="INFINITY_TRACEBACK",
    ),
) -> None:
    """Train PyTorch models whose training state fits neither the GPU nor the RAM."""


def main() -> None:
    """Runs the command of the arguments."""
    import infinity

    if "SwapConfig" not in getattr(infinity, "__all__", ()):
        from infinity.namesake import explain

        sys.exit(f"infinity: {explain([])}")
    from infinity.tools.training.process import open_closed_descriptors

    open_closed_descriptors()
    app(prog_name="infinity")
