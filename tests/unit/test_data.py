"""Text to sequences: which files, which tokens, which are held out, and what is refused."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import Data, SwapConfig
from infinity.errors import ConfigError
from infinity.tools.training import data_files
from infinity.tools.training.data_files import collect_files
from infinity.tools.training.job_data import (
    JobData,
    TokenFile,
    measure,
    open_data,
    split_rows,
    tokenize,
)
from infinity.tools.training.settle import settle
from infinity.tools.training.tokenizers import ByteTokenizer, HuggingFaceTokenizer, open_tokenizer

BYTES = ByteTokenizer()


def sources(*paths: object, **options) -> Data:
    return Data.model_validate({"paths": list(paths), "sequence_length": 8, **options})


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def job_data(tmp_path: Path, num_tokens: int, **options) -> JobData:
    """Sequences of four bytes, each of which holds its own number."""
    text = "".join(f"{number:4}" for number in range(num_tokens // 4)) + " " * (num_tokens % 4)
    data = {"paths": [str(write(tmp_path / "text.txt", text))], "sequence_length": 4}
    data |= {"held_out": 0.2, "tokenizer": "bytes"} | options
    table = {"data": data, "train": {"steps": 1, "batch_size": 2}}
    return open_data(SwapConfig.load(table), ByteTokenizer(), ExitStack(), vocab_size=256)


def numbers(dataset) -> list[int]:
    return [int(bytes(row["input_ids"].tolist())) for row in dataset]


def test_files_are_sorted_and_taken_once(tmp_path):
    b, a = write(tmp_path / "b.txt", "b"), write(tmp_path / "sub" / "a.txt", "a")
    write(tmp_path / ".hidden.txt", "no")
    write(tmp_path / "c.md", "no")

    assert collect_files(sources(str(tmp_path), str(b)).paths) == ([b, a], [])
    pattern = {"path": str(tmp_path), "pattern": "*.md"}
    assert [path.name for path in collect_files(sources(pattern).paths)[0]] == ["c.md"]


def test_python_stdlib_is_there_without_installed_packages():
    files = collect_files(sources("python-stdlib").paths)[0]

    assert len(files) > 100 and all(path.suffix == ".py" for path in files)
    assert not any("site-packages" in path.parts for path in files)


def test_source_without_a_matching_file_is_named(tmp_path):
    write(tmp_path / "a.md", "text")
    with pytest.raises(ConfigError, match=r"no file below .* matches '\*\*/\*\.txt'"):
        collect_files(sources(str(tmp_path)).paths)
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        collect_files(sources(str(tmp_path / "nowhere")).paths)


def test_tokens_are_the_bytes_of_the_files_in_order(tmp_path):
    files = [write(tmp_path / name, name * 3) for name in ("a", "b\u00e9")]

    tokens = tokenize(files, ByteTokenizer(), vocab_size=256)

    assert tokens.read(0, tokens.num_tokens).tobytes() == ("aaa" + "b\u00e9" * 3).encode()
    assert tokens.dtype == np.uint8


def test_max_bytes_cuts_inside_a_file(tmp_path):
    files = [write(tmp_path / name, "0123456789") for name in "ab"]

    tokens = tokenize(files, ByteTokenizer(), vocab_size=256, max_nbytes=13)

    assert tokens.read(0, tokens.num_tokens).tobytes() == b"0123456789012"


def test_token_outside_the_vocabulary_names_token_file_and_sizes(tmp_path):
    path = write(tmp_path / "a.txt", "plain \u00e9")
    with pytest.raises(ConfigError, match=r"a\.txt: token 195 .*xc3.* vocabulary of 128.* 256"):
        tokenize([path], ByteTokenizer(), vocab_size=128)


def test_empty_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no text in them"):
        tokenize([write(tmp_path / "a.txt", "")], ByteTokenizer(), vocab_size=256)


def test_unreadable_file_is_named(tmp_path):
    path = write(tmp_path / "a.txt", "text")
    path.unlink()  # As unreadable as it gets for a superuser.
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read: No such file"):
        tokenize([path], ByteTokenizer(), vocab_size=256)


def test_token_file_has_no_name(tmp_path):
    tokens = TokenFile(vocab_size=256, directory=tmp_path)
    assert os.listdir(tmp_path) == []
    tokens.close()


@given(
    num_sequences=st.integers(1, 500),
    held_out=st.floats(0, 0.5),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
)
def test_split_is_a_partition(num_sequences, held_out, seed, shuffle):
    train, rest = split_rows(num_sequences, held_out=held_out, seed=seed, shuffle=shuffle)

    both = np.concatenate([train, rest])
    assert sorted(both) == list(range(num_sequences))
    assert bool(len(rest)) == bool(held_out)


def test_held_out_sequences_are_not_trained_on(tmp_path):
    found = job_data(tmp_path, 4 * 50)
    train, held_out = numbers(found.train), numbers(found.held_out)

    assert len(held_out) == 10 and sorted(train + held_out) == list(range(50))
    assert held_out == numbers(job_data(tmp_path, 4 * 50).held_out)
    assert held_out != numbers(job_data(tmp_path, 4 * 50, seed=1).held_out)


def test_rows_are_ids_and_labels_alike_and_keep_the_order_of_any_request(tmp_path):
    found = job_data(tmp_path, 4 * 20, held_out=0.0, shuffle=False)
    rows = found.train[[7, 2, 7]]

    assert [int(bytes(ids.tolist())) for ids in rows["input_ids"]] == [7, 2, 7]
    assert all(np.array_equal(*both) for both in zip(*rows.values(), strict=True))
    assert found.held_out is None


def tokens_of(found: JobData) -> tuple[int, int, str]:
    return measure(found.train, found.files, 4)


def test_text_is_recognised_by_its_tokens(tmp_path):
    first = tokens_of(job_data(tmp_path, 4 * 20))
    assert first == tokens_of(job_data(tmp_path / "elsewhere", 4 * 20))
    assert first[-1] != tokens_of(job_data(tmp_path, 4 * 21))[-1]
    assert first[0] == 4 * 16


def test_records_are_recognised_by_their_tokens_rows_and_labels(tmp_path):
    rows = {"input_ids": [[1, 2, 3], [4]], "labels": [[-100, 2, 3], [4]], "text": ["a", "b"]}
    first = measure(datasets.Dataset.from_dict(rows), [], 0)
    assert first[:2] == (4, 4)
    for other in ({"labels": [[1, 2, 3], [4]]}, {"input_ids": [[1, 2], [3, 4]]}):
        assert measure(datasets.Dataset.from_dict(rows | other), [], 0)[-1] != first[-1]
    assert measure(datasets.Dataset.from_dict(rows | {"text": ["c", "d"]}), [], 0) == first


def test_without_shuffling_text_comes_in_order_and_its_end_is_held_out(tmp_path):
    found = job_data(tmp_path, 4 * 10, shuffle=False)

    assert numbers(found.train) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert numbers(found.held_out) == [8, 9]


def test_a_file_of_its_own_is_held_out(tmp_path):
    other = write(tmp_path / "other.txt", " 500 501")
    found = job_data(tmp_path, 4 * 10, eval_paths=[str(other)])

    assert sorted(numbers(found.train)) == list(range(10))
    assert numbers(found.held_out) == [500, 501]


def test_too_few_sequences_for_a_batch_is_an_error_with_the_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"11 tokens, 2 sequences of .*=4, 1 of them held out: 1"):
        job_data(tmp_path, 11)


def test_max_bytes_limits_what_is_trained_on(tmp_path):
    found = job_data(tmp_path, 100, held_out=0, max_bytes="64B")

    assert found.files[0].num_tokens == 64 and len(found.train) == 16


def test_byte_tokenizer_decodes_what_it_encodes():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("na\u00efve")) == "na\u00efve"
    assert tokenizer.decode([97, 300]) == "a\ufffd"


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_byte_tokenizer_is_the_same_for_records(text):
    assert BYTES.for_records()(text)["input_ids"] == BYTES.encode(text)
    assert BYTES.for_records().eos_token_id == 0


@pytest.fixture
def word_tokenizer(tmp_path) -> Path:
    """A whitespace tokenizer with an end-of-text token, saved as transformers does."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<unk>", "<eos>", "one", "two", "three"])}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    directory = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(directory)
    return directory


def test_hugging_face_tokens_end_each_file_with_eos(tmp_path, word_tokenizer):
    files = [write(tmp_path / "a", "one two\nthree"), write(tmp_path / "b", "two")]

    tokens = tokenize(files, HuggingFaceTokenizer(word_tokenizer), vocab_size=5)

    assert tokens.read(0, tokens.num_tokens).tolist() == [2, 3, 4, 1, 3, 1]


def test_large_file_is_tokenized_line_by_line_without_cutting_words(
    tmp_path, word_tokenizer, monkeypatch
):
    monkeypatch.setattr("infinity.tools.training.data_files._READ_NBYTES", 5)
    path = write(tmp_path / "a", "one two three\n" * 4)

    tokens = tokenize([path], HuggingFaceTokenizer(word_tokenizer), vocab_size=5)

    assert tokens.read(0, tokens.num_tokens).tolist() == [2, 3, 4] * 4 + [1]


def test_a_text_to_continue_begins_as_the_tokenizer_begins_one_and_has_no_end(word_tokenizer):
    from tokenizers.processors import TemplateProcessing

    own = HuggingFaceTokenizer(word_tokenizer)
    assert own.begin("one two") == [2, 3]
    own.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="three $A <eos>", special_tokens=[("three", 4), ("<eos>", 1)]
    )
    assert own.tokenizer("one two")["input_ids"] == [4, 2, 3, 1]
    assert own.begin("one two") == [4, 2, 3] == own.begin("three one two")


def test_hugging_face_token_outside_the_vocabulary_is_shown_as_text(tmp_path, word_tokenizer):
    path = write(tmp_path / "a", "one three")
    with pytest.raises(ConfigError, match=r"token 4 \('three'\)"):
        tokenize([path], HuggingFaceTokenizer(word_tokenizer), vocab_size=4)


@pytest.mark.parametrize("call", ["encode", "begin"])
def test_a_text_that_a_tokenizer_without_an_unknown_token_lacks_is_refused(word_tokenizer, call):
    file = word_tokenizer / "tokenizer.json"
    table = json.loads(file.read_text())
    del table["model"]["vocab"]["<unk>"]
    file.write_text(json.dumps(table | {"added_tokens": table["added_tokens"][1:]}))
    own = HuggingFaceTokenizer(word_tokenizer)
    assert getattr(own, call)("one") == [2]
    with pytest.raises(ConfigError, match=r"tokenizer cannot encode a text: .*Missing \[UNK\]"):
        getattr(own, call)("one four")


def test_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="data.tokenizer"):
        open_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="data.tokenizer"):
        open_tokenizer(tmp_path)


# What is not text.


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("map.geojson", b"[]", "JSON"),
        ("rows.csv", b"a,b\n", "a table"),
        ("rows.arrow", b"ARROW1", "Arrow"),
        ("text.txt.gz", b"\x1f\x8b\x08", "compressed"),
        ("packed.txt", b"\x1f\x8b\x08", "gzip"),
        ("rows.txt", b"PAR1\x15\x00", "Parquet"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, name, content, said):
    with pytest.raises(ConfigError, match=rf"{name} is .*{said}.*, not text; .*plain text"):
        collect_files(sources(str(write(tmp_path / name, content))).paths)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat.jsonl", b'{"messages": []}\n'),
        ("all.json", b"[]"),
        ("part.parquet", b"PAR1"),
        ("train", b'{"text": "a"}\n{"text": "b"}\n{"te'),
    ],
)
def test_records_are_told_from_text_by_their_names_or_lines(tmp_path, name, content):
    path = write(tmp_path / name, content)
    assert collect_files(sources(str(path)).paths) == ([], [path])


def test_a_directory_without_text_gives_its_records(tmp_path):
    path = write(tmp_path / "a" / "rows.jsonl", "{}\n")
    write(tmp_path / "readme.md", "text")
    assert collect_files(sources(str(tmp_path)).paths) == ([], [path])
    text = write(tmp_path / "b.txt", "text")
    assert collect_files(sources(str(tmp_path)).paths) == ([text], [])


def test_json_lines_that_are_named_text_are_read_with_a_notice(tmp_path, caplog):
    path = write(tmp_path / "a.txt", '{"text": "a"}\n')
    assert collect_files(sources(str(path)).paths) == ([path], [])
    assert "a.txt" in caplog.text and "JSON objects" in caplog.text


@pytest.mark.parametrize("size", [1, 2, 3, 1 << 20])
def test_bytes_that_are_no_utf8_are_named_with_their_offset(tmp_path, monkeypatch, size):
    monkeypatch.setattr(data_files, "_READ_NBYTES", size)
    bad = {b"abc\xff": 3, "\u20ac\u20ac".encode() + b"\xe2\x82": 6, b"ab\0c": 2, b"\xffa": 0}
    for content, offset in bad.items():
        path = write(tmp_path / "a.txt", content)
        with pytest.raises(ConfigError, match=rf"a\.txt is not UTF-8: at offset {offset} "):
            tokenize([path], ByteTokenizer(), vocab_size=256)
    good = "\u20ac\U0001f600 text".encode()
    tokens = tokenize([write(tmp_path / "a.txt", good)], ByteTokenizer(), vocab_size=256)
    assert tokens.read(0, tokens.num_tokens).tobytes() == good
    marked = tokenize(
        [write(tmp_path / "b.txt", b"\xef\xbb\xbf" + good)], ByteTokenizer(), vocab_size=256
    )
    assert marked.read(0, marked.num_tokens).tobytes() == good, "the mark of UTF-8 is no text"
    cut = tokenize([tmp_path / "a.txt"], ByteTokenizer(), vocab_size=256, max_nbytes=4)
    assert cut.read(0, cut.num_tokens).tobytes() == good[:4], "the limit may cut a character"


# What the model's directory decides.


def settled(tmp_path, files: dict[str, object], **sections) -> tuple[str, object]:
    """precision.compute and data.tokenizer, with a model directory of these files."""
    model = tmp_path / "model"
    for name, content in files.items():
        write(model / name, json.dumps(content))
    table = {"model": {"path": str(model)}, "data": {"paths": ["x"]}}
    config = settle(SwapConfig.load(table | sections))
    assert config.data is not None
    return config.precision.compute, config.data.tokenizer


def test_the_model_directory_decides_dtype_and_tokenizer(tmp_path):
    own = tmp_path / "model"
    assert settled(tmp_path, {"config.json": {"dtype": "bfloat16"}}) == ("bfloat16", "bytes")
    files = {"config.json": {"torch_dtype": "float16"}, "tokenizer.json": {}}
    assert settled(tmp_path, files) == ("float32", own)
    nested = {"config.json": {"text_config": {"dtype": "bfloat16"}}}
    assert settled(tmp_path, nested) == ("bfloat16", own)
    asked = {"precision": {"compute": "float32"}, "data": {"paths": ["x"], "tokenizer": "bytes"}}
    assert settled(tmp_path, {}, **asked) == ("float32", "bytes")


def test_the_weights_decide_where_the_configuration_names_no_dtype(tmp_path):
    from safetensors.torch import save_file

    write(tmp_path / "model" / "config.json", "{}")
    tensors = {"a": torch.zeros(2, dtype=torch.int64), "b": torch.zeros(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    assert settled(tmp_path, {})[0] == "bfloat16"
    (tmp_path / "model" / "model.safetensors").write_bytes(b"broken")
    assert settled(tmp_path, {})[0] == "float32"
