"""The table `[optimizer]`."""

from __future__ import annotations

import fnmatch
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from infinity.config.schema import Section, one_as_list
from infinity.config.values import (
    Flag,
    choice,
    fault,
    number,
    or_off,
    refuse,
    refuse_all,
    some_text,
)

OptimizerName = Literal["adamw", "adam", "sgd", "lion"]

_BETA = number(minimum=0, below=1)
_Name = Annotated[str, some_text("a name or a pattern")]


def _pair(betas: Any) -> Any:
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise refuse("two numbers, such as [0.9, 0.999]", betas)
    return betas


_ADAM_KEYS = ("betas", "eps")
_SGD_KEYS = ("momentum", "dampening", "nesterov")
# Keys that not every optimizer has, with their defaults.
_OWN_KEYS: dict[str, tuple[str, ...]] = {
    "adamw": _ADAM_KEYS, "adam": _ADAM_KEYS, "sgd": _SGD_KEYS, "lion": ("betas",)
}  # fmt: skip
_DERIVED: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "weight_decay": 0.01},
    "adam": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "sgd": {"weight_decay": 0.0},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
}


class Optimizer(Section):
    """The optimizer of `infinity train`.

    In a loop of your own, `name` and `momentum` decide the state that a model reserves: that of the
    `infinity.AdamW`, `Adam`, `SGD` or `Lion` that will train it.
    """

    name: Annotated[OptimizerName, choice(OptimizerName)] = "adamw"
    """The update rule. It decides which moments are kept per trainable parameter: two for "adamw"
    and "adam", one for "lion", one for "sgd" with `momentum`, none for "sgd" without."""
    lr: Annotated[float, number(minimum=0)] = 1e-4
    """Peak learning rate."""
    betas: Annotated[
        tuple[Annotated[float, _BETA], Annotated[float, _BETA]], BeforeValidator(_pair)
    ] = Field(
        (0.9, 0.999), json_schema_extra={"x-default": "`[0.9, 0.999]`, for lion `[0.9, 0.99]`"}
    )
    """Decay of the first and second moment; of Lion the weight of its momentum in the step, and the
    momentum's decay. Not of sgd."""
    eps: Annotated[float, number(minimum=0)] = 1e-8
    """Added to the denominator of the update. Of adamw and adam only."""
    momentum: Annotated[float, number(minimum=0)] = 0.0
    """Decay of the momentum; 0 keeps none. Of sgd only, as the next two."""
    dampening: Annotated[float, number()] = 0.0
    """Part of a gradient that the momentum does not take."""
    nesterov: Flag = False
    """Nesterov's momentum; without dampening."""
    weight_decay: Annotated[float, number(minimum=0)] = Field(
        0.01, json_schema_extra={"x-default": "`0.01`, for others than adamw `0.0`"}
    )
    """Weight decay of the parameters that `no_decay` leaves: decoupled in adamw and lion, added to
    the gradient in adam and sgd."""
    max_grad_norm: Annotated[float | None, or_off(number(above=0))] = 1.0
    """Clip the global norm of the gradients to this."""
    no_decay: Annotated[
        tuple[_Name, ...],
        BeforeValidator(one_as_list, json_schema_input_type=tuple[_Name, ...] | _Name),
    ] = ("bias", "norm")
    """Parameters without weight decay, by name, upper and lower case alike: a pattern with *, ? or
    [ matches the full name, any other text matches anywhere in it."""

    @model_validator(mode="after")
    def _keys_of_the_rule(self) -> Optimizer:
        """Refuses keys of other rules; fills in what the rule takes where the file is silent."""
        named, own = self.model_fields_set, _OWN_KEYS[self.name]
        fields = type(self).model_fields
        foreign = [
            key
            for key in (*_ADAM_KEYS, *_SGD_KEYS)
            if key not in own and getattr(self, key) != fields[key].default
        ]
        text = f'optimizer.name = "{self.name}" has no such setting; leave it out'
        faults = [fault(text, key) for key in foreign]
        if self.nesterov and not foreign and (not self.momentum or self.dampening):
            text = "expected false, or a momentum above 0 and a dampening of 0; got true"
            faults.append(fault(text, "nesterov"))
        refuse_all(faults)
        for key, value in _DERIVED[self.name].items():
            if key not in named:
                self.__dict__[key] = value
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that this rule's numbers depend on."""
        foreign = {*_ADAM_KEYS, *_SGD_KEYS} - set(_OWN_KEYS[self.name])
        return tuple(key for key in type(self).model_fields if key not in foreign)

    @property
    def num_moments(self) -> int:
        """The number of moments of a trainable parameter."""
        if self.name == "sgd":
            return 1 if self.momentum else 0
        return 1 if self.name == "lion" else 2

    def has_decay(self, parameter_name: str) -> bool:
        """Whether weight decay applies to the parameter of this name."""
        name = parameter_name.lower()
        for pattern in map(str.lower, self.no_decay):
            is_glob = any(sign in pattern for sign in "*?[")
            if fnmatch.fnmatchcase(name, pattern) if is_glob else pattern in name:
                return False
        return True
