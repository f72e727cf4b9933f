"""Refuses paths that lead nowhere, before a command imports torch and transformers, which takes
seconds. What reads the files later raises the same errors."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from infinity.bounded import MalformedError, read_json, table_of
from infinity.config.hub import download_remedy, in_hub_cache
from infinity.config.schema import changed
from infinity.config.schema.inputs import DataSource
from infinity.config.swap import SwapConfig
from infinity.errors import ConfigError
from infinity.sizes import counted

# The files of an adapter that PEFT saved with safetensors.
ADAPTER_NAMES = ("adapter_config.json", "adapter_model.safetensors")
# The files by which a run of `infinity train` describes itself in its output directory: the marker,
# the summary, the metrics, and the files of a frozen base with checksums of what was read.
RUN_NAMES = ("infinity-run.json", "summary.json", "metrics.jsonl", "shards.json")


def refuse_absent_inputs(config: SwapConfig) -> None:
    """Raises ConfigError for a model, data or a saved adapter of the file that is not there."""
    refuse_absent_model_of(config)
    if config.data is not None:
        refuse_absent_data((*config.data.paths, *config.data.eval_paths))
    if config.adapter is not None and config.adapter.resume is not None:
        refuse_absent_adapter(config.adapter.resume)


def refuse_absent_model_of(config: SwapConfig) -> None:
    """As `refuse_absent_model` for `[model]`, where the file has it."""
    if config.model is not None and config.model.path is not None:
        refuse_absent_model(config.model.path)


def with_located_model(config: SwapConfig) -> SwapConfig:
    """Returns the configuration with `model.path` in the hub's local cache, if it is there."""
    path = None if config.model is None else config.model.path
    if path is None or (found := in_hub_cache(path)) == path:
        return config
    return changed(config, {"model.path": found})


def refuse_absent_model(path: Path) -> None:
    """Raises ConfigError for a `model.path` that is no directory, or has no config.json."""
    if not path.is_dir():
        raise ConfigError(
            f"model.path: {path} is no directory; expected one with config.json and safetensors"
            f"{download_remedy(path)}"
        )
    if not (path / "config.json").is_file():
        refuse_adapter(path)
        raise ConfigError(
            f"model.path: {path} has no config.json; expected a Hugging Face model"
            f"{runs_remedy(path)}{download_remedy(path)}"
        )


def runs_in(directory: Path) -> list[Path]:
    """Returns the output directories of runs in a directory, such as those of several adapters."""
    with suppress(OSError):
        return sorted(marker.parent for marker in directory.glob(f"*/{RUN_NAMES[0]}"))
    return []


def runs_remedy(directory: Path) -> str:
    """Returns the end of an error about a directory that is no run and may hold some."""
    found = runs_in(directory)
    return (
        f". It holds {counted(len(found), 'runs')}: give one, such as {found[0]}" if found else ""
    )


def refuse_adapter(path: Path) -> None:
    """Raises ConfigError for the directory of an adapter in place of a model."""
    if not is_adapter(path):
        return
    base = None
    with suppress(OSError, MalformedError):
        table = table_of(read_json(path / ADAPTER_NAMES[0]), "it")
        base = table.get("base_model_name_or_path")
    raise ConfigError(
        f"{path} is an adapter, and no model: give its base{f' {base}' if base else ''}, and this "
        "directory as adapter.resume (infinity score: --adapter)"
    )


def refuse_absent_data(sources: Iterable[DataSource]) -> None:
    """Raises ConfigError for the first source of `[data]` that is no file and no directory."""
    for source in sources:
        if not source.location.is_file() and not source.location.is_dir():
            raise ConfigError(f"data.paths: {source.location} does not exist")


def is_adapter(path: Path) -> bool:
    """Whether a directory holds a saved adapter of PEFT, and no model."""
    return (path / ADAPTER_NAMES[0]).is_file() and not (path / "config.json").is_file()


def refuse_absent_adapter(path: Path) -> None:
    """Raises ConfigError for a directory that lacks a file of an adapter that PEFT saved."""
    for name in ADAPTER_NAMES:
        if not (path / name).is_file():
            raise ConfigError(
                f"the saved adapter {path} has no {name}; expected the directory of an adapter "
                f"that PEFT saved with safetensors{runs_remedy(path)}"
            )


def refuse_no_directory(path: Path) -> None:
    """Raises ConfigError for the path of a checkpoint that is no directory."""
    if not path.is_dir():
        remedy = download_remedy(path)
        raise ConfigError(f"{path} is no directory; expected a Hugging Face checkpoint{remedy}")
