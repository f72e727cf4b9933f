"""A module returns its parameters, or views of them, in whatever holds tensors."""

from __future__ import annotations

import dataclasses
import operator
from collections import UserDict, namedtuple
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity.errors import UnsupportedError
from infinity.modules.autograd.outputs import detach_from_parameters, tensors_in
from tests.support.offloading import offloaded, swap_config

from .harness import compare, trained


class Slots:
    __slots__ = ("__private", "named", "unset")

    def __init__(self, value: Tensor) -> None:
        self.__private = self.named = value

    def read(self) -> Tensor:
        return self.__private + self.named


class MoreSlots(Slots):
    """Has both, and can be called."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self.more = {"deep": [(value, None)]}

    def __call__(self) -> None:
        raise AssertionError


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Tensor


Pair = namedtuple("Pair", "left right")


class Tagged(tuple):
    """With an attribute of its own."""


def tagged(value: Tensor) -> Tagged:
    made = Tagged((value,))
    made.tag = 3
    return made


def cyclic(value: Tensor) -> Any:
    made = SimpleNamespace(value=value)
    made.self = [made]
    return made


# How a parameter is returned, and read from what came.
WAYS = {
    "object": (lambda w: SimpleNamespace(value=w), lambda o: o.value),
    "nested": (lambda w: SimpleNamespace(a=[SimpleNamespace(b=w)]), lambda o: o.a[0].b),
    "slots": (Slots, lambda o: o.read()),
    "more slots": (MoreSlots, lambda o: o.read() + o.more["deep"][0][0]),
    "frozen dataclass": (Frozen, lambda o: o.value),
    "named tuple": (lambda w: Pair(1, (w,)), lambda o: o.right[0]),
    "tuple with attributes": (tagged, lambda o: o[0] * o.tag),
    "return type": (lambda w: torch.return_types.max((w, w)), lambda o: o.values + o.indices),
    "set": (lambda w: {w}, lambda o: next(iter(o))),
    "frozen set": (lambda w: frozenset([w]), lambda o: next(iter(o))),
    "user dict": (lambda w: UserDict(x=[w]), lambda o: o["x"][0]),
    "cycle": (cyclic, lambda o: o.self[0].value),
    "twice": (lambda w: (w, [w]), lambda o: o[0] * o[1][0]),
}


class Returns(nn.Module):
    def __init__(self, put: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        self.put = [put]

    def forward(self, x: Tensor) -> Any:
        return self.put[0](self.weight[1:] if x.sum() > 0 else self.weight)


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        put, self.get = WAYS[way]
        self.returns = Returns(put)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.returns(x)
        return self.last(x + self.get(found).mean(0))


@pytest.mark.parametrize("way", WAYS)
def test_parameters_in_what_a_module_returns_are_trained(way: str, swap_directory: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return model(torch.linspace(-1, 1, 4) + step - 1).pow(2).mean()

    compare(lambda side: trained(side, loss), lambda: Model(way), swap_directory)


def test_a_mapping_that_cannot_be_changed_is_refused(swap_directory: Path) -> None:
    model = Returns(lambda w: MappingProxyType({"w": w}))
    with (
        offloaded(model, swap_config(swap_directory)) as model,
        pytest.raises(UnsupportedError, match="mappingproxy.*clone"),
    ):
        model(torch.ones(4))


def test_all_that_is_found_is_what_is_replaced() -> None:
    for put, _ in WAYS.values():
        value = torch.ones(2)
        output = put(value)
        assert any(each is value for each in tensors_in(output))
        replaced = detach_from_parameters(output, partial(operator.is_, value))
        assert not any(each is value for each in tensors_in(replaced))
        assert len({id(each) for each in tensors_in(replaced)}) == 1
