"""The tokens of text files, end to end in a file without a name, and sequences cut from it.

Files are read in sorted order. Each token takes one, two or four bytes, as the vocabulary needs.
Sequences have equal length; a remainder at the end is dropped. Tokens are read back with pread, so
that their pages do not count as resident: the text may be larger than memory. A permutation drawn
from the seed decides which sequences are held out.

Bytes are joined without changes. If a Hugging Face tokenizer has an end-of-text token, it follows
each file. The module uses numpy and does not import torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from infinity.errors import ConfigError, StorageError
from infinity.sizes import MIB
from infinity.tools.training.source_files import (
    Utf8,
)
from infinity.tools.training.tokenizers import Ids, Tokenizer


class TokenFile:
    """Token ids in a temporary file without a name, which disappears with the process."""

    def __init__(
        self,
        *,
        vocab_size: int,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self.dtype = np.dtype(
            np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32
        )
        self.num_tokens = 0
        self._sha256 = hashlib.sha256()
        self._directory = directory
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115, closed by close().
                dir=directory, prefix=".tokens-"
            )
        except OSError as error:
            raise self._failed("create", error) from None

    def append(self, ids: Ids) -> None:
        """Appends ids. Raises StorageError."""
        content = memoryview(ids.astype(self.dtype, copy=False).tobytes())
        self._sha256.update(content)
        try:
            while content:
                content = content[os.write(self._file.fileno(), content) :]
        except OSError as error:
            raise self._failed("write", error) from None
        self.num_tokens += len(ids)

    def read(self, start: int, count: int) -> Ids:
        """Returns the ids [start, start + count) as a new array of the file's dtype. Raises
        StorageError."""
        assert start >= 0 and start + count <= self.num_tokens, (start, count, self.num_tokens)
        itemsize = self.dtype.itemsize
        try:
            content = os.pread(self._file.fileno(), count * itemsize, start * itemsize)
        except OSError as error:
            raise self._failed("read", error) from None
        if len(content) < count * itemsize:
            raise self._failed("read", OSError(errno.EIO, "the file of tokens was shortened"))
        return np.frombuffer(content, dtype=self.dtype)

    @property
    def sha256(self) -> str:
        """Returns the digest of all tokens so far, as they lie in the file."""
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _failed(self, operation: str, error: OSError) -> StorageError:
        where = os.fspath(self._directory or tempfile.gettempdir())
        return StorageError(error.errno or 0, operation=f"{operation} tokens", path=str(where))


_READ_NBYTES = MIB


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


def _permutation(count: int, *stream: int) -> npt.NDArray[np.int64]:
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(stream)))
    return generator.permutation(count)
