"""The inputs of `infinity plan`: which go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.errors import ConfigError

_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def refuse_inputs(
    config: Path | None, model: str | None, params: str | None, data_tokens: Any, examples: Any
) -> None:
    """Raises ConfigError for inputs of `infinity plan` that exclude each other, or that name no
    model, and for a model in the place of a file."""
    from infinity.plan.shipped import refuse_model_as_file

    if model is not None and params is not None:
        raise ConfigError("expected --model or --params, got both; leave one out")
    if config is None and model is None and params is None:
        raise ConfigError(
            "expected CONFIG, --model or --params; `infinity plan --list` has names, and --table "
            "says which model trains on which machine"
        )
    if data_tokens is not None and examples is not None:
        raise ConfigError("expected --data-tokens or --examples, got both; leave one out")
    if config is not None and not config.is_file():
        refuse_model_as_file(config)


def parse_count(text: str, option: str = "--params") -> int:
    """Returns a number: "7B", "1.5T", "124M", "350000". Raises ConfigError."""
    number, unit = text[:-1], text[-1:]
    if unit.isdigit():
        number, unit = text, ""
    try:
        count = int(float(number) * _UNITS.get(unit, 1 if unit == "" else float("nan")))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ConfigError(f"{option} {text!r}: expected a number such as 124M, 70B or 1T")
    return count
