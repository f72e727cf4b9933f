"""Whether the tensors of a directory are the model's weights, all of them, as numbers.

A quantised checkpoint has the names and often the shapes of a plain one, and its codes read as
numbers train without an error. So a directory that says that it is quantised is refused, and so is
every tensor that nobody asked for: a scale, a zero point, a part of the model that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError

WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_MAX_NAMES_IN_MESSAGE = 5
_QUANTISATION_KEYS = ("quantization_config", "compression_config")
# What the tools of ModelOpt, GPTQ and AWQ leave beside a config.json that says nothing.
_QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def refuse_quantised(directory: Path) -> None:
    """Raises ConfigError where the directory says that its weights are codes."""
    for name in _QUANTISATION_FILES:
        if (directory / name).is_file():
            raise _quantised(directory, f"{name} is there")
    file = directory / "config.json"
    if not file.is_file():
        return
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    for section in [table, *_sections(table)]:
        for key in _QUANTISATION_KEYS:
            if section.get(key):
                raise _quantised(directory, f"{key} in its config.json: {_kind(section[key])}")


def _sections(table: Any) -> list[dict[str, Any]]:
    """The configurations of a composite model's parts."""
    values = table.values() if isinstance(table, dict) else ()
    return [value for value in values if isinstance(value, dict)]


def _kind(said: Any) -> str:
    if not isinstance(said, dict):
        return repr(said)
    known = ("quant_method", "format", "fmt", "bits", "weight_block_size", "load_in_4bit")
    return ", ".join(f"{key}={said[key]!r}" for key in known if said.get(key)) or "unnamed"


def _quantised(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{directory} holds quantized weights ({why}); expected plain ones, because codes without "
        "their scales would be read as numbers. Use the bfloat16 or float32 checkpoint of the "
        "model, or dequantize this one and save it; if its weights are plain already, remove the "
        "key"
    )


def refuse_codes(
    path: object,
    target: str,
    wanted: torch.dtype,
    sources: Iterable[tuple[str, torch.dtype | str]],
) -> None:
    """Numbers of a model come from numbers: of the same dtype, or of a wide one."""
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
    if names:
        raise ConfigError(
            f"{path} has tensors that {type(model).__name__} has no place for: {listed(names)}. "
            "Scales of a quantized checkpoint, or parts that the model lacks? Build the model that "
            "the checkpoint is of, or say which are to be left out: infinity.offload(..., "
            'weights=..., ignore=["pattern", ...]), in a file `model.ignore`'
        )


def is_ignored(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_other_head(model: Any, name: str, source_names: Iterable[str]) -> bool:
    """Whether tensor `name` is of a head that the checkpoint has and the model has not: outside of
    what both have in common, and of a module that is not there."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not any(each.startswith(f"{prefix}.") for each in source_names):
        return False
    return not name.startswith(f"{prefix}.") and not _has(model, name.rpartition(".")[0])


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def is_new_head(model: Any, missing: Sequence[str], directory: Path) -> bool:
    """Whether the model is a head over the base that the checkpoint has: another class, by the
    checkpoint's own word, and nothing of the base is missing."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not _has(model, prefix) or getattr(model, prefix) is model:
        return False
    if any(name.startswith(f"{prefix}.") for name in missing):
        return False
    try:
        classes = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        classes = classes["architectures"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(classes, list) and classes != [] and type(model).__name__ not in classes


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES_IN_MESSAGE])
    more = len(names) - _MAX_NAMES_IN_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
