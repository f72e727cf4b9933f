"""Values of records: texts are those that the file writes, and token ids have an embedding."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from infinity.errors import ConfigError
from infinity.tools.training.records import load_records

from .record_jobs import rows_of, small_job, write

ASK = {"role": "user", "content": "a"}


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    return small_job(tmp_path)


def conversation(written: str) -> str:
    answer = f'{{"role": "assistant", "content": {written}}}'
    return f'{{"messages": [{json.dumps(ASK)}, {answer}]}}'


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('"2024-01-01"', "2024-01-01"), ('"2024-01-01T00:00:00Z"', "2024-01-01T00:00:00Z"),
        ('"2024-01-01 00:00:00"', "2024-01-01 00:00:00"), ("42", "42"), ("3.50", "3.50"),
        ("1e3", "1e3"), ("12345678901234567890123", "12345678901234567890123"), ('"42"', "42"),
        ("-0.0", "-0.0"), ('"true"', "true"), ('"null"', "null"), ('"[1]"', "[1]"),
    ],
)  # fmt: skip
def test_dates_and_numbers_are_the_texts_that_json_writes(tmp_path, written, text) -> None:
    path = tmp_path / "data.jsonl"
    forms = {
        conversation(written): lambda row: row["messages"][1]["content"],
        f'{{"text": {written}}}': lambda row: row["text"],
        f'{{"prompt": "a", "completion": {written}}}': lambda row: row["completion"],
        f'{{"instruction": "a", "output": {written}}}': lambda row: row["messages"][1]["content"],
        f'{{"chosen": {written}, "rejected": "b"}}': lambda row: row["chosen"],
    }
    for line, get in forms.items():
        path.write_text(line + "\n")
        found = load_records([path])
        assert get(found[0]) == text
    (tmp_path / "data.json").write_text(f"[{conversation(written)}]")
    found = load_records([tmp_path / "data.json"])
    assert found[0]["messages"][1]["content"] == text


@pytest.mark.parametrize(
    ("written", "got"),
    [("true", "true"), ("null", "null"), ("[]", "an empty list"), ("{}", "an object of 0"),
     ("[[1]]", "a list of 1")],
)  # fmt: skip
def test_values_of_json_that_are_no_texts_are_refused_by_record(tmp_path, written, got) -> None:
    good = conversation('"b"')
    path = tmp_path / "data.jsonl"
    path.write_text(f"{good}\n{conversation(written)}\n")
    with pytest.raises(ConfigError, match=rf"record 2: messages\[1\].content.*: .*got {got}"):
        load_records([path])


@pytest.mark.parametrize(
    "value", [datetime.datetime(2024, 1, 1), datetime.date(2024, 1, 1), 3.5, True, b"a"]
)
@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_columns_of_arrow_that_are_no_texts_are_refused_by_record(tmp_path, value, form) -> None:
    saved = datasets.Dataset.from_dict({"prompt": ["a"], "completion": [value]})
    (saved.to_parquet if form == "parquet" else saved.save_to_disk)(tmp_path / f"data.{form}")
    with pytest.raises(ConfigError, match="record 1: completion: expected text; got"):
        load_records([tmp_path / f"data.{form}"])


def test_integers_of_arrow_are_texts(tmp_path) -> None:
    datasets.Dataset.from_dict({"prompt": ["a"], "completion": [42]}).to_parquet(
        tmp_path / "d.parquet"
    )
    assert load_records([tmp_path / "d.parquet"])[0] == {"prompt": "a", "completion": "42"}


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_classes_are_learned_by_their_names(tmp_path, form) -> None:
    classes = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"prompt": datasets.Value("string"), "completion": classes})
    saved = datasets.Dataset.from_dict({"prompt": ["a"], "completion": [1]}, features=features)
    (saved.to_parquet if form == "parquet" else saved.save_to_disk)(tmp_path / f"data.{form}")
    found = load_records([tmp_path / f"data.{form}"])
    assert found[0] == {"prompt": "a", "completion": "good"}


def test_a_date_inside_a_tool_is_the_text_that_json_writes(tmp_path) -> None:
    tool = {"name": "f", "since": "2024-01-01T00:00:00", "minimum": 0.30000000000000004}
    record = {"messages": [ASK, ASK | {"role": "assistant"}], "tools": [tool]}
    found = load_records([write(tmp_path / "data.jsonl", [record] * 2)])
    assert found[1]["tools"] == [tool]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a\0b"}, "text: it has a NUL"),
        ({"messages": [ASK | {"content": "a\0"}]}, r"messages\[0\].content: it has a NUL"),
        ({"messages": [ASK], "tools": [{"name": "f\0"}]}, r"tools\[0\].name: it has a NUL"),
        ({"messages": [ASK], "tools": [{"f\0": 1}]}, r"tools\[0\]: the key .* it has a NUL"),
        ({"messages": [ASK | {"role": "a\0"}]}, r"messages\[0\].role: it has a NUL"),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f\0"}}]}]},
         r"messages\[1\].tool_calls\[0\].function.name: it has a NUL"),
        ({"prompt": "a", "completion": "\0"}, "completion: it has a NUL"),
        ({"text": "a\ud800"}, "text: it has half of a surrogate pair"),
        ({"messages": [ASK], "tools": [{"x": float("nan")}]}, r"tools\[0\].x: expected a finite"),
        ({"messages": [ASK], "tools": [{"x": 2**64}]}, r"tools\[0\].x: a number beyond 64 bits"),
    ],
)  # fmt: skip
def test_characters_and_numbers_that_no_text_has_are_refused(tmp_path, record, said) -> None:
    with pytest.raises(ConfigError, match=f"record 1: {said}"):
        load_records([write(tmp_path / "data.jsonl", [record])])


def test_deep_nesting_is_refused_by_record(tmp_path) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"x": deep}
    record = {"messages": [ASK], "tools": [deep]}
    with pytest.raises(ConfigError, match="record 1: tools.*nested too deeply"):
        load_records([write(tmp_path / "data.jsonl", [record])])
    (tmp_path / "data.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match="data.jsonl:1 is no JSON"):
        load_records([tmp_path / "data.jsonl"])


def test_a_key_that_is_given_twice_is_refused(tmp_path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a", "text": "b"}\n')
    with pytest.raises(ConfigError, match="data.jsonl:1 is no JSON: .*'text' is given twice"):
        load_records([tmp_path / "data.jsonl"])


IDS = {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"input_ids": [1, 2**33]}, f"token {2**33} is outside the vocabulary of 256"),
        ({"input_ids": [1, 2**70]}, f"token {2**70} is outside the vocabulary of 256"),
        ({"input_ids": [1, -1]}, "token -1 is outside the vocabulary of 256"),
        ({"input_ids": [1, 256]}, "token 256 is outside the vocabulary of 256"),
        ({"input_ids": [1, 2.0]}, "input_ids: expected integers"),
        ({"input_ids": [1, None]}, "input_ids: expected integers"),
        ({"input_ids": "1 2"}, "input_ids: expected a list of integers"),
        ({"input_ids": []}, "input_ids: expected token ids; got an empty list"),
        (IDS | {"labels": [1, 2]}, "labels: expected 3 values, one for each token; got 2"),
        (IDS | {"labels": [-100, 2, 256]}, "labels: 256 is neither -100"),
        (IDS | {"labels": [-100, 2, -1]}, "labels: -1 is neither -100"),
        (IDS | {"assistant_masks": [0, 1]}, "assistant_masks: expected 3 values"),
        (IDS | {"completion_mask": [0, 1, 2]}, "completion_mask: expected 0 and 1"),
        (IDS | {"attention_mask": [1, 1, 0]}, "attention_mask: it leaves tokens out"),
        (IDS | {"labels": [1, 2, 3], "completion_mask": [0, 1, 1]}, "contradict each other"),
        (IDS | {"seq_lengths": [1, 1]}, "seq_lengths: expected lengths whose sum is 3"),
    ],
)  # fmt: skip
def test_token_ids_without_an_embedding_are_refused_by_record(
    tmp_path, table, record, said
) -> None:
    write(tmp_path / "data.jsonl", [record])
    with pytest.raises(ConfigError, match=f"data.jsonl: record 1: .*{said}"):
        rows_of(table)


def test_a_mask_in_some_records_only_is_refused(tmp_path, table) -> None:
    write(tmp_path / "data.jsonl", [IDS | {"labels": [1, 2, 3]}, IDS])
    with pytest.raises(
        ConfigError, match="record 2: it holds tokens, input_ids .*expected tokens, "
    ):
        rows_of(table)
