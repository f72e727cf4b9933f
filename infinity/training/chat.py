"""Marks what the assistant says, under chat templates that cannot mark it themselves.

TRL learns from marks of the template (`{% generation %}`) and has marked templates of its own for
many published ones. For every other template a message of the assistant is what the template adds
behind the prompt of the messages before it. Where a later message changes how an earlier one is
written (templates that drop old reasoning), every message of the assistant becomes a sequence of
its own, after the prompt that it would have as an answer. A tokenizer without a template gets
ChatML.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infinity.errors import ConfigError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Marked = dict[str, list[int]]  # `input_ids`, and `assistant_masks` with 1 for what is learned.


def is_markable(tokenizer: Any) -> bool:
    """Whether the tokenizer's template marks what the assistant says, or TRL has one that does."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return True
    try:
        return get_training_chat_template(tokenizer) is not None
    except Exception:  # TRL tries a template, which raises whatever its author chose.
        return False


@contextmanager
def without_false_alarms(tokenizer: Any) -> Iterator[None]:
    """Drops TRL's warning that the end of an answer is not learned, if the template is `CHATML`.

    A tokenizer without the token `<|im_end|>` writes it in several tokens. The run learns all of
    them; TRL looks for one token.
    """
    logger = logging.getLogger("trl.trainer.sft_trainer")

    def is_true(record: logging.LogRecord) -> bool:
        return tokenizer.chat_template != CHATML or "end-of-turn token" not in record.getMessage()

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)


def mark_by_prefixes(
    messages: list[Any], tokenizer: Any, place: str, *, own: dict[str, Any]
) -> list[Marked]:
    """Returns one sequence, or one for each message of the assistant. See the file.

    own: what else the record gives to the template: `tools`, and its chat_template_kwargs

    Raises ConfigError, which begins with `place`, for what the template refuses.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    alone: list[tuple[list[int], int]] = []  # (tokens up to the turn's end, where it begins)
    for turn in turns:
        prompt = _apply(tokenizer, messages[:turn], own, place, add_generation_prompt=True)
        tokens = _apply(tokenizer, messages[: turn + 1], own, place)
        if tokens[: len(prompt)] != prompt:
            raise ConfigError(
                f"{place}: the chat template writes messages[{turn}] not behind the prompt of the "
                "messages before it, so what the assistant says cannot be told; give the template "
                "{% generation %} marks"
            )
        alone.append((tokens, len(prompt)))
    if not alone:
        return []
    last = alone[-1][0]
    if all(last[: len(tokens)] == tokens for tokens, _ in alone):
        learned = [0] * len(last)
        for tokens, begin in alone:
            learned[begin : len(tokens)] = [1] * (len(tokens) - begin)
        return [{"input_ids": last, "assistant_masks": learned}]
    return [
        {"input_ids": tokens, "assistant_masks": [0] * begin + [1] * (len(tokens) - begin)}
        for tokens, begin in alone
    ]


def _apply(
    tokenizer: Any, messages: list[Any], own: dict[str, Any], place: str, **options: Any
) -> list[int]:
    try:
        made = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, **options, **own
        )
    except Exception as error:  # A template raises whatever its author chose.
        raise ConfigError(
            f"{place}: the chat template refuses this conversation: {error}"
        ) from error
    return list(made["input_ids"])
