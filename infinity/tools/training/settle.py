"""Decides "auto" values of the file from the model's own directory.

Reads config.json, names of files and at most one header. Does not import torch, so that `infinity
config show` reports the same values as `infinity train` and `infinity plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from infinity.bounded import MalformedError, field, list_of, read_json, table_of
from infinity.config import Model, SwapConfig
from infinity.config.schema.inputs import AdapterConfig
from infinity.config.values import PLACED_KINDS
from infinity.errors import ConfigError, refusing

_C = TypeVar("_C", bound=SwapConfig)

_TRAINED = ("float32", "bfloat16")
_ADAPTER_TIERS = ("host", "nvme")  # Of what an adapter has, where the file does not place it.
_DTYPE_KEYS = ("dtype", "torch_dtype")
# Each of these is a tokenizer for transformers. tokenizer_config.json alone names a class of its
# own.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_HEADER_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class AutoValue:
    """The value of an "auto", and the reason."""

    key: str
    value: Any
    reason: str

    @property
    def shown(self) -> str:
        """The value for messages."""
        if not isinstance(self.value, tuple):
            return str(self.value)
        left = len(self.value) - 2
        return " and ".join([*self.value[:2], *([f"{left} more"] if left > 0 else ())])

    def __str__(self) -> str:
        return f"{self.key} is {self.shown}: {self.reason}"


def choices(config: SwapConfig) -> list[AutoValue]:
    """Returns every "auto" of the file that the model decides, in the order of the sections."""
    found = []
    if config.model is not None and config.precision.compute == "auto":
        found.append(_compute_of(config.model))
    train, may_divide = config.train, config.schedule.micro_batch is None
    if config.every_adapter and train and train.embed is None and may_divide:
        reason = "a step of an adapter fetches each block once for all its batches"
        found.append(AutoValue("schedule.micro_batch", train.batch_size, reason))
    reason = "an adapter is small: memory first, drives for the rest"
    kinds = _kinds_of_adapter(config)
    found += [AutoValue(f"placement.{kind}", _ADAPTER_TIERS, reason) for kind in kinds]
    if config.adapter is not None and config.adapter.experts_percent is not None:
        found.append(_experts_of(config.adapter))
    has_text = config.train is None or config.train.diffusion is None
    if config.data is not None and config.data.tokenizer == "auto" and has_text:
        found.append(tokenizer_of(config.model.path if config.model is not None else None))
    return found


def lines_of(choices: Sequence[AutoValue]) -> list[str]:
    """Returns a line for each value and reason, with all the keys that have it."""
    alike: dict[tuple[str, str], list[AutoValue]] = {}
    for choice in choices:
        alike.setdefault((choice.shown, choice.reason), []).append(choice)
    return [
        str(replace(first, key=", ".join([first.key, *(c.key.rpartition(".")[2] for c in others)])))
        for first, *others in alike.values()
    ]


def settle(config: _C) -> _C:
    """Returns the configuration with `choices` applied; the same object if there are none."""
    sections: dict[str, dict[str, Any]] = {}
    for choice in choices(config):
        section, _, key = choice.key.partition(".")
        sections.setdefault(section, {})[key] = choice.value
    if not sections:
        return config
    return config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=values)
            for section, values in sections.items()
        }
    )


def _kinds_of_adapter(config: SwapConfig) -> list[str]:
    """Returns the kinds of `[placement]` that an adapter decides: with drives, those that the file
    does not name."""
    if not config.every_adapter or config.train is None or not config.tiers.nvme:
        return []
    named = set(config.placement.model_fields_set)
    if config.placement.frozen == "copy":
        named.add("parameters")  # These place the base.
    return [kind for kind in (*PLACED_KINDS, "activations") if kind not in named]


def _experts_of(adapter: AdapterConfig) -> AutoValue:
    """Returns the experts that a census puts first. Raises ConfigError for a file that is no
    census, and for a share of less than one expert."""
    file, percent, by = adapter.experts_census, adapter.experts_percent, adapter.experts_score
    assert file is not None and percent is not None
    what = f"adapter.experts_census: {file} is no census of experts"
    remedy = "; expected the file of infinity score --routing"
    with refusing(what, MalformedError, OSError, TypeError, ValueError, remedy=remedy):
        layers = table_of(field(table_of(read_json(file), "it"), "experts"), "experts")
        ranked = sorted(
            (-float(score), order, number, f"{path}.{number}")
            for order, (path, scores) in enumerate(layers.items())
            for number, score in enumerate(list_of(field(table_of(scores, path), by), by))
        )
    count = int(len(ranked) * percent / 100)
    if not count:
        least = f"; expected at least {100 / len(ranked):.2g} %" if ranked else ""
        raise ConfigError(
            f"adapter.experts_full: {percent} % of the {len(ranked)} experts of {file} is "
            f"less than one expert{least}"
        )
    reason = f"{count} of {len(ranked)} experts, by {by} in {file}"
    return AutoValue("adapter.experts_full", tuple(name for *_, name in ranked[:count]), reason)


def _compute_of(model: Model) -> AutoValue:
    key = "precision.compute"
    table = model.config if model.config is not None else _table_of(model.path)
    dtype, where = _dtype_in(table), "[model.config]" if model.path is None else "config.json"
    if dtype is None and model.path is not None:
        dtype, where = _dtype_of_weights(model.path), "the first tensor"
    if dtype is None:
        return AutoValue(key, "float32", "the model names no dtype")
    if dtype in _TRAINED:
        return AutoValue(key, dtype, f"as {where} of the model says")
    return AutoValue(key, "float32", f"{where} of the model says {dtype}, which cannot be trained")


def tokenizer_of(path: Path | None) -> AutoValue:
    """Returns the "auto" tokenizer of a model's directory: that directory, or bytes."""
    key = "data.tokenizer"
    if path is None:
        return AutoValue(key, "bytes", "the model has no directory that a tokenizer could be in")
    if any((path / name).is_file() for name in _TOKENIZER_FILES):
        return AutoValue(key, path, "the model's own")
    return AutoValue(
        key, "bytes", f"{path} has no tokenizer; name a directory that has, if bytes are not meant"
    )


def _table_of(path: Path | None) -> dict[str, Any]:
    """Returns config.json; empty if it cannot be read, which the build of the model refuses."""
    try:
        table = read_json((path or Path()) / "config.json", is_strict=False)
    except (OSError, MalformedError):
        return {}
    return table if isinstance(table, dict) else {}


def _dtype_in(table: dict[str, Any]) -> str | None:
    """Returns the dtype that a configuration names: its own, or that of its language model."""
    for part in (table, table.get("text_config")):
        for value in map(part.get, _DTYPE_KEYS) if isinstance(part, dict) else ():
            if isinstance(value, str) and value not in ("", "auto"):
                return value.removeprefix("torch.")
    return None


def _dtype_of_weights(path: Path) -> str | None:
    """Returns the dtype of the first floating-point tensor, as transformers does."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(path.glob("*.safetensors"))[:1]:
        try:
            with safe_open(file, framework="np") as weights:
                dtypes = [weights.get_slice(name).get_dtype() for name in weights.keys()]  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
        return next((_HEADER_DTYPES[dtype] for dtype in dtypes if dtype in _HEADER_DTYPES), None)
    return None
