"""The engine is used through an ordinary PyTorch loop, and behaves as PyTorch does in its corners.

What the engine cannot do exactly it refuses with an error of its own tree that says what to do
instead; those refusals are tested here too, and that they leave the model as it was.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import InfinityError, NonFiniteError
from infinity.modules.autograd.uses import UnitUses
from infinity.testing.simulated_device import SimulatedDevice
from tests.support import models
from tests.support.bits import differences
from tests.support.offloading import offloaded, swap_config

from .harness import (
    Named,
    Scenario,
    Side,
    compare,
    conditional,
    decoder,
    finish,
    held_units,
    loss_of,
    mlp,
    seed_everything,
    trained,
)
from .zoo import ZOO

WIDE = 272  # parameters of 64 * 272 * 4 bytes and more are built on meta


def wide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.TinyDecoder(width=WIDE).train()


# --- the loop ---------------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
         lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_learning_rate_schedulers(kind: str, swap_directory: Path) -> None:
    """They write `param_groups`: learning rates and, in one cycle, betas. Read at every step."""

    def scenario(side: Side) -> Named:
        made, rates = [], []

        def after(step: int, optimizer: Any) -> None:
            made[:] = made or [SCHEDULERS[kind](optimizer)]
            made[0].step(*([1.0 + step] if kind == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])

        return trained(side, steps=6, after=after) | {"rates": torch.tensor(rates)}

    compare(scenario, decoder, swap_directory)


def test_backward_passes_of_different_number_per_step(swap_directory: Path) -> None:
    compare(lambda side: trained(side, micro=[1, 3, 2]), conditional, swap_directory)


@pytest.mark.parametrize(
    "guard", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)
def test_evaluation_between_steps(guard: Any, swap_directory: Path) -> None:
    """Between backward and step, between step and zero_grad, and in the middle of accumulation; some
    parameters make their first step in the second one."""

    def scenario(side: Side) -> Named:
        optimizer = side.adamw()
        seen: Named = {}

        def evaluate(name: str) -> None:
            side.model.eval()
            with guard():
                seen[name] = loss_of(side.model, 99).clone()
                weight = side.model.norm.weight
                seen[f"{name}: grad"] = None if weight.grad is None else weight.grad.clone()
                seen[f"{name}: views"] = weight.detach().view(torch.int32)[1:] + weight[0].clone()
                seen.update({f"{name}: {n}": g for n, g in side.gradients().items()})
                if weight in optimizer.state:
                    seen[f"{name}: moment"] = optimizer.state[weight]["exp_avg"].clone()
            side.model.train()

        for step in range(2):
            evaluate(f"{step} before")
            loss_of(side.model, step).backward()
            evaluate(f"{step} accumulating")
            loss_of(side.model, step + 10).backward()
            evaluate(f"{step} before the step")
            for block in side.model.blocks if step == 0 else ():
                block.down.weight.grad = None
            optimizer.step()
            if step == 0:
                evaluate(f"{step} after the step")
            optimizer.zero_grad()
        return finish(side, seen)

    for placement in ("nvme", "host"):
        compare(scenario, decoder, swap_directory, placement=placement)


def test_weights_are_loaded_in_inference_mode_before_a_step_that_is_the_first_of_some(
    swap_directory: Path,
) -> None:
    def scenario(side: Side) -> Named:
        optimizer, first = side.adamw(), copy.deepcopy(side.model.state_dict())
        for step in range(2):
            loss_of(side.model, step).backward()
            if step == 0:
                side.model.head.weight.grad = side.model.blocks[0][0].weight.grad = None
            optimizer.step()
            if step == 0:
                with torch.inference_mode():
                    side.model.load_state_dict(first)
        return finish(side, {})

    compare(scenario, mlp, swap_directory, placement="host")


def test_generate_between_steps(swap_directory: Path) -> None:
    """Greedy and sampled tokens, with the cache and without, in eval and in train mode."""
    entry = ZOO["gpt2"]
    prompt = entry.prompt(3)

    def scenario(side: Side) -> Named:
        optimizer = side.adamw()
        seen: Named = {}
        for step in range(2):
            seed_everything(step)
            entry.loss(side.model, entry.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, options in {
                "greedy": {"do_sample": False},
                "no cache": {"do_sample": False, "use_cache": False},
                "sampled": {"do_sample": True, "top_k": 5},
                "beams": {"do_sample": False, "num_beams": 2},
            }.items():
                seed_everything(4)
                seen[f"{name} {step}"] = side.model.generate(**prompt, max_new_tokens=6, **options)
        return finish(side, seen)

    compare(scenario, lambda: entry.build(0), swap_directory)


@pytest.mark.parametrize(
    "clear",
    [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
        lambda model, optimizer: [setattr(p, "grad", None) for p in model.always.parameters()],
        lambda model, optimizer: None,
    ],
    ids=["optimizer", "optimizer-none", "optimizer-zeros", "model", "model-zeros", "by-hand",
         "by-hand-in-part", "never"],
)  # fmt: skip
def test_ways_to_clear_gradients(clear: Callable[[Any, Any], None], swap_directory: Path) -> None:
    """Zeros are not None: with zeros, weight decay and moments act on parameters without
    gradient."""

    def scenario(side: Side) -> Named:
        return trained(side, steps=5, clear=lambda optimizer: clear(side.model, optimizer))

    compare(scenario, conditional, swap_directory)


# Steps ("s"), gradients cleared ("z"), and backwards of batches by number. Without a gradient nothing
# is updated and no step is counted, as in torch. A gradient that nobody cleared is applied again, and
# summed up by the next backward.
@pytest.mark.parametrize(
    ("loop", "build"), [("s 1 s z s s 2 s", conditional), ("1 s s 2 s", decoder)]
)
def test_steps_without_a_backward(
    loop: str, build: Callable[[], nn.Module], swap_directory: Path
) -> None:
    def scenario(side: Side) -> Named:
        optimizer = side.adamw()
        calls = {"s": optimizer.step, "z": optimizer.zero_grad}
        for each in loop.split():
            calls.get(each, lambda each=each: loss_of(side.model, int(each)).backward())()
        return finish(side, {})

    compare(scenario, build, swap_directory)


def test_step_takes_a_closure(swap_directory: Path) -> None:
    def scenario(side: Side) -> Named:
        optimizer = side.adamw()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(side.model, 5)
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        return finish(side, {f"loss {i}": loss.detach() for i, loss in enumerate(losses)})

    compare(scenario, decoder, swap_directory)


# --- groups, freezing -------------------------------------------------------------------------


def test_groups_with_options_of_their_own(swap_directory: Path) -> None:
    """Learning rate, decay, betas and eps per group; one group later; a part of a unit in no
    group."""

    def scenario(side: Side) -> Named:
        def named(*parts: str) -> list[Tensor]:
            found = side.model.named_parameters()
            return [p for n, p in found if any(part in n for part in parts)]

        def after(step: int, optimizer: Any) -> None:
            if step == 1:
                optimizer.add_param_group({"params": named("gate"), "lr": 5e-2})
                optimizer.param_groups[0]["weight_decay"] = 0.3

        groups = [
            {"params": named("norm"), "weight_decay": 0.0, "lr": 3e-3},
            {"params": named("down", "qkv"), "betas": (0.8, 0.95), "eps": 1e-6},
        ]
        return trained(
            side, steps=4, groups=lambda _: groups, after=after,
            clear=lambda _: side.model.zero_grad(),
        )  # fmt: skip

    compare(scenario, decoder, swap_directory)


def test_a_group_that_the_program_changes_itself(swap_directory: Path) -> None:
    """What is taken out keeps its gradient, its value and its moments."""

    def scenario(side: Side) -> Named:
        def after(step: int, optimizer: Any) -> None:
            group = optimizer.param_groups[0]
            if step == 1:
                group["params"] = group["params"][::2]
            optimizer.param_groups[0] = {**group, "lr": group["lr"] / 2}

        seen = trained(side, steps=4, after=after)
        moments = [side.optimizer.state[p]["exp_avg"] for p in side.model.parameters()]
        return seen | {f"moment {index}": moment.clone() for index, moment in enumerate(moments)}

    compare(scenario, mlp, swap_directory)


def test_named_parameters_in_groups(swap_directory: Path) -> None:
    def scenario(side: Side) -> Named:
        return trained(side, steps=1, groups=lambda model: list(model.named_parameters()))

    compare(scenario, decoder, swap_directory)


def test_optimizer_takes_the_model_itself(swap_directory: Path) -> None:
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        by_model = infinity.AdamW(model, lr=1e-2)
        assert isinstance(by_model, torch.optim.Optimizer)
        counted = [p for group in by_model.param_groups for p in group["params"]]
        assert [id(p) for p in counted] == [id(p) for p in model.parameters()]


def test_freezing_in_the_middle_of_training(swap_directory: Path) -> None:
    """A frozen parameter gets no gradient and no update; its neighbours in the unit go on."""

    def scenario(side: Side) -> Named:
        def before(step: int) -> None:
            if step in (1, 3):
                side.model.blocks[1].requires_grad_(step == 3)
            if step == 1:
                side.model.blocks[0].qkv.weight.requires_grad_(False)

        return trained(side, steps=5, before=before)

    compare(scenario, decoder, swap_directory)


def test_unfreezing_what_was_frozen_at_offload_is_exact_or_refused(swap_directory: Path) -> None:
    """A frozen parameter has no space for moments and gradients."""
    with offloaded(ZOO["Frozen"].build(0), swap_config(swap_directory)) as model:
        with pytest.raises(InfinityError, match=r"stem\.weight"):
            model.stem.requires_grad_(True)
            loss_of(model, 1).backward()
        assert not held_units(model)


# --- graphs -----------------------------------------------------------------------------------


def two_forwards_before_one_backward(side: Side) -> Named:
    total = loss_of(side.model, 1) + 2 * loss_of(side.model, 2)
    total.backward()
    return {"loss": total.detach()}


def in_this_order(*order: int) -> Scenario:
    def scenario(side: Side) -> Named:
        losses = [loss_of(side.model, seed) for seed in range(3)]
        for index in order:
            losses[index].backward()
        return {}

    return scenario


def kept_and_used_again(side: Side) -> Named:
    loss = loss_of(side.model, 1)
    loss.backward(retain_graph=True)
    seen = {f"first {name}": g for name, g in side.gradients().items()}
    loss.backward()
    return seen


def dropped(side: Side) -> Named:
    """A forward without a backward, and one whose loss dies before the backward of the next."""
    unused = loss_of(side.model, 1)
    side.settled()
    loss = loss_of(side.model, 2)
    del unused
    loss.backward()
    return {}


GRAPHS = {
    "two forwards, one backward": two_forwards_before_one_backward,
    "in their order": in_this_order(0, 1, 2),
    "in another order": in_this_order(2, 0, 1),
    "kept and used again": kept_and_used_again,
    "dropped": dropped,
}


@pytest.mark.parametrize("graphs", GRAPHS)
def test_several_graphs(graphs: str, swap_directory: Path) -> None:
    compare(lambda side: finish(side, GRAPHS[graphs](side)), decoder, swap_directory)


def test_a_weight_saved_before_a_step_is_a_stale_graph(swap_directory: Path) -> None:
    """Backward through a forward that an optimizer step has overtaken: torch raises, so do we.

    Plain PyTorch refuses by the version counter of the saved weight. Silence here would be a
    gradient of new weights at old activations.
    """
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        optimizer = infinity.AdamW(model, lr=1e-2)
        stale = loss_of(model, 1)
        loss_of(model, 2).backward()
        optimizer.step()
        with pytest.raises(RuntimeError):
            stale.backward()
        assert not held_units(model)


def test_gradients_asked_for_by_hand(swap_directory: Path) -> None:
    """`torch.autograd.grad` with respect to inputs, and through a gradient (a penalty)."""

    def scenario(side: Side) -> Named:
        model = side.model
        optimizer = side.adamw()
        seen: Named = {}
        for step in range(2):
            x = model.inputs(step)["x"].requires_grad_()
            score = model(x).pow(2).mean()
            (slope,) = torch.autograd.grad(score, x, create_graph=True)
            seen[f"slope {step}"] = slope.detach()
            side.settled()
            (score + slope.pow(2).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert x.grad is not None
            seen[f"input {step}"] = x.grad
        return finish(side, seen)

    compare(scenario, mlp, swap_directory)


def test_input_gradients_alone(swap_directory: Path) -> None:
    """`backward(inputs=[x])` and a wholly frozen model: no parameter gets a gradient."""

    def scenario(side: Side) -> Named:
        x = side.model.inputs(1)["x"].requires_grad_()
        side.model(x).pow(2).mean().backward(inputs=[x])
        seen: Named = {"one": x.grad}
        side.settled()
        side.model.requires_grad_(False)
        y = side.model.inputs(2)["x"].requires_grad_()
        side.model(y).pow(2).mean().backward()
        seen["two"] = y.grad
        return finish(side, seen)

    compare(scenario, mlp, swap_directory)


def test_a_regulariser_reads_the_weights(swap_directory: Path) -> None:
    """A loss that reads parameters outside of any module: weight penalty, tying, a norm to log."""

    def loss(model: nn.Module, seed: int) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        return loss_of(model, seed) + 1e-3 * penalty

    compare(lambda side: trained(side, loss), mlp, swap_directory)


def test_user_hooks_see_real_parameters(swap_directory: Path) -> None:
    """Hooks of the user may read the weights, and read and change the gradients so far."""

    def scenario(side: Side) -> Named:
        sums: list[Tensor] = []
        block = side.model.blocks[1]

        def halve(m: Any, *gradients: Any) -> None:
            if m[2].weight.grad is not None:
                sums.append(m[2].weight.grad.sum())
                m[2].weight.grad.mul_(0.5)
            m[0].bias.grad = None
            m[0].weight.grad = torch.ones_like(m[0].weight)

        block.register_full_backward_hook(halve)
        block.register_forward_pre_hook(lambda m, args: sums.append(m[0].weight.detach().sum()))
        block.register_forward_hook(lambda m, args, out: out * m[2].bias.detach().mean().exp())
        seen = trained(side, steps=2, micro=2)
        return seen | {f"sum {at}": value for at, value in enumerate(sums)}

    compare(scenario, mlp, swap_directory)


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_hooks_on_outputs_and_parameters(when: str, swap_directory: Path) -> None:
    """`Tensor.register_hook` on an activation works; on a parameter it is kept or refused, not
    lost."""

    def build() -> nn.Module:
        model = mlp()
        if when == "before":
            model.head.weight.register_hook(lambda gradient: gradient * 3)
        return model

    def scenario(side: Side) -> Named:
        if when == "after":
            side.model.head.weight.register_hook(lambda gradient: gradient * 3)
        x = side.model.inputs(1)["x"]
        out = side.model.blocks[0](x)
        out.register_hook(lambda gradient: gradient * 2)
        side.model.head(out).pow(2).mean().backward()
        return finish(side, {})

    try:
        compare(scenario, build, swap_directory)
    except InfinityError as refused:
        assert "head.weight" in str(refused)


# --- recovery ---------------------------------------------------------------------------------


def test_not_finite_gradients_are_refused_before_anything_changes(swap_directory: Path) -> None:
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=1.0, error_if_nonfinite=True)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = Side(model).weights()
        (loss_of(model, 1) * float("inf")).backward()
        with pytest.raises(NonFiniteError) as refused:
            optimizer.step()
        assert refused.value.step == 2
        optimizer.zero_grad()
        assert not differences(before, Side(model).weights())
        loss_of(model, 2).backward()
        optimizer.step()
        assert torch.isfinite(optimizer.grad_norm)


# --- several models ---------------------------------------------------------------------------


def test_two_models_in_one_graph(tmp_path: Path) -> None:
    """A generator and a critic: each has its engine, optimizer and tiers; one feeds the other."""

    def scenario(first: Side, second: Side) -> Named:
        ours, theirs = (s.adamw() for s in (first, second))
        seen: Named = {}
        for step in range(3):
            x = first.model.inputs(step)["x"]
            made = torch.nn.functional.pad(first.model(x), (0, 13))
            score = second.model(made).mean()
            score.backward()
            ours.step()
            ours.zero_grad()
            theirs.zero_grad()
            second.model(made.detach()).mean().neg().backward()
            theirs.step()
            theirs.zero_grad()
            seen[f"score {step}"] = score.detach()
        seen = {f"first {k}": v for k, v in finish(first, seen).items()}
        return seen | {f"second {k}": v for k, v in finish(second, {}).items()}

    build = ZOO["Mlp"].build
    expected = scenario(Side(build(0), is_plain=True), Side(build(1), is_plain=True))
    with (
        offloaded(build(0), swap_config(tmp_path / "first")) as first,
        offloaded(build(1), swap_config(tmp_path / "second")) as second,
    ):
        came = scenario(Side(first), Side(second))
        assert not held_units(first) and not held_units(second)
    assert not differences(expected, came)


# --- building on meta -------------------------------------------------------------------------


def test_a_model_built_on_meta_trains_from_a_callable(swap_directory: Path) -> None:
    """`infinity.init_empty_weights`: large parameters on meta; weights streamed by name, tied ones once."""
    plain = wide()
    asked: list[str] = []

    def weights(name: str) -> Tensor:
        asked.append(name)
        return plain.get_parameter(name).detach()

    config = swap_config(swap_directory, host_nbytes="32MiB")
    with infinity.init_empty_weights(config):
        model = models.TinyDecoder(width=WIDE)
    # Small parameters may be real: they are what their constructors made them.
    assert model.tokens.weight.is_meta and model.blocks[0].qkv.weight.is_meta
    assert not any(buffer.is_meta for buffer in model.buffers())
    with offloaded(model.train(), config, weights=weights) as model:
        assert sorted(asked) == sorted(name for name, _ in plain.named_parameters())
        assert not differences(trained(Side(plain, is_plain=True)), trained(Side(model)))


@pytest.mark.parametrize("architecture", ["gpt2", "llama-tied", "mixtral", "t5", "falcon_mamba"])
def test_a_model_built_on_meta_trains_from_a_checkpoint(architecture: str, tmp_path: Path) -> None:
    """From a sharded Hugging Face directory, without the plain model ever being built."""
    entry = ZOO[architecture]
    plain = entry.build(0)
    plain.save_pretrained(tmp_path / "checkpoint", max_shard_size="40KB")
    config = swap_config(tmp_path / "swap")
    with infinity.init_empty_weights(config):
        model = entry.construct()
    with offloaded(model.train(), config, weights=tmp_path / "checkpoint") as model:
        seed_everything(1)
        loss = entry.loss(model, entry.batch(1))
        loss.backward()
        seed_everything(1)
        expected = entry.loss(plain, entry.batch(1))
        expected.backward()
        assert torch.equal(loss, expected)
        assert not differences(Side(plain, is_plain=True).gradients(), Side(model).gradients())


def test_seeded_weights_are_the_same_on_every_placement(tmp_path: Path) -> None:
    def weights(seed: int, where: str) -> dict[str, Tensor]:
        config = swap_config(tmp_path / f"{seed}{where}", placement=where, host_nbytes="64MiB")
        torch.manual_seed(seed)
        with infinity.init_empty_weights(config):
            model = models.TinyDecoder(width=WIDE)
        torch.manual_seed(len(where))  # what happens in between must not matter
        with offloaded(model, config, seed=seed) as model:
            return Side(model).weights()

    first = weights(1, "nvme")
    assert not differences(first, weights(1, "host"))
    assert not differences(first, weights(1, "device"))
    assert len(differences(first, weights(2, "host"))) >= 10
    for name, weight in first.items():
        if "norm" not in name:
            assert 0.01 < weight.std() < 1.5, name


# --- looking at parameters --------------------------------------------------------------------


def test_handles_look_like_parameters(swap_directory: Path) -> None:
    plain = decoder()
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
        assert list(ours) == list(theirs)
        for name, handle in ours.items():
            parameter = theirs[name]
            assert isinstance(handle, nn.Parameter), name
            assert handle.shape == parameter.shape and handle.dtype == parameter.dtype
            assert handle.stride() == parameter.stride() and handle.numel() == parameter.numel()
            assert handle.device == parameter.device and handle.ndim == parameter.ndim
            assert handle.requires_grad and handle.is_leaf and handle.grad is None
            assert handle.element_size() == 4 and len(handle) == len(parameter)
            assert not handle.is_meta and handle.is_floating_point() and handle.size(0)
            assert name in repr(handle) or "Handle" in repr(handle)
        assert model.head.weight is model.tokens.weight
        assert infinity.engine_of(model).parameter_names() == list(theirs)
        assert "TinyDecoder" in repr(model) and len(list(model.modules())) == len(
            list(plain.modules())
        )
        assert sum(p.numel() for p in model.parameters()) == sum(
            p.numel() for p in plain.parameters()
        )
        assert len({*model.parameters()}) == len(ours)  # hashable, each itself
        assert list(model.state_dict()) == list(plain.state_dict())
        assert type(model) is type(plain)


def test_a_released_parameter_reads_true(swap_directory: Path) -> None:
    """Outside of any forward a read fetches the parameter, or raises a named error: never
    rubbish."""
    plain = decoder()
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        for name in ("tokens.weight", "blocks.1.qkv.weight", "norm.bias"):
            handle, parameter = model.get_parameter(name), plain.get_parameter(name)
            for read in (
                lambda p: p + 1, lambda p: p.norm(), lambda p: p.clone(), lambda p: p.detach().sum(),
                lambda p: p.cpu().tolist(), lambda p: p.data.mean(), lambda p: p.t(),
                lambda p: p[0].item() if p.ndim == 1 else p[0, 0].item(), lambda p: p.numpy(force=True),
                lambda p: torch.equal(p, p), lambda p: p.max(), lambda p: p.float() @ p.float().t(),
                lambda p: torch.nn.functional.linear(torch.ones(1, p.shape[-1]), p.detach()),
                lambda p: torch.stack([p, p]), lambda p: p.to(torch.float64), lambda p: bool((p == p).all()),
            ):  # fmt: skip
                try:
                    came = read(handle)
                except InfinityError as error:
                    assert name in str(error)
                    continue
                wanted = torch.as_tensor(read(parameter))
                assert torch.equal(torch.as_tensor(came), wanted), f"{name}: wrong values"
        assert not held_units(model)


def test_gather_reads_and_modifies(swap_directory: Path) -> None:
    plain = decoder()
    with offloaded(decoder(), swap_config(swap_directory, compute="bfloat16")) as model:
        engine = infinity.engine_of(model)
        with infinity.gather(model.blocks[0]):
            with infinity.gather(model):  # nested: everything stays until the outermost ends
                assert torch.equal(model.norm.weight, plain.norm.weight.bfloat16())
            inner = model.blocks[0].qkv.weight
            assert torch.equal(inner, plain.blocks[0].qkv.weight.bfloat16())
        assert not held_units(model)
        with infinity.gather([model.norm.weight], modify=True), torch.no_grad():
            model.norm.weight.fill_(0.3)
        assert torch.equal(engine.read_parameter("norm.weight"), torch.full((32,), 0.3).bfloat16())
        wide = engine.read_parameter("norm.weight", master=True)
        assert wide.dtype is torch.float32 and torch.equal(
            wide.bfloat16(), torch.full((32,), 0.3).bfloat16()
        )
        value = torch.linspace(-1, 1, 32)
        engine.write_parameter("norm.bias", value)
        assert torch.equal(engine.read_parameter("norm.bias", master=True), value)
        assert torch.equal(engine.read_parameter("norm.bias"), value.bfloat16())
        assert not held_units(model)


def test_gather_sees_a_pending_update(swap_directory: Path) -> None:
    """What is read after `step()` is what the step made, wherever the update is applied."""

    def scenario(side: Side) -> Named:
        seen: Named = {}

        def clear(optimizer: Any) -> None:
            seen.update({f"{len(seen)} {name}": w for name, w in side.weights().items()})
            optimizer.zero_grad()

        return trained(side, steps=2, clear=clear) | seen

    compare(scenario, decoder, swap_directory)


def test_modified_weights_train_on(swap_directory: Path) -> None:
    """A weight set between steps keeps its moments, as an assignment under no_grad does in
    torch."""

    def scenario(side: Side) -> Named:
        block = side.model.blocks[1]

        def halve(*_: Any) -> None:
            is_plain = side.is_plain
            shown = nullcontext() if is_plain else infinity.gather(block, modify=True)
            with shown, torch.no_grad():
                block.up.weight.mul_(0.5)

        return trained(side, after=halve)

    compare(scenario, decoder, swap_directory)


# --- refusals ---------------------------------------------------------------------------------


def _plain_optimizer(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 1).backward()
    optimizer.step()


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "to-dtype": (lambda m: m.to(torch.bfloat16), "precision.compute"),
    "half": (lambda m: m.half(), "precision.compute"),
    "double": (lambda m: m.double(), "precision.compute"),
    "to-meta": (lambda m: m.to("meta"), "tier"),
    "deepcopy": (copy.deepcopy, "export|gather"),
    "deepcopy-parameter": (lambda m: copy.deepcopy(m.norm.weight), "gather"),
    "pickle": (pickle.dumps, "export|gather"),
    "torch-save": (lambda m: torch.save(m, io.BytesIO()), "export|gather"),
    "pickle-optimizer": (lambda m: pickle.dumps(infinity.AdamW(m, lr=1)), "state_dict"),
    "plain-optimizer": (_plain_optimizer, r"infinity\.AdamW|gather"),
    "share-memory": (lambda m: m.share_memory(), "tier|released"),
    "offload-twice": (lambda m: infinity.offload(m), "already|offloaded"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_say_what_to_do_and_do_no_damage(what: str, swap_directory: Path) -> None:
    action, advice = REFUSED[what]
    before = Side(decoder(), is_plain=True).weights()
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        with pytest.raises(InfinityError, match=advice):
            action(model)
        model.zero_grad()
        assert not held_units(model)
        assert not differences(before, Side(model).weights())
        plain = decoder()
        ours, theirs = loss_of(model, 3), loss_of(plain, 3)
        ours.backward()
        theirs.backward()
        assert torch.equal(ours, theirs)
        assert not differences(Side(plain, is_plain=True).gradients(), Side(model).gradients())


def test_reentrant_checkpointing(swap_directory: Path) -> None:
    """A backward inside a backward, which `use_reentrant=True` runs for every block."""

    def loss(model: Any, seed: int) -> Tensor:
        x = model.tokens(model.inputs(seed)["ids"])
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.pow(2).mean()

    compare(lambda side: trained(side, loss), decoder, swap_directory)


def test_a_backward_inside_another_is_a_part_of_it(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three steps has one end, at which the host waits for gradients, and blocks are updated
    in the backward as they are with checkpoints that are not reentrant. How many depends on the
    thread of updates."""
    ends: list[int] = []
    ended = UnitUses.backward_ended
    monkeypatch.setattr(UnitUses, "backward_ended", lambda uses: (ends.append(1), ended(uses)))

    def early_updates(reentrant: bool) -> float:
        config = swap_config(swap_directory, placement="host", updates="both_passes")
        with offloaded(decoder(), config, device=SimulatedDevice()) as model:
            optimizer = infinity.AdamW(model, lr=1e-2)
            for seed in range(3):
                x = model.tokens(model.inputs(seed)["ids"])
                for block in model.blocks:
                    x = checkpoint(block, x, use_reentrant=reentrant)
                model.norm(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return infinity.engine_of(model).counters.snapshot()["early_updates_kept"]

    assert early_updates(True) > 0 and early_updates(False) > 0
    assert len(ends) == 6


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool, swap_directory: Path) -> None:
    """Values go to their tiers, fp32 master included; moments stay, as in plain PyTorch."""

    def scenario(side: Side) -> Named:
        def after(step: int, optimizer: Any) -> None:
            if step == 1:
                side.model.load_state_dict(decoder(1).state_dict())
            if step == 2:
                part = {"norm.weight": torch.full((32,), 0.5), "unknown": torch.zeros(1)}
                outcome = side.model.load_state_dict(
                    part, strict=False, assign=assign and not side.is_plain
                )
                assert outcome.unexpected_keys == ["unknown"]
                assert "norm.bias" in outcome.missing_keys
                with pytest.raises(RuntimeError, match="size mismatch"):
                    side.model.load_state_dict({"norm.weight": torch.zeros(3)}, strict=False)

        return trained(side, steps=4, after=after)

    compare(scenario, decoder, swap_directory)


@pytest.mark.parametrize("call", [
    lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.to(torch.float32),
    lambda m: m.train().eval().train(), lambda m: m.requires_grad_(True), lambda m: m.apply(lambda _: None),
    lambda m: list(m.buffers()), lambda m: copy.copy(list(m.parameters())),
])  # fmt: skip
def test_calls_that_change_nothing_are_allowed(call: Any, swap_directory: Path) -> None:
    """Trainers call `model.to(device)` and friends without asking."""
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        call(model)
        plain = decoder()
        ours, theirs = loss_of(model, 3), loss_of(plain, 3)
        assert torch.equal(ours, theirs)


def test_parameters_of_before_offload_are_those_of_the_model(swap_directory: Path) -> None:
    """They follow it: no optimizer trains tensors that nothing reads."""
    model = decoder()
    old = list(model.parameters())
    with offloaded(model, swap_config(swap_directory)) as model:
        (group,) = infinity.AdamW(old, lr=1e-2).param_groups
        assert [id(each) for each in group["params"]] == [id(p) for p in model.parameters()]
        with pytest.raises(InfinityError):
            infinity.AdamW(decoder().parameters(), lr=1e-2)


def test_modules_added_after_offload_are_noticed(swap_directory: Path) -> None:
    """A new head trains or is refused; it is never silently left out."""
    with offloaded(mlp(), swap_config(swap_directory)) as model:
        model.head = nn.Linear(16, 5)
        with pytest.raises(InfinityError, match="after"):
            loss_of(model, 1).backward()
            infinity.AdamW(model, lr=1e-2)


def test_a_model_that_is_dropped_is_collected(swap_directory: Path) -> None:
    """Without `close`: no reference cycle keeps the engine, its threads and its files for ever."""
    model = infinity.offload(decoder(), swap_config(swap_directory))
    loss_of(model, 1).backward()
    del model
    gc.collect()
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        loss_of(model, 1).backward()


def test_fp32_tensors_beside_fp16_ones_in_one_unit(swap_directory: Path) -> None:
    """The unit keeps full fp32 masters, and the update of its fp32 tensors starts from theirs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).half()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x.half()).float())

    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(3)))
    twin = copy.deepcopy(plain)
    x = torch.randn(4, 8)
    plain(x).pow(3).mean().backward()
    fp32 = {n: p for n, p in plain.named_parameters() if p.dtype is torch.float32}
    torch.optim.AdamW(fp32.values(), lr=1e-2, fused=True).step()
    with offloaded(twin, swap_config(swap_directory)) as model:
        optimizer = infinity.AdamW(model, lr=1e-2)
        model(x).pow(3).mean().backward()
        optimizer.step()
        engine = infinity.engine_of(model)
        for name, parameter in fp32.items():
            assert torch.equal(engine.read_parameter(name), parameter), name


# --- several optimizers, and gradients in gather --------------------------------------------------


def test_two_optimizers_that_clip_for_themselves(swap_directory: Path) -> None:
    """Their parameters share units; a clip factor is of one optimizer's gradients alone."""

    def scenario(side: Side) -> Named:
        named = list(side.model.named_parameters())
        halves = [
            [p for n, p in named if ("weight" in n) == is_weight] for is_weight in (True, False)
        ]
        optimizers = [side.adamw(half) for half in halves]
        seen: Named = {}
        for step in range(4):
            loss_of(side.model, step).backward()
            for index, (optimizer, half) in enumerate(zip(optimizers, halves, strict=True)):
                max_norm = 0.01 * (1 + index)
                if side.is_plain:
                    norm = torch.nn.utils.clip_grad_norm_(half, max_norm)
                else:
                    optimizer.max_grad_norm = max_norm
                optimizer.step()
                seen[f"norm {step} {index}"] = (
                    norm if side.is_plain else optimizer.grad_norm
                ).clone()
            seen.update({f"{step} {name}": g for name, g in side.gradients().items()})
            for optimizer in optimizers:
                optimizer.zero_grad()
        return finish(side, seen)

    compare(scenario, mlp, swap_directory)


def test_a_new_optimizer_starts_with_new_moments(swap_directory: Path) -> None:
    def scenario(side: Side) -> Named:
        trained(side)
        return trained(side)

    compare(scenario, decoder, swap_directory)
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        first, _ = infinity.AdamW(model), infinity.AdamW(model)
        loss_of(model, 1).backward()
        with pytest.raises(InfinityError, match="another optimizer"):
            first.step()


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_backward_inside_gather_adds_once(num_before: int, swap_directory: Path) -> None:
    def scenario(side: Side) -> Named:
        for _ in range(num_before):
            loss_of(side.model, 1).backward()
        with nullcontext() if side.is_plain else infinity.gather(side.model):
            loss_of(side.model, 2).backward()
            inside = {name: p.grad.clone() for name, p in side.model.named_parameters()}
        return finish(side, inside)

    compare(scenario, decoder, swap_directory)


def test_a_parameter_is_accepted_in_place_of_its_handle(swap_directory: Path) -> None:
    """Inside `gather` modules show plain parameters: they may be gathered again, or trained."""
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        with infinity.gather(model):
            with infinity.gather([model.norm.weight]):
                assert model.norm.weight.sum() == 32
            optimizer = infinity.AdamW(list(model.parameters()), lr=1e-2)
        loss_of(model, 1).backward()
        optimizer.step()
        assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_default_device_and_mode_of_the_program_are_not_those_of_the_state(
    compute: str, swap_directory: Path
) -> None:
    """`torch.set_default_device("cuda")` is for the program's own tensors, and so is
    `inference_mode` around `offload`."""

    def scenario(model: Any, device: str) -> list[Tensor]:
        found, batches = (
            [],
            [model.inputs(step)["x"].to(getattr(torch, compute)) for step in (0, 1, 2)],
        )
        with torch.device(device):
            optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=0.1)
            for x in batches:
                model(x).square().mean().backward()
                optimizer.step()
                assert optimizer.grad_norm is not None
                found += [optimizer.grad_norm, model.head.weight.grad.clone()]
                optimizer.zero_grad()
            found += [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
        return [*found, *(p.detach().clone() for p in model.parameters())]

    sides = []
    for device in ("cpu", "meta"):
        with ExitStack() as stack:
            with torch.inference_mode(device == "meta"):
                config = swap_config(swap_directory, compute=compute)
                model = stack.enter_context(offloaded(mlp(), config))
            sides.append(scenario(model, device))
    assert all(map(torch.equal, *sides))


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_options_that_are_not_there_are_refused(option: str, swap_directory: Path) -> None:
    with offloaded(decoder(), swap_config(swap_directory)) as model:
        with pytest.raises(InfinityError, match=option):
            infinity.AdamW([{"params": model.parameters(), option: True}])
        with pytest.raises(InfinityError, match="lr"):
            infinity.AdamW([{"params": model.parameters(), "lr": -1.0}])


def test_a_gradient_from_before_offload_is_refused(swap_directory: Path) -> None:
    model = decoder()
    loss_of(model, 1).backward()
    with pytest.raises(InfinityError, match="zero_grad"):
        infinity.offload(model, swap_config(swap_directory))


@pytest.mark.parametrize("is_simulated", [False, True], ids=["cpu", "simulated"])
def test_blocks_may_be_compiled(is_simulated: bool, swap_directory: Path) -> None:
    """`block.compile()`, before offload: hooks stay outside of the graphs, which see parameters as
    plain ones. The backend that generates no code shows everything about the engine."""

    def losses(*, is_compiled: bool) -> list[float]:
        model = decoder()
        if is_compiled:
            for block in model.blocks:  # type: ignore[union-attr]
                block.compile(backend="aot_eager")
        device = SimulatedDevice(2, delay_s=1e-4) if is_simulated else None
        with offloaded(model, swap_config(swap_directory), device=device) as model:
            optimizer = infinity.AdamW(model, lr=1e-2)
            found = []
            for seed in range(3):
                loss = loss_of(model, seed)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

    torch._dynamo.reset()
    assert losses(is_compiled=True) == pytest.approx(losses(is_compiled=False), rel=1e-5)
