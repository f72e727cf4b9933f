"""Parameters of unusual kinds, and what a program does with them, between PyTorch and the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import UnsupportedError
from tests.support.offloading import offloaded, swap_config

from .harness import Named, Side, compare, finish, trained

# -- requires_grad between forward and backward ----------------------------------------------------


class FreezesItself(nn.Module):
    """Changes requires_grad of its own weight inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.inner(x)
        self.inner.weight.requires_grad_(self.calls != 2)
        return y


def with_blocks() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), FreezesItself())
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleList([block])[0], nn.Linear(4, 4))


def set_attribute(model: nn.Module, is_trainable: bool) -> None:
    model[1][0].bias.requires_grad = is_trainable


@pytest.mark.parametrize(
    "set_trainable",
    [
        lambda model, is_trainable: model.requires_grad_(is_trainable),
        lambda model, is_trainable: model[1].requires_grad_(is_trainable),
        set_attribute,
        lambda model, is_trainable: None,
    ],
    ids=["model", "block", "attribute", "in the forward"],
)
def test_a_parameter_that_is_frozen_before_the_backward_gets_no_gradient(
    swap_directory: Path, set_trainable: Callable[[nn.Module, bool], None]
) -> None:
    def scenario(side: Side) -> Named:
        seen: Named = {}
        optimizer = side.adamw()
        for step in range(4):
            loss = side.model(torch.linspace(-1, 1, 8).view(2, 4) + step).pow(2).mean()
            if step == 1:  # There is a gradient of the step before, too.
                set_trainable(side.model, False)
            loss.backward()
            seen.update({f"{step} {name}": g for name, g in side.gradients().items()})
            if step != 1:
                optimizer.step()
            if step:
                optimizer.zero_grad()
            set_trainable(side.model, True)
            side.settled()
        return finish(side, seen)

    compare(scenario, with_blocks, swap_directory)


def test_a_frozen_parameter_may_be_trainable_for_a_forward_alone(swap_directory: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    with offloaded(model, swap_config(swap_directory)) as model:
        model[0].requires_grad_(True)
        loss = model(torch.ones(2, 4)).sum()
        model[0].requires_grad_(False)
        loss.backward()
        assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
        with infinity.gather(model):  # Gradients that are shown stay as they are.
            loss, before = model(torch.ones(2, 4)).sum(), model[1].weight.grad.clone()
            model[1].weight.requires_grad_(False)
            loss.backward()
            assert torch.equal(model[1].weight.grad, before)


# -- Memory and strides ----------------------------------------------------------------------------


def three_steps(side: Side) -> Named:
    return trained(side, lambda model, step: model(ROWS + step).pow(2).mean())


ROWS = torch.linspace(-1, 1, 14).view(2, 7)


def linears(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 14), nn.Tanh(), nn.Linear(14, 7), *more)


def over_one_tensor() -> nn.Module:
    """Every parameter is a view of one flat tensor; none shares an element."""
    model = linears()
    flat, first = torch.randn(sum(p.numel() for p in model.parameters())), 0
    for module in (model[0], model[2]):
        for name, parameter in list(module.named_parameters()):
            part = flat[first : first + parameter.numel()].view_as(parameter)
            setattr(module, name, nn.Parameter(part))
            first += parameter.numel()
    model[0].tail = flat[first:]
    return model


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.point = nn.Conv2d(5, 1, 1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.tall = nn.Parameter(torch.randn(4).as_strided((4, 1), (1, 9)))
        self.number, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :3, None, None] * torch.linspace(0, 1, 20).view(4, 5)
        y = self.point(self.conv(image).tanh()) * self.number + self.none.sum()
        return (self.scale * x[0, :3]).sum(dim=(1, 2)).view(4, 1) * y * self.tall


def strided() -> nn.Module:
    torch.manual_seed(0)
    return Convolved()


def transposed() -> nn.Module:
    model = linears()
    model[0].weight = nn.Parameter(torch.randn(7, 14).t())
    model[2].weight = nn.Parameter(torch.randn(14, 7).t(), requires_grad=False)
    return model


@pytest.mark.parametrize("build", [over_one_tensor, strided, transposed])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_views_that_fill_their_memory_keep_their_strides(
    swap_directory: Path, build: Callable[[], nn.Module], compute: str
) -> None:
    if compute == "float32":
        compare(three_steps, build, swap_directory)
    strides = {name: p.stride() for name, p in build().named_parameters()}
    with offloaded(build(), swap_config(swap_directory, compute=compute)) as model:
        for name, parameter in model.named_parameters():
            with infinity.gather([parameter]):
                assert model.get_parameter(name).stride() == parameter.stride() == strides[name]


def tied_by_data(model: nn.Module) -> None:
    model[2].weight.data = model[0].weight.data.view(7, 14)


def tied_transposed(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[0].weight.data.t())


def sliced(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(model[0].weight.data[3], requires_grad=False)


def overlapping(model: nn.Module) -> None:
    flat = torch.randn(28)
    model[0].bias, model[0].more = nn.Parameter(flat[:14]), nn.Parameter(flat[13:])


def sharing_a_column(model: nn.Module) -> None:
    matrix = torch.randn(14, 9)
    model[0].weight, model[2].weight = nn.Parameter(matrix[:, :7]), nn.Parameter(matrix[:, 6:8].t())


def from_numpy(model: nn.Module) -> None:
    """Two storages over the same memory."""
    array = model[0].weight.detach().numpy()
    model[2].weight = nn.Parameter(torch.from_numpy(array).view(7, 14))


def frozen(model: nn.Module) -> None:
    tied_by_data(model.requires_grad_(False))


@pytest.mark.parametrize(
    "share",
    [tied_by_data, tied_transposed, sliced, overlapping, sharing_a_column, from_numpy, frozen],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_share_memory_are_refused_by_name(
    swap_directory: Path, share: Callable[[nn.Module], None], device: str
) -> None:
    with torch.device(device if share is not from_numpy else "cpu"):
        model = linears()
        share(model)
    before = list(model.parameters())
    with pytest.raises(UnsupportedError, match=r"'\w\.\w+' and '\w\.\w+' share.*one nn\.Parameter"):
        infinity.offload(model, swap_config(swap_directory))
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


def test_a_parameter_in_a_list_over_the_memory_of_another_is_refused(
    swap_directory: Path, tmp_path: Path
) -> None:
    model = linears()
    model[1].kept = [nn.Parameter(model[0].weight.data)]
    with pytest.raises(UnsupportedError, match=r"1\.kept is a view.*'0\.weight'"):
        infinity.offload(model, swap_config(swap_directory))
    model[1].kept = [model[0].weight]
    with offloaded(model, swap_config(swap_directory)) as first:
        second = linears()
        second[1].kept = list(first.parameters())  # They have no memory to share.
        with offloaded(second, swap_config(tmp_path / "second")):
            pass


VIEWS = {
    "expanded": torch.randn(1, 7).expand(14, 7),
    "padded": torch.randn(14, 8)[:, :7],
    "stepped": torch.randn(28, 7)[::2],
    "windows": torch.randn(20).unfold(0, 7, 1),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("is_trainable", [True, False])
def test_a_parameter_with_gaps_or_overlaps_is_refused_unless_it_is_converted(
    swap_directory: Path, tmp_path: Path, kind: str, is_trainable: bool
) -> None:
    """The remedy of the message works, and a conversion gives it memory of its own in PyTorch, too."""
    model = linears()
    model[0].weight = nn.Parameter(VIEWS[kind], requires_grad=is_trainable)
    with pytest.raises(UnsupportedError, match=r"'0\.weight'.*gaps or overlaps.*contiguous"):
        infinity.offload(model, swap_config(swap_directory))
    converted = model[0].weight.to(torch.bfloat16)
    with offloaded(model, swap_config(swap_directory, compute="bfloat16")):
        assert torch.equal(model[0].weight, converted)
        assert model[0].weight.stride() == converted.stride()

    def own() -> nn.Module:
        model = linears()
        weight = nn.Parameter(VIEWS[kind], requires_grad=is_trainable)
        model[0].weight = nn.Parameter(
            weight.detach().contiguous(), requires_grad=weight.requires_grad
        )
        return model

    compare(three_steps, own, tmp_path / "own")


# -- Compiled functions that get weights -----------------------------------------------------------


def head(x: torch.Tensor, weight: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)[:, 1:].logsumexp(1) + more[0].mean()


def scripted_head() -> Callable[..., torch.Tensor]:
    """Compiled anew each time: later calls of a function of torch.jit round in another way."""

    def head(x: torch.Tensor, weight: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        return (x @ weight.t())[:, 1:].tanh().sum(1) + weight.t()[:, :3].norm() + more[0].mean()

    return torch.jit.script(head)


class Ends(nn.Module):
    """Its loss is a compiled function over a weight of its last layer, and one outside."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.loss = nn.Linear(7, 7), nn.Linear(7, 7), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.loss(self.first(x), self.last.weight, more=[self.last.bias])
        return y + self.last(x).mean() + self.loss(x, weight=self.first.weight, more=[y.detach()])


@pytest.mark.parametrize("backend", ["torch.jit", "eager", "aot_eager"])
def test_compiled_functions_take_weights_as_arguments(swap_directory: Path, backend: str) -> None:
    def build() -> nn.Module:
        torch._dynamo.reset()
        return Ends(
            scripted_head() if backend == "torch.jit" else torch.compile(head, backend=backend)
        )

    compare(three_steps, build, swap_directory)


def test_the_engine_inside_a_compiled_step_is_not_compiled(swap_directory: Path) -> None:
    def compiled_steps(side: Side) -> Named:
        def step(x: torch.Tensor) -> None:
            side.model(x).pow(2).mean().backward()
            side.step()

        side.adamw()
        compiled = step if side.is_plain else torch.compile(step, backend="aot_eager")
        for number in range(3):
            compiled(ROWS + number)
        return finish(side, {})

    torch._dynamo.reset()
    compare(compiled_steps, linears, swap_directory)
