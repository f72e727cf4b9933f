"""`infinity chat`, `generate` and `score`: what a model says, and how likely it finds a text."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from infinity.errors import ConfigError, refusing
from infinity.tools.cli.options import (
    arg,
    flag,
    is_silent,
    note,
    opt,
    progress_bar,
    reply,
    wants_json,
)

if TYPE_CHECKING:
    from infinity.tools.chat import TextWriter

_MODEL = arg("DIR", "The output of a run, an adapter, or a directory of weights.")
_CONFIG = opt("FILE", "Tiers and budgets. Default: half the memory.")
_tokens = partial(opt, "N", "The most tokens to generate.", min=1)
_temperature = partial(opt, "T", "0 takes the likeliest token.", min=0.0)


def generate(
    directory: Path = _MODEL,
    prompt: str = arg("TEXT", "The beginning of the text."),
    tokens: int = _tokens(default=100),
    temperature: float = _temperature(default=0.0),
    config: Path | None = _CONFIG,
) -> None:
    """Let a trained model continue a text.

    The weights are read from their files, the adapter's from its own; what memory has no space for
    is read again for every token.
    """
    if not prompt:
        raise ConfigError("TEXT: expected the beginning of a text; got none")
    writer, started_s = _open(directory, config), time.perf_counter()
    try:
        ids = writer.tokenizer.begin(prompt)
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
    directory: Path = _MODEL,
    system: str | None = opt("TEXT", "The system prompt."),
    tokens: int = _tokens(default=400),
    temperature: float = _temperature(default=0.7),
    config: Path | None = _CONFIG,
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
            if writer.positions is not None and len(prompt) >= writer.positions:
                note(f"the text fills the model's {writer.positions} positions, so it begins anew")
                messages = messages[: bool(system)] + messages[-1:]
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
    from infinity.config.extras import require_release
    from infinity.config.paths import refuse_no_directory

    require_release("torch", "infinity")
    require_release("transformers", "infinity chat")
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


def score(
    model: Path = arg("MODEL", "A directory of weights, or the hub's name."),
    data: list[Path] = arg("DATA", "Texts, or records as `infinity train` reads them."),
    output: Path = opt("FILE", "A .jsonl or .parquet file.", "--output", "-o", default=...),
    adapter: Path | None = opt("DIR", "An adapter in PEFT's format."),
    config: Path | None = opt("FILE", "A swap-tier file. Default: what suits this machine."),
    dtype: str | None = opt("NAME", "float32 or bfloat16. Default: the model's."),
    top_k: int = opt("N", "Also the N likeliest tokens at each place.", default=0),
    layers: str | None = opt(
        "N,N", "Also the hidden states of these layers; 0 is the first input."
    ),
    max_length: int | None = opt(
        "N", "Tokens of a piece of a text file. A longer record is refused.", min=2
    ),
    sweep_tokens: int | None = opt(
        "N", "Tokens that pass the weights together. Default: 32768, on a GPU 131072.", min=1
    ),
    routing: Path | None = opt(
        "FILE", "Also a census of the experts that are chosen, for adapter.experts_full."
    ),
    trust_remote_code: bool = flag("--trust-remote-code", "Run the directory's own code."),
) -> None:
    """Write the log-probability of every token of texts under a model of any size.

    Every weight is read once for many texts. Each record is one row, written when its sweep is
    over. The same command goes on where a run was ended.
    """
    from infinity.config.extras import require_release
    from infinity.tools.scoring import program

    require_release("transformers", "infinity score")
    request = program.Request(
        model=model, data=tuple(data), output=output, adapter=adapter, config=config, dtype=dtype,
        top_k=top_k, layers=_numbers(layers), max_length=max_length, sweep_tokens=sweep_tokens,
        routing=routing, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with progress_bar("reading the model and the data") as update:
        begun_s = time.perf_counter()

        def show(done: int, total: int, read_nbytes: int) -> None:
            elapsed_s = time.perf_counter() - begun_s
            rates = f"{done / elapsed_s:,.0f} tokens/s, {read_nbytes / elapsed_s / 1e9:.2f} GB/s"
            what = f"{done:,} of {total:,} tokens, {rates}"
            update(total=total, completed=done, description=what)

        found = program.run(request, note=show)
    reply(found.to_dict(), f"{output}: {found}")


def _numbers(text: str | None) -> tuple[int, ...]:
    with refusing(f"--layers {text}: expected numbers such as 4,8", ValueError):
        return tuple(int(number) for number in text.split(",")) if text else ()
