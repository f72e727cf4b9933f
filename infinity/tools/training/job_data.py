"""`[data]` as datasets: what a run trains on, what it evaluates on, and how they are recognised.

The tokens of text files lie end to end in a file without a name. Files are read in sorted order,
and a tokenizer's end-of-text token, if it has one, follows each. Each token takes one, two or four
bytes, as the vocabulary needs. Sequences have equal length; a remainder at the end is dropped.
Tokens are read back with pread, so that their pages do not count as resident: the text may be
larger than memory. A permutation drawn from the seed decides which rows are held out.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from infinity.config import DataSource, JobConfig
from infinity.errors import ConfigError, reporting
from infinity.sizes import counted
from infinity.tools.training.data_files import collect_files, read_rows, read_utf8
from infinity.tools.training.embedding import check_columns
from infinity.tools.training.images import learned_images, open_processor
from infinity.tools.training.latents import load_images
from infinity.tools.training.records import (
    answers_with_prompts,
    kind_of,
    labelled_ids,
    load_prompts,
    load_records,
    mark_conversations,
)
from infinity.tools.training.tokenizers import Ids, Tokenizer

_log = logging.getLogger("infinity")

_READ_ROWS = 1000  # At a time.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobData:
    """The datasets of a run, as its trainer takes them."""

    train: Any
    held_out: Any  # None without evaluation data.
    files: tuple[TokenFile, ...] = ()  # Of text.
    processor: Any = None  # Of images, if records have some.

    @property
    def is_ready(self) -> bool:
        """Whether rows are token ids of equal length, which TRL takes as they are."""
        return bool(self.files)


def open_data(
    config: JobConfig,
    tokenizer: Tokenizer | None,
    stack: ExitStack,
    *,
    vocab_size: int,
    directory: str | os.PathLike[str] | None = None,
) -> JobData:
    """Reads `[data]`. Token files lie in `directory` until `stack` is closed. Raises ConfigError as
    its parts do."""
    data, train_options, files = config.data, config.train, list[TokenFile]()
    processor: Any = None

    def read(sources: Sequence[DataSource], max_nbytes: int | None = None) -> tuple[Any, str, Path]:
        """Returns the rows, what they are, and the first file."""
        if tokenizer is None:
            return load_images(sources, config), "images", sources[0].location
        texts, records = collect_files(sources)
        if records and max_nbytes is not None:
            raise ConfigError(
                f"data.max_bytes limits text; {records[0]} holds records. Leave it out, or write "
                "fewer records to a file"
            )
        if texts and train_options.facts.records:
            raise ConfigError(
                f"data.paths: {texts[0]} is text; train.method = "
                f'"{train_options.method}" learns records with {train_options.facts.records}'
            )
        if records and train_options.grpo is not None:
            return load_prompts(records, tokenizer.for_records()), "prompts", records[0]
        if records:
            nonlocal processor
            rows, kind, processor = read_records(records, config, tokenizer, vocab_size)
            return rows, kind, records[0]
        file = tokenize(
            texts, tokenizer, vocab_size=vocab_size, max_nbytes=max_nbytes, directory=directory
        )
        stack.callback(file.close)
        files.append(file)
        return _sequences(file, data.sequence_length), "plain text", texts[0]

    train, kind, first = read(data.paths, data.max_bytes)
    held_out, num_split = None, 0
    if data.eval_paths:
        held_out, other, other_first = read(data.eval_paths)
        if other != kind:
            raise ConfigError(
                f"data.eval_paths: {other_first} holds {other}, and data.paths ({first}) holds "
                f"{kind}; a run evaluates what it learns, so expected {kind}"
            )
    else:
        learned, rest = split_rows(
            len(train), held_out=data.held_out, seed=data.seed, shuffle=data.shuffle
        )
        num_split = len(rest)
        if num_split:
            train, held_out = train.select(learned), train.select(rest)
    count, remedy = len(train) + num_split, "; or hold less out" * bool(num_split)
    what = f"{counted(count, 'records')}, {num_split} of them held out"
    if files:
        remedy = "; or shorter sequences, which are more"
        what = (
            f"{files[0].num_tokens} tokens, {counted(count, 'sequences')} of "
            f"data.sequence_length={data.sequence_length}, {num_split} of them held out"
        )
    if train_options.grpo is None:  # Of prompts, `measure_prompts` knows how many a step learns.
        check_amount(len(train), train_options.batch_size, what, remedy)
    if held_out and tokenizer is None:
        held_out = held_out.add_column("held_out", [True] * len(held_out))
    return JobData(train=train, held_out=held_out or None, files=tuple(files), processor=processor)


def check_amount(
    count: int, batch_size: int, what: str, remedy: str, *, num_ranks: int = 1
) -> None:
    """Raises ConfigError where `count` sequences are less than a batch of each of `num_ranks`
    ranks; `what` says of which.

    remedy: what else the user may change, after a semicolon; "" for nothing
    """
    if count < batch_size * num_ranks:
        on = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise ConfigError(
            f"the data has too little to train on: {what}: {count} are left for "
            f"train.batch_size={batch_size}{on}. Give more data or a smaller batch{remedy}"
        )


def split_rows(
    count: int, *, held_out: float, seed: int, shuffle: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the numbers of the rows that are trained on, and of those that are held out: the
    fraction `held_out` of all, at least one row if it is not zero.

    The seed selects the rows; without `shuffle` they are the last ones. Both parts are in the order
    of the data: 10 rows at 0.2 without shuffling give 0..7 and 8, 9.
    """
    num_train = count - (max(1, round(count * held_out)) if held_out else 0)
    order = np.arange(count)
    if shuffle:
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 0)))).permutation(
            count
        )
    return np.sort(order[:num_train]), np.sort(order[num_train:])


def read_records(
    paths: list[Path], config: JobConfig, tokenizer: Tokenizer, vocab_size: int
) -> tuple[Any, str, Any]:
    """Returns records as they are trained on, what they are, and the processor of their images,
    None if they have none. Raises ConfigError that names the first record that cannot be learned.
    """
    place = str(paths[0])
    if len(paths) > 1:
        place += f" and {len(paths) - 1} more files, counted together"
    method, labels, fast = config.train.method, config.train.labels, tokenizer.for_records()
    if config.data.packing and config.train.facts.purpose != "generates text":
        raise ConfigError(
            f'data.packing: train.method = "{method}" takes each record by itself; expected '
            "packing = false"
        )
    found = load_records(paths, vocab_size=vocab_size, labels=labels)
    if labels:
        return labelled_ids(found, fast, config.data.sequence_length, place), "labelled texts", None
    kind = kind_of(found, method=method, place=place)
    if kind in ("texts", "tokens") and "label" in next(read_rows(paths[0], list), ()):
        _log.warning('%s: label is left out; train.method = "classify" learns it', place)
    if config.train.embed is not None:
        check_columns(found.column_names, config.train.embed, place, config.train.batch_size)
        return found, kind, None
    only = config.data.assistant_only_loss
    if "images" not in found.column_names:
        made = mark_conversations(found, fast, place, kind=kind, assistant_only=only)
        return answers_with_prompts(made) if method == "reward" else made, kind, None
    if config.data.packing:
        raise ConfigError(
            f"data.packing: {place} holds records with images, which TRL does not pack; expected "
            "packing = false"
        )
    processor, batch_size = open_processor(tokenizer), config.train.batch_size
    made = learned_images(
        found, kind, processor, place, assistant_only=only, length=config.data.sequence_length,
        batch_size=min(batch_size, config.schedule.micro_batch or batch_size),
    )  # fmt: skip
    return made, f"{kind} with images", processor


def measure(dataset: Any, files: Sequence[TokenFile], length: int) -> tuple[int, int, str]:
    """Returns of the tokens of a dataset that TRL has prepared, or of sequences of a token file,
    their number, the largest id, and the SHA-256 of all in order.

    The ids of token files were compared with the vocabulary as they were written. Records with
    images have these facts already.
    """
    if files:
        return len(dataset) * length, 0, files[0].sha256
    import pyarrow.compute as pc

    if "images" in dataset.column_names:
        digest = hashlib.sha256("".join(dataset["sha256"]).encode()).hexdigest()
        return sum(dataset["num_tokens"]), max(dataset["largest_id"]), digest
    columns = [
        name for name in sorted(dataset.column_names) if name == "labels" or name.endswith("_ids")
    ]
    sha256, count, largest = hashlib.sha256(), 0, 0
    for name in sorted({"label", "margin", "score"} & {*dataset.column_names}):
        sha256.update(json.dumps(dataset[name][:]).encode())
    for rows in dataset.select_columns(columns).with_format("arrow").iter(_READ_ROWS):
        for name in columns:
            column = rows.column(name).combine_chunks()
            for part in (pc.list_value_length(column), column.flatten()):
                sha256.update(part.to_numpy(zero_copy_only=False).astype(np.int64).tobytes())
            if name.endswith("_ids") and name != "token_type_ids":
                ids = column.flatten().to_numpy(zero_copy_only=False)
                count, largest = count + len(ids), max(largest, int(ids.max(initial=0)))
    return count, largest, sha256.hexdigest()


def check_ends(datasets: Iterable[Any], end: int) -> None:
    """Raises ConfigError for a text without the token `end`, or with another number of these than
    the first one: the head reads a batch of texts there."""
    most = 0
    for dataset in datasets:
        names = {"input_ids", "chosen_ids", "rejected_ids"} & {*dataset.column_names}
        for number, row in enumerate(dataset.select_columns([*names]), 1):
            for count in (ids.count(end) for ids in row.values()):
                most = most or count
                if not 0 < count == most:
                    raise ConfigError(
                        f"data.paths: record {number} of those that are learned has {count} end "
                        f"tokens ({end}), at which the head reads a text; expected "
                        f"{most or 'one'}, by a tokenizer that ends each text"
                    )


def refuse_stranger(token_id: int, tokenizer: Tokenizer, vocab_size: int, place: str) -> None:
    """Raises ConfigError for an id without an embedding."""
    if token_id >= vocab_size:
        raise ConfigError(
            f"{place}: token {token_id} ({tokenizer.token(token_id)}) of tokenizer "
            f"{tokenizer.name} is outside the model's vocabulary of {vocab_size}; the tokenizer "
            f"has {tokenizer.vocab_size} tokens. Use the model's own tokenizer, or a model whose "
            "vocab_size is large enough"
        )


# -- Text ------------------------------------------------------------------------------------------


class TokenFile:
    """Token ids in a temporary file without a name, which disappears with the process."""

    def __init__(self, *, vocab_size: int, directory: str | os.PathLike[str] | None = None) -> None:
        self.dtype = np.dtype(
            np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32
        )
        self.num_tokens = 0
        self._sha256 = hashlib.sha256()
        self._place = os.fspath(directory or tempfile.gettempdir())
        with reporting("create tokens", self._place):
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115, closed by close().
                dir=directory, prefix=".tokens-"
            )

    def append(self, ids: Ids) -> None:
        """Appends ids. Raises StorageError."""
        content = memoryview(ids.astype(self.dtype, copy=False).tobytes())
        self._sha256.update(content)
        with reporting("write tokens", self._place):
            while content:
                content = content[os.write(self._file.fileno(), content) :]
        self.num_tokens += len(ids)

    def read(self, start: int, count: int) -> Ids:
        """Returns the ids [start, start + count) as a new array of the file's dtype. Raises
        StorageError."""
        assert start >= 0 and start + count <= self.num_tokens, (start, count, self.num_tokens)
        itemsize = self.dtype.itemsize
        with reporting("read tokens", self._place):
            content = os.pread(self._file.fileno(), count * itemsize, start * itemsize)
            if len(content) < count * itemsize:
                raise OSError(errno.EIO, "the file of tokens was shortened")
        return np.frombuffer(content, dtype=self.dtype)

    @property
    def sha256(self) -> str:
        """Returns the digest of all tokens so far, as they lie in the file."""
        return self._sha256.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __deepcopy__(self, memo: dict[int, object]) -> TokenFile:
        return self

    def __reduce__(self) -> tuple[type[tuple[object, ...]], tuple[object, ...]]:
        return tuple, ((self.sha256,),)  # Hashed by `datasets`, never read back.


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
            for ids in tokenizer.encode_file(read_utf8(path, left_nbytes)):
                refuse_stranger(int(ids.max(initial=0)), tokenizer, vocab_size, str(path))
                tokens.append(ids)
            if left_nbytes is not None:
                left_nbytes -= path.stat().st_size
        if tokens.num_tokens == 0:
            raise ConfigError(
                f"data.paths: {len(files)} files were read, but there is no text in them, "
                f"e.g. {files[0]}"
            )
    except BaseException:
        tokens.close()
        raise
    return tokens


def _sequences(tokens: TokenFile, length: int) -> Any:
    """Returns a dataset of sequences of equal length, which are read from the file when they are
    asked for. The file is open as long as the dataset is used."""
    import datasets

    rows = datasets.Dataset.from_dict({"sequence": np.arange(tokens.num_tokens // length)})
    return rows.with_transform(partial(_read_sequences, tokens, length))


def _read_sequences(
    tokens: TokenFile, length: int, rows: dict[str, list[int]]
) -> dict[str, list[Ids]]:
    """Returns the ids of the numbered sequences, which are their labels, too."""
    numbers = rows["sequence"]
    ids: list[Ids] = [tokens.read(row * length, length).astype(np.int64) for row in numbers]
    return {"input_ids": ids, "labels": ids}
