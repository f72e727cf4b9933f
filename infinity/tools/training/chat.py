"""Writes conversations as tokens by a chat template, and marks what is learned of them.

A template that marks what the assistant says (`{% generation %}`) decides what is learned, and TRL
has marked templates for many published ones. For every other template a message of the assistant
is what the template adds behind the prompt of the messages before it. Where a later message changes
how an earlier one is written (templates that drop old reasoning), every message of the assistant
becomes a sequence of its own, after the prompt that it would have as an answer. A tokenizer without
a template gets ChatML.

A template is a program of a stranger: all functions here that run it are for a child process
(`bounded_call`).
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from infinity.errors import ConfigError, refusing
from infinity.tools.training.bounded_call import call_bounded
from infinity.tools.training.conversation import REASONING, Message
from infinity.tools.training.data_files import rows_at_once

_log = logging.getLogger("infinity")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What a template may not know. The names of tools are theirs to write or not.
_FIELDS = ("tool_calls", "name", *REASONING)
_PROBE = "infinity"
_CUT = "cut"  # Tokens at the end of a prompt that its answers do not stand behind.

Ids = list[int]
Row = dict[str, Ids]  # `input_ids`; `assistant_masks` or `completion_mask` with 1 for the learned.
Own = dict[str, Any]  # What a record gives to the template: `tools`, and chat_template_kwargs.


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template as a run uses it.

    text: TRL's marked form of it, or None for the tokenizer's own
    source: all text of the tokenizer's own
    """

    text: str | None
    source: str
    has_marks: bool
    takes_texts: bool  # It writes content that is a text.
    takes_parts: bool  # It writes lists of parts, [{"type": "text", "text": ...}].


def open_template(tokenizer: Any, *, assistant_only: bool) -> Template:
    """Returns the tokenizer's template. Raises ConfigError for one that takes too much."""
    import trl.chat_template_utils  # noqa: F401, here rather than in every child.

    name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
    (found,) = call_bounded(
        lambda only, _: _open(tokenizer, only),
        [assistant_only],
        place_of=lambda _: f"data.tokenizer: {name}",
    )
    assert isinstance(found, Template)
    return found


def _open(tokenizer: Any, assistant_only: bool) -> Template:
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    own = tokenizer.chat_template
    source = "\n".join(own.values()) if isinstance(own, dict) else own
    text, has_marks = None, assistant_only and has_generation_markers(own)
    try:
        if assistant_only and not has_marks:
            text = get_training_chat_template(tokenizer)
            has_marks = text is not None
    except MemoryError:
        raise
    except Exception:  # TRL tries a template, which raises whatever its author chose.
        text, has_marks = None, False
    takes = []
    for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
        messages = [{"role": role, "content": content} for role in ("user", "assistant")]
        try:
            written = tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False)
            takes.append(written.count(_PROBE) == 2 and not re.search("['\"]type['\"]", written))
        except MemoryError:
            raise
        except Exception:
            takes.append(False)
    return Template(text, source, has_marks, *takes)


@dataclass(slots=True)
class Writer:
    """Writes the conversations of records. Raises ConfigError, which begins with the record's
    place, for what the template refuses or does not write."""

    tokenizer: Any
    template: Template
    renew: Callable[[int], None]  # Gives the next call its time, for so many bytes of text.
    nbytes: int = 0  # Of the record.
    written: set[str] = field(default_factory=set)  # Fields and roles that the template writes.

    def conversation(self, messages: list[Message], own: Own, at: str, only: bool) -> list[Row]:
        """Returns one sequence, or one for each message of the assistant. See the file.

        only: what the assistant says is learned, or else all
        """
        learned = [
            i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0
        ]
        num_turns = sum(message["role"] == "assistant" for message in messages)
        if not only and any("weight" in message for message in messages):
            raise ConfigError(
                f"{at}: messages that are not to be learned need data.assistant_only_loss = true"
            )
        if only and not learned:
            return []
        messages = self.checked(messages, own, at)
        if not only:
            return [{"input_ids": self._apply(messages, own, at)[0]}]
        if self.template.has_marks and len(learned) == num_turns:
            tokens, marks = self._apply(messages, own, at)
            if 1 not in marks:
                raise ConfigError(
                    f"{at}: the chat template marks nothing of this conversation as what the "
                    "assistant says; repair its {% generation %}, or leave the record out"
                )
            return [{"input_ids": tokens, "assistant_masks": marks}]
        return self._by_prefixes(messages, learned, own, at)

    def completion(self, prompt: list[Message], answer: list[Message], own: Own, at: str) -> Row:
        """Returns the tokens of both, and the mask of those that only the answer adds."""
        talk = self.checked(prompt + answer, own, at)
        begin = self._apply(talk[: len(prompt)], own, at, add_generation_prompt=True)[0]
        tokens = self._apply(talk, own, at)[0]
        count = num_shared(begin, tokens)
        mask = [0] * count + [1] * (len(tokens) - count)
        return {"input_ids": tokens, "completion_mask": mask, _CUT: begin[count:]}

    def preference(
        self, prompt: list[Message], chosen: list[Message], rejected: list[Message],
        own: Own, at: str,
    ) -> Row:  # fmt: skip
        """Returns the tokens of the prompt, and those that either answer adds, as TRL has them."""
        talks = [self.checked(prompt + answer, own, at) for answer in (chosen, rejected)]
        begin = self._apply(talks[0][: len(prompt)], own, at, add_generation_prompt=True)[0]
        both = [self._apply(talk, own, at)[0] for talk in talks]
        count = min(num_shared(begin, tokens) for tokens in both)
        return {
            "prompt_ids": begin[:count],
            "chosen_ids": both[0][count:],
            "rejected_ids": both[1][count:],
            _CUT: begin[count:],
        }

    def _by_prefixes(
        self, messages: list[Message], learned: list[int], own: Own, at: str
    ) -> list[Row]:
        alone: list[tuple[Ids, int, Ids]] = []  # (tokens up to the turn's end, its begin, marks)
        for turn in learned:
            tokens, marks = self._apply(messages[: turn + 1], own, at)
            prompt: Ids = []  # Marks tell the rest.
            if turn and self.template.has_marks:
                prompt = self._apply(messages[:turn], own, at)[0]
            if not self.template.has_marks or tokens[: len(prompt)] != prompt:
                prompt = self._apply(messages[:turn], own, at, add_generation_prompt=True)[0]
            begin = len(prompt)
            if tokens[:begin] != prompt:
                raise ConfigError(
                    f"{at}: the chat template writes messages[{turn}] not behind the prompt of the "
                    "messages before it, so what the assistant says cannot be told; give the "
                    "template {% generation %} marks"
                )
            alone.append((tokens, begin, marks))
        rows = [
            {"input_ids": tokens, "assistant_masks": [0] * begin + marks[begin:]}
            for tokens, begin, marks in alone
        ]
        talk = alone[-1][0]
        if learned[-1] + 1 < len(messages):
            talk = self._apply(messages, own, at)[0]
        if any(talk[: len(tokens)] != tokens for tokens, _, _ in alone):
            return rows
        mask = [0] * len(talk)
        for row in rows:
            for index, bit in enumerate(row["assistant_masks"]):
                mask[index] |= bit
        return [{"input_ids": talk, "assistant_masks": mask}]

    def checked(self, messages: list[Message], own: Own, at: str) -> list[Message]:
        """Returns the messages as the template gets them. Raises ConfigError for a field or a
        message that the template does not write."""
        messages = [
            {key: value for key, value in message.items() if key != "weight"}
            for message in messages
        ]
        for message in messages:
            content = message.get("content")
            if isinstance(content, list) and not self.template.takes_parts:
                message["content"] = "".join(part["text"] for part in content)
            elif isinstance(content, str) and self.template.takes_parts > self.template.takes_texts:
                message["content"] = [{"type": "text", "text": content}]
        if own.get("tools") and "tools" not in self.written:
            if not self._is_written(messages, own, messages, own | {"tools": None}):
                raise ConfigError(f"{at}: tools: {_UNWRITTEN}")
            self.written.add("tools")
        for key in _FIELDS:
            self._check_field(key, messages, own, at)
        for index, message in enumerate(messages):
            case = f"{message['role']}, {'first' if index == 0 else 'later'}"
            is_usual = message["role"] in ("user", "assistant") or not message.get("content")
            if is_usual or case in self.written:
                continue
            others = [dict(turn) for turn in messages]
            others[index]["content"] = _PROBE  # Without the message there may be a default one.
            if not self._is_written(messages, own, others, own):
                raise ConfigError(
                    f"{at}: messages[{index}]: role {message['role']!r}: {_UNWRITTEN}"
                )
            self.written.add(case)
        return messages

    def _check_field(self, key: str, messages: list[Message], own: Own, at: str) -> None:
        having = [
            index
            for index, message in enumerate(messages)
            if message.get(key) and not (key == "name" and message["role"] == "tool")
        ]
        if not having or key in self.written:
            return
        without = [{k: v for k, v in message.items() if k != key} for message in messages]
        if self._is_written(messages, own, without, own):
            if key == "tool_calls":
                self.written.add(key)
            return
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if key in REASONING and key in self.template.source and last not in having:
            return  # Templates of reasoning models leave old reasoning out.
        raise ConfigError(f"{at}: messages[{having[-1]}].{key}: {_UNWRITTEN}")

    def _is_written(
        self, messages: list[Message], own: Own, others: list[Message], other_own: Own
    ) -> bool:
        """Whether the template writes other messages otherwise."""
        try:
            text = self._render(messages, own)
            return bool(text != self._render(others, other_own))
        except MemoryError:
            raise
        except Exception:  # A template that refuses either tells them apart.
            return True

    def _render(self, messages: list[Message], own: Own) -> Any:
        self.renew(self.nbytes)
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self.template.text, tokenize=False, **own
        )

    def _apply(self, messages: list[Message], own: Own, at: str, **options: Any) -> tuple[Ids, Ids]:
        """Returns the tokens, and 1 for each that the template marks, if it marks any."""
        self.renew(self.nbytes)
        apply = self.tokenizer.apply_chat_template
        taken = (own.keys() & inspect.signature(apply).parameters.keys()) - {"tools", "documents"}
        has_marks = self.template.has_marks and not options
        # A template raises whatever its author chose.
        with refusing(f"{at}: the chat template refuses this conversation", Exception):
            if taken:
                raise TypeError(f"{min(taken)!r} is an option of the tokenizer")
            made = apply(
                messages, chat_template=self.template.text, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=has_marks, **options, **own,
            )  # fmt: skip
        tokens = list(made["input_ids"])
        return tokens, list(made["assistant_masks"]) if has_marks else [1] * len(tokens)


_UNWRITTEN = (
    "the chat template does not write it, so it would not be learned or read; expected a tokenizer "
    "whose template does, or the text in `content`"
)


def num_shared(ids: Ids, others: Ids) -> int:
    """Returns the number of leading tokens that both have: a token may join a prompt and its
    answer."""
    pairs = zip(ids, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))


def encode_chats(
    dataset: Any, kind: str, tokenizer: Any, place: str, *, assistant_only: bool
) -> Any:
    """Returns the records of messages as token ids. `record` tells which record a row is of.

    Raises ConfigError that names the first record which the template cannot write.
    """
    import datasets

    template = open_template(tokenizer, assistant_only=assistant_only and kind == "conversations")
    names = {
        "conversations": ("input_ids", "assistant_masks") if assistant_only else ("input_ids",),
        "completions": ("input_ids", "completion_mask"),
        "preferences": ("prompt_ids", "chosen_ids", "rejected_ids"),
    }[kind]
    kept = {
        name: dataset.features[name]
        for name in dataset.column_names
        if name[:4] in ("ref_", "marg")
    }
    ids, mask = datasets.List(datasets.Value("int32")), datasets.List(datasets.Value("int8"))
    features = {name: ids if name.endswith("ids") else mask for name in names}
    writers: list[Writer] = []  # Made in the child.
    warned: list[str] = []

    def call(row: dict[str, Any], at: str, renew: Callable[[int], None]) -> list[dict[str, Any]]:
        if not writers:
            writers.append(Writer(tokenizer, template, renew))
        writers[0].nbytes = sum(len(text) for text in row.values() if isinstance(text, str))
        own = {name: row[name] for name in kept}
        return [found | own for found in _encode(writers[0], kind, row, at, assistant_only)]

    def note(row: dict[str, Any], at: str) -> None:
        if row.get(_CUT) and not warned:
            warned.append(at)
            _log.warning(
                "%s: the template writes the end of the prompt otherwise before an answer: "
                "%r is left out of what is learned behind, here and perhaps elsewhere",
                at, tokenizer.decode(row[_CUT]),
            )  # fmt: skip

    return map_records(dataset, features | kept, call, place, note=note)


def map_records(
    dataset: Any,
    features: dict[str, Any],
    call: Callable[[dict[str, Any], str, Callable[[int], None]], list[dict[str, Any]]],
    place: str,
    *,
    note: Callable[[dict[str, Any], str], None] = lambda *_: None,
) -> Any:
    """Returns the rows that `call` makes of records in child processes; `record` tells which record
    a row is of.

    features: those of the rows
    call: gets a record as Arrow has it, its place for messages, and the `renew` of `call_bounded`
    note: gets every row, in this process
    Raises ConfigError as `call_bounded`.
    """
    import datasets

    names = dataset.column_names

    def place_of(value: tuple[int, Any]) -> str:
        return f"data.paths: {place}: record {value[0] + 1}"

    def encode(rows: Any, numbers: list[int]) -> dict[str, list[Any]]:
        columns = [rows.column(name).to_pylist() for name in names]
        records = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        values = list(zip(numbers, records, strict=True))
        made: dict[str, list[Any]] = {name: [] for name in (*features, "record")}
        answers = call_bounded(
            lambda value, renew: call(value[1], place_of(value), renew), values, place_of=place_of
        )
        for value, found in zip(values, answers, strict=True):
            for row in found:
                note(row, place_of(value))
                for name in features:
                    made[name].append(row[name])
                made["record"].append(value[0])
        return made

    count = rows_at_once(dataset.data.nbytes, len(dataset.data))  # Of one child process.
    return dataset.with_format("arrow").map(
        encode, batched=True, batch_size=count, with_indices=True, remove_columns=names,
        features=datasets.Features(features | {"record": datasets.Value("int64")}),
        desc="Writing conversations as tokens",
    ).with_format(None)  # fmt: skip


def values_of(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of messages with the values of its JSON."""
    return {name: json.loads(v) if isinstance(v, str) else v for name, v in row.items()}


def _encode(writer: Writer, kind: str, row: dict[str, Any], at: str, only: bool) -> list[Row]:
    found = values_of(row)
    own = {"tools": found.get("tools")} | (found.get("chat_template_kwargs") or {})
    if kind == "conversations":
        return writer.conversation(found["messages"], own, at, only)
    if kind == "completions":
        return [writer.completion(found["prompt"], found["completion"], own, at)]
    if "prompt" not in found:
        from trl.data_utils import extract_prompt

        found |= extract_prompt(found)
    return [writer.preference(found["prompt"], found["chosen"], found["rejected"], own, at)]
