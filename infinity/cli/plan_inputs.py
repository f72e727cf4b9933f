"""The inputs of `infinity plan`: which go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infinity.errors import ConfigError


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
