"""Conversations of any program as lists of OpenAI's messages, which chat templates take.

Takes the messages of OpenAI (also its old `function_call`), TRL and ms-swift, ShareGPT's turns
(`from`, `value`) and Alpaca's columns. A field that changes what is meant becomes part of the
messages or is refused by its name: nothing of that kind is left out in silence. `weight` is 0 in
the message of an assistant that is read and not learned; no other message has it.
"""

from __future__ import annotations

import json
from typing import Any

from infinity.bounded import MAX_DEPTH
from infinity.errors import ConfigError, refusing
from infinity.tools.training.data_files import WrittenFloat, parse

Message = dict[str, Any]

_CALLS = ("function_call", "tool_call")  # Roles whose content is a call, or a list of calls.
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "function_response": "tool", "tool_response": "tool",
    **dict.fromkeys(_CALLS, "assistant"),
}  # fmt: skip
_SHAREGPT_ROLES = _ROLES | {
    "observation": "tool", "model": "assistant",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}  # fmt: skip
# Whether a message is learned: OpenAI's, ms-swift's, axolotl's (two), and a common one.
_MASKS = ("weight", "loss", "train", "training", "trainable")
# Fields that change what is learned of a message, and that a text model or TRL cannot follow.
_REFUSED = (
    "refusal", "audio", "audios", "image", "images", "video", "videos", "loss_scale", "loss_mask",
    "loss_weight", "train_detail", "training_detail", "prefix", "mask", "masked",
)  # fmt: skip
_IMAGE_KEYS = ("image", "path", "url", "image_url")  # Of Qwen, transformers (two) and OpenAI.
REASONING = ("reasoning_content", "reasoning", "thinking")
MOST_INT = 2**64  # Numbers that readers of JSON take.


def text_of(value: Any, at: str) -> str:
    """Returns a text; a number of JSON as the file writes it. `at` names the record and the field.

    Raises ConfigError for anything else, and for characters that no text has.
    """
    if isinstance(value, WrittenFloat):
        return value.text
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ConfigError(
            f"{at}: expected text; got {_shown(value)}. Write it as a text, as it is to be learned"
        )
    check_values(value, at)
    return value


def check_values(value: Any, at: str, depth: int = 0) -> None:
    """Raises ConfigError for what no text or template can write, at any depth: a NUL, half of a
    surrogate pair, numbers that are not finite or have more than 64 bits, dates, bytes."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{at[:200]}: it is nested too deeply: more than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            check_values(key, f"{at}: the key {key!r:.80}")
            check_values(inner, f"{at}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_values(inner, f"{at}[{index}]", depth + 1)
    elif isinstance(value, str):
        if "\0" in value:
            raise ConfigError(f"{at}: it has a NUL, which no text has; remove it")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise ConfigError(f"{at}: it has half of a surrogate pair, which has no UTF-8")
    elif isinstance(value, float):
        if not float("-inf") < value < float("inf"):
            raise ConfigError(f"{at}: expected a finite number; got {value}")
    elif isinstance(value, int):
        if not -MOST_INT // 2 <= value < MOST_INT:
            raise ConfigError(f"{at}: a number beyond 64 bits; write it as a text")
    elif value is not None:
        raise ConfigError(f"{at}: expected JSON; got {_shown(value)}. Write it as a text")


def messages_of(value: Any, at: str, name: str) -> list[Message]:
    """Returns the messages of a list, which is called `name` in the record. Raises ConfigError."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f'{at}: expected a list "{name}" that is not empty')
    return [_message(turn, f"{at}: {name}[{index}]") for index, turn in enumerate(value)]


def answer_of(value: Any, at: str, name: str) -> list[Message]:
    """Returns the messages of an answer: one turn of ShareGPT, a list of messages, or a text."""
    if isinstance(value, list):
        return messages_of(value, at, name)
    if isinstance(value, dict):
        return [_message(value, f"{at}: {name}")]
    return [{"role": "assistant", "content": text_of(value, f"{at}: {name}")}]


def from_alpaca(record: dict[str, Any], at: str) -> list[Message]:
    """Returns the messages of `history`, `instruction` and `input`, and of `output` if it is there.

    `history` has pairs of a question and its answer. All answers are learned.
    """
    pairs = _json(record.get("history") or [], f"{at}: history")
    if not isinstance(pairs, list):
        raise ConfigError(f"{at}: history: expected a list of pairs; got {_shown(pairs)}")
    messages = []
    for index, pair in enumerate(pairs):
        where = f"{at}: history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError(f"{where}: expected a question and its answer; got {_shown(pair)}")
        messages += _said(text_of(pair[0], where), text_of(pair[1], where))
    asked = [text_of(record.get("instruction"), f"{at}: instruction")]
    if record.get("input") is not None:
        asked.append(text_of(record["input"], f"{at}: input"))
    question = "\n\n".join(filter(None, asked))
    if "output" not in record:
        return [*messages, {"role": "user", "content": question}]
    return messages + _said(question, text_of(record["output"], f"{at}: output"))


def with_system(messages: list[Message], system: Any, at: str) -> list[Message]:
    """Returns the messages behind the system prompt of the record, if it has one."""
    text = "" if system is None else text_of(system, f"{at}: system")
    if not text:
        return messages
    if messages[0]["role"] in ("system", "developer"):
        if messages[0].get("content") == text:
            return messages
        raise ConfigError(
            f"{at}: system: the first message is another system prompt; expected one of them"
        )
    return [{"role": "system", "content": text}, *messages]


def tools_of(record: dict[str, Any], at: str) -> list[Any] | None:
    """Returns `tools`, a list or the text of one, or OpenAI's old `functions`; None for neither."""
    tools = _json(record.get("tools"), f"{at}: tools") or None
    functions = _json(record.get("functions"), f"{at}: functions") or None
    if tools is not None and functions is not None:
        raise ConfigError(f"{at}: functions: the record has tools, too; expected one of them")
    name = "tools" if functions is None else "functions"
    found = tools if functions is None else functions
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise ConfigError(f"{at}: {name}: expected a list of objects; got {_shown(found)}")
    check_values(found, f"{at}: {name}")
    return found if functions is None else [{"type": "function", "function": f} for f in found]


def refuse_weights(messages: list[Message], at: str, name: str) -> None:
    """Raises ConfigError for a message that is not to be learned; `name` is that of the list."""
    for index, message in enumerate(messages):
        if "weight" in message:
            raise ConfigError(
                f"{at}: {name}[{index}]: it is not to be learned; expected such marks in messages "
                "only, because all of this list is learned"
            )


def _message(turn: Any, at: str) -> Message:
    role = (turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None
    if not isinstance(role, str):
        raise ConfigError(
            f'{at}: expected an object with a role, such as {{"role": "user", "content": "..."}}'
        )
    check_values(role, f"{at}.role")
    roles = _ROLES if turn.get("role") else _SHAREGPT_ROLES
    keys = [key for key in ("value", "content") if turn.get(key) is not None]
    if len(keys) == 2 and turn["value"] != turn["content"]:
        raise ConfigError(f"{at}: value and content differ; expected one of them")
    content_key = keys[0] if keys else "content"
    known = {"role", "from", "value", "content", "function_call", *_MASKS, *_REFUSED}
    own = {key: value for key, value in turn.items() if value is not None and key not in known}
    message: Message = {"role": roles.get(role if turn.get("role") else role.lower(), role)}
    if role == "function":  # OpenAI's old results of a call.
        message["role"] = "tool"
    content = turn.get(content_key)
    calls = own.pop("tool_calls", None)
    if role in _CALLS:
        content, calls = None, _calls_of(_json(content, f"{at}.{content_key}"), at)
    elif turn.get("function_call") is not None:
        if calls:
            raise ConfigError(f"{at}.function_call: the message has tool_calls, too")
        calls = _calls_of(turn["function_call"], f"{at}.function_call")
    if calls:
        message["tool_calls"] = _checked_calls(calls, f"{at}.tool_calls")
    if content is not None or not (calls and message["role"] == "assistant"):
        message["content"] = _content(content, f"{at}.{content_key}")
    check_values(own, at)
    own |= {key: text_of(own[key], f"{at}.{key}") for key in (*REASONING, "name") if key in own}
    for name in _REFUSED:
        if turn.get(name) not in (None, False, "", [], {}):
            raise ConfigError(
                f"{at}.{name}: expected a message without it: it changes what is learned, and a "
                "run cannot follow it. Remove the field, or the record"
            )
    if not _is_learned(turn, message["role"], at):
        message["weight"] = 0
    return message | own


def _content(content: Any, at: str) -> Any:
    """Returns a text, or a list of parts. An image that a part names is its value "image"."""
    if not isinstance(content, list):
        return text_of(content, at)
    if not content:
        raise ConfigError(f"{at}: expected text; got an empty list")
    parts: list[Message] = []
    for index, part in enumerate(content):
        where = f"{at}[{index}]"
        kind = part.get("type", "text") if isinstance(part, dict) else part
        if isinstance(part, dict) and kind == "text":
            parts.append({"type": "text", "text": text_of(part.get("text"), f"{where}.text")})
        elif isinstance(part, dict) and kind in ("image", "image_url"):
            named = [part[key] for key in _IMAGE_KEYS if part.get(key) is not None]
            parts.append({"type": "image"} | ({"image": named[0]} if named else {}))
        else:
            raise ConfigError(
                f'{where}: expected {{"type": "text", "text": "..."}} or an image; got '
                f"{_shown(kind)}, which a run does not learn"
            )
    return parts


def _calls_of(found: Any, at: str) -> list[Any]:
    """Returns OpenAI's tool calls for a function call, or a list of them."""
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ConfigError(
            f'{at}: expected a call, {{"name": "...", "arguments": {{...}}}}, as JSON; got '
            f"{_shown(found)}"
        )
    return [{"type": "function", "function": call} for call in calls]


def _checked_calls(calls: Any, at: str) -> list[Any]:
    if not isinstance(calls, list):
        raise ConfigError(f"{at}: expected a list of calls; got {_shown(calls)}")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{at}[{index}]: expected a call with the name of a function")
    check_values(calls, at)
    return calls


def _is_learned(turn: Message, role: str, at: str) -> bool:
    """Returns whether a message is learned if its role is; the marks of a message agree."""
    marks = {}
    for name in _MASKS:
        if (value := turn.get(name)) is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ConfigError(
                f"{at}.{name}: expected true or 1 (learned), or false or 0 (read only); got "
                f"{_shown(value)}"
            )
        marks[name] = bool(value)
    if len(set(marks.values())) > 1:
        raise ConfigError(f"{at}: {' and '.join(marks)} contradict each other")
    is_learned = all(marks.values())
    if marks and is_learned and role != "assistant":
        raise ConfigError(
            f"{at}.{next(iter(marks))}: expected false, or no such field: a run learns what the "
            f"assistant says, not what the {role} says"
        )
    return is_learned or role != "assistant"


def _json(value: Any, at: str) -> Any:
    """Returns the value of a JSON text, and any other value as it is; "" is None."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    with refusing(f"{at}: expected JSON", ValueError, RecursionError):
        return parse(value)


def _said(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _shown(value: Any) -> str:
    """Returns a value for a message, as JSON if it is some."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value)
    except TypeError:
        text = f"a {type(value).__name__}, {value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."
