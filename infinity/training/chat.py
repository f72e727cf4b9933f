"""Conversations as training data: JSON lines with `messages`, of which the assistant's are learned.

A conversation becomes one sequence of `data.sequence_length` entries. An entry t >= 0 is a token
that is read and learned; an entry ~t (negative) is a token t that is read only: system and user
messages, markers, and the filling at the end. The filling is behind everything that is learned, so
a causal model never sees it. `infinity.training.marks` makes ids and labels of the entries.

The text and its marks come from the model's own chat template. Where the template marks what the
assistant says (`{% generation %}`), its marks are used. Otherwise a message of the assistant is
what the template adds behind the prompt of the messages before it. Where a later message changes
how an earlier one is written (templates that drop old reasoning), every message of the assistant
becomes a sequence of its own, after the prompt that it would have as an answer. A tokenizer without
a template gets ChatML.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.errors import ConfigError

_log = logging.getLogger("infinity")

Marks = npt.NDArray[np.int32]
_FILLING = -1  # Token 0, read only.
_HEAD_NBYTES = 1 << 20


def is_chat_file(path: Path) -> bool:
    """Whether the first line is a JSON object with a list of `messages`, not empty."""
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline(_HEAD_NBYTES))
    except (OSError, ValueError, RecursionError):
        return False
    messages = first.get("messages") if isinstance(first, dict) else None
    return isinstance(messages, list) and bool(messages)


def conversations(
    path: Path, tokenizer: Any, *, sequence_length: int, max_nbytes: int | None = None
) -> Iterator[Marks]:
    """Yields the sequences of one file, filled to `sequence_length`.

    A longer conversation is cut; one of which nothing learned is left is dropped. Raises
    ConfigError that names the line of what is no conversation, or what the template refuses.
    """
    num_cut = num_dropped = used_nbytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if max_nbytes is not None and used_nbytes >= max_nbytes:
                break
            used_nbytes += len(line)
            if not line.strip():
                continue
            place = f"{path}:{number}"
            for marks in _marked(_parse(line, place), tokenizer, place):
                num_cut += len(marks) > sequence_length
                cut = marks[:sequence_length]
                if not (cut[1:] >= 0).any():
                    num_dropped += 1
                    continue
                yield np.pad(cut, (0, sequence_length - len(cut)), constant_values=_FILLING)
    if num_cut or num_dropped:
        _log.warning(
            "%s: %d conversations are longer than data.sequence_length=%d and were cut; %d have "
            "nothing of the assistant in it and were left out",
            path, num_cut, sequence_length, num_dropped,
        )  # fmt: skip


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"data.paths: {place} is no JSON: {error}") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f'data.paths: {place}: expected an object with a list "messages"')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f"data.paths: {place}: messages[{index}]: expected an object with a role, such as "
                '{"role": "user", "content": "..."}'
            )
    return dict(record)


def _marked(record: dict[str, Any], tokenizer: Any, place: str) -> list[Marks]:
    messages = record["messages"]
    own = getattr(tokenizer, "tokenizer", None)
    if own is None or not own.chat_template:
        return [_chatml(messages, tokenizer, place)]
    template = _Template(own, record.get("tools"), place)
    if template.has_marks:
        return [template.by_marks(messages)]
    return template.by_prefixes(messages)


class _Template:
    """The chat template of a tokenizer of transformers, applied to one conversation."""

    def __init__(self, tokenizer: Any, tools: Any, place: str) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._place = place
        text = tokenizer.chat_template
        texts = text.values() if isinstance(text, dict) else [text]
        self.has_marks = any("{% generation" in t or "{%- generation" in t for t in texts)

    def by_marks(self, messages: list[Any]) -> Marks:
        made = self._apply(messages, return_assistant_tokens_mask=True)
        is_learned = np.asarray(made["assistant_masks"], dtype=bool)
        return _marks(made["input_ids"], is_learned)

    def by_prefixes(self, messages: list[Any]) -> list[Marks]:
        """Returns one sequence, or one for each message of the assistant. See the file."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        alone: list[tuple[list[int], int]] = []  # (tokens up to the turn's end, where it begins)
        for turn in turns:
            prompt = self._apply(messages[:turn], add_generation_prompt=True)["input_ids"]
            whole = self._apply(messages[: turn + 1])["input_ids"]
            if whole[: len(prompt)] != prompt:
                raise ConfigError(
                    f"data.paths: {self._place}: the chat template writes messages[{turn}] not "
                    "behind the prompt of the messages before it, so what the assistant says "
                    "cannot be told; give the template {% generation %} marks"
                )
            alone.append((whole, len(prompt)))
        if not alone:
            return []
        last = alone[-1][0]
        if all(last[: len(whole)] == whole for whole, _ in alone):
            is_learned = np.zeros(len(last), dtype=bool)
            for whole, begin in alone:
                is_learned[begin : len(whole)] = True
            return [_marks(last, is_learned)]
        return [_marks(whole, np.arange(len(whole)) >= begin) for whole, begin in alone]

    def _apply(self, messages: list[Any], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=True, return_dict=True, **options
            )
        except Exception as error:  # A template raises whatever its author chose.
            raise ConfigError(
                f"data.paths: {self._place}: the chat template refuses this conversation: {error}"
            ) from error


def _chatml(messages: list[Any], tokenizer: Any, place: str) -> Marks:
    ids: list[int] = []
    is_learned: list[bool] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str):
            raise ConfigError(
                f"data.paths: {place}: messages[{index}].content: expected text, because the "
                "tokenizer has no chat template"
            )
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
        body = tokenizer.encode(f"{content}<|im_end|>\n")
        ids += head + body
        is_learned += [False] * len(head) + [message["role"] == "assistant"] * len(body)
    return _marks(ids, np.asarray(is_learned))


def _marks(ids: Sequence[int], is_learned: npt.NDArray[np.bool_]) -> Marks:
    tokens = np.asarray(ids, dtype=np.int32)
    return np.where(is_learned, tokens, ~tokens).astype(np.int32)
