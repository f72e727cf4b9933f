"""The budget that a refusal names works, however the weights come; a byte less is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import infinity
from infinity.errors import CapacityError
from tests.support.exhaustive import in_turn, sampled
from tests.support.offloading import small_tiers

IDS = torch.randint(0, 200, (2, 8), generator=torch.Generator().manual_seed(1))
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 400,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=400, n_positions=16)
    ),
}


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


def on_meta(name: str, config: dict[str, Any]) -> Any:
    with infinity.init_empty_weights(config):
        return MODELS[name]()


def saved(name: str, directory: Path) -> Path:
    if not directory.exists():
        MODELS[name]().save_pretrained(directory)
    return directory


def from_files(name: str, config: dict[str, Any], directory: Path) -> Any:
    return infinity.offload(on_meta(name, config), config, weights=saved(name, directory))


WAYS: dict[str, Callable[[str, dict[str, Any], Path], Any]] = {
    "in memory": lambda name, config, _: infinity.offload(MODELS[name](), config),
    "random": lambda name, config, _: infinity.offload(on_meta(name, config), config),
    "from files": from_files,
    "adapters over meta": lambda name, config, _: infinity.offload(
        adapted(on_meta(name, config)), config
    ),
}


def from_function(name: str, config: dict[str, Any], _: Path) -> Any:
    values = dict(MODELS[name]().named_parameters())
    return infinity.offload(
        on_meta(name, config), config, weights=lambda wanted: values[wanted].detach()
    )


WAYS["from a function"] = from_function
WAYS["adapters over files"] = lambda name, config, directory: infinity.offload(
    adapted(on_meta(name, config)), config, weights=saved(name, directory)
)


def configured(capacity: str, swap: Path, **more: Any) -> dict[str, Any]:
    return {
        "tiers": small_tiers(swap, capacity),
        "schedule": {"tile": 0},
    } | more


def train(model: Any) -> list[torch.Tensor]:
    """Two steps, and the state that follows from them."""
    optimizer = infinity.AdamW(model, lr=1e-3)
    return continue_with(model, optimizer)


def continue_with(model: Any, optimizer: Any) -> list[torch.Tensor]:
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_capacities(run: Callable[[str], list[torch.Tensor]]) -> None:
    """What a refusal names works, a byte less is refused, and more changes no bit."""
    with pytest.raises(CapacityError, match="smallest host budget that works") as refused:
        run("64KiB")
    needed_nbytes = refused.value.needed_nbytes
    least = run(f"{needed_nbytes}B")
    # More than the least, and less than is comfortable.
    for more in (run(f"{int(2.4 * needed_nbytes)}B"), run("24MiB")):
        assert all(map(torch.equal, least, more))
    with pytest.raises(CapacityError, match="smallest host budget that works"):
        run(f"{needed_nbytes - 1}B")


def test_an_adapter_on_a_router_trains_in_the_named_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen weight of a router gets a new version in the forward: it is compared with its
    file, which takes no more room than its use."""
    sizes = SIZES | {"num_key_value_heads": 2, "num_local_experts": 4}
    monkeypatch.setitem(MODELS, "mixtral", lambda: MixtralForCausalLM(MixtralConfig(**sizes)))

    def run(capacity: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = configured(capacity, tmp_path / "swap")
        model = WAYS["adapters over files"]("mixtral", config, tmp_path / "files")
        with infinity.engine_of(model):
            return train(model)

    check_capacities(run)


PRECISIONS = [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "8bit")]
SOURCES = [(name, way) for name in MODELS for way in WAYS if name == "llama" or way == "random"]


def has_turn(case: tuple[str, str, str, str]) -> bool:
    """The three precisions come in turn for each way in which weights come."""
    name, way, *precision = case
    row, column = SOURCES.index((name, way)), PRECISIONS.index((precision[0], precision[1]))
    return (row + column) % 3 == 0


@pytest.mark.parametrize(
    ("name", "way", "compute", "moments"),
    sampled([(*source, *each) for source in SOURCES for each in PRECISIONS], has_turn),
)
def test_the_budget_that_a_refusal_names_trains(
    name: str, way: str, compute: str, moments: str, tmp_path: Path
) -> None:
    precision = {"compute": compute, "moments": moments}

    def run(capacity: str) -> list[torch.Tensor]:
        config = configured(capacity, tmp_path / "swap", precision=precision)
        torch.manual_seed(0)
        model = WAYS[way](name, config, tmp_path / "files")
        with infinity.engine_of(model):
            return train(model)

    check_capacities(run)


class Scaled(nn.Module):
    """A parameter that is in use while the modules inside run."""

    def __init__(self, width: int, *inside: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, width))
        self.inside = nn.Sequential(*inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x * self.scale).tanh()


@pytest.mark.parametrize("others", ["nvme", "host"])
def test_the_named_budget_trains_around_weights_in_use_and_holds_two_units(
    others: str, tmp_path: Path
) -> None:
    """The optimizer's ring ("nvme"), and units left in memory ("host"), once divided what was free."""
    placement = {"parameters": "nvme"} | dict.fromkeys(("master", "moments", "gradients"), others)

    def run(capacity: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inner = Scaled(96, nn.Linear(96, 96))
        model = Scaled(96, nn.Linear(96, 256), nn.Linear(256, 96), inner)
        inner.scale.requires_grad_(False)
        config = configured(capacity, tmp_path / "swap", placement=placement)
        with infinity.engine_of(infinity.offload(model, config)):
            optimizer = infinity.AdamW(model, lr=1e-2)
            x = torch.arange(192.0).sin().view(2, 96)
            for step in range(2):
                model(x + step).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            model(x)  # All units are updated.
            large, small = model.inside[0].weight, inner.scale
            for gathered in ([large], [inner.inside[0].weight, small], [small, large]):
                with infinity.gather(gathered):
                    pass
            return [parameter.detach().clone() for parameter in model.parameters()]

    check_capacities(run)


@pytest.mark.parametrize(
    ("name", "kind"), in_turn(MODELS, [("none", "bfloat16"), ("checkpoint", "float32")])
)
def test_the_budget_that_a_refusal_names_resumes(
    name: str, kind: tuple[str, str], tmp_path: Path
) -> None:
    durability, compute = kind
    kept = {"durability": durability}
    more = {"checkpoint": kept, "precision": {"compute": compute}}
    first = configured("24MiB", tmp_path / "swap", **more)
    model = infinity.offload(MODELS[name](), first)
    with infinity.engine_of(model):
        optimizer = infinity.AdamW(model, lr=1e-3)
        continue_with(model, optimizer)
        saved_at = infinity.checkpoint.save(tmp_path / "run", model, optimizer)

    def run(capacity: str) -> list[torch.Tensor]:
        config = configured(capacity, tmp_path / "swap", **more)
        model = infinity.offload(on_meta(name, config), config, resume=saved_at)
        with infinity.engine_of(model):
            optimizer = infinity.AdamW(model, lr=1e-3)
            infinity.checkpoint.load(saved_at, model, optimizer)
            return continue_with(model, optimizer)

    check_capacities(run)
