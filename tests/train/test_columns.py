"""The columns of records: what is learned of them, and those that no kind needs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.tools.cli import app
from infinity.tools.training import program
from infinity.tools.training.records import load_records

from .record_jobs import MODEL, rows_of, small_job, write

# Without marks for TRL: what the assistant says is marked here.
OPTIONAL = (
    "{% if tone is defined %}<{{ tone }}>{% endif %}{% if tools %}{{ tools | length }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    table = small_job(tmp_path)
    table["data"]["sequence_length"] = 64
    return table


@pytest.mark.parametrize(
    "mask",
    ["completion_mask", "assistant_masks", "labels"],
)
def test_of_token_ids_what_their_mask_marks_is_learned(tmp_path, table, mask) -> None:
    ids = list(b"so it is")
    marks = [0, 0, 0, 1, 1, 1, 0, 0]
    if mask == "labels":
        marks = [token if is_on else -100 for token, is_on in zip(ids, marks, strict=True)]
    write(tmp_path / "data.jsonl", [{"input_ids": ids, mask: marks}])
    assert rows_of(table)[0] == [("so it is", "it ")]


def test_all_of_token_ids_without_a_mask_is_learned(tmp_path, table) -> None:
    write(tmp_path / "data.jsonl", [{"input_ids": list(b"so it is")}])
    assert rows_of(table)[0] == [("so it is", "so it is")]


def test_a_completion_mask_is_not_asked_where_all_is_to_be_learned(tmp_path, table) -> None:
    record = {"input_ids": list(b"so it"), "completion_mask": [0, 0, 0, 1, 1]}
    write(tmp_path / "data.jsonl", [record])
    table["data"]["assistant_only_loss"] = False
    assert rows_of(table)[0] == [("so it", "so it")]


ASKED = [{"role": "user", "content": "a"}]
ANSWERED = [{"role": "assistant", "content": "B"}]
CHAT = {"messages": ASKED + ANSWERED}


@pytest.mark.parametrize(
    ("record", "more"),
    [
        (CHAT, {"prompt": "a", "prompt_id": "f0", "category": "Chat"}),
        (CHAT, {"completion": "c"}),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "B"}]}, {"prompt": "a"}),
        ({"instruction": "a", "output": "B"}, {"prompt": "a B", "text": "a B"}),
        ({"prompt": "a", "completion": "B"}, {"messages": ASKED, "text": "c"}),
        ({"prompt": ASKED, "completion": ANSWERED}, {"source": "here"}),
        ({"text": "a"}, {"prompt": "c", "completions": 3}),
        ({"input_ids": [97]}, {"prompt": "c", "completion": "d", "position_ids": [7]}),
    ],
    ids=["chat", "chat-completion", "sharegpt", "alpaca", "prompts", "talks", "text", "tokens"],
)  # fmt: skip
def test_columns_that_a_kind_does_not_need_are_left_out(tmp_path, table, record, more) -> None:
    """ultrachat_200k and no_robots have `prompt` beside messages."""
    write(tmp_path / "data.jsonl", [record])
    expected = rows_of(table)
    assert expected[0]
    write(tmp_path / "data.jsonl", [{**more, **record}])
    assert rows_of(table) == expected


def test_of_preferences_other_columns_are_left_out(tmp_path) -> None:
    record = {"chosen": "a", "rejected": "b", "messages": ASKED, "score": 1.0, "prompt": "c"}
    found = load_records([write(tmp_path / "data.jsonl", [record])])
    assert sorted(found.column_names) == ["chosen", "prompt", "rejected"]


def test_what_is_asked_with_images_needs_the_processor_of_a_model(tmp_path, table) -> None:
    write(tmp_path / "data.jsonl", [CHAT | {"images": ["a.png"]}])
    with pytest.raises(ConfigError, match="bytes have no processor of images"):
        rows_of(table)


@pytest.mark.parametrize(
    ("record", "other", "said"),
    [
        (CHAT, {"text": "a"}, "eval.jsonl holds texts, and .*data.jsonl. holds conversations"),
        ({"text": "a"}, {"prompt": "a", "completion": "b"}, "holds completions, .* expected texts"),
        ({"prompt": "a", "completion": "b"}, {"input_ids": [1]}, "holds tokens, and"),
    ],
)
def test_records_of_another_kind_to_evaluate_on_are_refused(
    tmp_path, table, record, other, said
) -> None:
    """Their loss would be that of all tokens."""
    write(tmp_path / "data.jsonl", [record])
    table["data"]["eval_paths"] = [str(write(tmp_path / "eval.jsonl", [other]))]
    table["train"]["eval_every"] = 1
    with pytest.raises(ConfigError, match=f"data.eval_paths: .*{said}"):
        rows_of(table)


def test_conversations_in_another_form_are_evaluated_on(tmp_path, table) -> None:
    write(tmp_path / "data.jsonl", [CHAT])
    other = {"instruction": "a", "output": "B"}
    table["data"]["eval_paths"] = [str(write(tmp_path / "eval.jsonl", [other]))]
    table["train"]["eval_every"] = 1
    assert rows_of(table)[0]


def test_the_template_gets_the_options_of_each_record(tmp_path, table) -> None:
    """One record's are not another's."""
    options = [{"tone": "dry"}, {"tone": "warm", "other": 1}, None]
    records = [CHAT | {"chat_template_kwargs": own, "tools": [{"name": "t"}]} for own in options]
    write(tmp_path / "data.jsonl", [*records, CHAT])
    assert rows_of(table, OPTIONAL)[0] == [
        ("<dry>1[user]a[assistant]B", "B"),
        ("<warm>1[user]a[assistant]B", "B"),
        ("1[user]a[assistant]B", "B"),
        ("[user]a[assistant]B", "B"),
    ]


def test_options_of_a_template_that_are_none_are_refused_by_record(tmp_path, table) -> None:
    write(tmp_path / "data.jsonl", [CHAT | {"chat_template_kwargs": "dry"}])
    with pytest.raises(ConfigError, match="record 1: chat_template_kwargs: expected an object"):
        rows_of(table, OPTIONAL)
    write(tmp_path / "data.jsonl", [CHAT | {"chat_template_kwargs": {"tokenize": False}}])
    with pytest.raises(ConfigError, match="record 1: the chat template refuses .*'tokenize'"):
        rows_of(table, OPTIONAL)


def test_a_model_without_a_tokenizer_is_said_before_the_data_is_counted(tmp_path, table) -> None:
    AutoModelForCausalLM.from_config(MODEL).save_pretrained(tmp_path / "base")
    table["model"], table["data"]["tokenizer"] = {"path": str(tmp_path / "base")}, "auto"
    write(tmp_path / "data.jsonl", [{"messages": 3}])
    console = Console(file=io.StringIO(), width=300)
    with pytest.raises(ConfigError, match='expected a list "messages"'):
        program.train(SwapConfig.load(table), console=console)
    assert "base has no tokenizer; name a directory that has" in console.file.getvalue()
    options = ["--data", tmp_path / "data.jsonl", "-o", tmp_path / "new.toml"]
    told = CliRunner().invoke(app, ["new", *map(str, [tmp_path / "base", *options])])
    assert "base has no tokenizer; name a directory that has" in told.stderr
