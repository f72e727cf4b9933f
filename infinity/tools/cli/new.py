"""`infinity new`: a file for `infinity train`, from a model's directory and this machine."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from infinity.errors import ConfigError, refusing
from infinity.tools.cli.options import (
    HARDWARE,
    arg,
    flag,
    is_silent,
    note,
    opt,
    reply,
    wants_json,
    with_options,
)

if TYPE_CHECKING:
    from infinity.plan.directory import ModelDirectory
    from infinity.plan.predict import Forecast
    from infinity.tools.plan.data_facts import DataFacts, Table
    from infinity.tools.plan.draft import Draft, Wish

_RANK = 16
_SWEPT: dict[str, Callable[[str], Any]] = {
    "lr": float, "rank": int, "alpha": float, "dropout": float, "seed": int,
}  # fmt: skip


@dataclass(frozen=True)
class NewOptions:
    """The options of the command line."""

    directory: Path = arg(
        "MODEL_DIR", "The directory of a downloaded model; config.json alone is enough."
    )
    data: list[Path] | None = opt("FILE", "Records, text, captioned images or videos; repeatable.")
    rank: int | None = opt("RANK", "Rank of the adapter; 16 by default.", "--lora", min=1)
    full: bool = flag("--full", "Train all weights, without an adapter.")
    sweep: list[str] | None = opt(
        "KEY=A,B",
        "An adapter for each of these values of lr, rank, alpha, dropout or seed; repeated, "
        "for each combination. All train in one run.",
    )
    experts: bool = flag("--experts", "Adapt the routed experts, too.")
    swap: list[Path] | None = opt(
        "DIR",
        "A directory on a drive for state that memory has no space for; one "
        "per drive. Default: next to the file.",
    )
    sequence: int | None = opt(
        "N", "Tokens of a sequence; by default as many as the data need.", min=2
    )
    batch: int | None = opt("N", "Sequences of a step; up to 16 by default.", min=1)
    epochs: int = opt("N", "Passes over the data.", default=1, min=1)
    ranks: int | None = opt(
        "N", "Ranks of one node. Default: one for each device of --hardware.", min=1
    )
    hardware: str | None = HARDWARE
    out: Path | None = opt(
        "FILE",
        "The file to write, .toml; - prints it. Default: the model's name, in this directory.",
        "--write",
        "-o",
    )

    @cached_property
    def num_ranks(self) -> int:
        """The number of ranks. The devices of this machine are not counted."""
        if self.ranks is not None or self.hardware is None:
            return self.ranks or 1
        from infinity.plan.hardware import load_hardware

        return load_hardware(self.hardware).device.count

    @property
    def file(self) -> Path | None:
        """The file to write; None: standard output."""
        if self.out == Path("-"):
            return None
        from infinity.config.hub import model_name

        return self.out or Path(f"{model_name(self.directory)}.toml")


@with_options(NewOptions)
def new(asked: NewOptions) -> None:
    """Write a file for `infinity train` that suits the model, the data and this machine.

    Memory, device and drives are measured in a few seconds; nothing is trained. The file has a
    comment for what was decided. An existing file is never overwritten.
    """
    from infinity.config.hub import in_hub_cache  # Slow to import.

    asked = replace(asked, directory=in_hub_cache(asked.directory))
    _refuse(asked)
    from infinity.config.schema.train import METHODS
    from infinity.modules.reading.configuration import table_of_denoiser
    from infinity.plan.directory import read_directory
    from infinity.tools.plan.data_facts import train_keys

    directory = None
    if table_of_denoiser(asked.directory) is not None:
        wish = _wish(asked, None, _captioned(asked))
    else:
        keys = train_keys(asked.data, asked.directory) if asked.data else {}
        method = keys.get("method", "sft")
        if asked.sweep and method != "sft":
            raise ConfigError(
                f"--sweep: several adapters train by 'sft' alone, and these data by {method!r}; "
                "leave --sweep out, and write a file for each setting"
            )
        purpose = METHODS[method].purpose
        num_labels = len(keys.get("labels", ()))
        directory = read_directory(asked.directory, purpose=purpose, num_labels=num_labels)
        _refuse_model(asked, directory)
        wish = _wish(asked, directory.shape.max_positions, _facts(asked, directory, keys))
    found, forecast = _decide(asked, wish, directory)
    if forecast.obstacles:
        raise ConfigError(
            f"no file was written, because nothing fits {forecast.hardware.name}: "
            + "; ".join(forecast.obstacles)
        )
    from infinity.tools.plan.draft import file_of

    name = shlex.quote(asked.file.name) if asked.file is not None else "FILE"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = file_of(wish, found, forecast, name, today)
    if asked.file is not None:
        with (
            refusing(f"{asked.file}: cannot be written", OSError),
            asked.file.open("x", encoding="utf-8") as stream,
        ):
            stream.write(text)
    elif not wants_json():
        typer.echo(text, nl=False)
    if wants_json():
        reply(_answer(asked, wish, found, forecast))
    elif not is_silent():
        for line in _lines(asked, wish, found, forecast):
            typer.echo(line, err=asked.file is None)


def _refuse(asked: NewOptions) -> None:
    from infinity.plan.files import refuse_no_model, refuse_unknown

    if asked.full and (asked.rank is not None or asked.experts):
        raise ConfigError("expected --full, or --lora and --experts; got both. Leave one out")
    if asked.sweep and (asked.full or asked.experts):
        raise ConfigError(
            "--sweep is for adapters without experts; leave it out, or --full and --experts"
        )
    if any("rank" in table for table in _swept(asked)) and asked.rank is not None:
        raise ConfigError("expected --lora, or the ranks of --sweep; got both. Leave one out")
    if asked.batch is not None and asked.batch % asked.num_ranks:
        devices = f"{asked.num_ranks} (--ranks: one for each device of {asked.hardware})"
        ranks = devices if asked.ranks is None else f"--ranks {asked.ranks}"
        raise ConfigError(
            f"--batch {asked.batch}: expected a multiple of {ranks}, because each rank has as many "
            "sequences of a step"
        )
    # Paths that lead nowhere are refused before torch is imported.
    refuse_no_model(asked.directory)
    if asked.hardware is not None:
        refuse_unknown("hardware", asked.hardware)
    missing = next((path for path in asked.data or () if not path.exists()), None)
    if missing is not None:
        raise ConfigError(f"--data {missing}: there is no such file or directory")
    file = asked.file
    if file is None:
        return
    if file.suffix != ".toml":
        raise ConfigError(f"--write {file}: expected a name that ends in .toml")
    if file.exists() or file.is_symlink():
        raise ConfigError(f"{file} already exists; give another name with -o, or remove it")
    if not file.resolve().parent.is_dir():
        raise ConfigError(f"--write {file}: {file.parent} is no directory; make it first")


def _swept(asked: NewOptions) -> tuple[dict[str, Any], ...]:
    """Returns a table for each adapter of `--sweep`. Raises ConfigError for what cannot be read."""
    axes: dict[str, list[str]] = {}
    for text in asked.sweep or ():
        key, equals, values = text.partition("=")
        kind = _SWEPT.get(key)
        if kind is None or not equals or key in axes:
            raise ConfigError(
                f"--sweep {text!r}: expected KEY=A,B, once for each of {', '.join(_SWEPT)}"
            )
        with refusing(f"--sweep {text!r}: expected numbers", ValueError):
            axes[key] = values.split(",")
            if len({kind(value) for value in axes[key]}) < len(axes[key]):
                raise ConfigError(f"--sweep {text!r}: expected each value once")
    found = []
    for chosen in product(*axes.values()) if axes else ():
        pairs = list(zip(axes, chosen, strict=True))
        name = "-".join(f"{key}{value}" for key, value in pairs)
        values_of = {key: _SWEPT[key](value) for key, value in pairs}
        found.append({"name": re.sub(r"[^A-Za-z0-9_-]", "_", name)} | values_of)
    return tuple(found)


def _refuse_model(asked: NewOptions, directory: ModelDirectory) -> None:
    if asked.full and directory.stored.is_quantised:
        raise ConfigError(
            f"--full: {asked.directory} is quantised ({directory.stored.formats}), and codes "
            "cannot be trained; leave --full out for an adapter, or use the one in bfloat16"
        )
    if asked.experts and not directory.shape.has_experts:
        raise ConfigError(f"--experts: {asked.directory} has no routed experts; leave it out")
    limit = directory.shape.max_positions
    if asked.sequence is not None and limit is not None and asked.sequence > limit:
        raise ConfigError(
            f"--sequence {asked.sequence}: {asked.directory} has {limit} positions, give "
            "fewer tokens"
        )


def _captioned(asked: NewOptions) -> DataFacts:
    from infinity.tools.plan.data_facts import captioned_facts

    if any((asked.sweep, asked.experts, not asked.data)):
        raise ConfigError(
            f"{asked.directory}: for a pipeline of diffusers expected --data IMAGES or VIDEOS, and "
            "neither --sweep nor --experts"
        )
    return captioned_facts(asked.data or ())


def _wish(asked: NewOptions, max_positions: int | None, data: DataFacts | None) -> Wish:
    from infinity.config.hub import model_name
    from infinity.tools.plan.draft import Wish

    place = (asked.file or Path("x.toml")).resolve().parent
    name = model_name(asked.file or asked.directory).removesuffix(".toml")
    return Wish(
        model=asked.directory.resolve(),
        max_positions=max_positions,
        rank=None if asked.full else asked.rank or _RANK,
        experts=asked.experts,
        data=data,
        data_paths=tuple(path.resolve() for path in asked.data or ()) or (place / "chat.jsonl",),
        swap=tuple(path.resolve() for path in asked.swap or ()) or (place / f"{name}-swap",),
        output=place / f"{name}-output",
        length=asked.sequence,
        sequences=asked.batch,
        passes=asked.epochs,
        num_ranks=asked.num_ranks,
        is_here=asked.hardware is None,
        sweep=_swept(asked),
    )


def _facts(asked: NewOptions, directory: ModelDirectory, keys: Table) -> DataFacts | None:
    from infinity.tools.plan.data_facts import read_data, sources_of
    from infinity.tools.training.data_files import collect_files
    from infinity.tools.training.settle import tokenizer_of
    from infinity.tools.training.tokenizers import open_tokenizer

    choice = tokenizer_of(asked.directory)
    tokenizer = open_tokenizer(choice.value)
    fast = tokenizer.for_records()
    # TRL fills records with one of them.
    fills = not asked.data or collect_files(sources_of(asked.data))[1]
    if fills and fast.pad_token is None and fast.eos_token is None:
        raise ConfigError(
            f"data.tokenizer: {asked.directory} has no token for padding or the end of a text; "
            "expected pad_token or eos_token in its tokenizer_config.json"
        )
    if not asked.data:
        return None
    if choice.value == "bytes":
        note(str(choice))
    length = asked.sequence or directory.shape.max_positions
    return read_data(asked.data, tokenizer, length, directory.vocab_size, keys)


def _decide(
    asked: NewOptions, wish: Wish, directory: ModelDirectory | None
) -> tuple[Draft, Forecast]:
    from rich.console import Console

    from infinity.config import JobConfig
    from infinity.plan import load_hardware
    from infinity.tools.plan.data_facts import IMAGES
    from infinity.tools.plan.draft import decide, draft
    from infinity.tools.plan.measure import measure
    from infinity.tools.training.denoising import Denoising
    from infinity.tools.training.model import refuse_untrainable

    first = draft(wish, None, spills=False).config
    if directory is None:
        Denoising(JobConfig.of(first))
    else:
        refuse_untrainable(directory.path, first, has_images=wish.noun == IMAGES)
    if asked.hardware is not None:
        machine = load_hardware(asked.hardware)
        return decide(wish, directory, lambda *_: machine)
    with Console(stderr=True, quiet=is_silent()).status("measuring this machine"):
        return decide(wish, directory, measure)


def _lines(asked: NewOptions, wish: Wish, found: Draft, forecast: Forecast) -> list[str]:
    from infinity.tools.plan.draft import answer_lines, describe_machine

    lines = [describe_machine(forecast.hardware), *answer_lines(wish, found, forecast)]
    if asked.file is not None:
        file = shlex.quote(str(asked.file))
        lines += [f"wrote {asked.file}", f"next: {wish.program} train {file}"]
    return lines


def _answer(asked: NewOptions, wish: Wish, found: Draft, forecast: Forecast) -> dict[str, Any]:
    from infinity.tools.plan.draft import answer_lines
    from infinity.tools.plan.report import answer

    return {
        "file": None if asked.file is None else str(asked.file),
        "text": " ".join(answer_lines(wish, found, forecast)),
        "answer": answer(forecast),
        "steps": found.steps,
        "seconds": found.steps * forecast.step.step_s if wish.data else None,
        "hardware": forecast.hardware.model_dump(),
        "config": found.config.model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
