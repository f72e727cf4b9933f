"""The whole swap-tier file: reading it, what its sections owe one another, where values came from.

One model for TOML, YAML, JSON and a dict. `SwapConfig.load` reports every fault at once.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from infinity.config import deepspeed, problems
from infinity.config.schema import SCHEMA, Section, changed, defaults
from infinity.config.schema.engine import (
    Distributed,
    Io,
    IoEngineName,
    Optimizer,
    Precision,
    Schedule,
)
from infinity.config.schema.inputs import AdapterConfig, Data, Model
from infinity.config.schema.tiers import Placement, Tiers
from infinity.config.schema.train import Checkpoint, Output, Train
from infinity.config.source import ConfigSource, read_source
from infinity.config.values import Loading, choice, fault, integer, refuse_all, show_value
from infinity.errors import ConfigError
from infinity.sizes import write_size

IO_ENGINE_VARIABLE = "INFINITY_IO_ENGINE"
COMMITS_NAME, COPYING_NAME = "commits", "copying"  # In the first swap directory.
# Chunks that one move of the optimizer holds of each kind of state.
_NUM_CHUNKS = {"master": 1, "gradients": 1}

_OF_SEVERAL, _UNSET = ("lr", "data", "seed", "output"), (None, ())  # Of [[adapter]].
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OF_PEFT = re.compile(  # Parts of the names that PEFT gives parameters, by which adapters are told.
    r"base_model|base_layer|original_module|modules_to_save|token_adapter|trainable_tokens_\w+"
    r"|lora_(A|B|embedding_[AB]|magnitude_vector|dropout|bias)"
)

SectionName = Literal["model", "data", "train"]


class Resolved(NamedTuple):
    """One value of a configuration as a file would write it, and where it came from.

    `origin` is "file NAME", "dict", "default", "derived" (from other keys) or "environment".
    """

    key: str
    value: Any
    origin: str


class SwapConfig(Section):
    """The whole swap-tier file. `[model]`, `[adapter]`, `[data]` and `[train]` serve
    `infinity train` only."""

    _source: ConfigSource = PrivateAttr(default_factory=ConfigSource)
    schema_version: Annotated[int, integer(1, SCHEMA)] = Field(SCHEMA, alias="schema")
    """Version of this file's format."""
    tiers: Tiers = defaults()
    placement: Placement = defaults()
    io: Io = defaults()
    schedule: Schedule = defaults()
    distributed: Distributed = defaults()
    precision: Precision = defaults()
    optimizer: Optimizer = defaults()
    model: Model | None = None
    adapter: AdapterConfig | None = None
    adapters: tuple[AdapterConfig, ...] = ()
    """Several adapters, each a table `[[adapter]]`, in one run over one base."""
    data: Data | None = None
    train: Train | None = None
    output: Output = defaults()
    checkpoint: Checkpoint | None = None

    @model_validator(mode="before")
    @classmethod
    def _several_adapters(cls, value: Any) -> Any:
        """Reads `[[adapter]]` as `adapters`."""
        if isinstance(value, dict) and isinstance(value.get("adapter"), (list, tuple)):
            several = value["adapter"]
            return {k: v for k, v in value.items() if k != "adapter"} | {"adapters": several}
        return value

    @model_validator(mode="after")
    def _adapters_apart(self) -> SwapConfig:
        """Refuses adapters that could not be told apart, and what several cannot have."""
        single = self.adapter and [k for k in _OF_SEVERAL if getattr(self.adapter, k) not in _UNSET]
        faults = [
            fault(
                "belongs to [[adapter]]; write the table so, or leave the key out", "adapter", key
            )
            for key in single or ()
        ]
        names = [adapter.name for adapter in self.adapters]
        for index, adapter in enumerate(self.adapters):
            name, place = adapter.name, ("adapters", index)
            if name is None or not _ADAPTER_NAME.fullmatch(name):
                text = f"expected letters, digits, _ and - for each of several; got {name!r}"
                faults.append(fault(text, *place, "name"))
            elif _OF_PEFT.fullmatch(name):
                text = f"expected another name; PEFT calls parts of its modules {name!r}"
                faults.append(fault(text, *place, "name"))
            elif names.index(name) < index:
                faults.append(fault(f"expected another name; {name!r} is used", *place, "name"))
            if adapter.experts:
                text = "expected false in each of several adapters: PEFT has one for experts"
                faults.append(fault(text, *place, "experts"))
            if adapter.experts_full:
                text = "expected none in each of several adapters: experts have weights once"
                faults.append(fault(text, *place, "experts_full"))
        places = [config.output.directory for config in self.of_adapters()]
        if self.adapters and (self.adapter or len(set(places)) < len(places)):
            text = "expected a directory of its own for each, and no [adapter] beside [[adapter]]"
            faults.append(fault(text, "adapters"))
        train, checkpoint = self.train, self.checkpoint
        for is_wrong, text, section, key in (
            (train and train.method != "sft", 'expected "sft"', "train", "method"),
            (train and set(train.report_to) - {"tensorboard"}, 'expected "tensorboard" or none',
             "train", "report_to"),
            (checkpoint and checkpoint.durability == "step", 'expected "checkpoint" or "none"',
             "checkpoint", "durability"),
        ):  # fmt: skip
            if self.adapters and is_wrong:
                faults.append(fault(f"{text} with several adapters ([[adapter]])", section, key))
        refuse_all(faults)
        return self

    def of_adapters(self) -> list[Self]:
        """Returns the configuration of each adapter as a run of it alone has it; this one where the
        file has no `[[adapter]]`."""
        found = []
        for adapter in self.adapters:
            own = {"lr": None, "data": (), "seed": None, "output": None}
            values: dict[str, Any] = {"adapters": (), "adapter": changed(adapter, own)}
            values["output.directory"] = adapter.output or self.output.directory / str(adapter.name)
            if self.checkpoint is not None and self.checkpoint.directory is not None:
                values["checkpoint.directory"] = self.checkpoint.directory / str(adapter.name)
            if adapter.lr is not None:
                values["optimizer.lr"] = adapter.lr
            if adapter.data and self.data is not None:
                values["data.paths"] = adapter.data
            for section in ("train", "model"):
                if adapter.seed is not None and getattr(self, section) is not None:
                    values[f"{section}.seed"] = adapter.seed
            found.append(changed(self, values))
        if self.adapter is not None and self.adapter.name is not None:
            return [changed(self, {"adapter.name": None})]  # That is one of several no more.
        return found or [self]

    @property
    def every_adapter(self) -> tuple[AdapterConfig, ...]:
        """The adapters of the file: those of `[[adapter]]`, that of `[adapter]`, or none."""
        return self.adapters or ((self.adapter,) if self.adapter is not None else ())

    @field_validator("placement")
    @classmethod
    def _on_tiers_that_exist(cls, placement: Placement, info: ValidationInfo) -> Placement:
        tiers: Tiers | None = info.data.get("tiers")
        if tiers is None:  # Its own faults are reported; placement cannot be checked.
            return placement
        if tiers.nvme:
            derived = {
                kind: ("nvme",)
                for kind in ("parameters", "master", "moments")
                if kind not in placement.model_fields_set
            }
            return Placement.model_construct(
                placement.model_fields_set, **placement.__dict__ | derived
            )
        missing = '"nvme" needs a [[tiers.nvme]] entry, and there is none'
        refuse_all(
            [
                fault(missing, kind, names.index("nvme"))
                for kind, names in placement
                if "nvme" in names
            ]
        )
        return placement

    @field_validator("io")
    @classmethod
    def _engine_of_environment(cls, io: Io, info: ValidationInfo) -> Io:
        word = os.environ.get(IO_ENGINE_VARIABLE)
        if not word or io.engine != "auto":
            return io
        if word not in get_args(IoEngineName):
            words = choice(IoEngineName).expected
            text = f"expected {words} in {IO_ENGINE_VARIABLE}; got {show_value(word)}"
            refuse_all([fault(text, "engine")])
        if isinstance(info.context, Loading) and word != "auto":
            info.context.environment.append("io.engine")
        return Io.model_construct(io.model_fields_set, **io.__dict__ | {"engine": word})

    @field_validator("schedule")
    @classmethod
    def _within_host(cls, schedule: Schedule, info: ValidationInfo) -> Schedule:
        tiers: Tiers | None = info.data.get("tiers")
        budget, window = tiers.host.capacity.nbytes if tiers else None, schedule.window
        if budget is not None and window != "auto" and window > budget:
            most = f"expected at most tiers.host.capacity, {write_size(budget)}"
            refuse_all([fault(f"{most}; got {write_size(window)}", "window")])
        return schedule

    @model_validator(mode="after")
    def _chunks_within_host(self) -> SwapConfig:
        """Refuses a chosen chunk that does not fit. The engine shrinks a default one, which a run
        has written into its own settings."""
        budget, chunk = self.tiers.host.capacity.nbytes, self.schedule.update_chunk
        if budget is None or chunk == Schedule.model_fields["update_chunk"].default:
            return self
        counts = {**_NUM_CHUNKS, "moments": self.optimizer.num_moments}
        num_chunks = sum(n for kind, n in counts.items() if "nvme" in getattr(self.placement, kind))
        if num_chunks * chunk > budget:
            text = (
                f"{num_chunks} chunks of {write_size(chunk)}, one for each kind of state on "
                f"nvme, do not fit tiers.host.capacity, {write_size(budget)}"
            )
            refuse_all([fault(text, "schedule", "update_chunk")])
        return self

    @field_validator("checkpoint")
    @classmethod
    def _steps_on_nvme(
        cls, checkpoint: Checkpoint | None, info: ValidationInfo
    ) -> Checkpoint | None:
        tiers: Tiers | None = info.data.get("tiers")
        if checkpoint and checkpoint.durability == "step" and tiers and not tiers.nvme:
            text = '"step" commits to the swap directory and needs a [[tiers.nvme]] entry'
            refuse_all([fault(text, "durability")])
        return checkpoint

    @field_validator("train")
    @classmethod
    def _fits_data(cls, train: Train | None, info: ValidationInfo) -> Train | None:
        data: Data | None = info.data.get("data")
        if not train:
            return train
        faults = []
        if data and train.eval_every and not (data.held_out or data.eval_paths):
            text = "evaluation needs held-out data; data.held_out is 0 and data.eval_paths is empty"
            faults.append(fault(text, "eval_every"))
        faults += [
            fault("needs evaluations; train.eval_every is 0", key)
            for key in ("early_stopping_patience", "keep_best")
            if getattr(train, key) and not train.eval_every
        ]
        if data and train.diffusion:
            plain = {"packing": False, "max_bytes": None, "tokenizer": "auto"}
            faults += [
                fault(f'expected no data.{key} with method = "diffusion"', "method")
                for key, value in plain.items()
                if getattr(data, key) != value
            ]
        most = data.sequence_length - 1 if data else None
        if most and train.grpo and train.grpo.max_completion_length > most:
            text = f"expected at most {most}: a prompt has to fit data.sequence_length, too"
            faults.append(fault(text, "grpo", "max_completion_length"))
        refuse_all(faults)
        return train

    def __init__(self, **sections: Any) -> None:
        """Reads sections given as tables, as `load` reads a dict. Raises ConfigError."""
        self._read(sections, ConfigSource())

    @classmethod
    def load(
        cls, source: str | os.PathLike[str] | Mapping[str, Any] | SwapConfig | None = None
    ) -> SwapConfig:
        """The configuration of a .toml, .yaml, .yml or .json file, or of a dict.

        None is all defaults; a SwapConfig is returned as it is. A configuration of DeepSpeed, or of
        accelerate for it, is translated (docs/DEEPSPEED.md). Relative paths start at the file's
        directory, or at the working directory. Raises one ConfigError with every fault.
        """
        if isinstance(source, SwapConfig):
            return source
        table, origin = read_source({} if source is None else source)
        found = deepspeed.translated(table, origin)
        return cls.from_table(table, origin) if found is None else configuration_of(found, origin)

    @classmethod
    def from_table(cls, table: dict[str, Any], source: ConfigSource) -> SwapConfig:
        """Returns the configuration of a table from `read_file`, which the caller may have changed.

        Paths and messages are those of `source`. Raises ConfigError as `load` does.
        """
        config = cls.__new__(cls)
        config._read(table, source)
        return config

    def _read(self, table: dict[str, Any], source: ConfigSource) -> None:
        version = table.get("schema")
        if isinstance(version, int) and version > SCHEMA:
            raise ConfigError(
                f"{source.name}: schema {version} is newer than this infinity, which reads up to "
                f"{SCHEMA}: upgrade infinity-offload"
            )
        loading = Loading(source.directory)
        try:
            self.__pydantic_validator__.validate_python(table, self_instance=self, context=loading)
        except ValidationError as error:
            raise problems.from_validation(error, SwapConfig, name=source.name) from None
        self._source = dataclasses.replace(source, environment=tuple(loading.environment))

    @property
    def checkpoint_directory(self) -> Path:
        """The directory of `[checkpoint]`, or its default without that section."""
        chosen = self.checkpoint.directory if self.checkpoint is not None else None
        return chosen or self.output.directory / "checkpoints"

    @property
    def commit_directory(self) -> Path | None:
        """The directory of commits, for `checkpoint.durability = "step"`: in the first swap
        directory.

        None without a swap directory.
        """
        return self.tiers.nvme[0].path / COMMITS_NAME if self.tiers.nvme else None

    @property
    def copying_directory(self) -> Path | None:
        """The directory of a checkpoint during its copy to another file system: beside the
        commits."""
        return self.tiers.nvme[0].path / COPYING_NAME if self.tiers.nvme else None

    @property
    def commit_directories(self) -> list[Path]:
        """All directories of the first swap directory that may hold committed steps."""
        return [*filter(None, (self.commit_directory, self.copying_directory))]

    @property
    def source(self) -> ConfigSource:
        """The source of this configuration."""
        return self._source

    def require(self, *sections: SectionName) -> None:
        """Raises ConfigError naming those of `sections` that the file leaves out."""
        missing = [name for name in sections if getattr(self, name) is None]
        if missing:
            raise problems.InvalidConfigError(
                (problems.Problem(name, f"the section [{name}] is missing") for name in missing),
                name=self._source.name,
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole configuration as a file holds it; `load` of it gives an equal one."""
        return self.model_dump(mode="json", by_alias=True)

    def resolved(self) -> list[Resolved]:
        """Every value, defaults included, and its origin. See `Resolved`."""
        return [
            Resolved(problems.dotted(place), value, origin) for place, value, origin in self.walk()
        ]

    def walk(self) -> Iterator[tuple[problems.Place, Any, str]]:
        """Like `resolved`, with places in parts; the plain values of a table precede its tables."""
        yield from _walk(self, self.to_dict(), (), self._source)


class JobConfig(SwapConfig):
    """A configuration of `infinity train`, whose sections are there."""

    model: Model
    data: Data
    train: Train

    @classmethod
    def of(cls, config: SwapConfig) -> JobConfig:
        """Returns the same configuration as one of a job. Raises ConfigError, which names the
        sections that are missing."""
        config.require("model", "data", "train")
        found = cls.model_construct(config.model_fields_set, **config.__dict__)
        found._source = config._source
        return found


def _walk(
    section: Section, written: dict[str, Any], place: problems.Place, source: ConfigSource
) -> Iterator[tuple[problems.Place, Any, str]]:
    tables: list[Iterable[tuple[problems.Place, Any, str]]] = []
    for name, info in type(section).model_fields.items():
        key = info.alias or name
        value, here = getattr(section, name), (*place, key)
        if isinstance(value, Section):
            tables.append(_walk(value, written[key], here, source))
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            for index, entry in enumerate(value):
                tables.append(_walk(entry, written[key][index], (*here, index), source))
        elif isinstance(value, dict):
            tables.append([((*here, inner), value[inner], source.origin) for inner in value])
        else:
            yield here, written[key], _origin(section, name, problems.dotted(here), source)
    for table in tables:
        yield from table


def _origin(section: Section, name: str, place: str, source: ConfigSource) -> str:
    if place in source.environment:
        return "environment"
    if name in section.model_fields_set:
        return source.origin
    extra = type(section).model_fields[name].json_schema_extra
    return "derived" if isinstance(extra, dict) and "x-default" in extra else "default"


# -- Of a DeepSpeed configuration ------------------------------------------------------------------


def from_deepspeed(
    source: str | os.PathLike[str] | Mapping[str, Any], *, skip_refused: bool = False
) -> SwapConfig:
    """Reads a DeepSpeed JSON file, or a dict of one, as a swap-tier configuration.

    docs/DEEPSPEED.md describes the translation of every key. The configuration has `[train]` only
    if the file has the number of steps. Raises ConfigError that names every key which is refused or
    unknown to DeepSpeed; with `skip_refused` these keys are left out.
    """
    table, origin = read_source(source)
    found = deepspeed.translate(table)
    if not skip_refused:
        deepspeed.refuse_lost(found, origin)
    return configuration_of(found, origin)


def configuration_of(found: deepspeed.Translation, source: ConfigSource) -> SwapConfig:
    """The configuration of a translation. Raises ConfigError that names both files' keys."""
    try:
        return SwapConfig.from_table(found.settings, source)
    except problems.InvalidConfigError as error:
        raise deepspeed.naming_theirs(found, error) from None
