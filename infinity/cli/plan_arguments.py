"""The arguments of `infinity plan` that are refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError


def refuse_arguments(
    config: Path | None, model: str | None, params: str | None, data_tokens: Any, examples: Any
) -> None:
    """Raises ConfigError for arguments of `infinity plan` that do not go together."""
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
        _refuse_model_as_file(config)


def _refuse_model_as_file(config: Path) -> None:
    """Raises ConfigError for a model that stands where a configuration file was expected."""
    from infinity.plan.shipped import shapes_remedy

    if config.is_dir():
        raise ConfigError(
            f"{config}: expected a configuration file; got a directory. For a model's directory: "
            f"infinity plan --model {shlex.quote(str(config))}"
        )
    if remedy := shapes_remedy(str(config)):
        raise ConfigError(f"{config}: expected a configuration file; there is none{remedy}")
