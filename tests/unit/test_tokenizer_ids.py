"""Ids of tokenizers: those that tables of tokens hold, and those of vocabularies with gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from infinity.errors import ConfigError
from infinity.tools.training.job_data import tokenize
from infinity.tools.training.tokenizers import HuggingFaceTokenizer


def save_tokenizer(path: Path, vocabulary: dict[str, int]) -> Path:
    backend = Tokenizer(models.WordLevel(dict.fromkeys(vocabulary, 0), unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    table = json.loads((path / "tokenizer.json").read_text())
    table["model"]["vocab"] = vocabulary
    (path / "tokenizer.json").write_text(json.dumps(table))
    return path


@pytest.mark.parametrize("largest", [2**31, 2**32 - 1, 2**33])
def test_a_tokenizer_with_ids_beyond_31_bits_is_refused(tmp_path, largest) -> None:
    path = save_tokenizer(tmp_path / "tokenizer", {"a": 0, "b": largest})
    refusal = f"gives 'b' the id {largest}; expec|cannot be loaded|has no tokens"
    with pytest.raises(ConfigError, match=refusal):
        HuggingFaceTokenizer(path)


def test_ids_of_a_tokenizer_with_gaps_are_kept_in_a_token_file(tmp_path) -> None:
    """Its two tokens do not fit a byte each."""
    path = save_tokenizer(tmp_path / "tokenizer", {"a": 0, "b": 300})
    (tmp_path / "data.txt").write_text("b a b")
    tokens = tokenize([tmp_path / "data.txt"], HuggingFaceTokenizer(path), vocab_size=512)
    assert tokens.read(0, 3).tolist() == [300, 0, 300]
