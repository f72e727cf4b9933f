"""The tokenizer of a Kimi directory: tiktoken's ids, without the directory's code."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from infinity.errors import ConfigError
from infinity.tools.training.tokenizers import PATTERN, HuggingFaceTokenizer

TEXT = (
    "The capital of France is Paris. I'll say they're right; we've done it, and IT'S FINE.\n\n"
    "你好\uff0c世界。今天天气很好。混合 中文 and English中文 words, 1234567890 and 3.14159\r\n"
    "\tdef f(x):\n\t\treturn x * 2  # naïve café Ǆungla ǅ straße ŒUVRE\n   \n" * 3
)
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 6: "<think>", 9: "[PAD]"}
TEMPLATE = "{% for message in messages %}<|im_user|>{{ message['content'] }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as Kimi K2's, with ranks of few tokens and code that must not run."""
    return write(tmp_path_factory.mktemp("kimi"), ranks())


def ranks() -> dict[bytes, int]:
    found: dict[bytes, int] = bpe_train(TEXT, 380, r"\S+|\s+", visualise=None)
    return found


def write(path: Path, of_tokens: dict[bytes, int], **changes: Any) -> Path:
    lines = [base64.b64encode(t) + b" " + str(rank).encode() for t, rank in of_tokens.items()]
    path.joinpath("tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    count = len(of_tokens)
    table = {
        "added_tokens_decoder": {
            str(count + at): {"content": name, "special": name != "<think>", "normalized": False}
            for at, name in NAMES.items()
        },
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
        "model_max_length": 131072, "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "chat_template": TEMPLATE,
    }  # fmt: skip
    path.joinpath("tokenizer_config.json").write_text(json.dumps(table | changes))
    path.joinpath("tokenization_kimi.py").write_text("raise SystemExit('code of the directory')")
    path.joinpath("config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> tiktoken.Encoding:
    """What Kimi's class makes of the files."""
    of_tokens = ranks()
    special = {
        NAMES.get(at, f"<|reserved_token_{len(of_tokens) + at}|>"): len(of_tokens) + at
        for at in range(max(NAMES) + 1)
    }
    return tiktoken.Encoding(
        "kimi", pat_str=PATTERN, mergeable_ranks=of_tokens, special_tokens=special
    )


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(directory)


PIECES = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            *TEXT.split(" "), *NAMES.values(), "<|reserved_token_", "'ll", "'S", " ", "  ", "\n",
            " \r\n", "中文", "ʰa", "é", "e\u0301", "々", "ー", "12345", "Ⅷ", "🚀🎉", "\u3000", "_",
        ]
    ),
)  # fmt: skip


@given(pieces=st.lists(PIECES, max_size=12))
@example(pieces=[TEXT])
@example(pieces=["a" * 30, "中" * 30, " " * 30])
def test_ids_are_those_of_tiktoken(
    tokenizer: HuggingFaceTokenizer, reference: tiktoken.Encoding, pieces: list[str]
) -> None:
    text = "".join(pieces)
    expected = reference.encode(text, allowed_special="all")
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == reference.decode(expected)


def test_names_and_template_are_those_of_the_directory(
    tokenizer: HuggingFaceTokenizer, directory: Path
) -> None:
    found = tokenizer.for_records()
    count = len(ranks())
    assert tokenizer.vocab_size == count + max(NAMES) + 1
    assert (found.eos_token_id, found.bos_token_id, found.pad_token_id) == (
        count + 1, count, count + 9,
    )  # fmt: skip
    assert found.convert_tokens_to_ids("<think>") == count + 6
    assert found.name_or_path == str(directory)
    shown = found.apply_chat_template([{"role": "user", "content": "你好"}], tokenize=False)
    assert shown == "<|im_user|>你好<|im_end|>"


def test_a_template_in_a_file_of_its_own_counts(tmp_path: Path) -> None:
    write(tmp_path, ranks(), chat_template=None)
    tmp_path.joinpath("chat_template.jinja").write_text(TEMPLATE)
    assert HuggingFaceTokenizer(tmp_path).for_records().chat_template == TEMPLATE


def test_a_fast_tokenizer_of_the_directory_goes_first(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    saved = tokenizer.for_records()
    saved.save_pretrained(tmp_path)
    tmp_path.joinpath("tiktoken.model").write_bytes(b"damaged")
    assert HuggingFaceTokenizer(tmp_path).encode(TEXT) == tokenizer.encode(TEXT)


@pytest.mark.parametrize("damage", ["no ranks", "cut", "a byte less", "a rank twice", "no names"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    of_tokens = ranks()
    changes: dict[str, Any] = {}
    if damage == "a byte less":
        del of_tokens[b"\x00"]
    elif damage == "a rank twice":
        of_tokens[b"\x00"] = 1
    elif damage == "no names":
        changes["added_tokens_decoder"] = None
    write(tmp_path, of_tokens, **changes)
    file = tmp_path / "tiktoken.model"
    if damage in ("no ranks", "cut"):
        file.write_bytes(b"" if damage == "no ranks" else file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="tokenizer_config" if changes else r"tiktoken\.model"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("first", [10, "shared"])
def test_names_of_another_model_are_refused(tmp_path: Path, first: Any) -> None:
    of_tokens = ranks()
    word = max((t for t in of_tokens if t.isascii()), key=len).decode()
    names = {"10": "[BOS]"} if first == 10 else {str(len(of_tokens)): word.replace(" ", "Ġ")}
    added = {key: {"content": name, "special": True} for key, name in names.items()}
    write(tmp_path, of_tokens, added_tokens_decoder=added)
    with pytest.raises(ConfigError, match="of two models"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("token", [2**31, 10**18])
def test_a_name_far_behind_the_ranks_is_refused(tmp_path: Path, token: int) -> None:
    """All ids before it would be reserved, in memory."""
    write(tmp_path, ranks(), added_tokens_decoder={str(token): {"content": "[X]"}})
    with pytest.raises(ConfigError, match=f"has a name for token {token}; expected ids below"):
        HuggingFaceTokenizer(tmp_path)
