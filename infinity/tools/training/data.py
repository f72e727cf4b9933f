"""Token ids from text files, and which files `[data]` means.

Files are read in sorted order. The tokens of text lie end to end in one file (one, two or four
bytes per token, as the vocabulary needs) and are cut into sequences of equal length; a remainder at
the end is dropped. Tokens are read back with pread, so that their pages do not count as resident:
the text may be larger than memory. A permutation drawn from the seed decides which sequences are
held out.

Bytes are joined without changes. If a Hugging Face tokenizer has an end-of-text token, it follows
each file. Records are read by `infinity.tools.training.records`. The module uses numpy and does not
import torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from infinity.config import PYTHON_STDLIB, DataSource
from infinity.config.paths import refuse_absent_data
from infinity.errors import ConfigError
from infinity.sizes import MIB
from infinity.tools.training import kimi_tokenizer
from infinity.tools.training.model_numbers import MOST_TOKENS
from infinity.tools.training.text import (
    Utf8,
    is_records,
    is_saved_dataset,
    is_utf8,
    refuse_other_formats,
)
from infinity.tools.training.token_file import Ids, TokenFile

_log = logging.getLogger(__name__)

_READ_NBYTES = MIB
# Below the directory of the standard library, but not part of it.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of `[data]`: all of them text, or all of them records."""

    texts: list[Path]
    records: list[Path]  # Files, or directories of `datasets.save_to_disk`.


def collect_files(sources: Sequence[DataSource]) -> Sources:
    """Returns every file of every source once, sorted within each source.

    Hidden files and directories are skipped. Raises ConfigError that names a missing source, a
    source without a matching file, the first file that is neither text nor records, or one of each.
    """
    files: dict[Path, bool] = {}  # Whether it holds records.
    for source in sources:
        found = _files_of(source)
        if not found:
            raise ConfigError(
                f"data.paths: no file below {source.location} matches {source.pattern!r}"
            )
        files.update({file: is_records(file) for file in found})
    texts = [file for file, has_records in files.items() if not has_records]
    records = [file for file, has_records in files.items() if has_records]
    if texts and records:
        raise ConfigError(
            f"data.paths: {records[0]} holds records and {texts[0]} does not; expected one kind"
        )
    as_json = [file for file in texts if refuse_other_formats(file)]
    if as_json:
        _log.warning(
            "data.paths: the lines of %s (%d files in all) are JSON objects; braces, quotes and "
            "keys are learned as they stand there", as_json[0], len(as_json),
        )  # fmt: skip
    return Sources(texts, records)


class Tokenizer(Protocol):
    """Converts text to ids. Every id is less than `vocab_size`."""

    name: str
    vocab_size: int

    def encode_file(self, chunks: Iterator[bytes]) -> Iterator[Ids]:
        """Yields the ids of one file, given as consecutive chunks of its bytes."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids."""

    def token(self, token_id: int) -> str:
        """Returns the form of a token in messages."""
        ...

    def for_records(self) -> Any:
        """Returns the same tokenizer as an object of transformers."""
        ...


class ByteTokenizer:
    """A tokenizer whose 256 tokens are the UTF-8 bytes."""

    name = "bytes"
    vocab_size = 256

    def __init__(self) -> None:
        self._fast: Any = None

    def encode_file(self, chunks: Iterator[bytes]) -> Iterator[Ids]:
        """Yields the ids of a file, piece by piece."""
        for chunk in chunks:
            yield np.frombuffer(chunk, dtype=np.uint8)

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of the text in UTF-8."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Shows ids above 255, which a model may have, as the replacement character."""
        text = b"".join(bytes([i]) if i < 256 else "\ufffd".encode() for i in ids)
        return text.decode(errors="replace")

    def token(self, token_id: int) -> str:
        """Returns the token as messages show it."""
        return repr(bytes([token_id])) if 0 <= token_id < self.vocab_size else "no byte"

    def for_records(self) -> Any:
        """Token 0, which no text has, ends and fills records."""
        if self._fast is None:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers
            from transformers import PreTrainedTokenizerFast

            vocabulary = {kimi_tokenizer.byte_char(byte): byte for byte in range(1, 256)}
            backend = Tokenizer(models.BPE({"\0": 0} | vocabulary, []))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(
                add_prefix_space=False, use_regex=False
            )
            backend.decoder = decoders.ByteLevel()
            self._fast = PreTrainedTokenizerFast(
                tokenizer_object=backend, pad_token="\0", eos_token="\0"
            )
        return self._fast


class HuggingFaceTokenizer:
    """The tokenizer of a local directory. `tokenizer` is the object of transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        if not path.is_dir():
            raise ConfigError(f"data.tokenizer: {path} is no directory")
        try:
            if kimi_tokenizer.is_kimi(path):
                self.tokenizer = kimi_tokenizer.load(path)
            else:
                self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            vocabulary = self.tokenizer.get_vocab()
        except ConfigError:
            raise
        except Exception as error:  # A broken directory makes transformers raise any exception.
            raise ConfigError(f"data.tokenizer: {path} cannot be loaded: {error}") from error
        last = max(vocabulary, key=vocabulary.__getitem__, default="")
        largest = vocabulary.get(last, 0)
        if largest >= MOST_TOKENS:
            raise ConfigError(
                f"data.tokenizer: {path} gives {last!r} the id {largest}; expected ids below "
                f"{MOST_TOKENS}. Use the model's own tokenizer"
            )
        self.name = str(path)
        self.vocab_size = max(len(self.tokenizer), largest + 1)

    def encode_file(self, chunks: Iterator[bytes]) -> Iterator[Ids]:
        """Yields the ids of a file, line by line, and the end-of-text token at its end."""
        for text in _complete_lines(chunks):
            yield np.asarray(self.encode(text), dtype=np.int64)
        if self.tokenizer.eos_token_id is not None:
            yield np.asarray([self.tokenizer.eos_token_id], dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(self.tokenizer.decode(list(ids)))

    def token(self, token_id: int) -> str:
        """Returns the token as messages show it."""
        if not 0 <= token_id < MOST_TOKENS:
            return "none"
        return repr(self.tokenizer.convert_ids_to_tokens(token_id))

    def for_records(self) -> Any:
        """Returns the object of transformers."""
        return self.tokenizer


def open_tokenizer(which: Path | str) -> Tokenizer:
    """Opens the settled `data.tokenizer`: "bytes", or a local Hugging Face directory."""
    assert which != "auto", "training.settle has not been asked"
    return ByteTokenizer() if which == "bytes" else HuggingFaceTokenizer(Path(which))


def tokenize(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    max_nbytes: int | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> TokenFile:
    """Writes all tokens of the first `max_nbytes` bytes of `files` to a file in `directory`.

    `vocab_size` is that of the model. Raises ConfigError for an id without an embedding (the
    message names token, file and both sizes), for a file that cannot be read, and for text without
    tokens.
    """
    tokens = TokenFile(vocab_size=tokenizer.vocab_size, directory=directory)
    left_nbytes = max_nbytes
    try:
        for path in files:
            if left_nbytes is not None and left_nbytes <= 0:
                break
            chunks = _Chunks(path, left_nbytes)
            for ids in tokenizer.encode_file(iter(chunks)):
                _refuse_strangers(ids, tokenizer, vocab_size, path)
                tokens.append(ids)
            if left_nbytes is not None:
                left_nbytes -= chunks.read_nbytes
        if tokens.num_tokens == 0:
            raise ConfigError(
                f"data.paths: {len(files)} files were read, but there is no text in them, "
                f"e.g. {files[0]}"
            )
    except BaseException:
        tokens.close()
        raise
    return tokens


def _refuse_strangers(ids: Ids, tokenizer: Tokenizer, vocab_size: int, path: Path) -> None:
    """Raises ConfigError for an id without an embedding."""
    if len(ids) and int(ids.max()) >= vocab_size:
        bad = int(ids[ids >= vocab_size][0])
        raise ConfigError(
            f"{path}: token {bad} ({tokenizer.token(bad)}) of tokenizer {tokenizer.name} is "
            f"outside the model's vocabulary of {vocab_size}; the tokenizer has "
            f"{tokenizer.vocab_size} tokens. Use the model's own tokenizer, or a model whose "
            "vocab_size is large enough"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The training sequences and the held-out sequences: disjoint, together all of them."""

    train: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.int64]


def split_sequences(num_sequences: int, *, held_out: float, seed: int, shuffle: bool) -> Split:
    """Holds out the fraction `held_out`, at least one sequence if it is not zero.

    The seed selects the sequences; without `shuffle` they are the last ones. Both parts are in the
    order of the text: 10 sequences at 0.2 without shuffling give 0..7 and 8, 9.
    """
    num_held_out = max(1, round(num_sequences * held_out)) if held_out else 0
    num_train = num_sequences - num_held_out
    order = np.arange(num_sequences)
    if shuffle:
        order = _permutation(num_sequences, seed, 0)
    return Split(train=np.sort(order[:num_train]), held_out=np.sort(order[num_train:]))


class Sequences:
    """Reads sequences of equal length from a token file: the transform of a dataset of numbers.

    The ids of a sequence are its labels, too. The file is open as long as this object is used;
    `datasets` identifies the object by `key`.
    """

    def __init__(self, tokens: TokenFile, length: int) -> None:
        self._tokens = tokens
        self._length = length
        self.key = (tokens.sha256, length)

    def __call__(self, rows: dict[str, list[int]]) -> dict[str, list[Ids]]:
        """Returns ids and labels of the numbered sequences."""
        length = self._length
        ids: list[Ids] = [
            self._tokens.read(row * length, length).astype(np.int64) for row in rows["sequence"]
        ]
        return {"input_ids": ids, "labels": ids}

    def __deepcopy__(self, memo: dict[int, object]) -> Sequences:
        return self

    def __reduce__(self) -> tuple[type[tuple[object, ...]], tuple[object, ...]]:
        return tuple, (self.key,)  # Hashed by `datasets`, never read back.


def _files_of(source: DataSource) -> list[Path]:
    location = source.location
    if location.is_file():
        return [location]
    refuse_absent_data([source])
    if is_saved_dataset(location):
        return [location]
    found = _matching(location, source.pattern)
    if not found and "pattern" not in source.model_fields_set:
        found = [path for path in _matching(location, "**/*") if is_records(path)]
    excluded = _NOT_STDLIB if source.path == PYTHON_STDLIB else frozenset()
    files = []
    for path in found:
        parts = path.relative_to(location).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if not is_hidden and excluded.isdisjoint(parts) and path.is_file():
            files.append(path)
    # Files with deliberate encoding errors, for the library's own tests.
    if source.path == PYTHON_STDLIB:
        return [path for path in files if is_utf8(path)]
    return files


def _matching(location: Path, pattern: str) -> list[Path]:
    try:
        return sorted(location.glob(pattern))
    except (ValueError, NotImplementedError, OSError, RecursionError) as error:
        raise ConfigError(f"data.paths: pattern {pattern[:80]!r}: {error}") from None


class _Chunks:
    """The bytes of a file, or its first `limit_nbytes`, in chunks: UTF-8, or ConfigError."""

    def __init__(self, path: Path, limit_nbytes: int | None) -> None:
        self._path = path
        self._check = Utf8(path)
        self._limit_nbytes = limit_nbytes
        self.read_nbytes = 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                while True:
                    want = _READ_NBYTES
                    if self._limit_nbytes is not None:
                        want = min(want, self._limit_nbytes - self.read_nbytes)
                    chunk = file.read(want)
                    if not chunk:
                        # The limit may have cut a character.
                        self._check.feed(b"", is_end=self.read_nbytes != self._limit_nbytes)
                        return
                    self._check.feed(chunk)
                    self.read_nbytes += len(chunk)
                    yield chunk
        except OSError as error:
            raise ConfigError(
                f"data.paths: {self._path} cannot be read: {error.strerror}"
            ) from None


def _complete_lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yields text in chunks that end with a line, so that no chunk cuts a character or a word.

    A character cut by the limit becomes the replacement character. A line longer than a chunk stays
    in one chunk.
    """
    rest = b""
    for chunk in chunks:
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if end:
            yield rest[:end].decode(errors="replace")
            rest = rest[end:]
    if rest:
        yield rest.decode(errors="replace")


def _permutation(count: int, *stream: int) -> npt.NDArray[np.int64]:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(stream)))
    return generator.permutation(count)
