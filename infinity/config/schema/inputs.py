"""The tables that a job reads from: `[model]`, `[adapter]` and `[data]`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from infinity.config.schema import MAY_CHANGE, SEED, Section, one_or_more
from infinity.config.values import (
    Flag,
    Location,
    choice,
    conflict,
    fault,
    integer,
    location,
    nearest,
    number,
    or_off,
    refuse,
    refuse_all,
    show_value,
    size,
    some_text,
    written_text,
)

PYTHON_STDLIB = "python-stdlib"
AdapterMethod = Literal["lora", "dora"]
ExpertScore = Literal["gate", "tokens"]
AUTO_TARGETS, ALL_LINEAR = "auto", "all-linear"
_Target = Annotated[str, some_text("the name of a module, or its end")]
_Expert = Annotated[str, some_text("the name of an expert, or a share")]
_SHARE = re.compile(r"top\s+(\d{1,3}(?:\.\d+)?)\s*%")


def _plain(value: Any, place: str, depth: int = 0) -> None:
    """Refuses what JSON could not hold: `config` is handed to transformers as it is."""
    if depth > 16:
        raise conflict(f"{place} is nested too deeply")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise conflict(f"{place} has the key {show_value(key)}: keys are text")
            _as_written(key, f"a key of {place}" if place else "a key")
            _plain(inner, f"{place}.{key}" if place else key, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _plain(inner, f"{place}[{index}]", depth + 1)
    elif isinstance(value, str):
        _as_written(value, place)
    elif not (value is None or isinstance(value, (bool, int, float))):
        raise conflict(f"{place}: expected text, a number, true or false; got {show_value(value)}")


def _as_written(text: str, place: str) -> None:
    try:
        written_text(text)
    except ValueError as error:
        raise conflict(f"{place}: expected text; got {show_value(text)} ({error})") from None


def _model_type_present(config: dict[str, Any] | None) -> dict[str, Any] | None:
    if config is not None:
        _plain(config, "")
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            expected = 'expected the name of an architecture in transformers, such as "gpt2"'
            if "model_type" in config:
                text = f"{expected}; got {show_value(model_type)}"
            else:
                near = nearest("model_type", list(config), cutoff=0.7)
                hint = f'; "{near}" is near' if near else ""
                text = f"a required key is missing; {expected}{hint}"
            refuse_all([fault(text, "model_type")])
    return config


class Model(Section):
    """The model that `infinity train` trains: exactly one of `path` and `[model.config]`."""

    path: Annotated[Location | None, MAY_CHANGE] = None
    """A local Hugging Face directory: config.json and safetensors. A repository id means its
    snapshot in the hub's local cache."""
    config: Annotated[dict[str, Any] | None, AfterValidator(_model_type_present)] = None
    """A transformers configuration for seeded random weights: `model_type` and any key of that
    architecture."""
    seed: Annotated[int, SEED] = 0
    """Seed of weights that no checkpoint holds. Same seed, same weights."""
    ignore: list[Annotated[str, some_text("a pattern of names")]] = Field(default_factory=list)
    """Name patterns of tensors of the checkpoint that the model has no place for and that are to be
    left out. Others are refused."""
    trust_remote_code: Annotated[Flag, MAY_CHANGE] = False
    """Runs the code of `path`'s directory for an architecture that transformers lacks. The code can
    do anything that you can."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.path is None) == (self.config is None):
            came = "neither" if self.path is None else "both"
            raise conflict(f"expected exactly one of path and [model.config]; got {came}")
        return self


_TextPath = Annotated[Path | Literal["python-stdlib"], location((PYTHON_STDLIB,))]


class DataSource(Section):
    """One place that text is read from."""

    path: _TextPath
    """A directory or one file; "python-stdlib" is the running interpreter's standard library."""
    pattern: Annotated[str, some_text("a glob pattern")] = Field(
        "**/*.txt", json_schema_extra={"x-default": '`"**/*.txt"`, for python-stdlib `"**/*.py"`'}
    )
    """Files to take, below a directory; one file is taken whatever its name."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, (str, os.PathLike)) else value

    @model_validator(mode="after")
    def _python_files(self) -> DataSource:
        if self.path == PYTHON_STDLIB and "pattern" not in self.model_fields_set:
            self.__dict__["pattern"] = "**/*.py"
        return self

    @property
    def has_pattern(self) -> bool:
        """Whether `pattern` is another than the default, which a run writes into its settings."""
        return bool(self.pattern != type(self).model_fields["pattern"].default)

    @property
    def location(self) -> Path:
        """The directory or file that `path` stands for on this machine."""
        if isinstance(self.path, str):
            import sysconfig

            return Path(sysconfig.get_path("stdlib"))
        return self.path


def _not_empty(sources: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
    if not sources:
        raise refuse("at least one path", sources)
    return sources


_Sources = Annotated[
    tuple[DataSource, ...],
    one_or_more(DataSource | str),
]


def _one_word_alone(targets: tuple[str, ...]) -> tuple[str, ...]:
    words = [word for word in (AUTO_TARGETS, ALL_LINEAR) if word in targets]
    if words and len(targets) > 1:
        refuse_all([fault(f'expected "{words[0]}" alone, or names of modules; got both')])
    return targets


def _one_share_alone(experts: tuple[str, ...]) -> tuple[str, ...]:
    shares = [name for name in experts if name.startswith("top")]
    found = _SHARE.fullmatch(shares[0]) if shares else None
    is_share = found is not None and len(experts) == 1 and Decimal(found[1]) <= 100
    if not experts or (shares and not is_share):
        raise refuse('names of experts, or one share such as "top 2%"', list(experts))
    return experts


class AdapterConfig(Section):
    """An adapter that `infinity train` trains while every weight of `[model]` is frozen. Several,
    as `[[adapter]]`, train over one base in one run, each as a run of it alone.

    PEFT makes it, initialises it and names its parts. It is saved in PEFT's format into
    output.directory, in place of a full checkpoint. Without this section all weights are trained.
    With it `schedule.micro_batch` is train.batch_size unless set.
    """

    method: Annotated[AdapterMethod, choice(AdapterMethod)] = "lora"
    """ "lora" adds B A x to W x; "dora" also trains the magnitude of W + B A."""
    rank: Annotated[int, integer(1)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, number(above=0)] = 32.0
    """The product B A is scaled by alpha / rank."""
    dropout: Annotated[float, number(minimum=0, below=1)] = 0.0
    """Probability that an element of an adapter's input is dropped in training."""
    rslora: Flag = False
    """Scale by alpha / sqrt(rank) instead."""
    targets: Annotated[
        tuple[_Target, ...],
        one_or_more(_Target),
        AfterValidator(_one_word_alone),
    ] = (AUTO_TARGETS,)
    """Modules that get an adapter, by name as PEFT's `target_modules`: "q_proj" is every module
    whose name ends so. "auto" is every linear layer of attention, dense MLPs and shared experts,
    without routers and the head (docs/ADAPTERS.md). "all-linear" is every linear layer except the
    head."""
    experts: Flag = False
    """Also adapt the routed experts (PEFT's `target_parameters`). An adapter of every expert has
    many parameters: ask `infinity plan` first."""
    experts_full: (
        Annotated[
            tuple[_Expert, ...],
            one_or_more(_Expert),
            AfterValidator(_one_share_alone),
        ]
        | None
    ) = None
    """Routed experts whose own weights are trained beside the adapter: names such as
    "model.layers.3.mlp.experts.17", or the share of all experts that a census puts first, such as
    "top 2%". `targets = []` trains these alone (docs/howto/experts-in-full.md)."""
    experts_census: Annotated[Location | None, MAY_CHANGE] = None
    """File that `infinity score --routing` wrote over this base; required for a share."""
    experts_score: Annotated[ExpertScore, choice(ExpertScore), MAY_CHANGE] = "gate"
    """The score by which the census orders experts: "gate", the expert's share of the router's
    weights in its layer, or "tokens", its share of the tokens (ESFT-Gate and ESFT-Token of arXiv
    2407.01906)."""
    resume: Annotated[Location | None, MAY_CHANGE] = None
    """Directory of an adapter in PEFT's format to continue from. Its adapter_config.json then
    decides the other keys; one that is set here must agree."""
    any_base: Annotated[Flag, MAY_CHANGE] = False
    """Take saved adapters that were trained over another base of the same names and shapes, too."""

    name: Annotated[str, some_text("a name")] | None = None
    """Required for each of several: letters, digits, _ and -. The keys below belong to
    `[[adapter]]` alone."""
    lr: Annotated[Annotated[float, number(minimum=0)] | None, MAY_CHANGE] = None
    """Takes the place of `optimizer.lr`."""
    data: Annotated[_Sources, MAY_CHANGE] = ()
    """Takes the place of `data.paths`."""
    seed: Annotated[Annotated[int, SEED] | None, MAY_CHANGE] = None
    """Takes the place of `train.seed`, and of `model.seed` for first values."""
    output: Annotated[Location | None, MAY_CHANGE] = Field(
        None, json_schema_extra={"x-default": "`output.directory`/NAME"}
    )
    """Directory of its files."""

    @property
    def peft_name(self) -> str:
        """The name that PEFT knows the adapter by."""
        return self.name or "default"

    @model_validator(mode="after")
    def _experts_have_neither_dropout_nor_magnitudes(self) -> AdapterConfig:
        """Refuses what PEFT has no expert adapters for, and an adapter of nothing."""
        faults = []
        if self.experts and self.method != "lora":
            text = f'expected "lora" with adapter.experts = true; got "{self.method}"'
            faults.append(fault(text, "method"))
        if self.experts and self.dropout:
            text = f"expected 0 with adapter.experts = true; got {self.dropout}"
            faults.append(fault(text, "dropout"))
        if not (self.targets or self.experts or self.experts_full) and self.resume is None:
            text = 'expected "auto", "all-linear" or names of modules, or experts = true; got []'
            faults.append(fault(text, "targets"))
        if self.experts and self.experts_full:
            text = "expected false with adapter.experts_full, which trains an expert's own weights"
            faults.append(fault(text, "experts"))
        if self.experts_percent is not None and self.experts_census is None:
            text = "needs adapter.experts_census, the file of infinity score --routing"
            faults.append(fault(text, "experts_full"))
        refuse_all(faults)
        return self

    @property
    def experts_percent(self) -> Decimal | None:
        """The per cent of all experts that `experts_full` asks for; None for names."""
        found = _SHARE.fullmatch(self.experts_full[0]) if self.experts_full else None
        return None if found is None else Decimal(found[1])

    @property
    def set_keys(self) -> dict[str, Any]:
        """The keys that the file holds, with their values."""
        return {key: getattr(self, key) for key in self.model_fields_set}


class Data(Section):
    """The data that `infinity train` reads: text, or records (docs/TRAINING.md#data)."""

    paths: Annotated[_Sources, AfterValidator(_not_empty), MAY_CHANGE]
    """Files and directories: each a path, or a table with path and pattern."""
    eval_paths: Annotated[_Sources, MAY_CHANGE] = ()
    """Files and directories to evaluate on. Without them `held_out` of the sequences are kept for
    it."""
    tokenizer: Annotated[
        Path | Literal["auto", "bytes"],
        location(("auto", "bytes"), "the directory of a local Hugging Face tokenizer"),
        MAY_CHANGE,
    ] = "auto"
    """ "auto" takes the tokenizer in `model.path`, and bytes where there is none. "bytes" takes
    UTF-8 bytes as tokens (vocabulary 256). A directory of the name bytes is written "./bytes"."""
    sequence_length: Annotated[int, integer(2)] = 512
    """Tokens per sequence of text; longer records are cut to so many."""
    packing: Flag = False
    """Put several records into one sequence of at most `sequence_length` tokens, kept apart by
    positions and attention."""
    assistant_only_loss: Flag = True
    """Learn what the assistant says and what completes a prompt. False learns the rest of a record,
    too."""
    held_out: Annotated[float, number(minimum=0, maximum=0.5)] = 0.05
    """Fraction of the sequences kept for evaluation."""
    max_bytes: Annotated[int | None, or_off(size()), MAY_CHANGE] = None
    """Most bytes of text to read; not for records."""
    seed: Annotated[int, SEED] = 0
    """Seed of the split and the order."""
    shuffle: Flag = True
    """Shuffle the sequences."""
