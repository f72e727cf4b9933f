"""Counts the tokens of a user's data, for the length of a sequence and the number of steps.

The first records of every file are tokenised; the others count by their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from infinity.config import DataSource, SwapConfig
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import MOST_TOKENS, config_of_directory, names_scorer
from infinity.simulate.job import Batch, batch_of
from infinity.sizes import MIB
from infinity.tools.training.data_files import collect_files, is_records, read_rows, texts_in
from infinity.tools.training.images import has_images, learned_images, open_processor
from infinity.tools.training.job_data import refuse_stranger
from infinity.tools.training.latents import captioned, has_videos
from infinity.tools.training.records import (
    first_record,
    kind_of_columns,
    learned_rows,
    load_records,
    mark_conversations,
    needed_columns,
)
from infinity.tools.training.tokenizers import Tokenizer, open_tokenizer

Table = dict[str, Any]

IMAGES = "records with images"
CAPTIONED = ("images with captions", "videos with captions")
_FRAMES = 33
_NOUNS = ("conversations", "preferences", "pairs")  # Other kinds are "records".
_SAMPLE_NBYTES = 2 * MIB  # Of each file.
_CHUNK_NBYTES = 8 * MIB
_MARKS = 8  # Tokens that a template writes around a message,
_MARKS_NBYTES = 24  # and the bytes of those of ChatML, which bytes get.
_TURNS = ("messages", "prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class DataFacts:
    """The content of the files. For text, `num_records` is 0. `longest`: the tokens of the longest
    record that was tokenised. `is_exact`: no token is guessed. `train`: `train_keys`."""

    noun: str  # One of `_NOUNS`, "records", "text" or a name above.
    num_records: int
    num_tokens: int
    longest: int
    is_exact: bool
    train: Table = field(default_factory=dict)


def captioned_facts(paths: Sequence[Path]) -> DataFacts:
    """Returns the facts of images or videos with captions, for a transformer of diffusers. Raises
    ConfigError as a run."""
    sources = sources_of(paths)
    are_videos = has_videos(sources)
    count = len(captioned(sources, are_videos=are_videos))
    options: Table = {"resolution": 512, "aspect": "keep"}
    if are_videos:
        options["frames"] = _FRAMES
    keys = {"method": "diffusion", "diffusion": options}
    return DataFacts(CAPTIONED[are_videos], count, 0, 0, is_exact=True, train=keys)


def train_keys(paths: Sequence[Path], model: Path | None = None) -> Table:
    """Returns the keys of `[train]` that the records of these files decide: a method other than
    "sft", and what it needs. If `model` has a head, the labels are its own. Raises ConfigError for
    labels that cannot be told apart."""
    records, columns = list[Path](), list[str]()
    with suppress(ConfigError):  # Raised again when the data is counted.
        records = collect_files(sources_of(paths))[1]
        columns = [*first_record(records)] if records else []
    kind = kind_of_columns(columns, str(records[0])) if columns else ""
    if kind == "preferences":
        return {"method": "dpo"}
    if kind == "pairs":
        loss = "CoSENTLoss" if "score" in columns else "MultipleNegativesRankingLoss"
        return {"method": "embed", "embed": {"loss": loss}}
    labels = _labels_of(records, model) if kind == "texts" else []
    return {"method": "classify", "labels": labels} if labels else {}


def _labels_of(records: Sequence[Path], model: Path | None) -> list[str]:
    """Returns the names of the labels of all texts, none if the first text has no label."""
    places: dict[str | int | None, str] = {}
    for file in records:
        for number, row in enumerate(read_rows(file, list), 1):
            value = row.get("label")
            if value is None and not places:
                return []
            place = f"{'none' if value is None else repr(value)} in record {number} of {file.name}"
            places.setdefault(value if type(value) in (str, int) else None, place)
    found = places.keys()
    hf_config = config_of_directory(model) if model is not None else None
    known = [*hf_config.id2label.values()] if hf_config and names_scorer(hf_config) else []
    if found <= {*known} or found <= {*range(len(known))}:
        return known
    if len(found) > 1 and all(isinstance(value, str) for value in found):
        return sorted(map(str, found))
    if len(found) > 1 and found == {*range(len(found))}:
        return [str(number) for number in range(len(found))]
    raise ConfigError(
        f"data.paths: the labels of {records[0]} cannot be told apart: expected two names or more, "
        "or all numbers from 0 on, in each record; got "
        f"{', '.join([*places.values()][:5])}. Change them, or remove them to learn the texts"
    )


def sources_of(paths: Sequence[Path]) -> list[DataSource]:
    """Returns files and directories as `data.paths` means them."""
    return [DataSource.model_validate(str(path.resolve())) for path in paths]


def read_data(
    paths: Sequence[Path], tokenizer: Tokenizer, length: int | None = None,
    vocab_size: int = MOST_TOKENS, train: Table | None = None,
) -> DataFacts:  # fmt: skip
    """Returns the facts of files and directories, as `data.paths` means them. Raises ConfigError
    for what `infinity train` would refuse, with sequences of at most `length` tokens. `train` are
    their `train_keys`, if these are known."""
    train = train_keys(paths) if train is None else train
    texts, records = collect_files(sources_of(paths))
    labels = tuple(train.get("labels", ()))
    if records:
        first_record(records, vocab_size=vocab_size, labels=labels)
    if records and not labels and (fast := tokenizer.for_records()).chat_template:
        first, place = load_records(records, most=1), str(records[0])
        if "images" not in first.column_names:
            kind = kind_of_columns(first.column_names, place)
            mark_conversations(first, fast, place, assistant_only=True, kind=kind)
    found = [_read(file, tokenizer, length, vocab_size, labels) for file in chain(texts, records)]
    num_tokens = sum(facts.num_tokens for facts in found)
    if not num_tokens:
        raise ConfigError(f"data.paths: {(texts + records)[0]} has no token to learn; give more")
    return DataFacts(
        noun=next(facts.noun for facts in found if facts.num_tokens),
        num_records=sum(facts.num_records for facts in found),
        num_tokens=num_tokens,
        longest=max(facts.longest for facts in found),
        is_exact=all(facts.is_exact for facts in found),
        train=train,
    )


def has_image_records(config: SwapConfig) -> bool:
    """Whether the first record of a file of `[data]` names an image; False where none is there."""
    files = _records_of(config)
    return any(has_images(next(iter(read_rows(file, needed_columns)), {})) for file in files)


def planned_batch(config: SwapConfig) -> Batch:
    """Returns the batch of a file, in which each text of a record of "embed" passes by itself."""
    is_divided = config.train is not None and config.train.embed is not None
    if is_divided and (files := _records_of(config)):
        with suppress(ConfigError):  # `infinity train` raises it.
            values = first_record(files).values()
            return batch_of(config, sum(isinstance(value, str) for value in values))
    return batch_of(config)


def batch_of_data(config: SwapConfig, batch: Batch) -> Batch | None:
    """Returns the batch with sequences as long as the records of `[data]` on average; None where
    these fill the sequences, as text and packed records do, or each is several sequences."""
    files = _records_of(config)
    is_apart = config.train is not None and config.train.method in ("sft", "distill")
    if config.data is None or config.data.packing or not is_apart or not files:
        return None
    with suppress(ConfigError):  # `infinity train` raises it.
        tokenizer = open_tokenizer(config.data.tokenizer)
        # Their labels, which would be read of all records, are not learned.
        facts = read_data(files, tokenizer, batch.sequence_length, train={})
        length = max(facts.num_tokens // facts.num_records, 1)
        if length < batch.sequence_length:
            num_tokens = batch.num_tokens // batch.sequence_length * length
            return replace(batch, num_tokens=num_tokens, sequence_length=length)
    return None


def _records_of(config: SwapConfig) -> list[Path]:
    """Returns the files of records of `[data]`, as far as they are there."""
    try:
        return [] if config.data is None else collect_files(config.data.paths)[1]
    except ConfigError:
        return []


def _read(
    file: Path, tokenizer: Tokenizer, length: int | None, vocab_size: int, labels: tuple[str, ...]
) -> DataFacts:
    if not is_records(file):
        return _text(file, tokenizer, vocab_size)
    marks = _MARKS_NBYTES if tokenizer.name == "bytes" else _MARKS
    records = learned_rows([file], vocab_size, labels)
    noun, lengths, marked = "records", list[int](), 0
    sampled_nbytes, longest, is_exact = 0, 0, True
    for record in records:
        if has_images(record):
            return _with_images(file, tokenizer, length)
        kind = kind_of_columns([*record], str(file))
        noun = kind if kind in _NOUNS else "records"
        if kind == "conversations" and not any(map(_is_learned, record["messages"])):
            continue  # A run leaves it out.
        counts = {
            name: sum(_num_tokens(text, tokenizer, vocab_size) for text in texts_in([value]))
            for name, value in record.items()
        }
        turns = [len(record[name]) for name in _TURNS if isinstance(record.get(name), list)]
        left_out, marked = 0, marks * (sum(turns) or 2)
        if kind == "tokens":
            counts, marked = {"input_ids": len(record["input_ids"])}, 0
        lengths.append(sum(counts.values()) + marked)
        if kind == "pairs":  # Each text is a sequence,
            left_out, marked = sum(counts.values()) - max(counts.values()), marks
        elif kind == "preferences":  # and each answer with its prompt.
            left_out = min(counts["chosen"], counts["rejected"])
        longest = max(longest, sum(counts.values()) - left_out + marked)
        sampled_nbytes += sum(len(text.encode(errors="replace")) for text in texts_in(record))
        if sampled_nbytes >= _SAMPLE_NBYTES:
            is_exact = next(records, None) is None
            break
    count = len(lengths) if is_exact else _count(file, len(lengths), sampled_nbytes)
    total = sum(lengths) * count // max(1, len(lengths))
    return DataFacts(noun, count, total, longest, is_exact and not marked)  # Marks are guessed.


def _is_learned(turn: Mapping[str, Any]) -> bool:
    return turn["role"] == "assistant" and turn.get("weight") != 0


def _with_images(file: Path, tokenizer: Tokenizer, length: int | None) -> DataFacts:
    """Returns the facts of all records, as `infinity train` writes them by the processor."""
    rows = load_records([file])
    kind = kind_of_columns(rows.column_names, str(file))
    counts = learned_images(
        rows, kind, open_processor(tokenizer), str(file), assistant_only=True, length=length
    )["num_tokens"]  # fmt: skip
    return DataFacts(IMAGES, len(counts), sum(counts), max(counts, default=0), is_exact=True)


def _count(file: Path, num_sampled: int, sampled_nbytes: int) -> int:
    """Returns the number of all records: of the lines, of the rows, or an estimate by bytes."""
    if file.is_dir():
        return len(load_records([file]))
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return int(parquet.ParquetFile(file).metadata.num_rows)
    if file.suffix == ".json":
        return num_sampled * file.stat().st_size // max(sampled_nbytes, 1)
    with file.open("rb") as stream:
        chunks = iter(lambda: stream.read(_CHUNK_NBYTES), b"")
        return max(num_sampled, sum(chunk.count(b"\n") for chunk in chunks))


def _text(file: Path, tokenizer: Tokenizer, vocab_size: int) -> DataFacts:
    with file.open("rb") as stream:
        content = stream.read(_SAMPLE_NBYTES)
    size_nbytes = file.stat().st_size
    count = _num_tokens(content.decode(errors="ignore"), tokenizer, vocab_size)
    num_tokens = count * size_nbytes // max(len(content), 1)
    return DataFacts("text", 0, num_tokens, 0, size_nbytes <= _SAMPLE_NBYTES)


def _num_tokens(text: str, tokenizer: Tokenizer, vocab_size: int) -> int:
    """Returns the number of tokens. Raises ConfigError for one that the model does not have."""
    ids = tokenizer.encode(text)
    refuse_stranger(max(ids, default=0), tokenizer, vocab_size, "data.paths")
    return len(ids)
