"""`infinity config check|show|schema|import`: configuration files, without running anything."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from infinity.errors import ConfigError, InfinityError, refusing
from infinity.sizes import format_nbytes
from infinity.tools.cli import print_error
from infinity.tools.cli.options import arg, flag, note, opt, reply, wants_json

if TYPE_CHECKING:
    from infinity.config import SwapConfig
    from infinity.config.deepspeed import Translation

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Check, show and describe configuration files; translate those of DeepSpeed.",
)

_FILE = arg("FILE", "A .toml, .yaml, .yml or .json file.")


@app.command()
def check(file: str = _FILE) -> None:
    """Print "ok", or every fault with its position and exit code 1."""
    from infinity.config import InvalidConfigError, SwapConfig

    try:
        fault = fault_of_model(SwapConfig.load(file))
        faults = [f"{file}: {fault}"] if fault else []
    except ConfigError as error:
        faults = (
            [problem.line(error.name) for problem in error.problems]
            if isinstance(error, InvalidConfigError)
            else [str(error)]
        )
    reply({"file": file, "faults": faults}, "" if faults else f"{file}: ok")
    if not wants_json():
        for line in faults:
            print_error(line)
    if faults:
        raise typer.Exit(1)


def fault_of_model(config: SwapConfig) -> str:
    """Returns what `infinity train` says of a model that lies here and that it does not read, else
    "". One that is not here may be where the file is meant for."""
    from infinity.config.paths import with_located_model

    model = with_located_model(config).model
    if model is None or model.path is None or not model.path.exists():
        return ""
    from infinity.tools.training.model import plan_model  # Imports torch.

    try:
        plan = plan_model(model, config.train)
    except InfinityError as error:
        return str(error)
    assert plan.weights is not None
    plan.weights.close()
    return ""


@app.command()
def show(file: str = _FILE) -> None:
    """Print every value and its origin, as a usable TOML file."""
    from infinity.config import SwapConfig, render

    config = SwapConfig.load(file)
    if wants_json():
        origins = {value.key: value.origin for value in config.resolved()}
        reply({"config": config.to_dict(), "origins": origins})
    else:
        typer.echo(render.to_toml(config, _on_this_machine(config)), nl=False)


@app.command()
def schema(
    markdown: bool = flag("--markdown", "The reference as Markdown: docs/CONFIG.md."),
    deepspeed: bool = flag("--deepspeed", "What `config import` does with each key: Markdown."),
) -> None:
    """Print the JSON Schema of a configuration file."""
    from infinity.config import render

    if wants_json() and (markdown or deepspeed):
        raise typer.BadParameter("--json prints the schema; the references are Markdown alone")
    if deepspeed:
        from infinity.config import deepspeed as ds

        typer.echo(ds.to_markdown(), nl=False)
    elif markdown:
        typer.echo(render.to_markdown(), nl=False)
    else:
        typer.echo(json.dumps(render.json_schema(), indent=2))


@app.command("import")
def import_(
    file: str = arg("FILE", "A DeepSpeed configuration, .json."),
    out: Path | None = opt("FILE", "Write to this file."),
    report: Literal["text", "json"] = opt(None, "Format of the report on keys.", default="text"),
    skip_refused: bool = flag("--skip-refused", "Leave out keys that cannot be translated."),
) -> None:
    """Translate a DeepSpeed configuration and report on every key.

    Without --out, the configuration is printed to standard output and the report to standard error.
    If a key is refused or unknown, no file is written and the exit code is 1.
    """
    from infinity.config.deepspeed import translate
    from infinity.config.source import read_file
    from infinity.config.swap import configuration_of

    table, source = read_file(file)
    found = translate(table)
    is_good = skip_refused or not found.lost
    config = configuration_of(found, source)
    toml = _translated(config, found, file) if is_good else ""
    if wants_json() or report == "json":
        entries = [asdict(entry) for entry in found.entries]
        answer = {"keys": entries, "config": found.settings, "train": found.train}
        typer.echo(json.dumps(answer, indent=2))
    else:
        _print_report(found, to_stderr=out is None)
    if out is not None and is_good:
        with refusing(f"{out}: cannot be written", OSError):
            out.write_text(toml, encoding="utf-8")
    elif not wants_json() and report == "text":
        typer.echo(toml, nl=False)
    if not is_good:
        print_error(
            f"{file}: {len(found.lost)} keys cannot be translated, so nothing was written; "
            "--skip-refused leaves them out"
        )
        raise typer.Exit(1)


def _translated(config: SwapConfig, found: Translation, file: str) -> str:
    """Returns the configuration file; every line names the DeepSpeed key that it comes from."""
    from infinity.config import render

    notes: dict[str, str] = {}
    for entry in found.entries:
        for place, value in entry.settings.items():
            key = place
            if place == "tiers.nvme[].path":
                key = f"tiers.nvme[{found.settings['tiers']['nvme'].index({'path': value})}].path"
            notes[key] = entry.key
    lines = [f"# From {Path(file).name}, a DeepSpeed configuration.\n"]
    lines.append(render.to_toml(config, notes, only_set=True))
    if found.train:
        lines.append("\n# For `infinity train`; it needs [model] and [data] too.\n# [train]\n")
        if "steps" not in found.train:
            lines.append("# steps =\n")
        lines += [f"# {key} = {json.dumps(value)}\n" for key, value in found.train.items()]
    return "".join(lines)


def _print_report(found: Translation, *, to_stderr: bool) -> None:
    width = max((len(entry.key) for entry in found.entries), default=0)
    for entry in found.entries:
        pairs = [f"{key} = {json.dumps(value)}" for key, value in entry.settings.items()]
        what = f"-> {', '.join(pairs)}; " if pairs else ""
        line = f"{entry.verdict:<8} {entry.key:<{width}}  {what}{entry.reason}"
        if entry.is_lost:
            print_error(line)
        else:
            (note if to_stderr else typer.echo)(line)


def _on_this_machine(config: SwapConfig) -> dict[str, str]:
    """Returns the present values of "auto" and of shares by dotted key. Device memory needs
    torch."""
    from infinity.config.machine import host_memory
    from infinity.tools.doctor.paths import nearest_directory
    from infinity.tools.training.settle import choices

    notes = {choice.key: f"{choice.shown} here: {choice.reason}" for choice in choices(config)}
    if config.tiers.host.capacity.nbytes is None:
        available = host_memory().nbytes
        budget = format_nbytes(config.tiers.host.budget_nbytes(available))
        notes["tiers.host.capacity"] = f"{budget} of the {format_nbytes(available)} available now"
    for index, entry in enumerate(config.tiers.nvme):
        if entry.capacity.nbytes is None:
            place = os.statvfs(nearest_directory(entry.path))
            free = place.f_bavail * place.f_frsize
            share = format_nbytes(entry.capacity.resolve(free))
            notes[f"tiers.nvme[{index}].capacity"] = f"at most {share} free now"
    return notes
