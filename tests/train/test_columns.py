"""The columns of records: what is learned of them, and those that no kind needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .record_jobs import MODEL, rows_of, write


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """A job over `data.jsonl`, which tests write."""
    return {
        "tiers": {"host": {"capacity": "24MiB", "huge_pages": False}},
        "model": {"config": MODEL.to_diff_dict()},
        "data": {
            "paths": [str(tmp_path / "data.jsonl")], "sequence_length": 64, "held_out": 0.0,
            "tokenizer": "bytes",
        },
        "train": {"steps": 1, "batch_size": 1},
        "output": {"directory": str(tmp_path / "output")},
    }  # fmt: skip


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
