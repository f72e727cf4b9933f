"""A package of the extra `hf` that is missing is named before it is imported."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import trl

from infinity.config import extras
from infinity.errors import ConfigError
from infinity.tools.training.methods import name_of_checkpointing


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


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_a_trainer_is_asked_not_to_checkpoint_by_the_name_of_its_release(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = dataclasses.make_dataclass("SFTConfig", [(name, bool, True)])
    monkeypatch.setattr(trl, "SFTConfig", kind)
    assert name_of_checkpointing() == name


def test_trl_of_this_release_has_the_name() -> None:
    assert name_of_checkpointing() in trl.DPOConfig.__dataclass_fields__


@pytest.mark.parametrize("package", ["trl", "peft"])
def test_a_package_of_training_that_is_too_old_is_refused_before_it_is_imported(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {name: "{}.{}.0".format(*tried.oldest) for name, tried in extras.TRIED.items()}
    monkeypatch.setattr(extras, "version", (found | {package: "0.1.0"}).__getitem__)
    with pytest.raises(ConfigError, match=rf"needs {package}>=.*got 0\.1\.0 .*pip install"):
        extras.require_training(has_adapter=True)
