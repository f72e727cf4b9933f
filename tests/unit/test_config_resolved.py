"""Every value and its origin, and writing a configuration so that reading gives it back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config import SwapConfig, render
from infinity.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_engine_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINITY_IO_ENGINE", raising=False)


def origins(config: SwapConfig) -> dict[str, str]:
    return {value.key: value.origin for value in config.resolved()}


def values(config: SwapConfig) -> dict[str, Any]:
    return {value.key: value.value for value in config.resolved()}


def test_value_comes_from_the_file_or_is_a_default(tmp_path: Path) -> None:
    file = tmp_path / "swap.toml"
    file.write_text('[io]\nthreads = 4\n[[tiers.nvme]]\npath = "/a"\n')
    found = origins(SwapConfig.load(file))
    assert found["io.threads"] == f"file {file}"  # Though it is what the default says.
    assert found["tiers.nvme[0].path"] == f"file {file}"
    assert found["tiers.nvme[0].weight"] == "default"
    assert found["io.stripe"] == "default"
    assert found["train"] == "default"


def test_origin_of_a_value_of_a_dict_is_the_dict() -> None:
    assert origins(SwapConfig.load({"io": {"threads": 3}}))["io.threads"] == "dict"


def test_placement_follows_from_the_tiers_that_are_there() -> None:
    nvme = SwapConfig.load({"tiers": {"nvme": [{"path": "/a"}]}, "placement": {"moments": "host"}})
    assert nvme.placement.parameters == nvme.placement.master == ("nvme",)
    assert nvme.placement.moments == nvme.placement.gradients == ("host",)
    found = origins(nvme)
    assert found["placement.parameters"] == found["placement.master"] == "derived"
    assert found["placement.moments"] == "dict"
    assert found["placement.gradients"] == "default"
    host = SwapConfig()
    assert host.placement.parameters == host.placement.moments == ("host",)
    assert origins(host)["placement.parameters"] == "derived"


def test_pattern_follows_from_the_path() -> None:
    config = SwapConfig.load({"data": {"paths": ["python-stdlib", {"path": "/a", "pattern": "*"}]}})
    found = origins(config)
    assert found["data.paths[0].pattern"] == "derived"
    assert found["data.paths[1].pattern"] == "dict"


@pytest.mark.parametrize("asked", [{}, {"io": {"engine": "auto"}}])
def test_environment_decides_an_automatic_engine(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setenv("INFINITY_IO_ENGINE", "threads")
    config = SwapConfig.load(asked)
    assert config.io.engine == "threads"
    assert origins(config)["io.engine"] == "environment"


def test_environment_does_not_overrule_an_engine_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFINITY_IO_ENGINE", "threads")
    config = SwapConfig.load({"io": {"engine": "io_uring"}})
    assert config.io.engine == "io_uring" and origins(config)["io.engine"] == "dict"


def test_engine_of_the_environment_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFINITY_IO_ENGINE", "aio")
    with pytest.raises(ConfigError, match=r'io\.engine: .*INFINITY_IO_ENGINE; got "aio"'):
        SwapConfig.load(None)


def test_every_key_of_the_schema_is_resolved() -> None:
    """No value is left out, whether the file says it or not."""
    config = SwapConfig.load(
        {
            "tiers": {"nvme": [{"path": "/a"}]},
            "model": {"config": {"model_type": "gpt2", "n_layer": 2}},
            "data": {"paths": ["/a"]},
            "train": {"steps": 1, "batch_size": 1, "sample": {"prompt": "a"}},
        }
    )
    found = values(config)

    def visit(table: dict[str, Any], place: str) -> None:
        for key, value in table.items():
            here = f"{place}.{key}" if place else key
            if isinstance(value, dict):
                visit(value, here)
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                for index, entry in enumerate(value):
                    visit(entry, f"{here}[{index}]")
            else:
                assert found.pop(here) == value

    visit(config.to_dict(), "")
    assert not found


def test_resolved_values_read_as_a_file_writes_them() -> None:
    found = values(
        SwapConfig.load({"tiers": {"host": {"capacity": "80 %"}}, "io": {"stripe": 8192}})
    )
    assert found["tiers.host.capacity"] == "80%"
    assert found["io.stripe"] == "8KiB"
    assert found["schema"] == 1
    assert found["optimizer.max_grad_norm"] == 1.0


SIZE = st.integers(1, 2**50)
SHARE = st.integers(1, 100).map(lambda percent: f"{percent}%")
CAPACITY = st.one_of(st.just("auto"), SIZE, SHARE)
TEXT = st.text(min_size=1, max_size=12).filter(lambda text: "$" not in text and "\0" not in text)
PLAIN = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), TEXT),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def section(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


TABLES = section(
    tiers=section(
        device=section(kind=st.sampled_from(["auto", "cpu", "cuda"]), capacity=CAPACITY),
        host=section(capacity=SHARE, huge_pages=st.booleans()),
        nvme=st.lists(
            st.tuples(st.integers(0, 10**6), CAPACITY, st.floats(1e-3, 1e3)),
            max_size=3,
            unique_by=lambda entry: entry[0],
        ).map(lambda all_: [{"path": f"/{n}", "capacity": c, "weight": w} for n, c, w in all_]),
    ),
    placement=section(
        gradients=st.lists(st.sampled_from(["device", "host"]), min_size=1, unique=True)
    ),
    io=section(
        engine=st.sampled_from(["auto", "io_uring", "threads"]),
        stripe=st.integers(1, 2**20).map(lambda pages: pages * 4096),
    ),
    optimizer=section(
        lr=st.floats(0, 1),
        max_grad_norm=st.none() | st.floats(1e-3, 1e3),
        no_decay=st.lists(TEXT, max_size=3),
    ),
    model=st.fixed_dictionaries(
        {"config": st.dictionaries(TEXT, PLAIN, max_size=3).map(lambda c: c | {"model_type": "x"})}
    ),
    train=st.fixed_dictionaries(
        {"steps": st.integers(1, 10**6), "batch_size": st.integers(1, 99)},
        optional={"sample": st.fixed_dictionaries({"prompt": TEXT})},
    ),
)


@settings(max_examples=100)
@given(TABLES)
def test_written_configuration_reads_back_equal_in_every_format(table: dict[str, Any]) -> None:
    """TOML as `show` prints it, and the dict through JSON and YAML."""
    config = SwapConfig.load(table)
    assert SwapConfig.load(tomllib.loads(render.to_toml(config))) == config
    assert SwapConfig.load(json.loads(json.dumps(config.to_dict()))) == config
    assert SwapConfig.load(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_null_inside_a_model_configuration_is_left_as_a_comment() -> None:
    config = SwapConfig.load(
        {"model": {"config": {"model_type": "gpt2", "pad": None, "a": [None]}}}
    )
    text = render.to_toml(config)
    assert "# pad is not set" in text and "# a holds a null" in text
    tomllib.loads(text)
