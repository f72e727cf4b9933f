"""Checks that the tensors of a directory are all weights of the model, stored as numbers.

A quantised checkpoint has the names and often the shapes of a plain one, and codes that are read as
numbers train without an error. So these checks refuse a directory that is declared as quantised,
and every tensor that the model has no place for: a scale, a zero point, a missing submodule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.bounded import MalformedError, read_json, table_of
from infinity.codecs.detect import DECLARING_FILES, quantization_of
from infinity.errors import ConfigError, listed

WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the table in config.json, empty if there is no such file, with the quantisation that
    another file declares. Raises ConfigError."""
    file = directory / "config.json"
    return with_declared(directory, _table_in(file) if file.is_file() else {})


def with_declared(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json with a `quantization_config`, if only another file of the directory says
    how weights are quantised. Raises ConfigError for a file that cannot be read."""
    if quantization_of(config, str(directory)) is not None:
        return config
    for name, as_config in DECLARING_FILES.items():
        if (directory / name).is_file():
            declared = as_config(_table_in(directory / name))
            return {**config, "quantization_config": declared} if declared else config
    return config


def _table_in(file: Path) -> dict[str, Any]:
    try:  # Configurations of some models have numbers that are not finite.
        return table_of(read_json(file, is_strict=False), "it")
    except (MalformedError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def refuse_codes(
    path: object,
    target: str,
    wanted: torch.dtype,
    sources: Iterable[tuple[str, torch.dtype | str]],
) -> None:
    """Raises ConfigError if a float weight would be read from codes of a quantised one.

    Sources are (name, dtype). Allowed are the dtype of the model and the WIDE ones.
    """
    if not wanted.is_floating_point:
        return
    for name, dtype in sources:
        if dtype not in WIDE and dtype is not wanted:
            raise ConfigError(
                f"{path}: {name!r} is {dtype}, and {target!r} of the model is {wanted}; codes of "
                "a quantized weight are not its numbers. Use the bfloat16 or float32 checkpoint "
                "of the model, or dequantize this one and save it"
            )


def refuse_unexpected(path: object, model: nn.Module, names: Sequence[str]) -> None:
    """Raises ConfigError if `names`, tensors that the model has no place for, is not empty."""
    if names:
        raise ConfigError(
            f"{path} has tensors that {type(model).__name__} has no place for: {listed(names)}. "
            "Scales of a quantized checkpoint, or parts that the model lacks? Build the model that "
            "the checkpoint is of, or say which are to be left out: infinity.offload(..., "
            'weights=..., ignore=["pattern", ...]), in a file `model.ignore`'
        )


def is_ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the shell patterns matches the name of a tensor."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_other_head(model: Any, name: str, source_names: Iterable[str]) -> bool:
    """Whether tensor `name` belongs to a head that the checkpoint has and the model does not have.

    Such a tensor lies outside the base model, in a module that the model does not have.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not any(source.startswith(f"{prefix}.") for source in source_names):
        return False
    return not name.startswith(f"{prefix}.") and not _has(model, name.rpartition(".")[0])


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def is_new_head(model: Any, missing: Sequence[str], directory: Path) -> bool:
    """Whether the missing names are those of a new head on the base model of the checkpoint.

    Then config.json names another class, and no tensor of the base model is missing. Raises
    ConfigError for a config.json that cannot be read.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not _has(model, prefix) or getattr(model, prefix) is model:
        return False
    if any(name.startswith(f"{prefix}.") for name in missing):
        return False
    classes = read_config(directory).get("architectures")
    return isinstance(classes, list) and classes != [] and type(model).__name__ not in classes
