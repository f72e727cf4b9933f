"""`infinity train`: the command around `infinity.tools.training.program`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity.errors import ConfigError
from infinity.tools.cli.options import Quiet, arg, flag, opt

if TYPE_CHECKING:
    from rich.console import Console

    from infinity.config import SwapConfig

_Resume = Annotated[
    bool,
    flag(
        "--resume", "Continue from the newest checkpoint of [checkpoint]; begin if there is none."
    ),
]
_ResumeFrom = Annotated[Path | None, opt("DIR", "Continue from this checkpoint, in any directory.")]
_AsJson = Annotated[bool, flag("--json", "Print the summary as JSON; progress goes to stderr.")]
_AcceptChanges = Annotated[
    bool,
    flag(
        "--accept-changes",
        "Continue although the learning rate, its schedule or the number of steps differ "
        "from those of the checkpoint; what differs is printed.",
    ),
]


def train(
    config: Annotated[Path, arg("CONFIG", "A .toml, .yaml, .yml or .json file.")],
    overrides: Annotated[
        list[str] | None,
        opt(
            "KEY=VALUE",
            "Replace one value of the file, such as train.steps=5 or "
            '\'placement.moments=["host", "nvme"]\'. Values as in TOML; a bare word is text.',
            "--set",
        ),
    ] = None,
    trace: Annotated[
        Path | None, opt("FILE", "Write a timeline of some steps, for Perfetto.")
    ] = None,
    trace_steps: Annotated[str, opt("FIRST:LAST", "The steps that are traced.")] = "2:5",
    resume: _Resume = False,
    resume_from: _ResumeFrom = None,
    accept_changes: _AcceptChanges = False,
    as_json: _AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune a causal language model as a configuration file describes.

    Ctrl-C finishes the step, writes the export (with [checkpoint]: a checkpoint), and ends with
    exit code 130. A second Ctrl-C ends the run at once. SIGTERM (143) and SIGQUIT do the same.
    SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU always end in order. The exit code is 128 plus the number
    of the signal.
    """
    from rich.console import Console

    from infinity.config import JobConfig, SwapConfig
    from infinity.config.paths import with_located_model
    from infinity.config.source import override, read_file
    from infinity.tools.training.process import outliving_streams
    from infinity.tools.training.tracing import Tracing

    table, source = read_file(config)
    for text in overrides or []:
        override(table, text)
    loaded = JobConfig.of(with_located_model(SwapConfig.from_table(table, source)))
    tracing = None
    if trace is not None:
        first, last = parse_steps(trace_steps)
        tracing = Tracing(trace, first, last)
        if loaded.train.steps is not None:
            tracing.check(num_steps=loaded.train.steps)

    _refuse(loaded, resume_from)
    with outliving_streams():
        exit_code = _run(
            loaded,
            Console(stderr=as_json, quiet=quiet),
            as_json=as_json,
            trace=tracing,
            resume=resume,
            resume_from=resume_from,
            accept_changes=accept_changes,
        )
    raise typer.Exit(exit_code)


def _refuse(config: SwapConfig, resume_from: Path | None) -> None:
    """Raises ConfigError for packages and inputs that are not there, without importing torch."""
    from infinity.checkpoint.run.directory import find_checkpoint
    from infinity.config.extras import require_training
    from infinity.config.paths import refuse_absent_inputs

    for job in config.of_adapters():
        require_training(has_adapter=job.adapter is not None)
        refuse_absent_inputs(job)
    if resume_from is not None:
        find_checkpoint(resume_from)


def _run(config: SwapConfig, console: Console, *, as_json: bool, **options: Any) -> int:
    from infinity.tools.training import program

    try:
        summary, exit_code = program.train(config, console=console, **options)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was exported", err=True)
        return 130
    if as_json:
        typer.echo(json.dumps(summary.to_dict(), indent=2))
    return exit_code


def parse_steps(text: str) -> tuple[int, int]:
    """Returns (first, last) of "2:5"; "3" is one step. Raises ConfigError."""
    first, colon, last = text.partition(":")
    if not first.isdigit() or not (last if colon else first).isdigit():
        raise ConfigError(f"--trace-steps {text!r}: expected FIRST:LAST, such as 2:5")
    return int(first), int(last if colon else first)
