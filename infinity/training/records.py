"""Records as training data: JSON lines, JSON, Parquet, and directories of `datasets`.

`datasets` reads the files into Arrow tables that it maps from disk, so records may be larger than
memory. TRL tokenizes, truncates and packs them. This file names the first record that is none.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

from infinity.errors import ConfigError
from infinity.training.chat import CHATML, is_markable, mark_by_prefixes
from infinity.training.text import READERS

_log = logging.getLogger("infinity")

Kind = Literal["conversations", "completions", "preferences", "texts", "tokens"]
_KindColumns: TypeAlias = tuple[Kind, tuple[str, ...], tuple[str, ...]]
# For those of images TRL refuses the records: a model that learns text cannot learn them.
_IMAGES = ("image", "images")
_TEMPLATE = ("tools", "chat_template_kwargs", *_IMAGES)
_MASKS = ("labels", "assistant_masks", "completion_mask", "seq_lengths")
_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")
# The columns that make a kind, the first that fits, and those that it takes beside them. All others
# are left out: TRL would take `prompt` beside messages for a prompt without its completion.
# `load_records` rewrites the columns of ShareGPT and Alpaca as messages.
_KINDS: tuple[_KindColumns, ...] = (
    ("tokens", ("input_ids",), (*_MASKS, *_IMAGES)),
    ("preferences", ("chosen", "rejected"), ("prompt", *_LOGPS, *_TEMPLATE)),
    ("completions", ("prompt", "completion"), _TEMPLATE),
    ("conversations", ("messages",), _TEMPLATE),
    ("conversations", ("conversations",), _TEMPLATE),
    ("conversations", ("instruction", "output"), ("input", *_TEMPLATE)),
    ("texts", ("text",), _IMAGES),
)
_ALL_COLUMNS = (
    "messages (or ShareGPT's conversations); prompt and completion; instruction and output; chosen "
    "and rejected; text; or input_ids"
)
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_LONGEST_LINE_NBYTES = 1 << 28


def load_records(paths: Sequence[Path]) -> Any:
    """Returns one `datasets.Dataset` of all files, in their order.

    Raises ConfigError that names the file, and of JSON lines the first line that is no JSON.
    """
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    parts = []
    for reader, group in groupby(paths, key=_reader_of):
        files = list(group)
        try:
            if reader == "disk":
                parts += [_load_from_disk(path) for path in files]
            else:
                names = [str(path) for path in files]
                parts.append(datasets.load_dataset(reader, data_files=names, split="train"))
        except Exception as error:  # `datasets` wraps what its readers raise.
            raise _unreadable(files, error) from error
    if sum(map(len, parts)) == 0:
        raise ConfigError(f"data.paths: {paths[0]} has no records ({len(paths)} files in all)")
    parts = [_as_messages(part.select_columns(needed_columns(part.column_names))) for part in parts]
    try:
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    except ValueError as error:
        raise ConfigError(f"data.paths: the files differ in their columns: {error}") from error


def needed_columns(columns: Sequence[str]) -> list[str]:
    """Returns the columns that the kind of records needs; of no kind all of them."""
    fitting = _fitting_kind(columns)
    if fitting is None:
        return list(columns)
    _, wanted, beside = fitting
    return [name for name in columns if name in wanted + beside]


def _fitting_kind(columns: Sequence[str]) -> _KindColumns | None:
    return next((row for row in _KINDS if set(row[1]) <= set(columns)), None)


def _as_messages(dataset: Any) -> Any:
    """Returns the records of ShareGPT (conversations) and Alpaca (instruction, output) as messages,
    others as they are. All columns are those of a kind."""
    columns = dataset.column_names
    if "conversations" in columns:
        return dataset.map(_from_sharegpt, remove_columns=["conversations"])
    if {"instruction", "output"} <= set(columns):
        own = [name for name in ("instruction", "input", "output") if name in columns]
        return dataset.map(_from_alpaca, remove_columns=own)
    return dataset


def _from_sharegpt(record: dict[str, Any]) -> dict[str, Any]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return {"messages": []}  # `check_messages` names the record.
    messages = []
    for turn in turns:
        role = turn.get("role") or turn.get("from")
        content = turn.get("content") if turn.get("value") is None else turn["value"]
        messages.append({"role": _SHAREGPT_ROLES.get(role, role), "content": content})
    return {"messages": messages}


def _from_alpaca(record: dict[str, Any]) -> dict[str, Any]:
    asked = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": record["output"]},
        ]
    }


def kind_of(dataset: Any, *, method: str, place: str) -> Kind:
    """Returns the kind of records by their columns. Raises ConfigError for other columns, and for
    a kind that `train.method` cannot learn."""
    kind = kind_of_columns(dataset.column_names, place)
    if (kind == "preferences") != (method == "dpo"):
        remedy = 'set train.method = "dpo"' if method == "sft" else "expected chosen and rejected"
        raise ConfigError(
            f'data.paths: {place} holds {kind}, which train.method = "{method}" does not learn; '
            f"{remedy}"
        )
    return kind


def kind_of_columns(columns: Sequence[str], place: str) -> Kind:
    """Returns the kind of records with these columns. Raises ConfigError for other columns."""
    fitting = _fitting_kind(columns)
    if fitting is None:
        raise ConfigError(
            f"data.paths: the records of {place} have the columns {', '.join(columns)}; expected "
            f"{_ALL_COLUMNS}"
        )
    return fitting[0]


def check_messages(dataset: Any, place: str, *, needs_text: bool) -> None:
    """Raises ConfigError that names the first record whose messages have no role or, with
    `needs_text`, whose content is no text."""
    for number, messages in enumerate(dataset["messages"], 1):
        at = f"data.paths: {place}: record {number}"
        if not isinstance(messages, list) or not messages:
            raise ConfigError(f'{at}: expected a list "messages" that is not empty')
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ConfigError(
                    f"{at}: messages[{index}]: expected an object with a role, such as "
                    '{"role": "user", "content": "..."}'
                )
            if needs_text and not isinstance(message.get("content"), str):
                raise ConfigError(
                    f"{at}: messages[{index}].content: expected text, because the tokenizer has "
                    "no chat template"
                )


def mark_conversations(
    dataset: Any, tokenizer: Any, place: str, *, assistant_only: bool
) -> tuple[Any, bool]:
    """Returns (dataset, whether TRL marks what the assistant says).

    Gives a tokenizer without a chat template ChatML. Marks the conversations here, which adds the
    columns `input_ids` and `assistant_masks`, where neither the template nor TRL can.
    """
    has_template = bool(tokenizer.chat_template)
    check_messages(dataset, place, needs_text=not has_template)
    if not has_template:
        tokenizer.chat_template = CHATML
    if not assistant_only or is_markable(tokenizer):
        if assistant_only:
            dataset = _with_answers(dataset, place)
        return dataset, assistant_only

    def mark(rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        marked = []
        for row, number in enumerate(numbers):
            at = f"data.paths: {place}: record {number + 1}"
            own = _for_template({name: values[row] for name, values in rows.items()}, at)
            messages = [_without_nulls(message) for message in rows["messages"][row]]
            marked += mark_by_prefixes(messages, tokenizer, at, own=own)
        keys = ("input_ids", "assistant_masks")
        return {key: [record[key] for record in marked] for key in keys}

    made = dataset.map(
        mark, batched=True, with_indices=True, remove_columns=dataset.column_names,
        desc="Marking what the assistant says",
    )  # fmt: skip
    return made, False


def _for_template(record: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns what a record gives to the template beside its messages, as TRL reads it."""
    tools, own = record.get("tools"), record.get("chat_template_kwargs")
    if not isinstance(own, dict | None):
        raise ConfigError(f"{place}: chat_template_kwargs: expected an object; got {own!r}")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return {"tools": tools} | _without_nulls(own or {})


def give_template(dataset: Any, tokenizer: Any) -> None:
    """Gives a tokenizer without a chat template ChatML where prompts and answers are messages."""
    from trl.data_utils import is_conversational

    if not tokenizer.chat_template and is_conversational(dataset[0]):
        tokenizer.chat_template = CHATML


def _with_answers(dataset: Any, place: str) -> Any:
    """Leaves out conversations in which the assistant says nothing, which TRL refuses."""
    kept = [
        number
        for number, messages in enumerate(dataset["messages"])
        if any(message["role"] == "assistant" for message in messages)
    ]
    if len(kept) == len(dataset):
        return dataset
    num_dropped = len(dataset) - len(kept)
    _log.warning("%s: %d conversations have no assistant and were left out", place, num_dropped)
    return dataset.select(kept)


def _without_nulls(table: dict[str, Any]) -> dict[str, Any]:
    """Removes the keys that only other messages or records have."""
    return {key: value for key, value in table.items() if value is not None}


def _reader_of(path: Path) -> str:
    return "disk" if path.is_dir() else READERS.get(path.suffix.lower(), "json")


def _load_from_disk(path: Path) -> Any:
    import datasets

    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if "train" not in found:
            raise ConfigError(f"data.paths: {path} has no split train, but {', '.join(found)}")
        found = found["train"]
    return found


def _unreadable(files: list[Path], error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    if (bad := next(filter(None, map(_bad_line, files)), None)) is not None:
        return bad
    filled = [path for path in files if not path.is_file() or path.stat().st_size]
    # Beside records an empty file of JSON is no fault; an empty one of Parquet always is.
    if len(filled) < len(files) and not (filled and _reader_of(files[0]) == "json"):
        empty = next(path for path in files if path not in filled)
        return ConfigError(f"data.paths: {empty} is empty; expected records: {_ALL_COLUMNS}")
    cause = error.__cause__ or error
    names = ", ".join(map(str, filled[:3]))
    return ConfigError(f"data.paths: {names} cannot be read: {' '.join(str(cause).split())}")


def _bad_line(path: Path) -> ConfigError | None:
    """Returns the error of the first line of JSON lines that is no record; None for none."""
    if _reader_of(path) != "json" or path.suffix.lower() == ".json":
        return None
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE_NBYTES):
            number += 1
            try:
                is_object = not line.strip() or isinstance(json.loads(line), dict)
                reason = "no object"
            except (ValueError, RecursionError) as fault:
                is_object, reason = False, f"no JSON: {fault}"
            if not is_object:
                return ConfigError(
                    f"data.paths: {path}:{number} is {reason}; expected one record per line, "
                    "in braces. Repair or remove that line"
                )
    return None
