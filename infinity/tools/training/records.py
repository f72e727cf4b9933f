"""Records as training data: JSON lines, JSON, Parquet, and directories of `datasets`.

Each record becomes one of few forms (`Kind`), checked as it is read, and lies in an Arrow table
that is mapped from disk, so records may be larger than memory. Messages, tools and options lie
there as JSON. The first record that cannot be learned as it is meant is refused by its file, its
number and its field.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal, TypeAlias

from infinity.config.schema.train import METHODS, Method
from infinity.errors import ConfigError, refusing
from infinity.tools.training.chat import CHATML, encode_chats
from infinity.tools.training.conversation import (
    Message,
    answer_of,
    check_values,
    from_alpaca,
    messages_of,
    refuse_weights,
    text_of,
    tools_of,
    with_system,
)
from infinity.tools.training.data_files import Row, read_rows, rows_at_once, stamp_of
from infinity.tools.training.images import COLUMNS as IMAGE_COLUMNS
from infinity.tools.training.images import place_images

_log = logging.getLogger("infinity")

_OF_METHODS = {"preferences": METHODS["dpo"].records, "pairs": METHODS["embed"].records}
MASKS = ("labels", "assistant_masks", "completion_mask", "seq_lengths")

Kind = Literal[
    "conversations", "completions", "preferences", "texts", "tokens", "labelled texts", "pairs"
]  # fmt: skip
_KindColumns: TypeAlias = tuple[Kind, tuple[str, ...], tuple[str, ...]]
_TEMPLATE = ("tools", "functions", "chat_template_kwargs", "system")
_NUMBERS = ("ref_chosen_logps", "ref_rejected_logps", "margin")
_ALPACA = ("instruction", "input", "history")
_SCORES = ("score", "label")
_NEGATIVES = ("negative", *(f"negative_{number}" for number in range(100)))
_PAIRS = (
    ("anchor", "positive"), ("query", "positive"), ("query", "answer"), ("question", "answer"),
    ("sentence1", "sentence2"),
)  # fmt: skip
# The columns that make a kind, the first that fits, and those that it takes beside them. `_REFUSED`
# are refused beside them, and all others are left out: ultrachat_200k has `prompt` beside messages.
_KINDS: tuple[_KindColumns, ...] = (
    ("tokens", ("input_ids",), (*MASKS, "attention_mask")),
    (
        "preferences", ("chosen", "rejected"),
        ("prompt", "messages", "conversations", *_ALPACA, *_NUMBERS, *_TEMPLATE),
    ),
    ("completions", ("prompt", "completion"), (*_TEMPLATE, *IMAGE_COLUMNS)),
    ("conversations", ("messages",), (*_TEMPLATE, *IMAGE_COLUMNS)),
    ("conversations", ("conversations",), (*_TEMPLATE, *IMAGE_COLUMNS)),
    ("conversations", ("instruction", "output"), ("input", "history", *_TEMPLATE)),
    ("texts", ("text",), ()),
    *(("pairs", pair, (*_NEGATIVES, *_SCORES)) for pair in _PAIRS),
)  # fmt: skip
# Columns that change what a record means, where its kind does not take them.
_REFUSED = (
    "system", "history", "tools", "functions", "documents", "chat_template_kwargs", "weight",
    "loss", "loss_scale", "loss_weight", "loss_mask", "train", "label", "kto_tag", *IMAGE_COLUMNS,
    "video", "videos", "audio", "audios",
)  # fmt: skip
_ALL_COLUMNS = (
    "messages (or ShareGPT's conversations); prompt and completion; instruction and output; chosen "
    "and rejected; anchor and positive; text; or input_ids"
)
_OPTIONAL = ("tools", "chat_template_kwargs")
_FORM = 2  # Of the tables in the cache of `datasets`. Raise it when a record becomes another one.


def load_records(
    paths: Sequence[Path],
    *,
    vocab_size: int | None = None,
    labels: tuple[str, ...] = (),
    most: int | None = None,
) -> Any:
    """Returns one `datasets.Dataset` of all files, in their order, with the columns of their kind.

    vocab_size: that of the model, with which records of token ids are compared
    labels: the names of labels; then records are texts with a `label`, which becomes its number
    most: so many of the first records; None is all
    Raises ConfigError that names the file, and the line or the record.
    """
    import datasets
    import pyarrow.compute as pc

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    first = first_record(paths, vocab_size=vocab_size, labels=labels)
    options = {"paths": tuple(map(str, paths)), "vocab_size": vocab_size, "labels": labels}
    options |= {"most": most}
    stamps = {"stamps": tuple(stamp_of(path) for path in paths), "form": _FORM}
    image_nbytes = sum(len(image["bytes"] or "") for image in first.get("images", ()))
    try:
        found = datasets.Dataset.from_generator(
            _generate, features=_features(first), gen_kwargs=options | stamps,
            writer_batch_size=rows_at_once(image_nbytes, 1),
        )  # fmt: skip
    except Exception as error:  # `datasets` wraps what the generator raises.
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(f"data.paths: {paths[0]}: {' '.join(str(cause).split())}") from error
    table = found.data
    used = [name for name in table.column_names if table.column(name).null_count < len(table)]
    if not pc.sum(pc.list_value_length(table.column("images"))).as_py():
        used.remove("images")
    return found.select_columns(used)


def first_record(
    paths: Sequence[Path], *, vocab_size: int | None = None, labels: tuple[str, ...] = ()
) -> Row:
    """Returns the first record of the table of `load_records`. Raises ConfigError if there is
    none."""
    first = next(learned_rows(paths, vocab_size, labels), None)
    if first is None:
        empty = next((path for path in paths if path.is_file() and not path.stat().st_size), None)
        if empty is not None:
            raise ConfigError(f"data.paths: {empty} is empty; expected records: {_ALL_COLUMNS}")
        raise ConfigError(f"data.paths: {paths[0]} has no records ({len(paths)} files in all)")
    return first


def load_prompts(paths: Sequence[Path], tokenizer: Any) -> Any:
    """Returns a `datasets.Dataset` of the rows of all files: `prompt`, a text or messages, and
    columns for rewards. Gives a tokenizer without a chat template ChatML. Raises ConfigError that
    names the first record without a prompt."""
    import datasets
    import pyarrow

    rows: list[Row] = []
    for path in paths:
        for number, row in enumerate(read_rows(path, list), 1):
            at, prompt = f"data.paths: {path}: record {number}", row.get("prompt")
            check_values(row, at)
            if isinstance(prompt, list):
                tokenizer.chat_template = tokenizer.chat_template or CHATML
                rows.append(row | {"prompt": messages_of(prompt, at, "prompt")})
            else:
                rows.append(row | {"prompt": text_of(prompt, f"{at}: prompt")})
    names = dict.fromkeys(name for row in rows for name in row)  # Not each record has all.
    what = f"data.paths: the records of {paths[0]} have columns of several kinds"
    with refusing(what, TypeError, pyarrow.ArrowInvalid):
        return datasets.Dataset.from_dict({n: [row.get(n) for row in rows] for n in names})


def needed_columns(columns: Sequence[str]) -> list[str]:
    """Returns the columns that a record of these columns needs; of no kind all of them."""
    fitting = _fitting_kind(columns)
    if fitting is None:
        return list(columns)
    _, wanted, beside = fitting
    return [name for name in columns if name in (*wanted, *beside, *_REFUSED)]


def kind_of(dataset: Any, *, method: Method, place: str) -> Kind:
    """Returns the kind of records by their columns. Raises ConfigError for other columns, and for
    a kind that `train.method` cannot learn."""
    kind = kind_of_columns(dataset.column_names, place)
    wanted, own = METHODS[method].records, _OF_METHODS.get(kind, "")
    if own != wanted:
        remedy = f"expected {wanted}"
        if not wanted:
            names = (f'"{name}"' for name, facts in METHODS.items() if facts.records == own)
            remedy = f"set train.method = {' or '.join(names)}"
        raise ConfigError(
            f'data.paths: {place} holds {kind}, which train.method = "{method}" does not learn; '
            f"{remedy}"
        )
    return kind


def kind_of_columns(columns: Sequence[str], place: str) -> Kind:
    """Returns the kind of records with these columns. Raises ConfigError for other columns."""
    return _kind_columns(columns, f"data.paths: the records of {place}")[0]


def _kind_columns(columns: Sequence[str], these: str) -> _KindColumns:
    fitting = _fitting_kind(columns)
    if fitting is None:
        raise ConfigError(f"{these} have the columns {', '.join(columns)}; expected {_ALL_COLUMNS}")
    return fitting


def _fitting_kind(columns: Sequence[str]) -> _KindColumns | None:
    return next((row for row in _KINDS if set(row[1]) <= set(columns)), None)


def mark_conversations(
    dataset: Any, tokenizer: Any, place: str, *, assistant_only: bool, kind: Kind = "conversations"
) -> Any:
    """Returns records of messages as token ids with masks of what is learned, without those in
    which no assistant is learned; records of another form as they are.

    Gives a tokenizer without a chat template ChatML.
    """
    if not has_messages(dataset):
        return dataset
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHATML
    made = encode_chats(dataset, kind, tokenizer, place, assistant_only=assistant_only)
    num_dropped = len(dataset) - len(made.unique("record"))
    if num_dropped:
        _log.warning(
            "%s: %d conversations have no assistant to learn from and were left out",
            place, num_dropped,
        )  # fmt: skip
    return made.remove_columns("record")


def answers_with_prompts(dataset: Any) -> Any:
    """Returns preferences of messages with the tokens of the prompt in each answer, which TRL's
    reward trainer scores as a whole."""
    if "prompt_ids" not in dataset.column_names:
        return dataset

    def join(row: Row) -> Row:
        return {name: row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids")}

    return dataset.map(join, remove_columns=["prompt_ids"])


def labelled_ids(dataset: Any, tokenizer: Any, length: int, place: str) -> Any:
    """Returns texts with labels as token ids, each cut to `length`. Raises ConfigError for a text
    without tokens; `place` names the files."""

    def encode(rows: dict[str, list[str]], numbers: list[int]) -> Any:
        found = tokenizer(rows["text"], truncation=True, max_length=length)
        for number, ids in zip(numbers, found["input_ids"], strict=True):
            if not ids:
                raise ConfigError(f"{place}: record {number + 1}: text: it has no token to score")
        return found

    return dataset.map(encode, batched=True, with_indices=True, remove_columns=["text"])


def has_messages(dataset: Any) -> bool:
    """Whether its records have messages, which lie in it as JSON."""
    from datasets import Json

    return any(isinstance(feature, Json) for feature in dataset.features.values())


# -- Reading ---------------------------------------------------------------------------------------


def _generate(
    paths: Sequence[str], vocab_size: int | None, labels: tuple[str, ...], most: int | None,
    stamps: Any, form: int,
) -> Iterator[Row]:  # fmt: skip
    """Yields the rows of the table. `stamps` and `form` tell tables in the cache apart."""
    assert stamps and form == _FORM
    rows = learned_rows([Path(path) for path in paths], vocab_size, labels)
    for record in islice(rows, most):
        is_json = {name for name, value in record.items() if _is_json(name, value)}
        yield (
            {"images": []}
            | dict.fromkeys(_OPTIONAL)
            | {
                name: json.dumps(value, ensure_ascii=False) if name in is_json else value
                for name, value in record.items()
            }
        )


def _features(record: Row) -> Any:
    from datasets import Features, Json, List, Value

    kinds: dict[type, Any] = {str: Value("string"), float: Value("float64"), int: Value("int64")}
    kinds[list] = List(Value("int64"))
    found = {
        name: Json() if _is_json(name, value) else kinds[type(value)]
        for name, value in record.items()
    }
    image = {"bytes": Value("binary"), "path": Value("string")}
    return Features({name: Json() for name in _OPTIONAL} | found | {"images": List(image)})


def _is_json(name: str, value: Any) -> bool:
    return name in _OPTIONAL or (
        isinstance(value, list) and not (name in ("input_ids", "images") or name in MASKS)
    )


def learned_rows(
    paths: Sequence[Path], vocab_size: int | None, labels: tuple[str, ...]
) -> Iterator[Row]:
    """Yields the records of all files as the table of `load_records` has them, all of one kind."""
    first: tuple[Kind, str] | None = None
    for path in paths:
        is_empty = path.is_file() and not path.stat().st_size
        if is_empty and path.suffix.lower() in (".parquet", ".pq"):
            raise ConfigError(f"data.paths: {path} is empty; expected records: {_ALL_COLUMNS}")
        for number, row in enumerate(read_rows(path, list if labels else needed_columns), 1):
            at = f"data.paths: {path}: record {number}"
            if number == 1:
                kind_of_columns(list(row), str(path))
            folder = path if path.is_dir() else path.parent
            kind, record = _record_of(row, at, vocab_size, folder, labels)
            own = (
                kind,
                ", ".join(
                    name if isinstance(value, str) else f"{name} (a list)"
                    for name, value in sorted(record.items())
                    if name not in (*_OPTIONAL, "images")
                ),
            )
            first = first or own
            if own != first:
                raise ConfigError(
                    f"{at}: it holds {own[0]}, {own[1]}; expected {first[0]}, {first[1]}, as the "
                    f"first record of {paths[0]}"
                )
            yield record


def _record_of(
    row: Row, at: str, vocab_size: int | None, folder: Path, labels: tuple[str, ...] = ()
) -> tuple[Kind, Row]:
    """Returns the kind of a record of a file in `folder`, and the record as its table has it."""
    if labels:
        label = _label_of(row.get("label"), labels, f"{at}: label")
        return "labelled texts", {"text": text_of(row.get("text"), f"{at}: text"), "label": label}
    fields = {name: value for name, value in row.items() if value is not None}
    columns = list(fields) if _fitting_kind(list(fields)) is not None else list(row)
    kind, wanted, beside = _kind_columns(columns, f"{at} and those like it")
    for name in _REFUSED:
        if name not in (*wanted, *beside):
            _refuse_column(name, fields.get(name), at, kind)
    if kind == "tokens":
        return kind, tokens_of(fields, at, vocab_size)
    if kind == "texts":
        return kind, {"text": text_of(fields.get("text"), f"{at}: text")}
    if kind == "pairs":
        return kind, _pair(fields, wanted, at)
    form = {"completions": _completion, "preferences": _preference}.get(kind, _conversation)
    record = form(fields, at)
    images = place_images(record, fields, folder, at)
    if any(isinstance(value, list) for value in record.values()):
        record |= _options_of(fields, at)
    else:
        for name in _TEMPLATE:
            _refuse_column(name, fields.get(name), at, "texts without messages")
    if images:
        for name in _OPTIONAL:  # TRL gives them to no template of images.
            _refuse_column(name, record.get(name), at, "records with images")
        record["images"] = images
    return kind, record


def _refuse_column(name: str, value: Any, at: str, kind: str) -> None:
    if value is None or value in ("", [], {}):
        return
    if name in ("label", "kto_tag"):  # Of an answer that is not wanted.
        if value != 0 or kind not in ("completions", "conversations"):
            return
    elif value in (1, True) and name not in _TEMPLATE:
        return
    raise ConfigError(
        f"{at}: {name}: the column changes what is learned, and {kind} do not take it. Remove the "
        "column, or the record"
    )


def _options_of(record: Row, at: str) -> Row:
    """Returns what a record gives to the template beside its messages."""
    own = record.get("chat_template_kwargs")
    if not isinstance(own, dict | None):
        raise ConfigError(f"{at}: chat_template_kwargs: expected an object; got {own!r}")
    check_values(own, f"{at}: chat_template_kwargs")
    found = {"tools": tools_of(record, at), "chat_template_kwargs": own or None}
    return {name: value for name, value in found.items() if value is not None}


def _conversation(record: Row, at: str) -> Row:
    name = next((name for name in ("messages", "conversations") if name in record), None)
    if name is None and {"instruction", "output"} & record.keys():
        messages = from_alpaca({"output": None} | record, at)
    else:
        messages = messages_of(record.get(name or "messages"), at, name or "messages")
    return {"messages": with_system(messages, record.get("system"), at)}


def _completion(record: Row, at: str) -> Row:
    prompt, completion = record.get("prompt"), record.get("completion")
    if not isinstance(prompt, list):
        return {
            "prompt": text_of(prompt, f"{at}: prompt"),
            "completion": text_of(completion, f"{at}: completion"),
        }
    return {
        "prompt": _prompt(messages_of(prompt, at, "prompt"), record, at),
        "completion": _answer(completion, at, "completion"),
    }


def _pair(record: Row, wanted: Sequence[str], at: str) -> Row:
    names = [*wanted, *(name for name in _NEGATIVES if name in record)]
    found: Row = {name: text_of(record.get(name), f"{at}: {name}") for name in names}
    empty = next((name for name in names if not found[name].strip()), None)
    if empty is not None:
        raise ConfigError(f"{at}: {empty}: it has no token to embed")
    scores = [_number(record[name], f"{at}: {name}") for name in _SCORES if name in record]
    if len(scores) > 1:
        raise ConfigError(f"{at}: it has a score and a label; expected one of them")
    return found | dict.fromkeys(["score"] * len(scores), *scores)


def _preference(record: Row, at: str) -> Row:
    found: Row = {
        name: _number(record[name], f"{at}: {name}") for name in _NUMBERS if name in record
    }
    answers = {name: record.get(name) for name in ("chosen", "rejected")}
    prompt, messages = record.get("prompt"), _messages_of_prompt(record, at)
    others = {"prompt", "messages", "conversations"}
    if messages is None or others & record.keys():  # Not Alpaca's.
        _refuse_column("history", record.get("history"), at, "preferences with their own prompt")
    if messages is not None:
        found["prompt"] = _prompt(messages, record, at)
    if messages is None and not isinstance(answers["chosen"], list | dict):
        texts = answers if prompt is None else answers | {"prompt": prompt}
        return found | {name: text_of(value, f"{at}: {name}") for name, value in texts.items()}
    found |= {name: _answer(value, at, name) for name, value in answers.items()}
    if messages is None:
        _refuse_column("system", record.get("system"), at, "answers with their own prompt")
        said = [turn.get("content") for answer in answers for turn in found[answer]]
        if prompt is not None and said.count(prompt) < 2:  # ultrafeedback_binarized repeats it.
            raise ConfigError(f"{at}: prompt: chosen and rejected begin with another one")
    return found


def _messages_of_prompt(record: Row, at: str) -> list[Message] | None:
    """Returns the prompt of a preference if it is messages; LLaMA-Factory has two forms of it."""
    prompt, chosen = record.get("prompt"), record.get("chosen")
    if isinstance(prompt, list):
        return messages_of(prompt, at, "prompt")
    if isinstance(chosen, list) and chosen:
        first = messages_of(chosen[:1], at, "chosen")[0]
        if first["role"] != "assistant":  # The answers begin with their prompt.
            return None
    if not chosen:
        return None
    if prompt is not None:
        asked = {"role": "user", "content": text_of(prompt, f"{at}: prompt")}
        return None if isinstance(chosen, str) else [asked]
    turns = next((name for name in ("messages", "conversations") if name in record), None)
    if turns is not None:
        return messages_of(record[turns], at, turns)
    if "instruction" not in record:
        return None
    return from_alpaca({name: value for name, value in record.items() if name != "output"}, at)


def _prompt(messages: list[Message], record: Row, at: str) -> list[Message]:
    for message in messages:
        message.pop("weight", None)  # No message of a prompt is learned.
    return with_system(messages, record.get("system"), at)


def _answer(value: Any, at: str, name: str) -> list[Message]:
    messages = answer_of(value, at, name)
    refuse_weights(messages, at, name)
    return messages


def _label_of(value: Any, labels: tuple[str, ...], at: str) -> int:
    """Returns the number of a label, which a record has by that or by its name."""
    if value in labels:
        return labels.index(value)
    if str(value) in labels and labels.index(str(value)) != value:
        raise ConfigError(
            f"{at}: expected {str(value)!r} in quotes for the label of that name, or the name of "
            f"another; the number {value} is not that label's"
        )
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
        return int(value)
    raise ConfigError(
        f"{at}: expected one of train.labels ({', '.join(labels)}), or a number from 0 to "
        f"{len(labels) - 1}; got {value!r}"
    )


def _number(value: Any, at: str) -> float:
    check_values(value, at)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{at}: expected a number; got {value!r}")
    return float(value)


# -- Records of token ids --------------------------------------------------------------------------


NOT_LEARNED = -100
_MOST = 2**31  # Ids of more bits have no place in an index of an embedding.


def tokens_of(record: dict[str, Any], at: str, vocab_size: int | None) -> dict[str, Any]:
    """Returns `input_ids` and its masks, checked: lists of one length, with ids that have an
    embedding. `at` names the record. Raises ConfigError."""
    most = vocab_size or _MOST
    ids = _integers(record.get("input_ids"), f"{at}: input_ids")
    if not ids:
        raise ConfigError(f"{at}: input_ids: expected token ids; got an empty list")
    if not 0 <= min(ids) <= max(ids) < most:
        bad = next(token for token in ids if not 0 <= token < most)
        raise ConfigError(f"{at}: input_ids: token {bad} is outside the vocabulary of {most}")
    found = {"input_ids": ids}
    for name in (*MASKS, "attention_mask"):
        if record.get(name) is None:
            continue
        values = _integers(record[name], f"{at}: {name}")
        if name == "seq_lengths":
            if sum(values) != len(ids) or min(values) < 1:
                raise ConfigError(f"{at}: {name}: expected lengths whose sum is {len(ids)}")
        elif len(values) != len(ids):
            raise ConfigError(
                f"{at}: {name}: expected {len(ids)} values, one for each token; got {len(values)}"
            )
        elif name == "labels":
            strange = [v for v in values if v != NOT_LEARNED and not 0 <= v < most]
            if strange:
                raise ConfigError(
                    f"{at}: labels: {strange[0]} is neither {NOT_LEARNED}, which is not learned, "
                    f"nor a token of the vocabulary of {most}"
                )
        elif not set(values) <= {0, 1}:
            raise ConfigError(f"{at}: {name}: expected 0 and 1 only")
        if name != "attention_mask":
            found[name] = values
        elif 0 in values:
            raise ConfigError(
                f"{at}: attention_mask: it leaves tokens out; expected input_ids without padding"
            )
    _refuse_contradiction(found, at)
    return found


def _refuse_contradiction(record: dict[str, Any], at: str) -> None:
    """TRL follows `labels`, and no mask beside them."""
    masks = [record[name] for name in ("assistant_masks", "completion_mask") if name in record]
    if "labels" not in record or not masks:
        return
    for label, *bits in zip(record["labels"], *masks, strict=True):
        if (label != NOT_LEARNED) != all(bits):
            raise ConfigError(f"{at}: labels and the mask contradict each other; expected one")


def _integers(value: Any, at: str) -> list[int]:
    if not isinstance(value, list):
        raise ConfigError(f"{at}: expected a list of integers; got {value!r:.80}")
    if not all(map(isinstance, value, repeat(int))):
        bad = next(item for item in value if not isinstance(item, int))
        raise ConfigError(f"{at}: expected integers; got {bad!r:.80}")
    return [int(item) for item in value]
