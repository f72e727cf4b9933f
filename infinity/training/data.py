"""Makes batches of token ids from text files, deterministic for the same files and seed.

Files are read in sorted order. Their tokens lie end to end in one file (one, two or four bytes per
token, as the vocabulary needs) and are cut into sequences of equal length; a remainder at the end
is dropped. A permutation drawn from the seed decides which sequences are held out and, epoch by
epoch, the order of the others. Tokens are read back with pread, so that their pages do not count as
resident.

Bytes are joined without changes. If a Hugging Face tokenizer has an end-of-text token, it follows
each file. Files of conversations, JSON lines with `messages`, become marked sequences instead: see
`infinity.training.chat`. The module uses numpy and does not import torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from infinity.config import PYTHON_STDLIB, Data, DataSource
from infinity.errors import ConfigError
from infinity.sizes import MIB
from infinity.training.chat import conversations, is_chat_file
from infinity.training.text import Utf8, is_utf8, refuse_other_formats
from infinity.training.token_file import Ids, TokenFile

_log = logging.getLogger(__name__)

_READ_NBYTES = MIB
# Below the directory of the standard library, but not part of it.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


def collect_files(sources: Sequence[DataSource]) -> list[Path]:
    """Returns every file of every source once, sorted within each source.

    Hidden files and directories are skipped. Raises ConfigError that names a missing source, a
    source without a matching file, or the first file that is no text. All files are conversations,
    or none is.
    """
    files: dict[Path, None] = {}
    for source in sources:
        found = _files_of(source)
        if not found:
            raise ConfigError(
                f"data.paths: no file below {source.location} matches {source.pattern!r}"
            )
        files.update(dict.fromkeys(found))
    chats = [file for file in files if is_chat_file(file)]
    if chats and len(chats) == len(files):
        return list(files)
    if chats:
        other = next(file for file in files if file not in chats)
        raise ConfigError(
            f"data.paths: {chats[0]} holds conversations and {other} does not; expected one kind"
        )
    as_json = [file for file in files if refuse_other_formats(file)]
    if as_json:
        _log.warning(
            "data.paths: the lines of %s (%d files in all) are JSON objects; braces, quotes and "
            "keys are learned as they stand there", as_json[0], len(as_json),
        )  # fmt: skip
    return list(files)


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


class ByteTokenizer:
    """A tokenizer whose 256 tokens are the UTF-8 bytes."""

    name = "bytes"
    vocab_size = 256

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
        return repr(bytes([token_id]))


class HuggingFaceTokenizer:
    """The tokenizer of a local directory. `tokenizer` is the object of transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        if not path.is_dir():
            raise ConfigError(f"data.tokenizer: {path} is no directory")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # A broken directory makes transformers raise any exception.
            raise ConfigError(f"data.tokenizer: {path} cannot be loaded: {error}") from error
        self.name = str(path)
        self.vocab_size = len(self.tokenizer)

    def encode_file(self, chunks: Iterator[bytes]) -> Iterator[Ids]:
        """Yields the ids of a file, line by line, and the end-of-text token at its end."""
        for text in _whole_lines(chunks):
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
        return repr(self.tokenizer.convert_ids_to_tokens(token_id))


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


def tokenize_conversations(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    sequence_length: int,
    max_nbytes: int | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> TokenFile:
    """Writes the marked sequences of all conversations, each `sequence_length` entries.

    Raises ConfigError as `tokenize` and `infinity.training.chat.conversations` do.
    """
    tokens = TokenFile(vocab_size=vocab_size, is_marked=True, directory=directory)
    left_nbytes = max_nbytes
    try:
        for path in files:
            if left_nbytes is not None and left_nbytes <= 0:
                break
            for marks in conversations(
                path, tokenizer, sequence_length=sequence_length, max_nbytes=left_nbytes
            ):
                _refuse_strangers(np.where(marks < 0, ~marks, marks), tokenizer, vocab_size, path)
                tokens.append(marks)
            if left_nbytes is not None:
                left_nbytes -= path.stat().st_size
        if tokens.num_tokens == 0:
            raise ConfigError(
                f"data.paths: {len(files)} files were read, but no conversation in them has a "
                f"message of an assistant, e.g. {files[0]}"
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


class Batches:
    """Batches of sequences. The seed and its number alone determine a batch.

    A batch is (batch_size, sequence_length) int64. Labels are the ids themselves, because Hugging
    Face models shift them; with `is_marked`, `infinity.training.marks.split_marks` gives both. The
    remainder of an epoch that does not fill a batch is skipped in that epoch.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        sequence_length: int,
        batch_size: int,
        held_out: float,
        seed: int,
        shuffle: bool,
    ) -> None:
        num_sequences = tokens.num_tokens // sequence_length
        split = split_sequences(num_sequences, held_out=held_out, seed=seed, shuffle=shuffle)
        if len(split.train) < batch_size:
            raise ConfigError(
                f"the text has {tokens.num_tokens} tokens, {num_sequences} sequences of "
                f"data.sequence_length={sequence_length}, {len(split.held_out)} of them held out: "
                f"{len(split.train)} are left for train.batch_size={batch_size}. Give more text, "
                "shorter sequences or a smaller batch"
            )
        self.split = split
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.batches_per_epoch = len(split.train) // batch_size
        self.num_tokens = tokens.num_tokens
        self.tokens_sha256 = tokens.sha256
        self.is_marked = tokens.is_marked
        self._tokens = tokens
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = split.train

    def train_batch(self, index: int) -> npt.NDArray[np.int64]:
        """Returns batch number `index`, counted from 0 through all epochs."""
        epoch, position = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self.split.train
            if self._shuffle:
                # Stream 0 made the split; epochs use the streams after it.
                self._order = self._order[_permutation(len(self._order), self._seed, epoch + 1)]
        start = position * self.batch_size
        return self._gather(self._order[start : start + self.batch_size])

    def held_out_batches(self, limit: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yields the first `limit` held-out batches, always the same ones; the last may be
        smaller."""
        held_out = self.split.held_out
        for start in range(0, min(len(held_out), limit * self.batch_size), self.batch_size):
            yield self._gather(held_out[start : start + self.batch_size])

    def close(self) -> None:
        """Closes the file of tokens."""
        self._tokens.close()

    def _gather(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        length = self.sequence_length
        rows = [self._tokens.read(int(sequence) * length, length) for sequence in sequences]
        return np.stack(rows).astype(np.int64)


def open_batches(
    data: Data,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    vocab_size: int,
    directory: str | os.PathLike[str] | None = None,
) -> Batches:
    """Does everything from `[data]` to batches. Raises ConfigError as its parts do."""
    files = collect_files(data.paths)
    if is_chat_file(files[0]):
        tokens = tokenize_conversations(
            files,
            tokenizer,
            vocab_size=vocab_size,
            sequence_length=data.sequence_length,
            max_nbytes=data.max_bytes,
            directory=directory,
        )
    else:
        tokens = tokenize(
            files,
            tokenizer,
            vocab_size=vocab_size,
            max_nbytes=data.max_bytes,
            directory=directory,
        )
    try:
        return Batches(
            tokens,
            sequence_length=data.sequence_length,
            batch_size=batch_size,
            held_out=data.held_out,
            seed=data.seed,
            shuffle=data.shuffle,
        )
    except BaseException:
        tokens.close()
        raise


def _files_of(source: DataSource) -> list[Path]:
    location = source.location
    if location.is_file():
        return [location]
    if not location.is_dir():
        raise ConfigError(f"data.paths: {location} does not exist")
    excluded = _NOT_STDLIB if source.path == PYTHON_STDLIB else frozenset()
    try:
        found = sorted(location.glob(source.pattern))
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"data.paths: pattern {source.pattern!r}: {error}") from None
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


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[str]:
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
