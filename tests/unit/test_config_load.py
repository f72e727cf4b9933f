"""Reading: four forms of one schema, syntax errors with their line, the traps of YAML, paths."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from infinity.config import Capacity, SwapConfig
from infinity.config.source import read_file
from infinity.errors import ConfigError
from infinity.sizes import GIB, MIB
from tests.support.commands import imported_by

TOML = """
schema = 1
[tiers.host]
capacity = "8GiB"
[[tiers.nvme]]
path = "/a"
capacity = "80%"
[[tiers.nvme]]
path = "/b"
weight = 2
[placement]
moments = ["host", "nvme"]
gradients = "nvme"
[io]
block_size = 1e6 # not a multiple
[optimizer]
lr = 1e-5
max_grad_norm = 0
[model.config]
model_type = "gpt2"
n_layer = 12
[data]
paths = ["python-stdlib", { path = "/t", pattern = "*.md" }]
[train]
steps = 10
batch_size = 2
sample = { prompt = "a" }
""".replace("1e6 # not a multiple", "1048576")

YAML = """
schema: 1
tiers:
  host: {capacity: 8GiB}
  nvme:
    - {path: /a, capacity: 80%}
    - path: /b
      weight: 2
placement:
  moments: [host, nvme]
  gradients: nvme
io:
  block_size: 1048576
optimizer: {lr: 1e-5, max_grad_norm: null}
model:
  config: {model_type: gpt2, n_layer: 12}
data:
  paths: [python-stdlib, {path: /t, pattern: "*.md"}]
train: {steps: 10, batch_size: 2, sample: {prompt: a}}
"""

TABLE: dict[str, Any] = {
    "schema": 1,
    "tiers": {
        "host": {"capacity": "8GiB"},
        "nvme": [{"path": "/a", "capacity": "80%"}, {"path": "/b", "weight": 2}],
    },
    "placement": {"moments": ["host", "nvme"], "gradients": "nvme"},
    "io": {"block_size": 1048576},
    "optimizer": {"lr": 1e-5, "max_grad_norm": "none"},
    "model": {"config": {"model_type": "gpt2", "n_layer": 12}},
    "data": {"paths": ["python-stdlib", {"path": "/t", "pattern": "*.md"}]},
    "train": {"steps": 10, "batch_size": 2, "sample": {"prompt": "a"}},
}


@pytest.fixture(autouse=True)
def _no_engine_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINITY_IO_ENGINE", raising=False)


def write(directory: Path, name: str, text: str) -> Path:
    file = directory / name
    file.write_text(text)
    return file


def test_toml_yaml_json_and_dict_give_equal_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # So that the relative default of [output] agrees.
    from_dict = SwapConfig.load(TABLE)
    assert from_dict.tiers.host.capacity == Capacity(nbytes=8 * GIB)
    assert from_dict.placement.moments == ("host", "nvme")
    assert from_dict.placement.parameters == ("nvme",)
    assert from_dict.optimizer.max_grad_norm is None
    for file in (
        write(tmp_path, "a.toml", TOML),
        write(tmp_path, "a.yaml", YAML),
        write(tmp_path, "a.yml", YAML),
        write(tmp_path, "a.json", json.dumps(TABLE)),
    ):
        assert SwapConfig.load(file) == from_dict, file.suffix
        assert SwapConfig.load(str(file)) == from_dict


def test_nothing_at_all_is_all_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty = SwapConfig.load(None)
    assert empty == SwapConfig() == SwapConfig.load({})
    for name in ("e.toml", "e.yaml"):
        assert SwapConfig.load(write(tmp_path, name, "")) == empty
    assert SwapConfig.load(write(tmp_path, "e.json", "{}")) == empty
    assert empty.model is None and empty.data is None and empty.train is None
    assert empty.placement.master == ("host",)


def test_yaml_section_with_every_key_commented_out_means_its_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "io:\n  # threads: 3\ntiers:\n  host:\n  nvme:\nmodel:\n")
    config = SwapConfig.load(file)
    assert config.io == SwapConfig().io and config.tiers.nvme == () and config.model is None


def test_swap_config_is_returned_as_it_is() -> None:
    config = SwapConfig()
    assert SwapConfig.load(config) is config


@pytest.mark.parametrize("source", [3, [], b"swap.toml", object()])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="expected a path, a dict"):
        SwapConfig.load(source)


def test_configuration_is_frozen() -> None:
    config = SwapConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.io.threads = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.io = config.io


def test_configuration_survives_pickling_and_copying(tmp_path: Path) -> None:
    config = SwapConfig.load(write(tmp_path, "a.toml", TOML))
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin == config
        assert twin.source.name == config.source.name and twin.resolved() == config.resolved()


@pytest.mark.parametrize("name", ["swap.ini", "swap", "swap.toml.bak"])
def test_file_of_another_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.toml, \.yaml, \.yml or \.json"):
        SwapConfig.load(write(tmp_path, name, ""))


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nope.toml: cannot be read: no such file.*infinity new MODEL_DIR"
    ):
        SwapConfig.load(tmp_path / "nope.toml")
    (tmp_path / "dir.toml").mkdir()
    with pytest.raises(ConfigError, match=r"dir.toml: cannot be read: is a directory"):
        SwapConfig.load(tmp_path / "dir.toml")


@pytest.mark.parametrize(
    ("name", "text", "place", "reason"),
    [
        ("a.toml", "[io]\nthreads = \n", ":2:", "not valid TOML"),
        ("a.toml", "[io]\nthreads = 1\nthreads = 2\n", ":3:", "not valid TOML"),
        ("a.toml", "[io]\nx = 'open", ":2", "not valid TOML"),
        ("a.yaml", "io:\n  threads: [1\n", ":3:", "not valid YAML"),
        ("a.yaml", "io:\n\tthreads: 1\n", ":2:", "not valid YAML"),
        ("a.yaml", "io:\n  threads: 1\n  threads: 2\n", ":3:", "given twice"),
        ("a.yaml", "io: !!python/name:os.system\n", ":1:", "not valid YAML"),
        ("a.yaml", "a: 1\n---\nb: 2\n", ":2:", "not valid YAML"),
        ("a.json", '{"io": {\n"threads": }}', ":2:", "not valid JSON"),
        ("a.json", '{"io": 1, "io": 2}', "", "'io' is given twice"),
        ("a.json", "[" * 100_000, "", "nested too deeply"),
        ("a.json", "[1]", "", "expected a table of sections"),
        ("a.yaml", "- 1", "", "expected a table of sections"),
        ("a.yaml", "hello", "", "expected a table of sections"),
        ("a.json", '{"schema": ' + "1" * 5000 + "}", "", "digits"),
    ],
)
def test_syntax_error_names_file_line_and_reason(
    tmp_path: Path, name: str, text: str, place: str, reason: str
) -> None:
    file = write(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        SwapConfig.load(file)
    assert str(caught.value).startswith(f"{file}{place}")
    assert reason in str(caught.value)


def test_file_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(b"schema = 1\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"a.toml:2: expected UTF-8"):
        SwapConfig.load(file)


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbf[io]\r\nthreads = 3\r\n")
    assert SwapConfig.load(file).io.threads == 3


def test_yaml_exponents_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-5 and 1e9 for text."""
    text = (
        "optimizer: {lr: 1e-5}\ntiers: {host: {capacity: 1e9}}\ntrain: {steps: 1e3, batch_size: 1}"
    )
    config = SwapConfig.load(write(tmp_path, "a.yaml", text))
    assert config.optimizer.lr == 1e-5
    assert config.tiers.host.capacity == Capacity(nbytes=10**9)
    assert config.train is not None and config.train.steps == 1000


def test_yaml_words_are_no_booleans_where_words_are_meant(tmp_path: Path) -> None:
    """YAML 1.1 takes on and no for true and false."""
    text = "schedule: {prefetch: off}\ntiers: {host: {huge_pages: no}}\ndata: {paths: 'on'}"
    config = SwapConfig.load(write(tmp_path, "a.yaml", text))
    assert config.schedule.prefetch is False and config.tiers.host.huge_pages is False
    text = "tiers: {nvme: [{path: /a, direct: no}]}\nmodel: {config: {model_type: no, on: 1}}"
    with pytest.raises(ConfigError, match=r'direct: .* got "no" \(did you mean "never"\?\)'):
        SwapConfig.load(write(tmp_path, "b.yaml", text))
    config = SwapConfig.load(
        write(tmp_path, "c.yaml", "model: {config: {model_type: no, on: 010, t: 1:30}}")
    )
    assert config.model is not None
    assert config.model.config == {"model_type": "no", "on": 10, "t": "1:30"}


def test_boolean_from_another_yaml_reader_is_explained() -> None:
    """A dict may come from a YAML 1.1 reader, which made the damage already."""
    table = yaml.safe_load("tiers: {nvme: [{path: /a, direct: no}]}\noptimizer: {lr: 1e-5}")
    with pytest.raises(ConfigError) as caught:
        SwapConfig.load(table)
    text = str(caught.value)
    assert "quote the word" in text and "YAML 1.1" in text
    assert 'got "1e-5"' in text and "remove the quotes" in text


def test_yaml_anchors_and_merges_are_followed(tmp_path: Path) -> None:
    text = "tiers:\n  nvme:\n    - &a {path: /a, weight: 2}\n    - {<<: *a, path: /b}\n"
    config = SwapConfig.load(write(tmp_path, "a.yaml", text))
    assert [(str(t.path), t.weight) for t in config.tiers.nvme] == [("/a", 2.0), ("/b", 2.0)]


def test_paths_of_a_file_start_at_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    text = """
    [[tiers.nvme]]
    path = "swap"
    [model]
    path = "../weights"
    [data]
    paths = ["text", "python-stdlib"]
    tokenizer = "./bytes"
    """
    write(tmp_path / "sub", "a.toml", text)
    monkeypatch.chdir(tmp_path)
    config = SwapConfig.load("sub/a.toml")
    assert config.model is not None and config.data is not None
    assert config.tiers.nvme[0].path == tmp_path / "sub" / "swap"
    assert config.model.path == (tmp_path / "weights").resolve()
    assert [source.path for source in config.data.paths] == [
        tmp_path / "sub" / "text",
        "python-stdlib",
    ]
    assert config.data.tokenizer == tmp_path / "sub" / "bytes"
    assert config.output.directory == tmp_path / "sub" / "output"
    assert config.output.metrics_path == tmp_path / "sub" / "output" / "metrics.jsonl"
    assert config.source.directory == tmp_path / "sub"


def test_table_that_was_changed_after_reading_keeps_the_paths_of_its_file(tmp_path: Path) -> None:
    """What `infinity train --set` does."""
    table, source = read_file(write(tmp_path, "a.toml", "[output]\ndirectory = 'out'\n"))
    table["io"] = {"threads": 3}
    config = SwapConfig.from_table(table, source)
    assert (config.io.threads, config.output.directory) == (3, tmp_path / "out")
    table["io"]["threads"] = 0
    with pytest.raises(ConfigError, match=r"a\.toml: io\.threads"):
        SwapConfig.from_table(table, source)


def test_an_entry_of_a_list_is_set_by_its_number_which_the_error_says(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", "[[adapter]]\nname = 'a'\n[[adapter]]\nname = 'b'\n")
    for key in ("adapter.lr", "adapter.2.lr"):
        with pytest.raises(ConfigError, match=r"whose entries are adapter\.0 to adapter\.1"):
            read_file(file, [f"{key}=0.1"])
    assert read_file(file, ["adapter.1.lr=0.1"])[0]["adapter"] == [
        {"name": "a"}, {"name": "b", "lr": 0.1}
    ]  # fmt: skip


def test_paths_of_a_dict_start_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = SwapConfig.load({"tiers": {"nvme": [{"path": "swap"}]}})
    assert config.tiers.nvme[0].path == tmp_path / "swap"


def test_python_stdlib_is_the_sources_of_the_running_interpreter() -> None:
    config = SwapConfig.load({"data": {"paths": ["python-stdlib", "/text"]}})
    assert config.data is not None
    stdlib, text = config.data.paths
    assert (stdlib.location / "os.py").samefile(os.__file__)
    assert (stdlib.pattern, text.pattern) == ("**/*.py", "**/*.txt")
    assert text.location == Path("/text")


@pytest.mark.parametrize(
    ("name", "decays"),
    [
        ("transformer.h.0.attn.weight", True),
        ("transformer.h.0.attn.bias", False),
        ("encoder.LayerNorm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", True),
    ],
)
def test_no_decay_matches_parts_of_names_and_patterns_of_whole_names(
    name: str, decays: bool
) -> None:
    optimizer = SwapConfig.load(
        {"optimizer": {"no_decay": ["bias", "norm", "*.embed_*"]}}
    ).optimizer
    assert optimizer.has_decay(name) is decays
    assert SwapConfig.load({"optimizer": {"no_decay": []}}).optimizer.has_decay(name)


def test_defaults_are_those_of_the_reference() -> None:
    config = SwapConfig()
    assert config.io.block_size == config.io.stripe == 4 * MIB
    assert config.schedule.update_chunk == 16 * MIB and config.schedule.window == "auto"
    assert (config.io.queue_depth, config.io.threads, config.io.engine) == ("auto", 4, "auto")
    assert config.optimizer.betas == (0.9, 0.999) and config.optimizer.max_grad_norm == 1.0
    assert config.output.max_shard_size == 2 * GIB


def test_reading_a_configuration_imports_no_torch_and_no_command_line() -> None:
    """Of every format, and of the reference."""
    code = (
        "from infinity.config import SwapConfig, render\n"
        "from infinity.config.machine import host_memory\n"
        "SwapConfig.load({}); render.to_markdown(); host_memory()\n"
    )
    heavy = ("torch", "numpy", "transformers", "typer", "rich", "infinity._core")
    assert imported_by(code, heavy) == ([], "")
