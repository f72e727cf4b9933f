"""Faults: all of them at once, each with its place, what was expected, what came, what is near."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config import InvalidConfigError, SwapConfig
from infinity.config.problems import dotted, known_keys, suggest, written
from infinity.errors import ConfigError
from infinity.storage.native_engine import open_engine

KEYS = known_keys(SwapConfig)


def faults(table: dict[str, Any]) -> dict[str, str]:
    """Place -> text of every fault of a dict."""
    with pytest.raises(InvalidConfigError) as caught:
        SwapConfig.load(table)
    found = {problem.place: problem.text for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "no place is reported twice"
    return found


def test_every_fault_is_reported_at_once_with_file_and_place(tmp_path: Path) -> None:
    """Wrong values, unknown keys, missing keys and contradictions, from one reading of one file."""
    file = tmp_path / "swap.toml"
    file.write_text(
        """
        typo = 1
        [tiers.host]
        capacty = "8GiB"
        [[tiers.nvme]]
        path = "/a"
        [[tiers.nvme]]
        path = "/b"
        capacity = "8G"
        [placement]
        moments = ["host", "disk"]
        [io]
        queue_depth = 0
        block_size = "5000B"
        [optimizer]
        betas = [0.9, 1.0]
        [model]
        [train]
        steps = 10
        warmup_steps = 11
        """
    )
    with pytest.raises(ConfigError) as caught:
        SwapConfig.load(file)
    text = str(caught.value)
    assert isinstance(caught.value, InvalidConfigError)
    assert [problem.place for problem in caught.value.problems] == [
        "tiers.host.capacty",
        "tiers.nvme[1].capacity",
        "placement.moments[1]",
        "io.block_size",
        "io.queue_depth",
        "optimizer.betas[1]",
        "model",
        "train.batch_size",
        "train.warmup_steps",
        "typo",
    ]
    assert text.startswith(f"{file}: 10 problems\n")
    for problem in caught.value.problems:
        assert f"  {file}: {problem.place}: {problem.text}" in text.splitlines()


def test_single_fault_is_a_single_line() -> None:
    with pytest.raises(ConfigError) as caught:
        SwapConfig.load({"io": {"threads": 0}})
    assert str(caught.value) == "config: io.threads: expected an integer from 1 to 1024; got 0"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("queue_depth", 1025, "an integer from 1 to 1024; got 1025"),
        ("block_size", "2GiB", "at most 1GiB"),
    ],
)
def test_limits_of_the_engine_are_those_of_the_file(key: str, value: Any, expected: str) -> None:
    """What the file accepts, the engine must open with: see the second test."""
    assert expected in faults({"io": {key: value}})[f"io.{key}"]


def test_engine_opens_with_the_largest_values_of_the_file() -> None:
    io = SwapConfig.load({"io": {"queue_depth": 1024, "threads": 1024, "block_size": "1GiB"}}).io
    open_engine(
        "auto",
        arena=None,
        block_nbytes=io.block_size,
        queue_depth=io.queue_depth,
        num_threads=io.threads,
    ).close()


def test_rings_that_an_earlier_tune_has_written_are_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "infinity")
    found = SwapConfig.load({"io": {"rings": 2, "flags": "none", "queue_depth": 4}})
    assert found == SwapConfig.load({"io": {"queue_depth": 4}})
    assert [record.getMessage() for record in caplog.records] == [
        "io.rings and io.flags are ignored: each drive has one ring"
    ]


def test_fault_says_what_was_expected_and_what_came() -> None:
    found = faults(
        {
            "tiers": {"device": {"kind": "gpu"}, "nvme": [{"path": "/a", "weight": 0}]},
            "io": {"engine": "uring", "queue_depth": True},
            "precision": {"compute": "bf16"},
            "optimizer": {"lr": "1e-5", "betas": 0.9},
            "schedule": {"prefetch": 1},
        }
    )
    expected = 'expected "auto", "cpu" or "cuda"; got "gpu" (did you mean "cuda"?)'
    assert found["tiers.device.kind"] == expected
    assert found["tiers.nvme[0].weight"] == 'expected "auto" or a number > 0; got 0'
    assert 'did you mean "io_uring"?' in found["io.engine"]
    assert found["io.queue_depth"] == 'expected "auto" or an integer from 1 to 1024; got true'
    assert 'did you mean "bfloat16"?' in found["precision.compute"]
    assert 'got "1e-5"' in found["optimizer.lr"] and "remove the quotes" in found["optimizer.lr"]
    assert found["optimizer.betas"] == "expected two numbers, such as [0.9, 0.999]; got 0.9"
    assert found["schedule.prefetch"] == "expected true or false; got 1"


def test_missing_key_says_what_it_holds() -> None:
    found = faults({"train": {}, "data": {}, "tiers": {"nvme": [{}]}})
    assert found["train.batch_size"] == "a required key is missing; expected an integer >= 1"
    assert found["tiers.nvme[0].path"] == "a required key is missing; expected a path"
    assert found["data.paths"].startswith("a required key is missing")


def test_section_of_the_wrong_shape_is_told_how_it_is_written() -> None:
    found = faults({"io": "fast", "tiers": {"nvme": {"path": "/a"}}, "data": {"paths": [3]}})
    assert found["io"] == 'expected a table, written [io]; got "fast"'
    assert found["tiers.nvme"] == "expected a list, written [[tiers.nvme]]; got a table"
    assert found["data.paths[0]"] == "expected a table, written [[data.paths]]; got 3"


@pytest.mark.parametrize(
    ("table", "key", "hint"),
    [
        # A slip of the pen, in the table where it happened.
        ("tiers.host", "capacty", 'did you mean "capacity"?'),
        ("io", "block-size", 'did you mean "block_size"?'),
        ("io", "Queue_Depth", 'did you mean "queue_depth"?'),
        ("", "tier", 'did you mean "tiers"?'),
        ("", "schema_version", 'did you mean "schema"?'),
        # A right key in the wrong table.
        ("io", "prefetch", '"prefetch" belongs to [schedule]'),
        ("", "steps", '"steps" belongs to [train]'),
        (
            "io",
            "capacity",
            '"capacity" belongs to [tiers.device], [tiers.host] or [[tiers.nvme]]',
        ),
        ("train.sample", "lr", '"lr" belongs to [optimizer]'),
        ("", "host", '"host" belongs to [tiers]'),
        # Both: near a key here, and the name of one elsewhere.
        ("data", "path", 'did you mean "paths"?; "path" belongs to'),
        # A slip of the pen in the wrong table.
        ("", "batchsize", "did you mean train.batch_size?"),
        ("train", "weight_decy", "did you mean optimizer.weight_decay?"),
        # What others call it.
        ("tiers", "gpu", 'did you mean "device"?'),
        ("", "learning_rate", "did you mean optimizer.lr?"),
        ("optimizer", "gradient_clipping", "did you mean optimizer.max_grad_norm?"),
        # Nothing like it anywhere.
        (
            "io",
            "zebra",
            "known keys here: block_size, engine, queue_depth, stripe, threads",
        ),
    ],
)
def test_unknown_key_is_told_the_nearest_known_one(table: str, key: str, hint: str) -> None:
    assert hint in suggest(table, key, KEYS)


def test_every_misplaced_key_is_named_with_its_table() -> None:
    """Each key of each table, put where it is unknown, is named with a table that knows it."""
    for table, names in KEYS.items():
        for name in names:
            for other in KEYS:
                if name not in KEYS[other]:
                    hint = suggest(other, name, KEYS)
                    assert written(table) in hint, (other, name, hint)


def test_unknown_key_of_a_list_entry_carries_its_index() -> None:
    found = faults({"tiers": {"nvme": [{"path": "/a"}, {"path": "/b", "size": 1}]}})
    assert list(found) == ["tiers.nvme[1].size"]


def test_placement_on_a_tier_that_is_not_there_is_refused() -> None:
    found = faults({"placement": {"moments": ["host", "nvme"], "master": "nvme"}})
    assert set(found) == {"placement.master[0]", "placement.moments[1]"}
    assert "[[tiers.nvme]]" in found["placement.master[0]"]


@pytest.mark.parametrize("tiers", [[], ["host", "host"]])
def test_placement_is_not_empty_and_names_a_tier_once(tiers: list[str]) -> None:
    assert "each named once" in faults({"placement": {"gradients": tiers}})["placement.gradients"]


def test_two_nvme_entries_for_one_directory_are_refused(tmp_path: Path) -> None:
    """Also when one of them goes by a link."""
    (tmp_path / "link").symlink_to(tmp_path)
    entries = [{"path": str(tmp_path / "swap")}, {"path": str(tmp_path / "link" / "swap")}]
    found = faults({"tiers": {"nvme": entries}})
    assert "the same directory as tiers.nvme[0].path" in found["tiers.nvme[1].path"]


def test_model_is_either_a_directory_or_a_configuration() -> None:
    both = {"path": "/m", "config": {"model_type": "gpt2"}}
    assert faults({"model": {}})["model"].endswith("got neither")
    assert faults({"model": both})["model"].endswith("got both")


def test_model_configuration_needs_a_model_type() -> None:
    found = faults({"model": {"config": {"modeltype": "gpt2"}}})
    assert "missing" in found["model.config.model_type"]
    assert '"modeltype" is near' in found["model.config.model_type"]
    assert "got 3" in faults({"model": {"config": {"model_type": 3}}})["model.config.model_type"]


def test_model_configuration_holds_plain_values_only() -> None:
    config = {"model_type": "gpt2", "a": {"b": [1, object()]}}
    assert "a.b[1]" in faults({"model": {"config": config}})["model.config"]


def test_model_configuration_that_holds_itself_is_refused() -> None:
    config: dict[str, Any] = {"model_type": "gpt2"}
    config["again"] = config
    assert "nested too deeply" in faults({"model": {"config": config}})["model.config"]


def test_warmup_is_not_longer_than_training() -> None:
    train = {"steps": 10, "batch_size": 1, "warmup_steps": 11}
    assert "at most train.steps, 10" in faults({"train": train})["train.warmup_steps"]
    assert SwapConfig.load({"train": train | {"warmup_steps": 10}}).train is not None


def test_evaluation_needs_held_out_data() -> None:
    train = {"steps": 1, "batch_size": 1, "eval_every": 1}
    data = {"paths": "/a", "held_out": 0}
    assert "data.held_out is 0" in faults({"train": train, "data": data})["train.eval_every"]
    train |= {"method": "grpo", "grpo": {"rewards": ["module:function"]}}
    assert faults({"train": train})["train"].startswith('eval_every: expected 0 with "grpo", whose')


def test_window_is_not_larger_than_the_host_budget() -> None:
    table = {"tiers": {"host": {"capacity": "8MiB"}}, "schedule": {"window": "9MiB"}}
    assert "8MiB; got 9MiB" in faults(table)["schedule.window"]
    table["tiers"]["host"]["capacity"] = "50%"  # Not known until the run.
    assert SwapConfig.load(table).schedule.window == 9 * 2**20


def test_update_chunk_that_was_asked_for_fits_the_host_budget() -> None:
    """Three chunks are in the host arena at once when master and both moments are on nvme."""
    table: dict[str, Any] = {
        "tiers": {"host": {"capacity": "8MiB"}, "nvme": [{"path": "/a"}]},
        "schedule": {"update_chunk": "4MiB"},
    }
    assert "3 chunks of 4MiB" in faults(table)["schedule.update_chunk"]
    table["placement"] = {"moments": "host"}
    assert SwapConfig.load(table).schedule.update_chunk == 4 * 2**20
    # The default chunk is the engine's to shrink.
    del table["schedule"], table["placement"]
    assert SwapConfig.load(table).schedule.update_chunk == 16 * 2**20


def test_contradictions_are_found_beside_faults_of_other_sections() -> None:
    found = faults(
        {
            "placement": {"master": "nvme"},
            "io": {"threads": 0},
            "train": {"steps": 1, "batch_size": 0, "warmup_steps": 2},
        }
    )
    assert set(found) == {
        "placement.master[0]",
        "io.threads",
        "train.batch_size",
        "train.warmup_steps",
    }


@pytest.mark.parametrize("version", [2, 99])
def test_newer_schema_is_one_clear_line_and_nothing_else(version: int) -> None:
    with pytest.raises(ConfigError) as caught:
        SwapConfig.load({"schema": version, "no_such_key": 1, "io": 3})
    text = str(caught.value)
    assert f"schema {version} is newer" in text and "upgrade" in text and "\n" not in text


@pytest.mark.parametrize("version", [0, -1, "1", None, True, 1.5])
def test_schema_is_a_number_this_version_knows(version: Any) -> None:
    assert "expected the integer 1" in faults({"schema": version})["schema"]


def test_require_names_every_missing_section() -> None:
    config = SwapConfig.load({"train": {"steps": 1, "batch_size": 1}})
    config.require("train")
    with pytest.raises(ConfigError) as caught:
        config.require("model", "data", "train")
    assert "[model]" in str(caught.value) and "[data]" in str(caught.value)
    assert "[train]" not in str(caught.value)


def test_direct_construction_reports_like_load() -> None:
    with pytest.raises(InvalidConfigError, match=r"io.threads.*got 0"):
        SwapConfig(io={"threads": 0})
    assert SwapConfig(io={"threads": 3}).io.threads == 3


def test_error_survives_pickling() -> None:
    """A worker process can hand it to its parent."""
    with pytest.raises(InvalidConfigError) as caught:
        SwapConfig.load({"io": {"threads": 0}})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.problems == caught.value.problems


def test_place_is_dotted_with_indexes() -> None:
    assert dotted(("tiers", "nvme", 1, "path")) == "tiers.nvme[1].path"
    assert dotted(()) == ""


_NAMES = st.sampled_from(sorted({name for names in KEYS.values() for name in names}))
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "8GiB", "80%", "nvme", "host", "~", "$X", "/a", "on"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(_NAMES | st.text(max_size=4), inner, max_size=4),
    ),
    max_leaves=12,
)


def _table_strategy(table: str) -> st.SearchStrategy[dict[str, Any]]:
    """Tables that have the right keys and any values, so that deep places are reached."""
    inner = {
        key: _VALUES
        | (
            _table_strategy(f"{table}.{key}".lstrip("."))
            if f"{table}.{key}".lstrip(".") in KEYS
            else _VALUES
        )
        for key in KEYS[table]
    }
    return st.fixed_dictionaries({}, optional=inner)


@settings(max_examples=150)
@given(_table_strategy(""))
def test_any_table_is_read_or_refused_with_a_config_error(table: dict[str, Any]) -> None:
    """Nothing that a file could hold ends in another exception."""
    try:
        config = SwapConfig.load(table)
    except ConfigError as error:
        assert str(error)
    else:
        assert SwapConfig.load(config.to_dict()) == config
