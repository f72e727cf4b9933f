"""`infinity train`, `replay` and `run`: the commands that train."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from infinity.errors import ConfigError
from infinity.tools.cli.options import PUSH, QUIET, arg, flag, is_silent, opt, pushing, reply

if TYPE_CHECKING:
    from infinity.config import SwapConfig

_OVERRIDES = opt(
    "KEY=VALUE",
    "Replace one value of the file, such as train.steps=5 or "
    '\'placement.moments=["host", "nvme"]\'. Values as in TOML; a bare word is text.',
    "--set",
)


def train(
    config: Path = arg("CONFIG", "A .toml, .yaml, .yml or .json file."),
    overrides: list[str] | None = _OVERRIDES,
    trace: Path | None = opt("FILE", "Write a timeline of some steps, for Perfetto."),
    trace_steps: str = opt("FIRST:LAST", "The steps that are traced.", default="2:5"),
    resume: bool = flag(
        "--resume", "Continue from the newest checkpoint of [checkpoint]; begin if there is none."
    ),
    resume_from: Path | None = opt("DIR", "Continue from this checkpoint, in any directory."),
    accept_changes: bool = flag(
        "--accept-changes",
        "Continue although the learning rate, its schedule, the number of steps, the held-out data "
        "or the base's config.json differ from those of the checkpoint; what differs is printed.",
    ),
    push: str | None = PUSH,
    as_json: bool = flag("--json", "Print the summary as JSON; progress goes to stderr."),
    quiet: bool = QUIET,
) -> None:
    """Fine-tune a model as a configuration file describes.

    Ctrl-C finishes the step, writes the export (with [checkpoint]: a checkpoint), and ends with
    exit code 130. A second Ctrl-C ends the run at once. SIGTERM (143) and SIGQUIT do the same.
    SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU always end in order. The exit code is 128 plus the number
    of the signal.
    """
    from rich.console import Console

    from infinity.config import JobConfig, SwapConfig
    from infinity.config.paths import with_located_model
    from infinity.config.source import read_file
    from infinity.tools.training.process import outliving_streams
    from infinity.tools.training.report import Tracing

    table, source = read_file(config, overrides or ())
    loaded = JobConfig.of(with_located_model(SwapConfig.from_table(table, source)))
    tracing = None
    if trace is not None:
        first, last = parse_steps(trace_steps)
        tracing = Tracing(trace, first, last)
        if loaded.train.steps is not None:
            tracing.check(num_steps=loaded.train.steps)

    _refuse(loaded, resume_from)
    if push is not None and (loaded.adapters or not loaded.output.export):
        raise ConfigError(
            "--push: expected output.export = true and at most one [adapter]; leave --push out, or "
            "change the file"
        )
    upload = pushing(push)
    with outliving_streams():
        from infinity.tools.training import program

        try:
            summary, exit_code = program.train(
                loaded, console=Console(stderr=as_json, quiet=quiet), trace=tracing, resume=resume,
                resume_from=resume_from, accept_changes=accept_changes,
            )  # fmt: skip
        except KeyboardInterrupt:
            typer.echo("stopped; nothing was exported", err=True)
            raise typer.Exit(130) from None
        if as_json:
            typer.echo(json.dumps(summary.to_dict(), indent=2))
        if exit_code == 0:
            upload(loaded.output.directory)
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


def replay(
    run: Path = arg("OUT", "The output directory of a run."),
    step: int | None = opt("K", "Up to this step. Default: the last one."),
    begin: str | None = opt(
        "DIR", 'A checkpoint, or "start". Default: the nearest before the step.', "--from"
    ),
    config: Path | None = opt("FILE", "Take tiers, placement, io and schedule from this file."),
    overrides: list[str] | None = _OVERRIDES,
) -> None:
    """Compute steps of a run again, anywhere, and compare their bits with what the run has noted.

    Compared are versions, base, data, settings, and of each step its rows, random numbers, loss,
    norms and learning rate; then checkpoints and exported weights of these steps. The first step
    that differs is the last. The exit code is 1 if something differs.
    """
    from rich.console import Console

    from infinity.config import SwapConfig
    from infinity.config.extras import require_release
    from infinity.tools.training import replay as program

    require_release("transformers", "infinity replay")
    found = program.replay(
        run,
        step,
        overrides=overrides or (),
        places=None if config is None else SwapConfig.load(config),
        begin=begin,
        console=Console(stderr=True, quiet=is_silent()),
    )
    lines = [f"note: {text}" for text in found["notes"]]
    for row in found["differences"]:
        place = row["what"] if row["step"] is None else f"step {row['step']}, {row['what']}"
        lines.append(f"DIFFERS: {place}: {row['text']}")
    if found["is_equal"]:
        counts = ", ".join(f"{count} x {what}" for what, count in found["compared"].items())
        first, last = found["after"] + 1, found["step"]
        lines.append(f"steps {first} to {last} are equal to the bit: {counts}")
    if os.environ.get("RANK", "0") == "0":  # The other ranks have compared a part.
        reply(found, "\n".join(lines))
    raise typer.Exit(not found["is_equal"])


# -- A program as it is ----------------------------------------------------------------------------

run_app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@run_app.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    script: Path = arg("SCRIPT", "A Python program."),
    arguments: list[str] | None = arg("ARGS", "Arguments of the program.", default=None),
    config: Path | None = opt(
        "FILE",
        "A swap-tier file, or one of DeepSpeed or accelerate. Default: the program's "
        "`deepspeed=`, or else what suits the model and this machine.",
    ),
    as_json: bool = flag("--json", "Print what was offloaded to stderr, at the end."),
    quiet: bool = QUIET,
) -> None:
    """Run a program for transformers' Trainer or TRL as it is, with its models offloaded.

    Models that `from_pretrained` loads are built without memory. A Trainer offloads its model, with
    its adapter, before it trains. Options of this command stand before SCRIPT.
    """
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such file; expected a Python program")
    if quiet:
        logging.getLogger("infinity").setLevel(logging.ERROR)
    from infinity.config import SwapConfig
    from infinity.config.extras import require_release

    require_release("transformers", "infinity run")
    require_release("torch", "infinity")
    loaded = None if config is None else SwapConfig.load(config)
    from infinity.tools.drop_in import DropIn

    drop_in = DropIn(loaded)
    sys.argv = [str(script), *(arguments or [])]
    sys.path.insert(0, str(script.resolve().parent))
    with drop_in.installed():
        runpy.run_path(str(script), run_name="__main__")
    if not drop_in.offloaded:
        logging.getLogger("infinity").warning(
            "%s: `infinity run` has offloaded no model. It takes those of transformers' "
            "from_pretrained, in a Trainer or accelerator.prepare, and of diffusers in the latter; "
            "any other needs infinity.offload(model, config) in the program",
            script.name,
        )
    if as_json:
        typer.echo(json.dumps({"offloaded": drop_in.offloaded}, indent=2), err=True)


def parse_steps(text: str) -> tuple[int, int]:
    """Returns (first, last) of "2:5"; "3" is one step. Raises ConfigError."""
    first, colon, last = text.partition(":")
    if not first.isdigit() or not (last if colon else first).isdigit():
        raise ConfigError(f"--trace-steps {text!r}: expected FIRST:LAST, such as 2:5")
    return int(first), int(last if colon else first)
