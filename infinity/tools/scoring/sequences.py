"""The files of `infinity score` as sequences of token ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infinity.config import DataSource, JobConfig, SwapConfig
from infinity.config.paths import with_located_model
from infinity.config.schema import changed
from infinity.config.source import read_file
from infinity.errors import ConfigError
from infinity.tools.training.chat import CHATML, encode_chats, num_shared
from infinity.tools.training.data_files import collect_files, read_rows, read_utf8
from infinity.tools.training.records import NOT_LEARNED, has_messages, kind_of_columns, load_records
from infinity.tools.training.settle import settle, tokenizer_of
from infinity.tools.training.tokenizers import Tokenizer, open_same, open_tokenizer, refusing_texts

_log = logging.getLogger("infinity")


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """The tokens of a record, or of a part of a text file.

    record: its number in all files, from 0 on
    name: the record's `id`, or the path of the text file
    mask: of the tokens that were an answer or completion; None if all tokens are of one kind
    """

    record: int
    name: Any
    ids: list[int]
    mask: list[int] | None = None


def read_sequences(
    paths: Sequence[Path], directory: Path, vocab_size: int, max_length: int | None
) -> list[ScoredSequence]:
    """Reads texts, conversations, completions or token ids. Text files are cut into pieces of
    `max_length` tokens; a record that is longer is refused. The file of a run of `infinity train`
    stands for the sequences that it learns and evaluates on. `directory`: of the model.

    Raises ConfigError, which names the file and the record.
    """
    if len(paths) == 1 and paths[0].suffix in (".toml", ".yaml", ".yml"):
        found = _of_run(paths[0], directory)
    else:
        choice = tokenizer_of(directory)
        if choice.value == "bytes":
            _log.warning("%s", choice)
        tokenizer = open_tokenizer(choice.value)
        texts, records = collect_files([DataSource.model_validate(str(path)) for path in paths])
        if texts:
            with suppress(ConfigError):  # Of a tokenizer that lacks this letter.
                if tokenizer.begin("a") != tokenizer.encode("a"):
                    _log.warning(
                        "the tokenizer begins a text with a token of its own, and pieces of a text "
                        'file have none; {"text": ...} in a .jsonl file has it'
                    )
            found = list(_of_texts(texts, tokenizer, max_length))
        else:
            with refusing_texts(tokenizer.name):
                found = list(_of_records(records, tokenizer, vocab_size))
    if not found:
        raise ConfigError(f"{paths[0]}: expected two tokens or more, in pieces of at least two")
    for sequence in found:
        if max_length is not None and len(sequence.ids) > max_length:
            raise ConfigError(
                f"{name_in(paths, sequence)} has {len(sequence.ids)} tokens, more than "
                f"{max_length}; leave it out, or cut it"
            )
    return found


def name_in(paths: Sequence[Path], sequence: ScoredSequence) -> str:
    """Returns the name of a sequence of `read_sequences` in errors."""
    return f"{', '.join(map(str, paths))}: record {sequence.record + 1}"


def _of_run(path: Path, directory: Path) -> list[ScoredSequence]:
    """Returns the sequences as TRL prepares them for the run, which is not begun: those of one
    adapter after the other."""
    from infinity.tools.training.job import read_model
    from infinity.tools.training.job_data import open_data
    from infinity.tools.training.model import build_model
    from infinity.tools.training.ranks import JobRank
    from infinity.tools.training.trainer import make_trainer

    found = with_located_model(SwapConfig.from_table(*read_file(path)))
    if found.adapter is not None and found.adapter.experts_full:
        found = changed(found, {"adapter": None})  # Its census may be what is made now.
    rows: list[tuple[list[int], list[int] | None]] = []
    for config in map(settle, JobConfig.of(found).of_adapters()):
        if config.train.facts.trainer != "SFTTrainer" or config.data.packing:
            raise ConfigError(
                f'{path}: expected a run of single sequences, got train.method = "'
                f'{config.train.method}" or data.packing'
            )
        with ExitStack() as stack, TemporaryDirectory() as place:  # The trainer makes its own.
            config = changed(config, {"output.directory": Path(place)})
            plan, tokenizer, _ = read_model(config)
            assert tokenizer is not None
            open_same(tokenizer, directory, str(path))
            data = open_data(config, tokenizer, stack, vocab_size=plan.vocab_size)
            trainer = make_trainer(config, build_model(plan, config), data, tokenizer, JobRank())
            for dataset in filter(None, (trainer.train_dataset, trainer.eval_dataset)):
                rows += [([*map(int, row["input_ids"])], _mask_of(row)) for row in dataset]
    has_masks = any(mask is not None and 0 in mask for _, mask in rows)
    return [
        ScoredSequence(number, None, ids, mask if has_masks else None)
        for number, (ids, mask) in enumerate(rows)
    ]


def _mask_of(row: Any) -> list[int] | None:
    """Returns 1 for each token that a row says is learned; None where it says nothing. TRL writes
    all its masks as `labels`."""
    if row.get("labels") is not None:
        return [int(label != NOT_LEARNED) for label in row["labels"]]
    mask: list[int] | None = row.get("completion_mask") or row.get("assistant_masks")
    return mask


def _of_texts(
    files: Sequence[Path], tokenizer: Tokenizer, max_length: int | None
) -> Iterator[ScoredSequence]:
    record = 0
    for path in files:
        ids = [int(token) for part in tokenizer.encode_file(read_utf8(path)) for token in part]
        length = max_length or max(2, len(ids))
        for start in range(0, len(ids), length):
            part = ids[start : start + length]
            if len(part) > 1:  # A token is scored by those before it.
                yield ScoredSequence(record, str(path), part)
                record += 1


def _of_records(
    paths: list[Path], tokenizer: Tokenizer, vocab_size: int
) -> Iterator[ScoredSequence]:
    dataset, place = load_records(paths, vocab_size=vocab_size), str(paths[0])
    kind = kind_of_columns(dataset.column_names, place)
    if kind == "preferences":
        raise ConfigError(
            f"{place} holds preferences; write chosen and rejected as completions to score both"
        )
    fast = tokenizer.for_records()
    names = list(_names(paths))
    if "input_ids" not in dataset.column_names and has_messages(dataset):
        fast.chat_template = fast.chat_template or CHATML
        dataset = encode_chats(dataset, kind, fast, place, assistant_only=False)
    for number, row in enumerate(dataset):
        record = row.get("record", number)
        name = names[record] if names else None
        if "input_ids" in row:
            yield ScoredSequence(record, name, list(row["input_ids"]), _mask_of(row))
        elif kind == "texts":
            yield ScoredSequence(record, name, list(fast(row["text"])["input_ids"]))
        else:
            prompt = list(fast(row["prompt"])["input_ids"])
            ids = list(fast(row["prompt"] + row["completion"])["input_ids"])
            shared = num_shared(prompt, ids)
            yield ScoredSequence(record, name, ids, [0] * shared + [1] * (len(ids) - shared))


def _names(paths: Sequence[Path]) -> Iterator[Any]:
    """Yields the `id` of every record, as a text where JSON lacks such a value; nothing where no
    file has that column."""

    def only(columns: list[str]) -> list[str]:
        return [name for name in columns if name == "id"] or columns[:1]

    found = [row.get("id") for path in paths for row in read_rows(path, only)]
    if any(name is not None for name in found):
        yield from json.loads(json.dumps(found, default=str))  # Parquet has dates and bytes.
