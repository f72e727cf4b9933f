"""A parameter that is given to a `torch.autograd.Function` outside of its own module.

Fused heads and losses, fused MLPs over children's weights, adjoints and reentrant checkpoints do
so. Whatever they do with it, and wherever else it is used, every gradient arrives: the same bits as
in plain PyTorch.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _FunctionBase
from torch.autograd.function import _SingleLevelFunction
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import InfinityError, UnsupportedError
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.patches import _replace_bound
from tests.support.offloading import offloaded, swap_config

from .harness import Named, Side, compare, finish, seed_everything, trained

MAX_NORM = 0.05
WIDTH, WORDS = 16, 40
CUT_WORDS = 2048  # Two tiles of the smallest size.


class FusedCrossEntropy(torch.autograd.Function):
    """Logits and their gradients a few rows at a time, in the manner of Liger and TRL."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
    ) -> Any:
        loss = hidden.new_zeros(())
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        assert weight.data_ptr() and not weight.is_meta
        for rows, ids, out in zip(
            hidden.split(5), target.split(5), of_hidden.split(5), strict=True
        ):
            logits = functional.linear(rows, weight, bias).detach()
            loss += functional.cross_entropy(logits, ids, reduction="sum")
            slope = logits.softmax(-1)
            slope[torch.arange(len(ids)), ids] -= 1
            out.copy_(slope @ weight)
            of_weight.addmm_(slope.t(), rows)
            if of_bias is not None:
                of_bias += slope.sum(0)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return loss / len(target)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        scale = slope / len(ctx.saved_tensors[0])
        return *(None if each is None else each * scale for each in ctx.saved_tensors), None


class SavesTheWeight(torch.autograd.Function):
    """A linear layer that computes with the weight in the backward again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        assert ctx.weight is weight
        return slope @ weight, slope.flatten(0, -2).t() @ x.flatten(0, -2)


class WithContextApart(torch.autograd.Function):
    """With `setup_context`, and given the weight by name."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = SavesTheWeightBackward = staticmethod(
        lambda ctx, slope: (
            slope @ ctx.saved_tensors[1],
            slope.flatten(0, -2).t() @ ctx.saved_tensors[0].flatten(0, -2),
        )
    )


bound_early = SavesTheWeight.apply  # As libraries do when they are imported.


def takes_names() -> bool:
    """Whether this PyTorch takes arguments of `apply` by name."""
    try:
        WithContextApart.apply(torch.ones(1, 1), weight=torch.ones(1, 1))
    except TypeError:
        return False
    return True


TAKES_NAMES = takes_names()


class FusedMlp(nn.Module):
    """No entry of a list; its children's forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = bound_early(x, self.up.weight).relu()
        if TAKES_NAMES:
            return WithContextApart.apply(inner, weight=self.down.weight)
        return WithContextApart.apply(inner, self.down.weight)


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Language(nn.Module):
    """Embedding, a fused MLP, a few blocks, and a head that only a fused loss uses."""

    def __init__(self, is_tied: bool, bias: bool, words: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, WIDTH)
        self.mlp = FusedMlp()
        self.blocks = nn.ModuleList(Residual(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=bias)
        if is_tied:
            self.head.weight = self.tokens.weight

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.mlp(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        rows = self.hidden(ids).flatten(0, 1)
        return FusedCrossEntropy.apply(rows, self.head.weight, self.head.bias, target.flatten())


def build(is_tied: bool, bias: bool = False, words: int = WORDS) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Language(is_tied, bias, words)

    return made


def batch(seed: int) -> tuple[Tensor, Tensor]:
    seed_everything(seed)
    ids = torch.randint(WORDS, (2, 2, 9))
    return ids[0], ids[1]


def train(
    side: Side,
    loss_of: Callable[[Any, int], Tensor],
    *,
    micro: int = 2,
    to_none: bool = True,
    max_norm: float | None = MAX_NORM,
) -> Named:
    def clear(optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=to_none)

    return trained(side, loss_of, micro=micro, max_norm=max_norm, clear=clear)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_fused_loss_trains_the_head(is_tied: bool, to_none: bool, swap_directory: Path) -> None:
    def scenario(side: Side) -> Named:
        return train(side, lambda model, seed: model(*batch(seed)), to_none=to_none)

    compare(scenario, build(is_tied, bias=not is_tied), swap_directory)


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda w: w.to(torch.float64),
    "like": lambda w: w.to(torch.ones(1, dtype=torch.float64)),
    "double": lambda w: w.double(),
    "narrow": lambda w: w.bfloat16().double(),
    "half": lambda w: w.half().double(),
    "host": lambda w: w.to("cpu", torch.float64),
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_loss_in_another_dtype_trains_the_head(how: str, swap_directory: Path) -> None:
    """Its own copy of the weight; the model itself keeps its dtype."""

    def loss_of(model: Any, seed: int) -> Tensor:
        ids, target = batch(seed)
        rows = model.hidden(ids).flatten(0, 1).double()
        weight = CONVERSIONS[how](model.head.weight)
        loss: Tensor = FusedCrossEntropy.apply(rows, weight, None, target.flatten())
        return loss

    def scenario(side: Side) -> Named:
        return train(side, loss_of)

    compare(scenario, build(False), swap_directory)


def test_gradients_of_several_uses_are_summed_in_the_order_of_plain_autograd(
    swap_directory: Path,
) -> None:
    """Four uses of one weight in one backward: by its module, by handle, and by two functions."""

    def loss_of(model: Any, seed: int) -> Tensor:
        ids, target = batch(seed)
        rows = model.hidden(ids).flatten(0, 1)
        loss = FusedCrossEntropy.apply(rows, model.head.weight, None, target.flatten())
        again = SavesTheWeight.apply(rows * 0.7, model.tokens.weight).pow(2).mean()
        return loss + again * 3 + model.head(rows).sin().mean() + model.tokens.weight.pow(2).mean()

    def scenario(side: Side) -> Named:
        return train(side, loss_of)

    compare(scenario, build(True), swap_directory)


def differentiated(model: Any, rows: Tensor) -> Tensor:
    tangents: Tensor = torch.func.jvp(model.head, (rows,), (torch.ones_like(rows),))[1]
    return tangents


TRANSFORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vmap of a module": lambda model, rows: torch.vmap(model.head)(rows),
    "vmap over a weight": lambda model, rows: torch.vmap(lambda row: row @ model.head.weight.t())(
        rows
    ),
    "grad": lambda model, rows: torch.func.grad(lambda rows: model.head(rows).pow(2).sum())(rows),
    "vjp": lambda model, rows: torch.func.vjp(model.head, rows)[0],
    "jvp": differentiated,
}


@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms_of_torch_func_are_refused_but_inside_gather(
    how: str, swap_directory: Path
) -> None:
    """The hooks do not see the nodes of a transform: their weights would be gone in the backward."""

    def loss_of(model: Any, seed: int) -> Tensor:
        rows = model.hidden(batch(seed)[0]).flatten(0, 1)
        return TRANSFORMS[how](model, rows).sin().mean() + model.head(rows).mean()

    def scenario(side: Side) -> Named:
        seen: Named = {}
        optimizer = side.adamw()
        for step in range(2):
            is_plain = side.is_plain
            with nullcontext() if is_plain else infinity.gather(side.model):
                loss = loss_of(side.model, step)
                loss.backward()
            seen[f"loss {step}"] = loss.detach()
            seen |= {f"{step} {name}": gradient for name, gradient in side.gradients().items()}
            side.update(MAX_NORM)
            optimizer.zero_grad()
        return finish(side, seen)

    compare(scenario, build(False), swap_directory)
    with (
        offloaded(build(False)(), swap_config(swap_directory)) as model,
        pytest.raises(UnsupportedError, match=r"torch\.func.*infinity\.gather"),
    ):
        loss_of(model, 0)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_accumulated_micro_batches_train_a_fused_head(is_tied: bool, swap_directory: Path) -> None:
    def scenario(side: Side) -> Named:
        losses = [side.model(*batch(seed)) / 3 for seed in range(3)]
        for loss in losses:
            loss.backward()
        return {f"loss {i}": loss.detach() for i, loss in enumerate(losses)} | side.gradients()

    expected = scenario(Side(build(is_tied)(), is_plain=True))
    with offloaded(build(is_tied)(), swap_config(swap_directory)) as model:
        seeds = range(3)
        losses = infinity.forward_backward(model, lambda seed: model(*batch(seed)) / 3, seeds)
        came = {f"loss {i}": loss for i, loss in enumerate(losses)}
        came |= Side(model).gradients()
    assert list(came) == list(expected)
    for name, tensor in expected.items():
        if is_tied and name == "tokens.weight":
            torch.testing.assert_close(came[name], tensor)  # Summed as the uses come.
        else:
            assert torch.equal(came[name], tensor), name


def test_reentrant_checkpoints_of_weights_are_exact(swap_directory: Path) -> None:
    def head(rows: Tensor, weight: Tensor) -> Tensor:
        return SavesTheWeight.apply(rows, weight).tanh() + rows @ weight.t()

    def loss_of(model: Any, seed: int) -> Tensor:
        ids, target = batch(seed)
        rows = model.hidden(ids).flatten(0, 1)
        logits = checkpoint(head, rows, model.head.weight, use_reentrant=True)
        return functional.cross_entropy(logits, target.flatten())

    def scenario(side: Side) -> Named:
        return train(side, loss_of)

    compare(scenario, build(True), swap_directory)


class Adjoint(torch.autograd.Function):
    """Gradients of parameters by `torch.autograd.grad` inside the backward, as ODE solvers do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        for _ in range(3):
            x = x + 0.1 * module(x).tanh()
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = out = x.detach().requires_grad_()
            for _ in range(3):
                out = out + 0.1 * ctx.module(out).tanh()
            found = torch.autograd.grad(out, (x, *parameters), slope)
        return None, *found


def test_adjoints_train_their_parameters(swap_directory: Path) -> None:
    def loss_of(model: Any, seed: int) -> Tensor:
        x = Adjoint.apply(
            model.blocks[0], model.tokens(batch(seed)[0]), *model.blocks[0].parameters()
        )
        return model.head(x).pow(2).mean()

    def scenario(side: Side) -> Named:
        return train(side, loss_of)

    compare(scenario, build(False), swap_directory)


def test_functions_of_weights_that_stand_as_tiles(swap_directory: Path) -> None:
    """The tiled parameter is gathered for the function; each tile gets its rows of the gradient."""

    def scenario(side: Side) -> Named:
        seen = train(side, lambda model, seed: model(*batch(seed)), max_norm=None)
        return {name: each for name, each in seen.items() if name.startswith("loss ")}

    expected = scenario(Side(build(True, words=CUT_WORDS)(), is_plain=True))
    config = swap_config(swap_directory, schedule={"tile": "64KiB"})
    with offloaded(build(True, words=CUT_WORDS)(), config) as model:
        assert infinity.engine_of(model).tiled_params
        came = scenario(Side(model))
    for name, tensor in expected.items():
        assert torch.equal(came[name], tensor), name


def test_weights_of_two_models_in_one_function(tmp_path: Path) -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, ours: Tensor, theirs: Tensor) -> Tensor:
            ctx.save_for_backward(ours, theirs)
            return (ours * theirs).sum()

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Any:
            ours, theirs = ctx.saved_tensors
            return slope * theirs, slope * ours

    def scenario(first: Side, second: Side) -> Named:
        for _ in range(2):
            a, b = first.model.head.weight, second.model.head.weight
            (Both.apply(a, b) + Both.apply(b, a * 2)).backward()
        return first.gradients() | {f"second {n}": g for n, g in second.gradients().items()}

    expected = scenario(Side(build(False)(), is_plain=True), Side(build(True)(), is_plain=True))
    with (
        offloaded(build(False)(), swap_config(tmp_path / "first")) as first,
        offloaded(build(True)(), swap_config(tmp_path / "second")) as second,
    ):
        came = scenario(Side(first), Side(second))
    assert {n for n, g in expected.items() if g is not None} == {
        "head.weight",
        "second tokens.weight",
    }
    for name, tensor in expected.items():
        other = came[name]
        assert (tensor is None) == (other is None), name
        assert tensor is None or other is None or torch.equal(tensor, other), name


def test_a_gradient_that_reaches_the_handle_itself_is_taken(swap_directory: Path) -> None:
    """By a door that asks nobody. It is summed where all others are, and forgotten with them."""

    def scenario(side: Side) -> Named:
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: Tensor) -> Tensor:
                return torch.ones(())

            @staticmethod
            def backward(ctx: Any, slope: Tensor) -> Tensor:
                return torch.full((WORDS, WIDTH), 0.5) * slope

        door = super(_SingleLevelFunction, Scale).apply
        seen: Named = {}
        optimizer = side.adamw()
        for step in range(3):
            head = side.model.head
            (door(head.weight) * 2).backward()
            (head(torch.ones(WIDTH)).sum() + door(head.weight)).backward()
            seen.update({f"{step} {n}": g for n, g in side.gradients().items()})
            side.update(MAX_NORM)
            optimizer.zero_grad(set_to_none=step == 0)
        return finish(side, seen)

    compare(scenario, build(True), swap_directory)


# --- hooks and gradients by handle ------------------------------------------------------------


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_on_many_gradients_fire(mode: str, swap_directory: Path) -> None:
    def scenario(side: Side) -> Named:
        seen: list[Tensor] = []

        def hook(gradients: Any) -> None:
            found = gradients if mode == "all" else [gradients]
            seen.append(sum(g.abs().sum() for g in found if g is not None))

        parameters = list(side.model.parameters())
        handle = torch.autograd.graph.register_multi_grad_hook(parameters, hook, mode=mode)
        for seed in range(2):
            side.model(*batch(seed)).backward()
        assert len(seen) == 2
        handle.remove()
        side.model(*batch(5)).backward()
        assert len(seen) == 2
        return finish(side, {f"sum {index}": each.detach() for index, each in enumerate(seen)})

    compare(scenario, build(False), swap_directory)


def test_gradients_are_asked_for_by_handle(swap_directory: Path) -> None:
    """`autograd.grad`, `backward(inputs=...)` and gradient edges; no unit is acquired for them."""

    def scenario(side: Side) -> Named:
        model = side.model
        named = dict(model.named_parameters())
        found = torch.autograd.grad(model(*batch(1)), list(named.values()), allow_unused=True)
        seen: Named = dict(zip((f"grad {name}" for name in named), found, strict=True))
        edges = [torch.autograd.graph.get_gradient_edge(model.norm.weight)]
        seen["edge"] = torch.autograd.grad(model(*batch(2)), edges)[0]
        assert all(gradient is None for gradient in side.gradients().values())
        model(*batch(3)).backward(inputs=[model.head.weight, model.mlp.up.weight])
        side.settled()
        return finish(side, seen)

    compare(scenario, build(False), swap_directory)


def test_a_backward_that_asks_no_handle_gets_the_leaves(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.autograd.backward` of PyTorch 2.10."""
    seen: list[Any] = []

    def plain(
        tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: Any = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> None:  # fmt: skip
        seen.append((tensors, retain_graph, inputs))

    monkeypatch.setattr(torch.autograd, "backward", plain)
    monkeypatch.setattr(Handle, "special", Handle.special)
    with offloaded(build(False)(), swap_config(swap_directory)) as model:
        loss = torch.ones((), requires_grad=True)
        loss.backward(retain_graph=True, inputs=model.head.weight)
        torch.autograd.backward([loss], None, None, False, None, [loss, model.norm.weight])
        loss.backward()
    assert [tensors for tensors, _, _ in seen] == [loss, [loss], loss]
    assert seen[0][1] and seen[2][2] is None
    for inputs in (seen[0][2], seen[1][2]):
        assert not any(isinstance(leaf, Handle) for leaf in inputs)
        assert all(leaf.is_leaf and leaf.requires_grad for leaf in inputs)


def test_gradients_of_tiles_are_asked_for_by_the_tiled_parameter(swap_directory: Path) -> None:
    def scenario(side: Side) -> Named:
        rows = torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)
        (found,) = torch.autograd.grad(side.model.head(rows).pow(2).sum(), side.model.head.weight)
        return {"found": found}

    expected = scenario(Side(build(False, words=CUT_WORDS)(), is_plain=True))
    config = swap_config(swap_directory, schedule={"tile": "64KiB"})
    with offloaded(build(False, words=CUT_WORDS)(), config) as model:
        head = model.head
        came = scenario(Side(model))
        with pytest.raises(InfinityError, match=r"head\.weight.*tiles"):
            head.weight.register_hook(print)
        with pytest.raises(InfinityError, match=r"head\.weight.*tiles"):
            torch.autograd.graph.register_multi_grad_hook([head.weight], print)
    assert torch.equal(came["found"], expected["found"])


# --- methods that were bound before, from PyTorch 2.14 on in C ---------------------------------------


class Holder:
    """Holds a bound method as an attribute of a class, and of an object."""

    in_class: Any = None
    static: Any = None

    def __init__(self) -> None:
        self.in_object: Any = None


def bound_in_c(function: Any) -> Any:
    return vars(_FunctionBase)["apply"].__get__(None, function)


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Shows a collection the objects that the suite has frozen, until the test ends."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_a_method_bound_in_c_is_replaced_wherever_it_is_held(unfrozen: None) -> None:
    bound = bound_in_c(SavesTheWeight)
    holder, listed, table, part = Holder(), [None, bound], {"apply": bound}, partial(bound, 1, a=2)

    def closure() -> Any:
        return bound

    held: dict[str, Callable[[], Any]] = {
        "name": lambda: globals()["_held"], "class": lambda: Holder.in_class,
        "static": lambda: Holder.static, "partial": lambda: part.func,
        "object": lambda: holder.in_object, "list": lambda: listed[1],
        "dict": lambda: table["apply"], "closure": closure,
    }  # fmt: skip
    globals()["_held"] = Holder.in_class = holder.in_object = bound
    Holder.static = staticmethod(bound)
    try:
        assert all(get() is bound for get in held.values())
        _replace_bound()
        found = {kind: get() for kind, get in held.items()}
    finally:
        del globals()["_held"]
        Holder.in_class = Holder.static = None
    assert part.args == (1,) and part.keywords == {"a": 2}
    for kind, method in found.items():
        assert isinstance(method, MethodType) and method.__self__ is SavesTheWeight, kind


def test_a_method_bound_in_c_that_cannot_be_replaced_is_warned_of(
    caplog: pytest.LogCaptureFixture, unfrozen: None
) -> None:
    held = (bound_in_c(WithContextApart),)
    with caplog.at_level(logging.WARNING, logger="infinity"):
        _replace_bound()
    assert held and "WithContextApart.apply was bound before infinity.offload" in caplog.text
