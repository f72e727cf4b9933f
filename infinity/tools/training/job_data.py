"""`[data]` as datasets: what a run trains on, what it evaluates on, and how they are recognised."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.config import Data, DataSource, SwapConfig
from infinity.errors import ConfigError
from infinity.tools.training.records import Kind, kind_of, load_records, mark_conversations
from infinity.tools.training.source_files import collect_files
from infinity.tools.training.token_file import Sequences, TokenFile, split_sequences, tokenize
from infinity.tools.training.tokenizers import Tokenizer

_READ_ROWS = 1000  # At a time.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobData:
    """The datasets of a run, as its trainer takes them; `close` removes the token files.

    is_ready: rows are token ids of equal length, which TRL takes as they are
    """

    train: Any
    held_out: Any  # None without evaluation data.
    is_ready: bool
    files: tuple[TokenFile, ...] = ()

    def close(self) -> None:
        """Closes the token files, which removes them."""
        for file in self.files:
            file.close()


def open_data(
    config: SwapConfig,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    directory: str | os.PathLike[str] | None = None,
) -> JobData:
    """Reads `[data]`. Token files lie in `directory`. Raises ConfigError as its parts do."""
    assert config.data is not None and config.train is not None
    data = config.data
    texts, records = _sources(data.paths, config)
    if texts:
        found = _open_text(data, texts, tokenizer, vocab_size, directory)
        try:
            _check_text(found, data, config.train.batch_size)
        except BaseException:
            found.close()
            raise
        return found
    train, kind = _read(records, config, tokenizer, vocab_size)
    held_out = None
    if data.eval_paths:
        others = _sources(data.eval_paths, config)[1]
        if not others:
            raise ConfigError("data.eval_paths: expected records, as data.paths holds; got text")
        held_out, other = _read(others, config, tokenizer, vocab_size)
        if other != kind:
            raise ConfigError(
                f"data.eval_paths: {others[0]} holds {other}, and data.paths ({records[0]}) holds "
                f"{kind}; a run evaluates what it learns, so expected {kind}"
            )
    else:
        split = split_sequences(
            len(train), held_out=data.held_out, seed=data.seed, shuffle=data.shuffle
        )
        if len(split.held_out):
            held_out = train.select(split.held_out)
            train = train.select(split.train)
    num_held_out = 0 if held_out is None else len(held_out)
    what = f"{len(train) + num_held_out} records, {num_held_out} of them held out"
    check_amount(
        len(train), config.train.batch_size, what, "; or hold less out" * bool(num_held_out)
    )
    return JobData(train=train, held_out=held_out, is_ready=False)


def check_amount(count: int, batch_size: int, what: str, remedy: str) -> None:
    """Raises ConfigError where `count` sequences are less than a batch; `what` says of which.

    remedy: what else the user may change, after a semicolon; "" for nothing
    """
    if count < batch_size:
        raise ConfigError(
            f"the data has too little to train on: {what}: {count} are left for "
            f"train.batch_size={batch_size}. Give more data or a smaller batch{remedy}"
        )


def _check_text(found: JobData, data: Data, batch_size: int) -> None:
    num_held_out = 0 if found.held_out is None or data.eval_paths else len(found.held_out)
    num_sequences = len(found.train) + num_held_out
    check_amount(
        len(found.train),
        batch_size,
        f"{found.files[0].num_tokens} tokens, {num_sequences} sequences of "
        f"data.sequence_length={data.sequence_length}, {num_held_out} of them held out",
        "; or shorter sequences, which are more",
    )


def _sources(sources: Sequence[DataSource], config: SwapConfig) -> tuple[list[Path], list[Path]]:
    found = collect_files(sources)
    assert config.data is not None and config.train is not None
    if found.records and config.data.max_bytes is not None:
        raise ConfigError(
            f"data.max_bytes limits text; {found.records[0]} holds records. Leave it out, or write "
            "fewer records to a file"
        )
    if found.texts and config.train.method == "dpo":
        raise ConfigError(
            f'data.paths: {found.texts[0]} is text; train.method = "dpo" learns records with '
            "chosen and rejected"
        )
    return found.texts, found.records


def _open_text(
    data: Data,
    texts: list[Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    directory: str | os.PathLike[str] | None,
) -> JobData:
    tokens = tokenize(
        texts, tokenizer, vocab_size=vocab_size, max_nbytes=data.max_bytes, directory=directory
    )
    files = [tokens]
    try:
        length = data.sequence_length
        num_sequences = tokens.num_tokens // length
        if data.eval_paths:
            others = collect_files(data.eval_paths)
            if others.records:
                raise ConfigError(
                    "data.eval_paths: expected text, as data.paths holds; got records"
                )
            files.append(
                tokenize(others.texts, tokenizer, vocab_size=vocab_size, directory=directory)
            )
            train = _sequences(tokens, np.arange(num_sequences), length)
            held_out = _sequences(files[1], np.arange(files[1].num_tokens // length), length)
        else:
            split = split_sequences(
                num_sequences, held_out=data.held_out, seed=data.seed, shuffle=data.shuffle
            )
            train = _sequences(tokens, split.train, length)
            held_out = _sequences(tokens, split.held_out, length)
    except BaseException:
        for file in files:
            file.close()
        raise
    return JobData(
        train=train,
        held_out=held_out if len(held_out) else None,
        is_ready=True,
        files=tuple(files),
    )


def _sequences(tokens: TokenFile, numbers: npt.NDArray[np.int64], length: int) -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"sequence": numbers})
    return rows.with_transform(Sequences(tokens, length))


def _read(
    paths: list[Path], config: SwapConfig, tokenizer: Tokenizer, vocab_size: int
) -> tuple[Any, Kind]:
    assert config.data is not None and config.train is not None
    place = str(paths[0])
    if len(paths) > 1:
        place += f" and {len(paths) - 1} more files, counted together"
    found = load_records(paths, vocab_size=vocab_size)
    kind = kind_of(found, method=config.train.method, place=place)
    marked, _ = mark_conversations(
        found, tokenizer.for_records(), place, kind=kind,
        assistant_only=config.data.assistant_only_loss,
    )  # fmt: skip
    return marked, kind


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that a run trains on: how many, the largest id, the SHA-256 of all in order."""

    count: int
    largest: int
    sha256: str


def measure(dataset: Any, files: Sequence[TokenFile], length: int) -> Tokens:
    """Returns the tokens of a dataset that TRL has prepared, or of sequences of a token file.

    The ids of token files were compared with the vocabulary as they were written.
    """
    if files:
        return Tokens(len(dataset) * length, 0, files[0].sha256)
    import pyarrow.compute as pc

    columns = [name for name in sorted(dataset.column_names) if _is_measured(name)]
    sha256, count, largest = hashlib.sha256(), 0, 0
    for rows in dataset.select_columns(columns).with_format("arrow").iter(_READ_ROWS):
        for name in columns:
            column = rows.column(name).combine_chunks()
            for part in (pc.list_value_length(column), column.flatten()):
                sha256.update(part.to_numpy(zero_copy_only=False).astype(np.int64).tobytes())
            if name.endswith("_ids"):
                ids = column.flatten().to_numpy(zero_copy_only=False)
                count, largest = count + len(ids), max(largest, int(ids.max(initial=0)))
    return Tokens(count, largest, sha256.hexdigest())


def refuse_strangers(tokens: Tokens, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError for an id without an embedding."""
    if tokens.largest >= vocab_size:
        raise ConfigError(
            f"data.paths: token {tokens.largest} ({tokenizer.token(tokens.largest)}) of tokenizer "
            f"{tokenizer.name} is outside the model's vocabulary of {vocab_size}; the tokenizer "
            f"has {tokenizer.vocab_size} tokens. Use the model's own tokenizer"
        )


def _is_measured(name: str) -> bool:
    return name == "labels" or name.endswith("_ids")
