"""Losses of several calls, adapters that are switched, and router losses, layer-major.

The reference is `for batch in batches: loss_of(batch).backward()` over the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import infinity
from infinity.errors import InfinityError
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences
from tests.support.exhaustive import covering, sampled
from tests.support.hooks import harmless
from tests.support.offloading import offloaded, swap_config

from .harness import Named, Side, held_units, seed_everything, smallest_host_nbytes

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "use_cache": False,
    "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = ("q_proj", "v_proj", "down_proj", "lm_head")
BATCHES = [
    torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(n)) for n in range(4)
]


def llama(
    *, width: int = 32, layers: int = 4, targets: Sequence[str] = TARGETS, dropout: float = 0.0
) -> Any:
    """With an adapter that trains and a frozen reference adapter, neither of them zero. The head
    has them, too: what is behind the last block runs with the modes of its own call."""
    torch.manual_seed(7)
    sizes = SIZES | {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
    }  # fmt: skip
    config = LoraConfig(
        r=4, target_modules=list(targets), init_lora_weights=False, lora_dropout=dropout
    )  # fmt: skip
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), config)
    model.add_adapter("ref", config)
    model.set_adapter("default")
    return model.train()


def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))


def of_disabled(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        return log_probs(model, ids)


def of_reference(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        model.set_adapter("ref")
        try:
            return log_probs(model, ids)
        finally:
            model.set_adapter("default")


def in_evaluation(model: Any, ids: Tensor) -> Tensor:
    model.eval()
    try:
        with torch.no_grad():
            return log_probs(model, ids)
    finally:
        model.train()


def dpo(policy: Tensor, reference: Tensor) -> Tensor:
    return -logsigmoid(policy - reference).mean() / len(BATCHES)


def plain(
    make: Callable[[], Any], loss_of: Callable[[Any, Tensor], Tensor], count: int = len(BATCHES)
) -> tuple[list[float], Named]:
    model = make()
    losses = []
    seed_everything(5)
    for ids in BATCHES[:count]:
        loss = loss_of(model, ids)
        loss.backward()
        losses.append(loss.item())
    return losses, Side(model, is_plain=True).gradients()


def layer_major(
    make: Callable[[], Any],
    loss_of: Callable[[Any, Tensor], Tensor],
    config: dict[str, Any],
    count: int = len(BATCHES),
    device: Any = None,
) -> tuple[list[float], Named]:
    place = "cpu" if device is None else device.torch_device
    with offloaded(make(), config, device=device) as model:
        seed_everything(5)
        losses = infinity.forward_backward(
            model, lambda ids: loss_of(model, ids.to(place)), BATCHES[:count]
        )
        assert not held_units(model)
        return [loss.item() for loss in losses], Side(model).gradients()


REFERENCES = {"disabled": of_disabled, "ref": of_reference, "eval": in_evaluation}


PROPERTIES = {"name": [*REFERENCES], "where": ["after", "beside"], "device": ["cpu", "simulated"]}
PAIRS = [tuple(case.values()) for case in covering(PROPERTIES)]


@pytest.mark.parametrize(
    tuple(PROPERTIES), sampled(product(*PROPERTIES.values()), PAIRS.__contains__)
)
def test_each_call_of_a_loss_has_its_own_adapters_and_modes(
    name: str, where: str, device: str, swap_directory: Path
) -> None:
    """Also in the repeated forward of a block, and also behind the last block."""
    reference_of = REFERENCES[name]

    def in_order(model: Any, ids: Tensor) -> Tensor:
        return dpo(log_probs(model, ids), reference_of(model, ids))

    def beside(model: Any, ids: Tensor) -> Tensor:
        reference = infinity.beside(model, lambda: reference_of(model, ids))
        return dpo(log_probs(model, ids), reference())

    # With dropout in training alone. Further micro-batches would draw other numbers.
    make, count = (partial(llama, dropout=0.2), 1) if name == "eval" else (llama, len(BATCHES))
    losses, expected = plain(make, in_order, count)
    assert any(g is not None and "default" in n for n, g in expected.items())
    found = layer_major(
        make, beside if where == "beside" else in_order, swap_config(swap_directory), count,
        SimulatedDevice(seed=3, delay_s=1e-4) if device == "simulated" else None,
    )  # fmt: skip
    assert found[0] == losses
    assert not differences(expected, found[1])


def test_a_switched_adapter_is_that_of_its_call_in_the_backward(swap_directory: Path) -> None:
    """The first call trains the adapter, the second one has it disabled and passes a gradient to
    the embedding's output alone."""

    def make() -> Any:
        model = llama()
        model.get_input_embeddings().weight.requires_grad_(True)
        return model

    def loss_of(model: Any, ids: Tensor) -> Tensor:
        policy = log_probs(model, ids)
        with model.disable_adapter():
            other = log_probs(model, ids.flip(0))
        return dpo(policy, other)

    losses, expected = plain(make, loss_of)
    found = layer_major(make, loss_of, swap_config(swap_directory))
    assert found[0] == losses
    for key, gradient in expected.items():
        if gradient is None:
            assert found[1][key] is None
        else:  # The embedding has two uses in a micro-batch, whose order of sums differs.
            torch.testing.assert_close(found[1][key], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_beside", [False, True], ids=["after", "beside"])
def test_prompts_are_disabled_for_their_call_alone(is_beside: bool, swap_directory: Path) -> None:
    """PEFT replaces the forward of the whole model for this."""

    def make() -> Any:
        torch.manual_seed(7)
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        return get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), config).train()

    def of(model: Any, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, -ids.shape[1] : -1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))

    def of_base(model: Any, ids: Tensor) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            return of(model, ids)

    def in_order(model: Any, ids: Tensor) -> Tensor:
        return dpo(of(model, ids), of_base(model, ids))

    def beside(model: Any, ids: Tensor) -> Tensor:
        reference = infinity.beside(model, lambda: of_base(model, ids))
        return dpo(of(model, ids), reference())

    losses, expected = plain(make, in_order)
    assert sum(gradient is not None for gradient in expected.values()) == 1
    loss_of = beside if is_beside else in_order
    found = layer_major(make, loss_of, swap_config(swap_directory))
    assert found[0] == losses
    assert not differences(expected, found[1])


@pytest.mark.parametrize("count", sampled([1, 4], (4).__eq__))
def test_calls_beside_each_other_read_the_base_as_often_as_one_call(
    count: int, swap_directory: Path
) -> None:
    """A forward and a backward of the base, 2 W, for policy and reference; one after the other they
    need 3 W."""
    read = {}
    swap_directory.mkdir()
    for kind in ("one", "after", "beside"):
        config = swap_config(swap_directory / kind, placement="nvme", prefetch=False)
        make = lambda: llama(width=128, layers=10, targets=["q_proj"])  # noqa: E731
        config["schedule"]["tile"] = 0  # The budget of undivided layers.
        config["tiers"]["host"]["capacity"] = smallest_host_nbytes(make, config)
        with offloaded(make(), config) as model:
            engine = infinity.engine_of(model)

            def loss_of(ids: Tensor, model: Any = model, kind: str = kind) -> Tensor:
                if kind == "one":
                    return log_probs(model, ids).mean()
                if kind == "after":
                    return dpo(log_probs(model, ids), of_disabled(model, ids))
                reference = infinity.beside(model, lambda: of_disabled(model, ids))
                return dpo(log_probs(model, ids), reference())

            for _ in range(2):
                before = engine.counters.snapshot().get("nvme_read_nbytes", 0)
                infinity.forward_backward(model, loss_of, BATCHES[:count])
                model.zero_grad()
                read[kind] = engine.counters.snapshot()["nvme_read_nbytes"] - before
    assert abs(read["beside"] / read["one"] - 1) <= 0.02, read
    assert read["after"] >= 1.35 * read["one"], read


def test_a_call_beside_waits_and_may_be_left(swap_directory: Path) -> None:
    """Its result may be asked for before any block, twice, or not at all."""

    def asks_first(model: Any, ids: Tensor) -> Tensor:
        reference = infinity.beside(model, lambda: of_disabled(model, ids))
        early = reference()
        assert reference() is early
        return dpo(log_probs(model, ids), early)

    def never_asks(model: Any, ids: Tensor) -> Tensor:
        infinity.beside(model, lambda: of_disabled(model, ids))
        return dpo(log_probs(model, ids), torch.zeros(2))

    def in_order(model: Any, ids: Tensor) -> Tensor:
        return dpo(log_probs(model, ids), of_disabled(model, ids))

    def alone(model: Any, ids: Tensor) -> Tensor:
        return dpo(log_probs(model, ids), torch.zeros(2))

    for loss_of, same in ((asks_first, in_order), (never_asks, alone)):
        losses, expected = plain(llama, same)
        found = layer_major(llama, loss_of, swap_config(swap_directory))
        assert found[0] == losses
        assert not differences(expected, found[1])


def test_a_call_beside_runs_at_once_outside_and_its_error_is_raised(swap_directory: Path) -> None:
    def fails(model: Any, ids: Tensor) -> Tensor:
        infinity.beside(model, lambda: 1 // 0)
        return dpo(log_probs(model, ids), torch.zeros(2))

    with offloaded(llama(), swap_config(swap_directory)) as model:
        expected = of_disabled(model, BATCHES[0])
        assert torch.equal(
            infinity.beside(model, lambda: of_disabled(model, BATCHES[0]))(), expected
        )
        with pytest.raises(ZeroDivisionError):
            infinity.forward_backward(model, lambda ids: fails(model, ids), BATCHES)
        assert not held_units(model)
        assert model.active_adapter == "default" and model.training
        layer = model.base_model.model.model.layers[0]
        beside_nothing = harmless(lambda *_: infinity.beside(model, lambda: None))
        handle = layer.register_forward_pre_hook(beside_nothing)
        layer.mlp.register_forward_pre_hook(beside_nothing)
        handle.remove()
        with pytest.raises(InfinityError, match="inside a block"):
            infinity.forward_backward(model, lambda ids: log_probs(model, ids).mean(), BATCHES)
        assert not held_units(model)


MOE = SIZES | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
ROUTED: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MOE, num_local_experts=4)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MOE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**MOE, num_local_experts=4, head_dim=16, sliding_window=8)
    ),
}


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("is_adapter", [False, True], ids=["full", "lora"])
def test_auxiliary_losses_of_routers_are_those_of_the_plain_loop(
    name: str, is_adapter: bool, swap_directory: Path
) -> None:
    def make() -> Any:
        torch.manual_seed(3)
        model = ROUTED[name]().train()
        if is_adapter:
            config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            model = get_peft_model(model, config)
        return model

    def loss_of(model: Any, ids: Tensor) -> Tensor:
        output = model(input_ids=ids, labels=ids)
        assert output.aux_loss.requires_grad and output.aux_loss > 0
        return output.loss / len(BATCHES)

    losses, expected = plain(make, loss_of)
    with_router = [n for n, g in expected.items() if g is not None and ("gate" in n or "rout" in n)]
    assert is_adapter or with_router
    found = layer_major(make, loss_of, swap_config(swap_directory))
    assert found[0] == losses
    assert not differences(expected, found[1])


@pytest.mark.parametrize("place", ["nvme", "host"])
def test_auxiliary_losses_are_the_same_with_tiles(place: str, swap_directory: Path) -> None:
    """Experts and adapters in tiles: every fiber stops inside the blocks, in both directions."""

    def make() -> Any:
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        sizes = MOE | {"hidden_size": 64, "intermediate_size": 256}
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
        return get_peft_model(model.train(), config)

    def loss_of(model: Any, ids: Tensor) -> Tensor:
        reference = infinity.beside(model, lambda: of_disabled(model, ids))
        output = model(input_ids=ids, labels=ids)
        return output.loss / len(BATCHES) + 0.01 * dpo(output.logits.mean((1, 2)), reference())

    losses, expected = plain(make, _in_order)
    config = swap_config(swap_directory, placement=place, schedule={"tile": "64KiB"})
    found = layer_major(make, loss_of, config)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses))
    trained = {name: gradient for name, gradient in expected.items() if gradient is not None}
    assert len(trained) == 16
    for name, gradient in trained.items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-7)


def _in_order(model: Any, ids: Tensor) -> Tensor:
    output = model(input_ids=ids, labels=ids)
    reference = of_disabled(model, ids)
    return output.loss / len(BATCHES) + 0.01 * dpo(output.logits.mean((1, 2)), reference)
