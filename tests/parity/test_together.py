"""`infinity.together`: training loops of several adapters whose calls pass the blocks together.

The reference of each adapter is its loop alone: in plain PyTorch where a step has one micro-batch,
and otherwise over an offloaded model with this adapter and no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.errors import ConfigError
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences
from tests.support.offloading import offloaded, swap_config
from tests.support.quantized import tiny_causal_lm, write_quantized

from . import in_place
from .in_place import Base, at_least, config_of, over

IDS = [torch.arange(24).view(2, 12)] * 2


@dataclass(frozen=True)
class Loop:
    """A training of one adapter."""

    rank: int
    lr: float
    seed: int
    steps: int = 3
    micro_batches: int = 2
    max_norm: float | None = 0.05
    dora: bool = False

    @property
    def config(self) -> peft.LoraConfig:
        return peft.LoraConfig(
            r=self.rank, lora_dropout=0.3, target_modules=["q_proj", "down_proj"],
            use_dora=self.dora,
        )  # fmt: skip


LOOPS = {
    "first": Loop(4, 1e-2, seed=1),
    "second": Loop(2, 3e-2, seed=2, steps=2, micro_batches=3, dora=True),
    "third": Loop(8, 1e-3, seed=3, max_norm=None, micro_batches=1),
}


def model_of(names: dict[str, str]) -> Any:
    """A Llama that draws numbers in its blocks, with adapters of these names as `LOOPS` has them."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=64, tie_word_embeddings=False, attention_dropout=0.2,
        )
    )  # fmt: skip
    return with_adapters(model, names)


def with_adapters(model: Any, names: dict[str, str]) -> Any:
    for name, loop in names.items():
        torch.manual_seed(LOOPS[loop].seed)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, LOOPS[loop].config)
        else:
            model = peft.get_peft_model(model, LOOPS[loop].config, adapter_name=name)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model.train()


Seen = dict[str, Tensor]


def train(
    model: Any, adapter: str, name: str, device: Any = "cpu", *, is_plain: bool = False
) -> Seen:
    """An ordinary loop of `LOOPS`. Returns losses, norms, weights, moments, random numbers."""
    loop, seen, batches = LOOPS[name], Seen(), list[Tensor]()
    torch.manual_seed(loop.seed)
    own = {n: p for n, p in model.named_parameters() if adapter in n.split(".") and p.requires_grad}
    optimizer: Any
    if is_plain:
        optimizer = torch.optim.AdamW(own.values(), lr=loop.lr, fused=True)
    else:
        optimizer = infinity.AdamW(own.values(), lr=loop.lr, max_grad_norm=loop.max_norm)
    for step in range(loop.steps):
        model.train()
        batches = [torch.randint(0, 64, (2, 10)).to(device) for _ in range(loop.micro_batches)]
        for i, loss in enumerate(losses_of(model, batches, is_plain=is_plain)):
            seen[f"loss {step}.{i}"] = loss.detach().cpu()
        if is_plain and loop.max_norm is not None:
            seen[f"norm {step}"] = nn.utils.clip_grad_norm_(own.values(), loop.max_norm)
        optimizer.step()
        if not is_plain and loop.max_norm is not None:
            seen[f"norm {step}"] = optimizer.grad_norm
        model.zero_grad()  # Of this loop, although others have a step to make.
        model.eval()
        with torch.no_grad():
            evaluation = model(input_ids=batches[0], labels=batches[0]).loss
        seen[f"evaluation {step}"] = evaluation.cpu()
    seen["random"] = torch.rand(4)
    for full, parameter in own.items():
        short = full.replace(f".{adapter}", "")
        seen[short] = parameter.detach().clone().cpu()
        for moment in ("exp_avg", "exp_avg_sq"):
            seen[f"{moment} of {short}"] = optimizer.state[parameter][moment].detach().clone().cpu()
    return seen


def losses_of(model: Any, batches: list[Tensor], *, is_plain: bool) -> list[Tensor]:
    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad(), model.disable_adapter():  # As that of a reference.
            reference = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss - reference
        return loss

    if not is_plain:
        return infinity.forward_backward(model, loss_of, batches)
    losses = [loss_of(batch) for batch in batches]
    sum(losses, torch.zeros(())).backward()
    return losses


def alone(name: str, config: Any) -> Seen:
    if LOOPS[name].micro_batches == 1:
        return train(model_of({"default": name}), "default", name, is_plain=True)
    with offloaded(model_of({"default": name}), config) as model:
        return train(model, "default", name)


@cache
def alone_on_host(name: str) -> Seen:
    """One reference for all places, which change no bit of a loop."""
    return alone(name, swap_config(None, placement="host"))


@pytest.mark.parametrize("place", ["host", "nvme", "device"])
def test_every_adapter_has_the_bits_of_its_loop_alone(place: str, swap_directory: Path) -> None:
    """Of other ranks, rates, seeds, numbers of steps and of micro-batches, clipped or not."""
    config = swap_config(swap_directory, placement="host" if place == "device" else place)
    expected = {name: alone_on_host(name) for name in LOOPS}
    device = SimulatedDevice() if place == "device" else None
    with offloaded(model_of({name: name for name in LOOPS}), config, device=device) as model:
        there = "cpu" if device is None else device.torch_device
        before = torch.get_rng_state()
        found = infinity.together(
            model, {name: partial(train, model, name, name, there) for name in LOOPS}
        )
        assert torch.equal(before, torch.get_rng_state())
        assert model.training and model.active_adapter == "first"
        assert all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)
    for name in LOOPS:
        assert not differences(expected[name], found[name]), name


def several(model: Any) -> Any:
    return with_adapters(model, {name: name for name in LOOPS})


def test_the_base_in_its_files_is_read_for_all_loops_as_for_one(tmp_path: Path) -> None:
    """In the least memory. A loop that evaluates where others train shares their sweep, and one that
    has ended leaves the others their bytes."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384}
    write_quantized(tiny_causal_lm("llama", **sizes), tmp_path / "base", "nf4")
    base = Base.at(tmp_path / "base")
    places = dict.fromkeys(("master", "moments", "gradients", "activations"), "host")
    config = config_of(
        tmp_path, tiers={"host": {"capacity": "least"}}, schedule={"tile": 0}, placement=places
    )
    config, read = at_least(base, config, simulated=False, adapt=several), list[float]()
    with over(base, config, several) as (model, engine):

        def loop(name: str, steps: int, evaluates: bool) -> None:
            own = [p for n, p in model.named_parameters() if name in n.split(".")]
            optimizer = infinity.AdamW(own, lr=1e-2)
            for step in range(steps):
                if name == "first":
                    read.append(engine.counters.snapshot().get("shard_read_nbytes", 0))
                if evaluates and step == 1:
                    infinity.forward(model, partial(in_place.loss_of, model), IDS)
                infinity.forward_backward(model, partial(in_place.loss_of, model), IDS)
                optimizer.step()
                optimizer.zero_grad()

        infinity.together(
            model,
            {
                "first": partial(loop, "first", 5, False),
                "second": partial(loop, "second", 3, True),
                "third": partial(loop, "third", 1, False),
            },
        )
    steps = [after - before for before, after in pairwise(read)]
    assert steps == [pytest.approx(2 * base.nbytes, rel=0.2)] * 4


def test_an_error_in_one_loop_ends_all_and_leaves_a_model_that_trains(tmp_path: Path) -> None:
    names, ended = {name: name for name in LOOPS}, list[str]()
    config = swap_config(tmp_path / "swap")
    expected = alone("second", config)

    def fails(model: Any) -> None:
        train(model, "third", "third")
        raise ArithmeticError("as a loss may")

    def waits(model: Any) -> None:
        """Tries again whatever ends a sweep, twice."""
        while len(ended) < 3:
            try:
                losses_of(model, [torch.zeros(1, 4, dtype=torch.long)], is_plain=False)
            except BaseException:
                ended.append("first")

    with offloaded(model_of(names), config) as model:
        with pytest.raises(ArithmeticError, match="as a loss may"):
            infinity.together(
                model, {"first": partial(waits, model), "third": partial(fails, model)}
                | {"second": lambda: None}
            )  # fmt: skip
        assert ended == ["first"] * 3
        infinity.AdamW(model, lr=0.0).zero_grad()
        loops = {name: lambda: None for name in LOOPS}
        found = infinity.together(
            model, loops | {"second": partial(train, model, "second", "second")}
        )
    assert not differences(expected, found["second"])


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (
            ("first", "second"),
            "'base_model.*third.* is trained and belongs to none of the adapters first",
        ),
        (
            (*LOOPS, "fourth"),
            "the model has no adapter 'fourth'; expected some of first, second, third",
        ),
    ],
)
def test_a_loop_without_adapter_and_an_adapter_without_loop_are_refused(
    names: tuple[str, ...], refused: str, tmp_path: Path
) -> None:
    begun, model = list[str](), model_of({name: name for name in LOOPS})
    with offloaded(model, swap_config(tmp_path)), pytest.raises(ConfigError, match=refused):
        infinity.together(model, {name: partial(begun.append, name) for name in names})
    assert not begun
