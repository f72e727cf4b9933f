"""`infinity plan`: the command around `infinity.plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from infinity.config import SwapConfig
from infinity.config.extras import require_transformers
from infinity.errors import ConfigError

_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
# The tiers of a model by name without a file: state that fits stays in host memory.
_DEFAULTS: dict[str, Any] = {
    "tiers": {"host": {"capacity": "85%"}},
    "precision": {"compute": "bfloat16"},
}
_KINDS = ("parameters", "master", "moments", "gradients")


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A configuration file; optional with --model."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="A shipped model, or a .toml of shapes."),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option("--params", metavar="N", help="A GPT-like model of this size, such as 1T."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", metavar="NAME", help="A shipped machine, or a .toml. Default: this one."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=1,
            help="Tokens of a micro-batch, on all devices together; with --ranks, of each.",
        ),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--sequence", min=1, help="Tokens of a sequence.")
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option("--accumulation", min=1, help="Micro-batches a step.")
    ] = None,
    ranks: Annotated[
        int,
        typer.Option("--ranks", min=1, help="Ranks on the node that state is divided over."),
    ] = 1,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace one value of the file."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", help="Draw the simulated step.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="List the machines and models that are shipped.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict a training step without running it: placement, duration, and useful changes.

    The model is that of CONFIG, or one given by its shapes. The machine is this one, measured in a
    few seconds, or one described in a file. Nothing is trained and nothing stays on the drives.
    """
    from infinity.plan import advise, forecast, load_hardware, report
    from infinity.plan.files import shipped_in

    if show:
        for folder in ("hardware", "models"):
            typer.echo(f"{folder}: {', '.join(shipped_in(folder))}")
        return
    if model is not None and params is not None:
        raise ConfigError("expected --model or --params, got both; leave one out")
    by_name = model is not None or params is not None
    if config is None and not by_name:
        raise ConfigError("expected CONFIG, --model or --params; `infinity plan --list` has names")
    loaded = _load(config, overrides or [], has_nvme=_has_nvme(hardware))
    shape = _model(loaded, model, params)
    batch = _batch(loaded, tokens, sequence, accumulation, by_name=by_name)
    if hardware is not None:
        machine = load_hardware(hardware)
    else:
        from infinity.plan.measure import measure

        machine = measure(loaded, shape, batch)
    found = forecast(loaded, shape, machine, batch, num_ranks=ranks)
    advice = advise(loaded, shape, found)
    if as_json:
        typer.echo(json.dumps(report.to_dict(found, advice), indent=1))
    else:
        typer.echo(report.to_text(found, advice))
    if plot is not None:
        from infinity.plan import gantt

        gantt.save(found, plot)


def _has_nvme(hardware: str | None) -> bool:
    from infinity.plan import load_hardware

    return hardware is not None and load_hardware(hardware).nvme is not None


def _load(config: Path | None, overrides: list[str], *, has_nvme: bool) -> SwapConfig:
    from infinity.cli.train import override
    from infinity.config.source import ConfigSource, read_file
    from infinity.training.settle import settle

    if config is not None:
        table, source = read_file(config)
    else:
        import copy

        table, source = copy.deepcopy(_DEFAULTS), ConfigSource()
        if has_nvme:
            table["tiers"]["nvme"] = [{"path": "/mnt/nvme"}]
            table["placement"] = {kind: ["host", "nvme"] for kind in _KINDS}
    for text in overrides:
        override(table, text)
    return settle(SwapConfig.from_table(table, source))


def _model(config: SwapConfig, name: str | None, params: str | None) -> Any:
    import torch

    from infinity.plan import load_model, scaled_gpt
    from infinity.plan.model import model_of_config, model_of_shape
    from infinity.state.moments import moments_of

    dtype = getattr(torch, config.precision.compute_dtype)
    if name is not None:
        return load_model(name, dtype, moments_of(config))
    if params is not None:
        return model_of_shape(scaled_gpt(parse_count(params)), dtype, moments_of(config))
    config.require("model", "data", "train")
    require_transformers("infinity plan of a file's [model]")
    return model_of_config(config)


def _batch(
    config: SwapConfig,
    tokens: int | None,
    sequence: int | None,
    accumulation: int | None,
    *,
    by_name: bool,
) -> Any:
    """Returns the batch of the file if it trains the file's model; options take precedence."""
    from infinity.plan import Batch
    from infinity.simulate.job import UNKNOWN_BATCH, batch_of

    own = UNKNOWN_BATCH if by_name else batch_of(config)
    if own == UNKNOWN_BATCH:
        sequence = sequence or 2048
        return Batch(tokens or 16 * sequence, sequence, accumulation or 1)
    sequence = sequence or own.sequence_length
    return replace(
        own,
        num_tokens=tokens or own.num_tokens // own.sequence_length * sequence,
        sequence_length=sequence,
        num_micro_batches=accumulation or own.num_micro_batches,
    )


def parse_count(text: str) -> int:
    """Returns a number of parameters: "7B", "1.5T", "124M", "350000". Raises ConfigError."""
    number, unit = text[:-1], text[-1:]
    if unit.isdigit():
        number, unit = text, ""
    try:
        count = int(float(number) * _UNITS.get(unit, 1 if unit == "" else float("nan")))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ConfigError(f"--params {text!r}: expected a number such as 124M, 70B or 1T")
    return count
