"""Impossible sizes, token ids and names, in the files of a model and of a job."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import check_sides, positions_of
from infinity.tools.training import program
from infinity.tools.training.job_data import tokenize
from infinity.tools.training.tokenizers import ByteTokenizer, HuggingFaceTokenizer

from .jobs import GPT2, job_table

SHAPE = GPT2 | {"vocab_size": 300}


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    GPT2LMHeadModel(GPT2Config(**SHAPE)).save_pretrained(tmp_path / "base")
    ByteTokenizer().for_records().save_pretrained(tmp_path / "tokenizer")
    return job_table(
        tmp_path, model={"path": str(tmp_path / "base")}, train={"steps": 1, "batch_size": 2}
    )


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(table: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        program.train(SwapConfig.load(table), console=Console(file=io.StringIO()))
    for key in (table["output"]["directory"], table["tiers"]["nvme"][0]["path"]):
        assert not Path(key).exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("vocab_size", value) for value in (2**31, 2**31 - 1, 301, 2**63, -1, 0, "300", None)),
        ("n_embd", 2**31), ("n_embd", 2**50), ("n_layer", 2**31), ("n_head", -1), ("n_embd", "x"),
        *((f"{name}_token_id", 2**31) for name in ("bos", "eos", "pad")),
        ("eos_token_id", [0, 2**40]), ("eos_token_id", "</s>"), ("pad_token_id", 1.5),
        ("dtype", []), ("model_type", ["gpt2"]), ("architectures", [3]), ("architectures", "GPT2"),
    ],
)  # fmt: skip
def test_an_impossible_number_in_config_json_is_refused_by_name(tmp_path, table, key, value):
    edit(tmp_path / "base" / "config.json", **{key: value})
    refused(table, rf"config\.json.*{key}")


@pytest.mark.parametrize("value", [2**31, [2**31], "x", [["x"]]])
def test_an_impossible_token_id_in_generation_config_json_is_refused_by_name(
    tmp_path, table, value
):
    edit(tmp_path / "base" / "generation_config.json", eos_token_id=value)
    refused(table, r"generation_config\.json: eos_token_id: expected an id below 2147483648")


@pytest.mark.parametrize("value", [2**31, 2**40, -1, 0, "many"])
def test_an_impossible_vocabulary_of_the_job_is_refused_by_name(table, value):
    table["model"] = {"config": SHAPE | {"vocab_size": value}}
    refused(table, r"model\.config.*vocab_size")


@pytest.mark.parametrize("sizes", [{"n_head": 0}, {"n_head": 7}])
def test_sizes_of_which_no_model_can_be_made_are_refused_with_their_file(tmp_path, table, sizes):
    edit(tmp_path / "base" / "config.json", **sizes)
    refused(table, r"base/config\.json")


@pytest.mark.parametrize("factor", ["x", None, 1e999])
def test_a_rotary_embedding_without_a_length_is_refused_by_its_key(factor: Any) -> None:
    rope = {"rope_type": "yarn", "factor": factor, "rope_theta": 1e4}
    config = LlamaConfig(rope_parameters=rope | {"original_max_position_embeddings": 8})
    with pytest.raises(ConfigError, match="no length follows from rope_parameters"):
        positions_of(config)


def test_a_part_of_a_model_that_is_not_stored_may_have_longer_sides() -> None:
    """PaliGemma has a vocabulary of 257,152 outside of its text, by default."""
    table = {"text_config": {"hidden_size": 8}, "vision_config": {"hidden_size": 99}}
    table |= {"vocab_size": 99}
    check_sides(table, 9, "")
    with pytest.raises(ConfigError, match=r"text_config\.hidden_size: expected at most 7"):
        check_sides(table, 7, "")


@pytest.mark.parametrize("token_id", [2**31, 2**32 - 1, 2**32, -1, "x"])
def test_an_impossible_id_in_a_tokenizer_is_refused_by_its_directory(tmp_path, table, token_id):
    file = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["a"] = token_id
    file.write_text(json.dumps(content))
    table["data"]["tokenizer"] = str(tmp_path / "tokenizer")
    refused(table, r"data\.tokenizer: .*tokenizer.*(gives '.*' the id|cannot be loaded)")


def test_a_vocabulary_with_gaps_keeps_its_ids(tmp_path) -> None:
    """256 tokens, of which one has the id 290: it does not fit a byte."""
    file = tmp_path / "tokenizer" / "tokenizer.json"
    ByteTokenizer().for_records().save_pretrained(file.parent)
    content = json.loads(file.read_text())
    content["model"]["vocab"]["a"] = 290
    file.write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(file.parent)
    (tmp_path / "text.txt").write_text("banana")
    tokens = tokenize([tmp_path / "text.txt"], tokenizer, vocab_size=300)
    expected = [98, 290, 110, 290, 110, 290, 0]
    assert np.array_equal(tokens.read(0, tokens.num_tokens), expected)
    with pytest.raises(ConfigError, match="token 290"):
        tokenize([tmp_path / "text.txt"], tokenizer, vocab_size=290)


NAMES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "tiers.nvme[0].path": (("tiers", "nvme", 0, "path"), "/{}"),
    "output.directory": (("output", "directory"), "/{}"),
    "output.metrics": (("output", "metrics"), "{}"),
    "data.paths[0].path": (("data", "paths"), ["/{}"]),
    "data.paths[0].pattern": (("data", "paths"), [{"path": "/", "pattern": "{}"}]),
    "data.tokenizer": (("data", "tokenizer"), "/{}"),
    "model.path": (("model",), {"path": "/{}"}),
    "model.ignore[0]": (("model", "ignore"), ["{}"]),
    "adapter.targets[0]": (("adapter",), {"targets": ["{}"]}),
    "adapter.resume": (("adapter",), {"resume": "/{}"}),
    "checkpoint.directory": (("checkpoint",), {"directory": "/{}"}),
    "train.run_name": (("train", "run_name"), "{}"),
    "optimizer.no_decay[0]": (("optimizer",), {"no_decay": ["{}"]}),
    "model.config": (("model",), {"config": {"model_type": "gpt2", "name": "{}"}}),
    "model.config: a key": (("model",), {"config": {"model_type": "gpt2", "{}": 1}}),
}


def filled(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {filled(key, text): filled(inner, text) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, text) for inner in value]
    return value.replace("{}", text) if isinstance(value, str) else value


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
@pytest.mark.parametrize("key", NAMES)
def test_a_name_that_no_file_can_hold_is_refused_by_its_key(table, key, text):
    path, value = NAMES[key]
    part: Any = table
    for name in path[:-1]:
        part = part.setdefault(name, {}) if isinstance(part, dict) else part[name]
    part[path[-1]] = filled(value, text)
    with pytest.raises(ConfigError) as caught:
        SwapConfig.load(table)
    assert f"config: {key}" in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize("text", ["x" * 256, "é" * 128, "a/" * 2100])
def test_a_path_that_is_too_long_is_refused_by_its_key(table, text):
    for key in ("tiers.nvme[0].path", "output.directory", "data.tokenizer", "model.path"):
        (*path, last), value = NAMES[key]
        changed = copy.deepcopy(table)
        part: Any = changed
        for name in path:
            part = part[name]
        part[last] = filled(value, text)
        with pytest.raises(ConfigError, match=r"has more than") as caught:
            SwapConfig.load(changed)
        assert f"config: {key}" in str(caught.value)
    table["data"]["paths"] = [{"path": table["model"]["path"], "pattern": text}]
    with pytest.raises(ConfigError, match=r"data\.paths: "):
        program.train(SwapConfig.load(table), console=Console(file=io.StringIO()))
