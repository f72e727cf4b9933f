"""A package of the extra `hf` that is missing is named before it is imported."""

from __future__ import annotations

import importlib.util

import pytest

from infinity.config import extras
from infinity.errors import ConfigError


@pytest.mark.parametrize("missing", ["accelerate", "datasets", "peft", "trl"])
def test_a_missing_package_of_training_gets_the_command_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> object:
        return None if name == missing else importlib.util.find_spec("json")

    monkeypatch.setattr(extras, "find_spec", find)
    with pytest.raises(ConfigError, match=rf"needs {missing}, which .* pip install 'infinity-off"):
        extras.require_training(has_adapter=True)
    if missing == "peft":
        extras.require_training(has_adapter=False)
