"""Who has a parameter object of before `offload` has the parameter still."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import InfinityError, UnsupportedError
from tests.support.offloading import offloaded, swap_config

from .harness import Named, Side, compare, trained


def scaled(weight: Tensor, x: Tensor) -> Tensor:
    return x * weight


class Slotted:
    __slots__ = ("weight",)


class Keeps(nn.Module):
    """Its weights are registered, and used as they were put aside in other places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.rand(4) + 0.5) for _ in range(3))
        self.d, self.e, self.f = (nn.Parameter(torch.rand(4) + 0.5) for _ in range(3))
        self.table = nn.Embedding(6, 4)
        self.listed = [self.a]
        object.__setattr__(self, "aside", self.b)
        self.bound = partial(scaled, self.c)
        weight = self.d
        self.closed = lambda x: x * weight
        self.slotted = Slotted()
        self.slotted.weight = self.e
        self.nested = {"deep": ({"er": [self.f]},)}
        self.scores = [self.table.weight]

    def forward(self, x: Tensor) -> Tensor:
        x = self.closed(self.bound(x * self.listed[0]) + self.aside)
        x = x * self.slotted.weight / self.nested["deep"][0]["er"][0]
        x = x + self.table(torch.tensor([1, 3]))
        return torch.nn.functional.linear(x.tanh(), self.scores[0]) * self.a.sum()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.keeps = Keeps()
        self.kept_by_the_parent = [self.keeps.a, self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.kept_by_the_parent[1].t() + self.first(x)
        return self.keeps(x) * self.kept_by_the_parent[0].mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Outer()


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(torch.linspace(-1, 1, 8).view(2, 4) + step).pow(2).mean()


def test_originals_that_are_kept_anywhere_are_trained(swap_directory: Path) -> None:
    compare(lambda side: trained(side, loss_of), build, swap_directory)


def groups_by_identity(model: nn.Module) -> tuple[dict[Tensor, float], set[int], set[Tensor]]:
    """Learning rates by parameter, ids without decay, and parameters of a set: made before offload."""
    rates = {p: 1e-2 / (1 + number) for number, p in enumerate(model.parameters())}
    return rates, {id(model.keeps.a), id(model.first.bias)}, {model.keeps.table.weight}


def test_sets_dicts_and_ids_of_before_find_the_parameters(swap_directory: Path) -> None:
    made: dict[nn.Module, Any] = {}

    def tagged() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Outer(), nn.LSTM(4, 4))
        model[0].keeps.extra, model.first, model.keeps = model[1], model[0].first, model[0].keeps
        made[model] = groups_by_identity(model), model[1].bias_ih_l0
        return model

    def scenario(side: Side) -> Named:
        (rates, no_decay, chosen), bias = made[side.model]
        assert side.model[1].bias_ih_l0 is bias and side.model[1]._flat_weights[2] is bias
        assert all(p in rates for p in side.model.parameters())
        groups = [
            {"params": [p], "lr": rate, "weight_decay": 0.0 if id(p) in no_decay else 0.1}
            for p, rate in rates.items()
            if p not in chosen
        ]

        def loss(model: nn.Module, step: int) -> Tensor:
            y = model[0](torch.linspace(-1, 1, 8).view(2, 4) + step)
            out = model[1](torch.nn.functional.pad(y, (0, 4 - y.shape[1])))[0]
            return out.pow(2).mean() + y.mean()

        def after(step: int, _: Any) -> None:
            bias.requires_grad_(step == 0)

        seen = trained(side, loss, groups=lambda _: groups, after=after)
        return {**seen, "kept": bias.detach().clone()}

    compare(scenario, tagged, swap_directory)


def test_an_original_with_a_weak_reference_stands_for_its_parameter(swap_directory: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    seen, kept = weakref.ref(model[0].weight), list(model.parameters())
    values = [parameter.detach().clone() for parameter in kept]
    with offloaded(model, swap_config(swap_directory)) as model:
        assert [a is b for a, b in zip(model.parameters(), kept, strict=True)] == [
            False, True, True, True
        ]  # fmt: skip
        assert seen() is kept[0] and torch.equal(kept[0], values[0])
        model(torch.ones(4)).sum().backward()
        assert torch.equal(kept[0].grad + 0, model[0].weight.grad + 0)
        infinity.AdamW(kept, lr=1e-1).step()
        assert not torch.equal(kept[0] + 0, values[0])


def test_a_follower_stands_for_its_parameter(swap_directory: Path) -> None:
    """In optimizers and `gather`, as an argument of functions, and for whoever looks at it."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight * 2

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            return slope * 2

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    kept = list(model.parameters())
    watched = [weakref.ref(parameter) for parameter in kept]  # They cannot be the handles.
    values = [parameter.detach().clone() for parameter in kept]
    with offloaded(model, swap_config(swap_directory)) as model:
        assert not any(ref() is handle for ref in watched for handle in model.parameters())
        for parameter, value, handle in zip(kept, values, model.parameters(), strict=True):
            assert isinstance(parameter, nn.Parameter) and parameter.shape == value.shape
            assert torch.equal(parameter, value) and parameter.is_leaf and parameter.requires_grad
            assert repr(parameter) == repr(handle) and parameter.grad is None
            assert len({parameter, parameter}) == 1
        optimizer = infinity.AdamW(kept, lr=1e-1)
        (Double.apply(kept[0]).sum() + kept[1].pow(2).sum()).backward()
        assert torch.equal(kept[0].grad + 0, torch.full((3, 4), 2.0))
        (found,) = torch.autograd.grad(kept[2].sin().sum(), [kept[2]])
        assert torch.equal(found, values[2].cos())
        with infinity.gather(kept[:1]):
            assert torch.equal(model[0].weight, values[0])
        optimizer.step()
        assert not torch.equal(kept[0] + 0, values[0]) and torch.equal(kept[2] + 0, values[2])
        kept[0].grad = None
        assert model[0].weight.grad is None
        model.zero_grad()
        fired: list[int] = []
        torch.autograd.graph.register_multi_grad_hook(kept, lambda grads: fired.append(len(grads)))
        model(torch.ones(4)).sum().backward()
        assert fired == [4]
        model.zero_grad()
        kept[0].requires_grad_(False)
        assert not model[0].weight.requires_grad
        assert not Side(model).weights()["0.weight"].equal(values[0])


def test_an_original_without_a_value_stands_for_its_parameter(swap_directory: Path) -> None:
    """An original without memory (the weight), and one that kept its constructor's value."""
    config = swap_config(swap_directory)
    with infinity.init_empty_weights(config):
        model = nn.Linear(512, 512)
    kept = list(model.parameters())
    with offloaded(model, config) as model:
        assert kept[0].shape == (512, 512) and torch.equal(kept[0] + 0, model.weight + 0)
        optimizer = infinity.AdamW(kept, lr=1e-2)
        before = kept[0].detach().clone()
        model(torch.ones(512)).sum().backward()
        assert torch.equal(kept[0].grad + 0, torch.ones(512, 512))
        optimizer.step()
        assert not torch.equal(kept[0] + 0, before)


def test_an_original_stands_for_its_tiled_parameter(swap_directory: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 2048, bias=False))
    kept, value = model[0].weight, model[0].weight.detach().clone()
    with offloaded(model, swap_config(swap_directory, schedule={"tile": "64KiB"})) as model:
        assert infinity.engine_of(model).tiled_params
        assert torch.equal(kept + 0, value)
        assert len(infinity.AdamW([kept]).param_groups[0]["params"]) > 1  # One for each tile.
        (model(torch.ones(16)).sum() + kept.sum()).backward()
        gradients = Side(model).gradients()
        assert all(torch.equal(g, torch.full_like(g, 2.0)) for g in gradients.values())


def test_hooks_of_before_are_removed_by_their_handles(swap_directory: Path) -> None:
    fired: list[Any] = []
    removable: dict[nn.Module, Any] = {}

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        hooks = [lambda g: fired.append(g.sum().item()), lambda g: g * 2]
        removable[model] = [model[0].weight.register_hook(hook) for hook in hooks]
        model[1].bias.register_hook(lambda g: fired.append("frozen"))
        model[1].bias.requires_grad_(False)
        return model

    def scenario(side: Side) -> Named:
        fired.clear()
        seen: Named = {}
        for step in range(3):
            loss_of(side.model, step).backward()
            seen.update({f"{step} {name}": g for name, g in side.gradients().items()})
            if step < 2:
                removable[side.model][step].remove()
        return {**seen, "fired": torch.tensor(fired)}

    compare(scenario, build, swap_directory)


def test_the_memory_of_originals_is_given_back(swap_directory: Path) -> None:
    model = nn.Linear(64, 64)
    kept = list(model.parameters())
    stored = kept[0].untyped_storage()._weak_ref()
    with offloaded(model, swap_config(swap_directory)):
        gc.collect()
        assert torch.UntypedStorage._expired(stored)
        assert len(kept) == 2
    torch.UntypedStorage._free_weak_ref(stored)


def test_a_graph_of_before_is_refused_by_name(swap_directory: Path) -> None:
    model = nn.Linear(4, 3)
    loss = model(torch.ones(4)).sum()
    with (
        offloaded(model, swap_config(swap_directory)) as model,
        pytest.raises(InfinityError, match=r"before infinity\.offload.*(weight|bias)"),
    ):
        loss.backward()


@pytest.mark.parametrize("how", ["buffer", "view", "listed"])
def test_views_of_parameters_that_modules_keep_are_refused_by_name(
    how: str, swap_directory: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Module())
    if how == "buffer":
        model[1].register_buffer("kept", model[0].weight.data[1:])
    else:
        view = model[0].weight.detach().t()
        model[1].kept = [view] if how == "listed" else view
    with pytest.raises(UnsupportedError, match=r"1\.kept.*0\.weight"):
        infinity.offload(model, swap_config(swap_directory))
    assert type(model[0].weight) is nn.Parameter


def test_a_graph_of_before_keeps_no_model_alive(swap_directory: Path) -> None:
    """One that is dropped without `close()` gives its memory and its swap files back."""
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].kept = model[0].weight.sum()  # As the old weight_norm keeps one.
    engine = weakref.ref(infinity.engine_of(infinity.offload(model, swap_config(swap_directory))))
    original = model[0].kept.grad_fn.next_functions[0][0].variable
    del model
    gc.collect()
    assert engine() is None
    with pytest.raises(InfinityError, match=r"0\.weight.*gone"):
        original.sum()
