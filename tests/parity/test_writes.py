"""Weights and gradients are changed by other hands than the optimizer's, outside of `gather`: through
handles, through views of them, and by the functions of torch that people use. Each change does to an
offloaded model what it does to a plain one, or is refused; none is lost."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, InfinityError, ParameterNotResident, UnsupportedError
from tests.support import models
from tests.support.bits import assert_same, differences
from tests.support.offloading import offloaded, swap_config

from .harness import held_units


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def loss_of(model: nn.Module, seed: int = 3) -> Tensor:
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).pow(2).mean()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A plain model and an offloaded one, which every test changes alike."""
    directory = tmp_path_factory.mktemp("swap")
    with offloaded(build(), swap_config(directory)) as model:
        yield build(), model


def both(pair: tuple[nn.Module, nn.Module], change: Callable[[nn.Module], Any]) -> Any:
    """The change is made to both; afterwards they are equal, and it gave the same."""
    plain, ours = pair
    expected, came = change(plain), change(ours)
    if isinstance(expected, Tensor):
        assert torch.equal(expected.detach(), torch.as_tensor(came).detach())
    else:
        assert expected == came
    engine = infinity.engine_of(ours)
    assert not held_units(ours)
    # As it rests, and not as somebody sees it who still holds a copy.
    assert not differences(weights(plain), {n: engine.read_parameter(n) for n in weights(plain)})
    return came


def swapped(weight: Tensor) -> float:
    """How an average of weights is shown for an evaluation, and taken away again."""
    backup, weight.data = weight.data, torch.full_like(weight, 0.25)
    seen = weight.sum().item()
    weight.data = backup
    return seen + weight.sum().item()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda w: w[0].zero_(),
    "detach": lambda w: w.detach()[1].fill_(2),
    "data": lambda w: w.data.clamp_(-0.5, 0.5),
    "unbind": lambda w: w.unbind()[2].mul_(3),
    "iteration": lambda w: sum(row.add_(1).sum() for row in w),
    "transposed": lambda w: w.t()[0].add_(1),
    "chunk": lambda w: w.chunk(2)[1].neg_(),
    "slice-assignment": lambda w: w.__setitem__((slice(None), 2), 9.0),
    "mask": lambda w: w.__setitem__(w > 0.1, 0.0),
    "init-of-a-slice": lambda w: nn.init.zeros_(w[:3]),
    "constant-of-a-slice": lambda w: nn.init.constant_(w[:3], 0.5),
    "uniform-of-a-row": lambda w: nn.init.uniform_(
        w[2], generator=torch.Generator().manual_seed(1)
    ),
    "view-of-a-view": lambda w: w.view(-1)[3:40].reshape(-1)[5].fill_(7),
    "other-dtype": lambda w: w.view(torch.int32)[3].zero_(),
    "alias": lambda w: w.contiguous().cpu().mul_(0.9),
    "in-place-function": lambda w: nn.functional.relu(w[2:5], inplace=True).sum(),
    "embedding-max-norm": lambda w: nn.functional.embedding(torch.tensor([1]), w, max_norm=0.1),
    "out": lambda w: torch.add(w, 1, out=w).sum(),
    "polyak": lambda w: w.mul_(0.9).add_(torch.ones(8, 8), alpha=0.1),
    "lerp": lambda w: w.lerp_(torch.ones(8, 8), 0.3).sum(),
    "copy": lambda w: w.copy_(torch.ones(8, 8)).sum(),
    "data-assignment": lambda w: setattr(w, "data", w.data * 2),
    "swap": swapped,
    "an-alias-sees-a-write": lambda w: [w.detach(), w[0], w.data, w.fill_(0.3)][0].sum().item(),
    "a-dead-alias-does-not": lambda w: [w[0], setattr(w, "data", w * 2)][0].add_(1).sum(),
}  # fmt: skip


@pytest.mark.parametrize("how", WRITES)
def test_a_write_outside_of_gather_changes_the_weight(how: str, pair: Any) -> None:
    with torch.no_grad():
        both(pair, lambda model: WRITES[how](model[0].weight))


@pytest.mark.parametrize("how", ["row", "mask", "polyak", "out", "iteration"])
def test_a_write_that_autograd_forbids_raises_what_torch_raises(how: str, pair: Any) -> None:
    said = []
    for model in pair:
        with pytest.raises(RuntimeError) as error:
            WRITES[how](model[0].weight)
        said.append(str(error.value))
    # torch says of unbind's outputs that they are those of a function with several.
    assert said[0] == said[1] or how == "iteration"
    both(pair, lambda model: None)


def test_a_write_that_cannot_be_followed_is_refused(pair: Any) -> None:
    _, model = pair
    weight, other = model[0].weight, model[2].weight
    for array in (weight.detach().numpy(), weight.data.numpy(), numpy.asarray(weight[0].detach())):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(ParameterNotResident, match="shape"), torch.no_grad():
        weight.t_()
    with pytest.raises(ParameterNotResident, match="copy_"):
        model[0].bias.data = other.data
    with pytest.raises(ParameterNotResident, match=r"shape \(8, 8\), got \(9, 8\)"):
        weight.data = torch.zeros(9, 8)
    with pytest.raises(UnsupportedError, match=r"infinity\.AdamW"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="Can't call numpy"):
        weight.numpy()
    both(pair, lambda model: None)


MADE_OF: dict[str, Callable[[Any], torch.Tensor]] = {
    "transposed": lambda weight: weight.T,
    "detached": lambda weight: weight.detach(),
    "row": lambda weight: weight[1].detach(),
}


@pytest.mark.parametrize("view", MADE_OF)
def test_a_parameter_made_of_a_view_shares_the_values_and_has_a_gradient_of_its_own(
    view: str, pair: Any
) -> None:
    """PEFT makes such a parameter of an embedding (`peft.utils.other.transpose`)."""
    seen = []
    for model in pair:
        weight = model[0].weight
        own = nn.Parameter(MADE_OF[view](weight))
        assert isinstance(own, nn.Parameter) and own.is_leaf and own.requires_grad
        own.square().sum().backward()
        assert weight.grad is None
        torch.optim.SGD([own], lr=0.1).step()
        with torch.no_grad():
            weight.mul_(1.25)
        assert own.grad is not None
        seen.append({"own": own.detach().clone(), "grad": own.grad.clone()})
    assert_same(seen[0], seen[1])
    both(pair, lambda model: None)


def ema_of_dict(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value *= 0.9
        value += 0.1


OF_MODELS: dict[str, Callable[[nn.Module], Any]] = {
    "state-dict": ema_of_dict,
    "state-dict-rows": lambda m: len([v[:1].mul_(3) for v in m.state_dict().values()]),
    "foreach": lambda m: len(
        torch._foreach_lerp_(
            list(m.parameters()), [torch.ones_like(p) for p in m.parameters()], 0.1
        )
    ),
    "vector": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()) * 2, m.parameters()
    ),
    "reset": lambda m: [torch.manual_seed(1), m[0].reset_parameters()][1],
}  # fmt: skip


@pytest.mark.parametrize("how", OF_MODELS)
def test_a_write_to_many_weights_changes_them(how: str, pair: Any) -> None:
    with torch.no_grad():
        both(pair, OF_MODELS[how])


def test_a_loop_over_parameters_writes_each_unit_once(swap_directory: Path) -> None:
    model = models.TinyDecoder(width=128, layers=4)
    with offloaded(model, swap_config(swap_directory)), torch.no_grad():
        engine = infinity.engine_of(model)
        engine.flush()
        before = engine.counters.snapshot().get("nvme_write_nbytes", 0)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        engine.flush()
        written = engine.counters.snapshot()["nvme_write_nbytes"] - before
    nbytes = sum(4 * parameter.numel() for parameter in model.parameters())
    assert nbytes <= written <= 1.1 * nbytes


def test_a_state_dict_is_saved_copied_and_loaded_as_plain_tensors(pair: Any) -> None:
    plain, ours = pair
    state, stream = ours.state_dict(), io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    for loaded in (torch.load(stream, weights_only=True), copy.deepcopy(state)):
        assert all(type(value) is Tensor for value in loaded.values())
        assert not differences(plain.state_dict(), loaded)
    other = build(1)
    other.load_state_dict(state)
    loss_of(other).backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    with pytest.raises(RuntimeError, match=r"no parameter can be made of it; clone\(\) it first"):
        build(1).load_state_dict(state, assign=True)
    both(pair, lambda model: None)


def test_a_value_with_an_address_shows_later_writes_at_that_address(pair: Any) -> None:
    plain, ours = pair
    states = plain.state_dict(), ours.state_dict()
    addresses = [state["0.weight"].data_ptr() for state in states]

    def scale(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight.mul_(0.75)

    both(pair, scale)
    for state, address in zip(states, addresses, strict=True):
        assert state["0.weight"].data_ptr() == address
    expected, value = (state["0.weight"] for state in states)
    assert torch.equal(expected, value.clone())
    assert numpy.array_equal(expected.numpy(), value.numpy())
    with pytest.raises(ValueError, match="read-only"):
        value.numpy()[...] = 0


# --- gradients --------------------------------------------------------------------------------


def scaled(model: nn.Module, optimizer: Any) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def accumulated(model: nn.Module, optimizer: Any) -> float:
    seen = model[0].weight.grad.detach()
    loss_of(model, 4).backward()
    return seen.sum().item()


def swapped_gradient(model: nn.Module, optimizer: Any) -> None:
    weight = model[0].weight
    before, weight.grad = weight.grad, torch.zeros(8, 8)
    weight.grad = before * 2


def noisy(model: nn.Module, optimizer: Any) -> None:
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)


def assigned_in_place(model: nn.Module, optimizer: Any) -> None:
    model[0].weight.grad += 1
    model[0].weight.grad /= 3


GRADIENTS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "row": lambda m, _: m[0].weight.grad[0].zero_().sum().item(),
    "scaled": lambda m, _: m[0].weight.grad.mul_(2).sum().item(),
    "replaced": lambda m, _: setattr(m[0].weight, "grad", torch.ones(8, 8)),
    "replaced-data": lambda m, _: setattr(m[0].weight.grad, "data", torch.ones(8, 8)),
    "one-from-none": lambda m, o: [o.zero_grad(), setattr(m[2].bias, "grad", torch.ones(4))][0],
    "detached": lambda m, _: m[0].weight.grad.detach().mul_(5).sum().item(),
    "clip-norm": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.01).item(),
    "clip-value": lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "foreach": lambda m, _: len(torch._foreach_mul_([p.grad for p in m.parameters()], 0.5)),
    "model-to": lambda m, _: len(list(m.to("cpu").cpu().float().parameters())),
    "grad-scaler": scaled, "accumulated": accumulated, "swapped": swapped_gradient,
    "noise": noisy, "assigned-in-place": assigned_in_place,
}  # fmt: skip


@pytest.mark.parametrize("how", GRADIENTS)
def test_a_change_of_a_gradient_is_what_the_step_uses(how: str, pair: Any) -> None:
    plain, _ = pair

    def change(model: nn.Module) -> Any:
        if model is plain:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        else:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2, always_norm=True)
        optimizer.zero_grad()
        loss_of(model).backward()
        answer = GRADIENTS[how](model, optimizer)
        seen = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.stack([g.norm() for g in seen.values() if g is not None]).norm()
        optimizer.step()
        assert model is plain or torch.equal(norm, optimizer.grad_norm)
        return answer, {n: None if g is None else g.tolist() for n, g in seen.items()}

    both(pair, change)


def test_a_gradient_that_was_replaced_is_not_taken_for_the_new_one(pair: Any) -> None:
    _, model = pair
    weight = model[0].weight
    loss_of(model).backward()
    gradient = weight.grad
    model.zero_grad()
    loss_of(model).backward()
    with pytest.raises(InfinityError, match="not there any more"):
        gradient.sum()
    with pytest.raises(ConfigError, match=r"shape \(8, 8\), got \(8,\)"):
        weight.grad = torch.zeros(8)
    model.zero_grad()


# --- several models, masters, gather ----------------------------------------------------------


def test_parameters_of_two_offloaded_models_work_in_one_operation(
    tmp_path: Path, pair: Any
) -> None:
    """A teacher that follows its student, and a penalty on the distance between them."""
    plain, ours = pair
    plain.zero_grad()
    ours.zero_grad()
    with offloaded(build(7), swap_config(tmp_path / "teacher")) as teacher:
        seen = []
        for student, follower in ((plain, build(7)), (ours, teacher)):
            with torch.no_grad():
                for mine, theirs in zip(follower.parameters(), student.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
                torch._foreach_lerp_(list(follower.parameters()), list(student.parameters()), 0.2)
                follower[0].weight[1].copy_(student[0].weight[2])
            pairs = zip(follower.parameters(), student.parameters(), strict=True)
            loss = sum((mine - theirs).pow(2).sum() for mine, theirs in pairs)
            loss.backward()
            found = weights(follower)
            found |= {f"{n} of {w}": p.grad.clone() for w, m in (("student", student), ("teacher", follower))
                      for n, p in m.named_parameters()}  # fmt: skip
            seen.append(found)
            for model in (student, follower):
                model.zero_grad()
        assert not differences(seen[0], seen[1])
        assert not held_units(teacher)


@pytest.mark.parametrize("how", ["handle", "view"])
def test_the_fp32_value_follows_where_the_narrow_one_changed(how: str, tmp_path: Path) -> None:
    """And stays where it did not, to the bit."""
    with offloaded(build(), swap_config(tmp_path, compute="bfloat16")) as model:
        engine = infinity.engine_of(model)
        wide = engine.read_parameter("0.weight", master=True)
        weight = model[0].weight
        with torch.no_grad():
            if how == "handle":
                weight.copy_(torch.cat([torch.ones(1, 8).bfloat16(), weight[1:].clone()]))
            else:
                weight[0].fill_(1)
        wide[0] = 1
        assert torch.equal(engine.read_parameter("0.weight", master=True), wide)


@pytest.mark.parametrize("how", ["data", "in-place", "numpy"])
def test_a_change_inside_gather_without_modify_is_kept_with_a_warning(
    how: str, tmp_path: Path
) -> None:
    with offloaded(build(), swap_config(tmp_path, compute="bfloat16")) as model:
        engine = infinity.engine_of(model)
        expected = engine.read_parameter("0.weight")
        expected[0] = 1
        with (
            pytest.warns(UserWarning, match=r"0\.weight changed inside .*modify=True"),
            torch.no_grad(),
            infinity.gather(model),
        ):
            weight = model[0].weight
            if how == "numpy":
                weight.detach()[0].view(torch.int16).numpy()[:] = 0x3F80
            else:
                (weight.data if how == "data" else weight)[0].fill_(1)
        for name in engine.parameter_names():
            engine.read_parameter(name)  # It is not only in memory that goes away.
        assert torch.equal(engine.read_parameter("0.weight"), expected)
        assert torch.equal(engine.read_parameter("0.weight", master=True), expected.float())


def test_a_change_of_a_gradient_inside_gather_is_kept(pair: Any) -> None:
    plain, ours = pair
    for model in pair:
        model.zero_grad()
        loss_of(model).backward()
        with infinity.gather(ours):
            model[0].weight.grad.mul_(3)
            model[2].bias.grad = None
            model[2].weight.grad = torch.ones(4, 8)
    seen = [
        {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        for model in pair
    ]
    assert not differences(*seen)
    plain.zero_grad()
    ours.zero_grad()


# --- any program ------------------------------------------------------------------------------

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t, lambda t: t[0], lambda t: t[1:3], lambda t: t.t(), lambda t: t.detach(),
    lambda t: t.data, lambda t: t.view(-1), lambda t: t.unbind()[-1], lambda t: t.split(2)[1],
    lambda t: t.diagonal(), lambda t: t.clone(), lambda t: t.flatten(), lambda t: t[..., ::2],
    lambda t: t.float(), lambda t: t.contiguous(), lambda t: t.reshape(2, -1), lambda t: t.T,
]  # fmt: skip
CHANGES: list[Callable[[Tensor], Any]] = [
    lambda t: t.add_(0.5), lambda t: t.mul_(0.5), lambda t: t.zero_(), lambda t: t.fill_(2),
    lambda t: t.clamp_(-1, 1), lambda t: t.copy_(t.flip(0)), lambda t: t.sum(), lambda t: t.norm(),
    lambda t: t.__setitem__(0, 1.5), lambda t: setattr(t, "data", t * 2 + 1), lambda t: t.sin_(),
    lambda t: torch._foreach_add_([t, t], 1.0),
]  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    of_gradient=st.booleans(),
    program=st.lists(
        st.tuples(st.sampled_from(["view", "change"]), st.integers(0, 50), st.integers(0, 50)),
        max_size=8,
    ),
)
def test_any_program_of_views_and_writes_is_exact_or_refused(
    of_gradient: bool, program: list[tuple[str, int, int]], pair: Any
) -> None:
    plain, ours = pair
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            mine.copy_(theirs.copy_(torch.linspace(-1, 1, theirs.numel()).view_as(theirs)))
    seen: list[list[Tensor]] = []
    for model in pair:
        model.zero_grad()
        loss_of(model).backward()
        seen.append([model[0].weight.grad if of_gradient else model[0].weight])
    with torch.no_grad():
        for kind, which, index in program:
            apply = (VIEWS if kind == "view" else CHANGES)[
                index % len(VIEWS if kind == "view" else CHANGES)
            ]
            answers = []
            for tensors in seen:
                try:
                    answers.append(apply(tensors[which % len(tensors)]))
                except Exception as error:
                    answers.append(error)
            if isinstance(answers[1], Exception):
                # In the middle of a refusal nothing was done; plain PyTorch may have.
                assert isinstance(answers[1], InfinityError) or isinstance(answers[0], Exception)
                return
            assert not isinstance(answers[0], Exception), answers
            if isinstance(answers[0], Tensor):
                assert torch.equal(answers[0], answers[1]), (kind, index)
                for tensors, answer in zip(seen, answers, strict=True):
                    tensors.append(answer)
        for theirs, mine in zip(*seen, strict=True):
            assert torch.equal(theirs, mine)
    assert not differences(weights(plain), weights(ours))
    theirs, mine = plain[0].weight.grad, ours[0].weight.grad
    assert torch.equal(theirs, mine.clone())
