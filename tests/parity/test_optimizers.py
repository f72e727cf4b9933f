"""Every optimizer has the bits of torch's of that name, wherever its state rests.

torch has no Lion: the reference is the rule as its paper says it, in torch operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import get_cosine_schedule_with_warmup

import infinity
from infinity.errors import ConfigError, InfinityError, NonFiniteError, UnsupportedError
from tests.support.bits import differences
from tests.support.exhaustive import in_turn
from tests.support.lion import PlainLion
from tests.support.models import Mlp
from tests.support.offloading import swap_config

STEPS = 4
MAX_NORM = 0.02  # Acts in every step of these models.


@dataclass(frozen=True)
class Rule:
    """One optimizer: ours, the reference, and what the file says of it."""

    name: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    options: dict[str, Any]
    file: dict[str, Any] = field(default_factory=dict)
    moments: tuple[str, ...] = ()

    @property
    def section(self) -> dict[str, Any]:
        return {"name": self.name, **self.file}


BOTH = ("exp_avg", "exp_avg_sq")
MOMENTUM = {"momentum": 0.9}
RULES = {
    "adamw": Rule("adamw", infinity.AdamW, torch.optim.AdamW,
                  {"betas": (0.8, 0.95), "weight_decay": 0.1}, moments=BOTH),
    "adam": Rule("adam", infinity.Adam, torch.optim.Adam,
                 {"betas": (0.8, 0.95), "weight_decay": 0.1}, moments=BOTH),
    "sgd": Rule("sgd", infinity.SGD, torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": Rule("sgd", infinity.SGD, torch.optim.SGD,
                     {**MOMENTUM, "dampening": 0.2, "weight_decay": 0.1}, MOMENTUM,
                     ("momentum_buffer",)),
    "nesterov": Rule("sgd", infinity.SGD, torch.optim.SGD, {**MOMENTUM, "nesterov": True},
                     MOMENTUM, ("momentum_buffer",)),
    "lion": Rule("lion", infinity.Lion, PlainLion, {"betas": (0.8, 0.95), "weight_decay": 0.1},
                 moments=("exp_avg",)),
}  # fmt: skip
WAYS = {
    "host": {"placement": "host", "updates": "at_step"},
    "nvme": {"placement": "nvme"},
    "split": {"placement": {"moments": ["host", "nvme"], "parameters": ["nvme"],
                            "gradients": ["nvme"]}, "updates": "at_step"},
}  # fmt: skip


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Rule:
    return RULES[request.param]


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp(width=36, layers=3)  # Rows that end in a vector's middle.


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with settings of their own; a third comes later."""
    by_rank = [[p for p in model.blocks.parameters() if p.ndim == rank] for rank in (2, 1)]
    return [{"params": by_rank[0]}, {"params": by_rank[1], "weight_decay": 0.0, "lr": 0.02}]


def make(rule: Rule, model: nn.Module, *, plain: bool = False, **more: Any) -> Any:
    options = {"lr": 0.01, **rule.options, **more}
    if plain and rule.name != "lion":
        options["fused"] = True
    return (rule.plain if plain else rule.ours)(groups_of(model), **options)


def train(
    model: nn.Module, optimizer: Any, steps: range = range(STEPS), *, layer_major: bool = False
) -> list[float]:
    """Losses. The head joins the optimizer after the first step, and the schedule begins anew."""
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, 1, 2 * STEPS, last_epoch=steps.start - 2 if steps.start else -1
    )
    losses = []
    for step in steps:
        if step == 1:
            optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.03})
            scheduler = get_cosine_schedule_with_warmup(optimizer, 1, 2 * STEPS)
        losses += one_step(model, optimizer, step, layer_major=layer_major)
        scheduler.step()
    return losses


def one_step(model: nn.Module, optimizer: Any, step: int, *, layer_major: bool) -> list[float]:
    batches = [model.inputs(10 * step + micro)["x"] for micro in range(2)]

    def loss_of(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    if layer_major:
        losses = infinity.forward_backward(model, loss_of, batches)
    else:
        losses = [loss_of(batch) for batch in batches]
        for loss in losses:
            loss.backward()
    if isinstance(optimizer, infinity.AdamW | infinity.SGD | infinity.Lion):
        optimizer.step()
    else:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if id(p) in mine], MAX_NORM)
        optimizer.step()
    model.zero_grad()
    return [loss.item() for loss in losses]


def plain_run(rule: Rule) -> tuple[list[float], nn.Module, Any]:
    model = build()
    optimizer = make(rule, model, plain=True)
    return train(model, optimizer), model, optimizer


def offload(rule: Rule, swap: Path, way: str = "host", **more: Any) -> nn.Module:
    options = {**WAYS[way], **more}
    return infinity.offload(build(), swap_config(swap, optimizer=rule.section, **options))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    try:
        engine = infinity.engine_of(model)
    except InfinityError:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: engine.read_parameter(name) for name in engine.parameter_names()}


def assert_moments(ours: nn.Module, optimizer: Any, plain: nn.Module, theirs: Any) -> None:
    """`optimizer.state` shows what the reference keeps, name by name."""
    plains = dict(plain.named_parameters())
    for name, handle in ours.named_parameters():
        mine, expected = optimizer.state[handle], theirs.state.get(plains[name], {})
        assert sorted(mine) == sorted(expected), name
        for key, value in expected.items():
            assert torch.equal(mine[key], torch.as_tensor(value, dtype=torch.float32)), (name, key)


@pytest.mark.parametrize("way", WAYS)
def test_every_optimizer_has_the_bits_of_torchs(rule: Rule, way: str, swap_directory: Path) -> None:
    """With clipping, groups, a group that is added, and a schedule; layer-major in one of the
    ways."""
    losses, plain, theirs = plain_run(rule)
    model = offload(rule, swap_directory, way)
    with infinity.engine_of(model):
        optimizer = make(rule, model, max_grad_norm=MAX_NORM)
        found = train(model, optimizer, layer_major=way == "nvme")
        assert found == losses
        assert not differences(weights_of(plain), weights_of(model))
        assert_moments(model, optimizer, plain, theirs)
        placed = infinity.engine_of(model).placed_nbytes()
        assert ("moments" in placed) == bool(rule.moments), "no room for what is not kept"


@pytest.mark.parametrize("durability", ["none", "checkpoint"])
def test_a_checkpoint_goes_on_to_the_bit_and_only_with_its_own_optimizer(
    rule: Rule, durability: str, tmp_path: Path
) -> None:
    losses, plain, _ = plain_run(rule)
    section = {"directory": str(tmp_path / "checkpoints"), "durability": durability}
    model = offload(rule, tmp_path / "a", "nvme", checkpoint=section)
    with infinity.engine_of(model):
        optimizer = make(rule, model, max_grad_norm=MAX_NORM)
        train(model, optimizer, range(2))
        path = infinity.checkpoint.save(tmp_path / "checkpoints", model, optimizer)
    model = offload(rule, tmp_path / "b", "host")
    with infinity.engine_of(model):
        optimizer = make(rule, model, max_grad_norm=MAX_NORM)
        optimizer.add_param_group({"params": list(model.head.parameters())})
        infinity.checkpoint.load(path, model, optimizer)
        assert train(model, optimizer, range(2, STEPS)) == losses[4:]
        assert not differences(weights_of(plain), weights_of(model))
    other = RULES["adamw" if rule.name == "lion" else "lion"]
    model = offload(other, tmp_path / "c", "host")
    with infinity.engine_of(model):
        before = weights_of(model)
        optimizer = make(other, model)
        optimizer.add_param_group({"params": list(model.head.parameters())})
        with pytest.raises(ConfigError, match=f'that of "{rule.name}"'):
            infinity.checkpoint.load(path, model, optimizer)
        with pytest.raises(ConfigError, match="another (model, )?optimizer"):
            infinity.checkpoint.load(path, model)
        assert not differences(before, weights_of(model)), "nothing was changed"


@pytest.mark.parametrize(
    ("rule", "compute"), in_turn(RULES, ["float32", "bfloat16"]), indirect=["rule"]
)
def test_moments_of_eight_bits_rest_anywhere(rule: Rule, compute: str, tmp_path: Path) -> None:
    """Approximate, and the same on every tier."""
    found = []
    for way in ("host", "nvme"):
        model = offload(
            rule, tmp_path / way, way, host_nbytes="16MiB",
            precision={"compute": compute, "moments": "8bit"},
        )  # fmt: skip
        with infinity.engine_of(model):
            optimizer = make(rule, model)
            for step in range(3):
                model(model.inputs(step)["x"].to(getattr(torch, compute))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(weights_of(model))
    assert not differences(*found)


def test_a_momentum_that_begins_late_begins_as_torchs(swap_directory: Path) -> None:
    """torch's buffer begins with the gradient of the first step that has a momentum."""
    rule = RULES["momentum"]
    plain, model = build(), offload(rule, swap_directory)
    with infinity.engine_of(model):
        pair = [(plain, make(rule, plain, plain=True, dampening=0.5)), (model, make(rule, model, dampening=0.5))]  # fmt: skip
        for each, optimizer in pair:
            for step in range(3):
                optimizer.param_groups[0]["momentum"] = 0.9 if step else 0.0
                each(each.inputs(step)["x"]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not differences(weights_of(plain), weights_of(model))


@pytest.mark.parametrize(
    ("section", "make_other", "said"),
    [
        ({}, lambda m: infinity.SGD(m), 'set optimizer.name = "sgd" in'),
        ({}, lambda m: infinity.SGD(m, momentum=0.9), 'optimizer.name = "sgd", and optimizer.mom'),
        ({}, lambda m: infinity.Lion(m), 'set optimizer.name = "lion"'),
        ({"name": "lion"}, lambda m: infinity.AdamW(m), 'set optimizer.name = "adamw"'),
        ({"name": "sgd"}, lambda m: infinity.SGD(m, momentum=0.9), "optimizer.momentum as it is"),
    ],
)
def test_an_optimizer_without_space_for_its_state_is_refused_naming_the_key(
    section: dict[str, Any], make_other: Any, said: str, swap_directory: Path
) -> None:
    model = infinity.offload(build(), swap_config(swap_directory, optimizer=section))
    with infinity.engine_of(model), pytest.raises(ConfigError, match=said):
        make_other(model)


@pytest.mark.parametrize(
    "refused",
    [
        lambda m: infinity.Lion(m),
        lambda m: infinity.SGD(m[0].parameters()).add_param_group(
            {"params": list(m[1].parameters()), "momentum": 0.9}
        ),
        lambda m: infinity.SGD([{"params": [p]} for p in [m[1].weight] * 2]),
    ],
    ids=["no space", "a group without space", "a parameter twice"],
)
def test_what_is_refused_leaves_the_optimizer_that_trains(
    refused: Callable[[nn.Module], Any], swap_directory: Path
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = swap_config(swap_directory, optimizer={"name": "sgd"})
    with infinity.engine_of(infinity.offload(model, config)):
        optimizer = infinity.SGD(model[1].parameters())
        with pytest.raises((ConfigError, ValueError)):
            refused(model)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match="momentum"):
            optimizer.add_param_group({"params": list(model[0].parameters()), "momentum": 0.9})
        assert len(optimizer.param_groups) == 1
        optimizer.step()


def test_moments_that_were_read_cannot_be_changed(swap_directory: Path) -> None:
    model = offload(RULES["adamw"], swap_directory, "nvme")
    with infinity.engine_of(model):
        optimizer = make(RULES["adamw"], model)
        assert len(optimizer.state) == 0
        train(model, optimizer, range(1))
        handle = model.blocks[0][0].weight
        state = optimizer.state[handle]
        moment = state["exp_avg"]
        for change in (
            lambda: moment.zero_(),
            lambda: moment[0].mul_(2),
            lambda: moment.T.detach().add_(1),
            lambda: torch.neg(moment, out=moment),
            lambda: moment.__setitem__(0, 1.0),
            lambda: state.__setitem__("exp_avg", moment),
            lambda: optimizer.state.__setitem__(handle, {}),
        ):
            with pytest.raises(UnsupportedError, match=r"optimizer\.state"):
                change()
        with pytest.raises(ValueError, match="read-only"):
            moment.numpy()[0] = 1
        changed = (moment * 2).add_(1)
        assert type(changed) is torch.Tensor and type(moment.clone().zero_()) is torch.Tensor
        for each, found in optimizer.state.items():  # As who moves an optimizer to a device does.
            optimizer.state[each] = found
        assert len(optimizer.state) == 12 and handle in optimizer.state


def test_a_step_that_is_not_finite_is_refused_or_skipped(rule: Rule, swap_directory: Path) -> None:
    model = offload(rule, swap_directory, "nvme")
    with infinity.engine_of(model):
        optimizer = make(rule, model, max_grad_norm=1.0, skip_if_nonfinite=True)
        train(model, optimizer, range(2))
        before, counts = weights_of(model), optimizer.state_dict()["state"]
        (model(model.inputs(0)["x"]) * float("inf")).sum().backward()
        optimizer.step()
        assert optimizer.step_was_skipped and not torch.isfinite(optimizer.grad_norm)
        assert not differences(before, weights_of(model))
        assert optimizer.state_dict()["state"] == counts
        with pytest.raises(NonFiniteError, match="gradient norm"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        optimizer.zero_grad()
        model(model.inputs(0)["x"]).sum().backward()
        optimizer.step()
        assert not optimizer.step_was_skipped and differences(before, weights_of(model))


def _loaded(optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """A state dict of torch's, which has these options."""
    state = optimizer.state_dict()
    state["param_groups"][0] |= options
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("make_one", "said"),
    [
        (lambda m: infinity.AdamW(m, lr=float("nan")), "lr to be a finite number"),
        (lambda m: infinity.SGD(m, lr=-1), "lr to be a finite number of at least 0, got -1"),
        (lambda m: infinity.Lion(m, betas=(0.9, 1.0)), "below 1, got 1.0"),
        (lambda m: infinity.Adam(m, betas=(float("nan"), 0.9)), "betas"),
        (lambda m: infinity.Adam(m, eps=-1e-8), "eps"),
        (lambda m: infinity.SGD(m, momentum=-0.1), "momentum"),
        (lambda m: infinity.SGD(m, nesterov=True), "nesterov expects a momentum"),
        (lambda m: infinity.AdamW([{"params": list(m.parameters()), "lr": -1}]), "lr"),
        (lambda m: infinity.AdamW(m, amsgrad=True), "no 'amsgrad'"),
        (lambda m: infinity.SGD(m, maximize=True), "no 'maximize'"),
        (lambda m: infinity.AdamW(m, capturable=True), "no 'capturable'"),
        (lambda m: _loaded(infinity.AdamW(m), maximize=True), "no 'maximize'"),
        (lambda m: _loaded(infinity.AdamW(m), decoupled_weight_decay=False), "infinity.Adam$"),
        (lambda m: _loaded(infinity.AdamW(m), lr=-1), "lr to be a finite"),
        (lambda m: infinity.AdamW([]), "got none"),
        (lambda m: infinity.AdamW(m.requires_grad_(False)), "is frozen"),
        (lambda m: infinity.AdamW(m, error_if_nonfinite=True, skip_if_nonfinite=True), "one of"),
    ],
)  # fmt: skip
def test_settings_without_a_meaning_are_refused(
    make_one: Any, said: str, swap_directory: Path
) -> None:
    model = infinity.offload(build(), swap_config(swap_directory, placement="host"))
    with (
        infinity.engine_of(model),
        pytest.raises((ConfigError, UnsupportedError), match=said),
    ):
        make_one(model)


def test_an_optimizer_is_used_as_torchs_is(swap_directory: Path) -> None:
    """torch's own options, a closure, and an end."""
    model = infinity.offload(build(), swap_config(swap_directory, placement="host"))
    with infinity.engine_of(model):
        optimizer = infinity.AdamW(model, fused=True, foreach=True)
        _loaded(optimizer, capturable=True, differentiable=True)  # Of no consequence here.

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(model.inputs(0)["x"]).sum()
            loss.backward()
            return loss

        first = optimizer.step(closure)
        assert optimizer.step(closure) != first
    with pytest.raises(InfinityError, match="engine of this model is closed"):
        optimizer.step()


def step_of(model: nn.Module, optimizer: Any, seed: int) -> None:
    model(model.inputs(seed)["x"]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("form", ["state dict", "dcp"])
def test_state_goes_to_torchs_optimizer_and_back(rule: Rule, form: str, tmp_path: Path) -> None:
    if rule.name == "lion" and form == "state dict":
        pytest.skip("torch has no Lion to load it")
    model = infinity.offload(build(), swap_config(tmp_path / "a", optimizer=rule.section))
    options = {"lr": 0.01, **rule.options}
    with infinity.engine_of(model):
        optimizer = rule.ours(model, **options)
        for seed in range(2):
            step_of(model, optimizer, seed)
        there = weights_of(model)
        if form == "dcp":
            infinity.checkpoint.export_dcp(model, tmp_path / "out", optimizer)
        else:
            state = infinity.checkpoint.optimizer_state_dict(model, optimizer)
        step_of(model, optimizer, 2)
        expected = weights_of(model)
    if form == "dcp":
        again = infinity.offload(build(1), swap_config(tmp_path / "b", optimizer=rule.section))
        with infinity.engine_of(again):
            other = rule.ours(again, **options)
            infinity.checkpoint.import_dcp(tmp_path / "out", again, other)
            step_of(again, other, 2)
            assert not differences(expected, weights_of(again))
        return
    plain = build(1)
    plain.load_state_dict(there)
    theirs = rule.plain(plain.parameters(), fused=True, **options)
    theirs.load_state_dict(state)
    for group in theirs.param_groups:
        group["fused"] = True  # The dict does not say which of torch's kernels to take.
    step_of(plain, theirs, 2)
    assert not differences(expected, weights_of(plain))


def test_training_continues_from_state_that_torch_saved(rule: Rule, tmp_path: Path) -> None:
    """torch.distributed.checkpoint of a plain model; torch's SGD counts no steps."""
    if rule.name == "lion":
        pytest.skip("torch has no Lion to save it")
    plain, options = build(), {"lr": 0.01, **rule.options}
    theirs = rule.plain(plain.parameters(), fused=True, **options)
    for seed in range(2):
        step_of(plain, theirs, seed)
    state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, theirs)}
    dcp.save(state, checkpoint_id=tmp_path / "out", no_dist=True)
    model = infinity.offload(build(1), swap_config(tmp_path / "a", optimizer=rule.section))
    with infinity.engine_of(model):
        optimizer = rule.ours(model, **options)
        infinity.checkpoint.import_dcp(tmp_path / "out", model, optimizer)
        for each, one in ((plain, theirs), (model, optimizer)):
            step_of(each, one, 2)
        assert not differences(weights_of(plain), weights_of(model))
