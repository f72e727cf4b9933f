"""The tables that a job reads from: `[model]` and `[data]`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from infinity.config.reading import conflict, fault, nearest, refuse, refuse_all, show_value
from infinity.config.schema.section import SEED, Section, one_as_list
from infinity.config.values import Flag, Integer, Location, Number, OrOff, Size, Text

PYTHON_STDLIB = "python-stdlib"


def _plain(value: Any, place: str, depth: int = 0) -> None:
    """Refuses what JSON could not hold: `config` is handed to transformers as it is."""
    if depth > 16:
        raise conflict(f"{place} is nested too deeply")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise conflict(f"{place} has the key {show_value(key)}: keys are text")
            _plain(inner, f"{place}.{key}" if place else key, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _plain(inner, f"{place}[{index}]", depth + 1)
    elif not (value is None or isinstance(value, (str, bool, int, float))):
        raise conflict(f"{place}: expected text, a number, true or false; got {show_value(value)}")


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

    path: Annotated[Path, Location()] | None = Field(
        None, description="A local Hugging Face directory: config.json and safetensors."
    )
    config: Annotated[dict[str, Any] | None, AfterValidator(_model_type_present)] = Field(
        None,
        description="A transformers configuration for seeded random weights: `model_type` and any "
        "key of that architecture.",
    )
    seed: Annotated[int, SEED] = Field(
        0, description="Seed of weights that no checkpoint holds. Same seed, same weights."
    )
    ignore: list[str] = Field(
        default_factory=list,
        description="Name patterns of tensors of the checkpoint that the model has no place for "
        "and that are to be left out. Others are refused.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.path is None) == (self.config is None):
            came = "neither" if self.path is None else "both"
            raise conflict(f"expected exactly one of path and [model.config]; got {came}")
        return self


class DataSource(Section):
    """One place that text is read from."""

    path: Annotated[Path | Literal["python-stdlib"], Location((PYTHON_STDLIB,))] = Field(
        description="A directory or one file; "
        '"python-stdlib" is the running interpreter\'s standard library.'
    )
    pattern: Annotated[str, Text("a glob pattern")] = Field(
        "**/*.txt",
        description="Files to take, below a directory; one file is taken whatever its name.",
        json_schema_extra={"x-default": '`"**/*.txt"`, for python-stdlib `"**/*.py"`'},
    )

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


class Data(Section):
    """The text of `infinity train`: files in UTF-8.

    Files of conversations are JSON lines, each with a list of `messages` with role and content. The
    chat template of the model writes them, and only the assistant's turns are learned. Other JSON,
    tables, archives and other formats are refused by name.
    """

    paths: Annotated[
        tuple[DataSource, ...],
        BeforeValidator(one_as_list, json_schema_input_type=tuple[DataSource | str, ...] | str),
        AfterValidator(_not_empty),
    ] = Field(description="Files and directories: each a path, or a table with path and pattern.")
    tokenizer: Annotated[
        Path | Literal["auto", "bytes"],
        Location(("auto", "bytes"), "the directory of a local Hugging Face tokenizer"),
    ] = Field(
        "auto",
        description='"auto" takes the tokenizer in `model.path`, and bytes where there is none. '
        '"bytes" takes UTF-8 bytes as tokens (vocabulary 256). A directory of the name bytes is '
        'written "./bytes".',
    )
    sequence_length: Annotated[int, Integer(2)] = Field(512, description="Tokens per sequence.")
    held_out: Annotated[float, Number(minimum=0, maximum=0.5)] = Field(
        0.05, description="Fraction of the sequences kept for evaluation."
    )
    max_bytes: Annotated[int | None, OrOff(Size())] = Field(
        None, description="Most bytes of text to read."
    )
    seed: Annotated[int, SEED] = Field(0, description="Seed of the split and the order.")
    shuffle: Annotated[bool, Flag()] = Field(True, description="Shuffle the sequences.")
