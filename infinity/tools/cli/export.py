"""`infinity export`: a checkpoint of a run in a format of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from infinity.bounded import MAX_TEXT_NBYTES, MalformedError, read_json, table_of
from infinity.errors import ConfigError
from infinity.sizes import format_nbytes, parse_nbytes
from infinity.tools.cli.progress import Quiet

if TYPE_CHECKING:
    from infinity.config import SwapConfig
    from infinity.config.source import ConfigSource


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint of a run, or a directory of them."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    to: Annotated[
        Literal["hf", "fp32", "dcp"],
        typer.Option(
            "--to",
            help="hf: safetensors in the compute dtype, as from_pretrained loads them. fp32: the "
            "same in float32, as the optimizer keeps it. dcp: weights, masters and the optimizer's "
            "state for torch.distributed.checkpoint.",
        ),
    ] = "hf",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The configuration file of the run, for its [model]. Default: the copy in the "
            "output directory of the run, if the checkpoint is below it.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard", metavar="SIZE", help="Largest safetensors file.")
    ] = "2GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint of a run to a format of other programs.

    The checkpoint is read tensor by tensor, without a GPU and without the model in memory. In a
    directory of checkpoints the newest one is used.
    """
    from infinity.checkpoint.run.directory import find_checkpoint
    from infinity.config import SwapConfig

    max_shard_nbytes = _nbytes(max_shard_size)
    found = find_checkpoint(checkpoint)
    loaded = _config_of_run(found) if config is None else SwapConfig.load(config)
    loaded = None if loaded is None else _settled(loaded)
    from infinity.checkpoint import export_checkpoint_dcp, export_checkpoint_safetensors

    if to == "dcp":
        model = None if loaded is None or loaded.model is None else _model_on_meta(loaded)
        files = list(export_checkpoint_dcp(found, out, model).iterdir())
    else:
        if loaded is None:
            raise ConfigError(
                f"{found}: the architecture is not known, as no infinity-run.json is above it; "
                "name the swap-tier file of the run with --config FILE"
            )
        files = export_checkpoint_safetensors(
            found,
            out,
            _model_on_meta(loaded),
            master=to == "fp32",
            max_shard_nbytes=max_shard_nbytes,
            tokenizer=_tokenizer(loaded),
        )
    nbytes = sum(file.stat().st_size for file in files)
    if as_json:
        names = sorted(file.name for file in files)
        said = {"checkpoint": str(found), "directory": str(out), "files": names, "nbytes": nbytes}
        typer.echo(json.dumps(said, indent=2))
    elif not quiet:
        typer.echo(f"wrote {format_nbytes(nbytes)} of {found.name} to {out}")


def _settled(config: SwapConfig) -> SwapConfig:
    from infinity.config.paths import refuse_absent_model_of
    from infinity.tools.training.settle import settle

    refuse_absent_model_of(config)
    return settle(config)


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise ConfigError(f"--max-shard: {error}") from None


def _config_of_run(checkpoint: Path) -> SwapConfig | None:
    """Returns the configuration that `infinity train` left in the output directory above a
    checkpoint."""
    from infinity.config import SwapConfig
    from infinity.tools.training.output import MARKER_NAME

    for directory in checkpoint.resolve().parents[:2]:
        marker = directory / MARKER_NAME
        if marker.is_file():
            try:
                content = read_json(marker, max_nbytes=MAX_TEXT_NBYTES)
                table = table_of(table_of(content, "it").get("config"), "'config' in it")
            except (OSError, MalformedError) as error:
                raise ConfigError(f"{marker} cannot be used: {error}; give --config") from None
            return SwapConfig.from_table(table, _source_of(marker))
    return None


def _source_of(marker: Path) -> ConfigSource:
    from infinity.config import ConfigSource

    return ConfigSource("file", str(marker), marker.parent)


def _model_on_meta(config: SwapConfig) -> Any:
    from infinity.tools.training.model import build_model, plan_model

    config.require("model", "train")
    assert config.model is not None
    return build_model(plan_model(config.model), config)


def _tokenizer(config: SwapConfig) -> Any:
    from infinity.tools.training.tokenizers import open_tokenizer

    if config.data is None:
        return None
    return getattr(open_tokenizer(config.data.tokenizer), "tokenizer", None)
