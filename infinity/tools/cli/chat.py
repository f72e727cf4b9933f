"""`infinity chat` and `infinity generate`: texts of a model that a run has trained."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.tools.cli.options import arg, is_silent, opt, reply, wants_json

if TYPE_CHECKING:
    from infinity.tools.chat import TextWriter

_Model = Annotated[Path, arg("DIR", "The output of a run, an adapter, or a directory of weights.")]
_Config = Annotated[Path | None, opt("FILE", "Tiers and budgets. Default: half the memory.")]
_Tokens = Annotated[int, opt("N", "At most so many.", min=1)]
_Temperature = Annotated[float, opt("T", "0 takes the likeliest token.", min=0.0)]


def generate(
    directory: _Model,
    prompt: Annotated[str, arg("TEXT", "The beginning of the text.")],
    tokens: _Tokens = 100,
    temperature: _Temperature = 0.0,
    config: _Config = None,
) -> None:
    """Let a trained model continue a text.

    The weights are read from their files, the adapter's from its own; what memory has no space for
    is read again for every token.
    """
    writer, started_s = _open(directory, config), time.perf_counter()
    try:
        ids = writer.tokenizer.encode(prompt)
        new = writer.write(ids, num_tokens=tokens, temperature=temperature, say=_say)
    finally:
        writer.close()
    _say("\n")
    answer = {
        "prompt": prompt,
        "text": writer.tokenizer.decode(new),
        "num_tokens": len(new),
        "seconds": time.perf_counter() - started_s,
    }
    reply(answer)


def chat(
    directory: _Model,
    system: Annotated[str | None, opt("TEXT", "Said to the model first.")] = None,
    tokens: _Tokens = 400,
    temperature: _Temperature = 0.7,
    config: _Config = None,
) -> None:
    """Talk to a trained model, one line at a time; an empty line or Ctrl-D ends it.

    With --json, each answer is a line of JSON.
    """
    writer = _open(directory, config)
    messages = [{"role": "system", "content": system}] if system else []
    try:
        while text := _line():
            messages.append({"role": "user", "content": text})
            prompt = writer.prompt_of(messages)
            new = writer.write(prompt, num_tokens=tokens, temperature=temperature, say=_say)
            messages.append({"role": "assistant", "content": writer.tokenizer.decode(new)})
            _say("\n")
            if wants_json():
                typer.echo(json.dumps(messages[-1]))
    except KeyboardInterrupt:
        typer.echo()
    finally:
        writer.close()


def _open(directory: Path, config: Path | None) -> TextWriter:
    from infinity.config.extras import require_release, require_transformers
    from infinity.config.paths import refuse_no_directory

    require_release("torch", "infinity")
    require_transformers("infinity chat")
    refuse_no_directory(directory)
    from infinity.tools.chat import open_writer

    return open_writer(directory, config)


def _say(text: str) -> None:
    if not is_silent():
        sys.stdout.write(text)
        sys.stdout.flush()


def _line() -> str:
    """Returns the next line of the user; "" at the end of the input."""
    if sys.stdin.isatty():
        _say("> ")
    return sys.stdin.readline().strip()
