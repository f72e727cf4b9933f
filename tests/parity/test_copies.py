"""Copies and pickles of an offloaded model and of its parts, inside `infinity.gather`."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity
from infinity.errors import InfinityError, UnsupportedError
from tests.support.bits import assert_same
from tests.support.offloading import offloaded, swap_config


class Layer(nn.Module):
    """A recurrent layer, which keeps its weights in a second list, and others; `also` holds a
    parameter outside of the modules' tables."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.also = [self.out.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((self.out(self.rnn(x)[0]) + self.also[0]).flatten(0, 1)).view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.first = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


X = torch.linspace(-1, 1, 48).view(2, 3, 8)


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def unpickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved_and_loaded(module: Any) -> Any:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    assert b"infinity" not in stream.getvalue()
    return torch.load(stream, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": unpickled,
    "torch.save": saved_and_loaded,
}
PARTS: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "list": lambda model: model.layers,
    "block": lambda model: model.layers[1],
    "linear": lambda model: model.layers[0].out,
    "recurrent": lambda model: model.layers[0].rnn,
    "parameter": lambda model: model.first.weight,
}


def values(part: Any) -> dict[str, torch.Tensor]:
    return {"": part.detach()} if isinstance(part, torch.Tensor) else dict(part.named_parameters())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_part_is_copied_inside_gather_and_refused_outside(
    way: str, part: str, tmp_path: Path
) -> None:
    plain = model_of()
    with offloaded(model_of(), swap_config(tmp_path)) as model:
        taken = PARTS[part](model)
        with pytest.raises(UnsupportedError, match=r"with infinity.gather\(module\)"):
            WAYS[way](taken)
        with infinity.gather(taken):
            copied = WAYS[way](taken)
        assert_same(values(PARTS[part](plain)), values(copied))
        for parameter in values(copied).values():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        if isinstance(copied, nn.Module):
            assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
            with pytest.raises(InfinityError, match="is not offloaded"):
                infinity.engine_of(copied)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_model_trains_by_itself_and_can_be_offloaded(way: str, tmp_path: Path) -> None:
    plain = model_of()
    train(plain, plain_adamw(plain))
    with offloaded(model_of(), swap_config(tmp_path / "model")) as model:
        optimizer = infinity.AdamW(model, lr=0.01)
        train(model, optimizer)
        with infinity.gather(model):
            copied = WAYS[way](model)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        assert copied.last.weight is copied.first.weight
        train(plain, plain_adamw(plain))
        train(copied, plain_adamw(copied))
        assert_same(dict(plain.named_parameters()), dict(copied.named_parameters()))
        assert_same(kept, dict(model.state_dict()))
        with offloaded(copied, swap_config(tmp_path / "copy")):
            assert torch.equal(plain(X), copied(X))


def test_a_copy_of_a_parametrized_module_is_plain(tmp_path: Path) -> None:
    plain = weight_norm(nn.Linear(8, 8))
    with offloaded(copy.deepcopy(plain), swap_config(tmp_path)) as model, infinity.gather(model):
        copied = copy.deepcopy(model)
    assert torch.equal(plain(X), copied(X))


def test_gradients_and_data_are_copied_anywhere(tmp_path: Path) -> None:
    plain = model_of()
    plain(X).sum().backward()
    with offloaded(model_of(), swap_config(tmp_path)) as model:
        model(X).sum().backward()
        for way in WAYS.values():
            assert torch.equal(way(model.first.weight.grad), plain.first.weight.grad)
            assert torch.equal(way(model.first.weight.data), plain.first.weight.data)


class Average(nn.Module):
    """An average of weights as timm's ModelEma computes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for mean, value in zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        ):
            mean.copy_(0.9 * mean + 0.1 * value)


AVERAGES: dict[str, Callable[[nn.Module], Any]] = {
    "mean": AveragedModel,
    "ema": lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
    "timm": Average,
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_an_average_of_weights_has_the_bits_of_plain_pytorch(kind: str, tmp_path: Path) -> None:
    plain = model_of()
    with offloaded(model_of(), swap_config(tmp_path)) as model:
        with pytest.raises(UnsupportedError, match=r"with infinity.gather\(module\)"):
            AVERAGES[kind](model)
        with infinity.gather(model):
            ours = AVERAGES[kind](model)
        theirs = AVERAGES[kind](plain)
        optimizers = infinity.AdamW(model, lr=0.01), plain_adamw(plain)
        for _ in range(3):
            for side, optimizer, mean in zip(
                (model, plain), optimizers, (ours, theirs), strict=True
            ):
                train(side, optimizer)
                mean.update_parameters(side)
        assert_same(dict(theirs.state_dict()), dict(ours.state_dict()))


def test_a_module_of_tiles_is_refused_and_its_values_are_copied(tmp_path: Path) -> None:
    config = swap_config(tmp_path, schedule={"tile": "64KiB"})
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 2048), nn.Linear(2048, 8))
    with offloaded(copy.deepcopy(plain), config) as model:
        assert infinity.engine_of(model).tiled_params
        with infinity.gather(model), pytest.raises(UnsupportedError, match="runs as tiles"):
            copy.deepcopy(model)
        twin = nn.Sequential(nn.Linear(32, 2048), nn.Linear(2048, 8))
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_same(dict(plain.state_dict()), dict(twin.state_dict()))
