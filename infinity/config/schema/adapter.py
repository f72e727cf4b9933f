"""The table `[adapter]`: a low-rank adapter over a frozen base."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from infinity.config.schema.section import Section, one_as_list
from infinity.config.values import (
    Flag,
    Location,
    choice,
    fault,
    integer,
    number,
    refuse_all,
    some_text,
)

AdapterMethod = Literal["lora", "dora"]
AUTO_TARGETS, ALL_LINEAR = "auto", "all-linear"
_Target = Annotated[str, some_text("the name of a module, or its end")]


def _one_word_alone(targets: tuple[str, ...]) -> tuple[str, ...]:
    words = [word for word in (AUTO_TARGETS, ALL_LINEAR) if word in targets]
    if words and len(targets) > 1:
        refuse_all([fault(f'expected "{words[0]}" alone, or names of modules; got both')])
    return targets


class AdapterConfig(Section):
    """An adapter that `infinity train` trains while every weight of `[model]` is frozen.

    PEFT makes it, initialises it and names its parts. It is saved in PEFT's format into
    output.directory, in place of a full checkpoint. Without this section all weights are trained.
    A block of the base is fetched once per direction and step for all batches of the step
    (`schedule.micro_batch` is train.batch_size unless set).
    """

    method: Annotated[AdapterMethod, choice(AdapterMethod)] = Field(
        "lora",
        description='"lora" adds B A x to W x; "dora" also trains the magnitude of W + B A.',
    )
    rank: Annotated[int, integer(1)] = Field(16, description="Rows of A and columns of B.")
    alpha: Annotated[float, number(above=0)] = Field(
        32.0, description="The product B A is scaled by alpha / rank."
    )
    dropout: Annotated[float, number(minimum=0, below=1)] = Field(
        0.0, description="Probability that an element of an adapter's input is dropped in training."
    )
    rslora: Flag = Field(False, description="Scale by alpha / sqrt(rank) instead.")
    targets: Annotated[
        tuple[_Target, ...],
        BeforeValidator(one_as_list, json_schema_input_type=tuple[_Target, ...] | _Target),
        AfterValidator(_one_word_alone),
    ] = Field(
        (AUTO_TARGETS,),
        description='Modules that get an adapter, by name as PEFT\'s `target_modules`: "q_proj" '
        'is every module whose name ends so. "auto" is every linear layer of attention, of dense '
        "MLPs and of shared experts, without routers, the head, and names that PEFT takes for "
        'routed experts (docs/ADAPTERS.md). "all-linear" is every linear layer except the head.',
    )
    experts: Flag = Field(
        False,
        description="Also adapt the routed experts, whose weights are packed in parameters of "
        "three dimensions, as PEFT's `target_parameters`. A rank-16 adapter of every expert has "
        "many parameters: ask `infinity plan` first.",
    )
    resume: Location | None = Field(
        None,
        description="Directory of an adapter in PEFT's format to continue from. Its "
        "adapter_config.json then decides the other keys; one that is set here must agree.",
    )
    any_base: Flag = Field(
        False,
        description="Continue from `resume` also over another base than the adapter was trained "
        "over, of the same names and shapes.",
    )

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
        if not self.targets and not self.experts and self.resume is None:
            text = 'expected "auto", "all-linear" or names of modules, or experts = true; got []'
            faults.append(fault(text, "targets"))
        refuse_all(faults)
        return self

    @property
    def set_keys(self) -> dict[str, Any]:
        """The keys that the file holds, with their values."""
        return {key: getattr(self, key) for key in self.model_fields_set}
