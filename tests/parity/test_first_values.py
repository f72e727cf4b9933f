"""Weights on NVMe that get their values at start-up are written once, and not read before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.state.units import StateKind
from tests.support.exhaustive import in_turn

SIZES = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=1000, tie_word_embeddings=False,
)  # fmt: skip


def configured(swap: Path, capacity: str, compute: str) -> dict[str, Any]:
    return {
        "tiers": {
            "host": {"capacity": capacity, "huge_pages": False},
            "nvme": [{"path": str(swap), "capacity": "256MiB"}],
        },
        "placement": dict.fromkeys(("parameters", "master", "moments", "gradients"), "nvme"),
        "precision": {"compute": compute},
        "schedule": {"tile": 0},
    }


def empty(config: dict[str, Any]) -> Any:
    with infinity.init_empty_weights(config):
        return LlamaForCausalLM(SIZES)


def trained(config: dict[str, Any], _: Path) -> Any:
    return infinity.offload(empty(config), config)


def frozen(config: dict[str, Any], _: Path) -> Any:
    adapted = get_peft_model(empty(config), LoraConfig(r=2, target_modules=["q_proj"]))
    return infinity.offload(adapted, config)


def from_files(config: dict[str, Any], files: Path) -> Any:
    torch.manual_seed(1)
    LlamaForCausalLM(SIZES).save_pretrained(files)
    return infinity.offload(empty(config), config, weights=files)


def from_function(config: dict[str, Any], _: Path) -> Any:
    torch.manual_seed(1)
    values = LlamaForCausalLM(SIZES).state_dict()
    return infinity.offload(empty(config), config, weights=values.__getitem__)


def first_state(
    way: Callable[[dict[str, Any], Path], Any], config: dict[str, Any], files: Path
) -> tuple[dict[str, torch.Tensor], float, float]:
    """The weights, and the bytes that were written and read, by bytes of weights and masters."""
    torch.manual_seed(0)
    model = way(config, files)
    with infinity.engine_of(model) as engine:
        store = engine.store
        assert store.volume is not None
        counted = store.volume.engine.stats()
        nbytes = sum(
            unit.nbytes(kind)
            for unit, kind in ((store.units[i], kind) for i, kind in store.placed())
            if kind in (StateKind.PARAMETERS, StateKind.MASTER)
        )
        written = sum(file.write_nbytes for file in counted) / nbytes
        read = sum(file.read_nbytes for file in counted) / nbytes
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return weights, written, read


@pytest.mark.parametrize(
    ("way", "compute"),
    in_turn([trained, frozen, from_files, from_function], ["float32", "bfloat16"]),
)
def test_first_values_are_written_once(
    way: Callable[[dict[str, Any], Path], Any], compute: str, tmp_path: Path
) -> None:
    def state(capacity: str) -> tuple[dict[str, torch.Tensor], float, float]:
        config = configured(tmp_path / "swap", capacity, compute)
        return first_state(way, config, tmp_path / "files")

    weights, written, read = state("15MiB")
    roomy, _, _ = state("64MiB")
    assert weights.keys() == roomy.keys()
    assert all(torch.equal(weights[name], roomy[name]) for name in weights)
    # A page that two masters share is written and read twice.
    assert written < 1.05
    assert read < (0.01 if compute == "float32" else 0.7)


def test_a_parameter_that_no_rule_initialises_keeps_its_value(tmp_path: Path) -> None:
    """The module has no weights to wait for, so nothing else writes its unit."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
            self.scale = torch.nn.Parameter(torch.full((64,), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) * self.scale
            return x

    config = configured(tmp_path / "swap", "10MiB", "float32")
    with infinity.init_empty_weights(config):
        model = Scaled()
    infinity.offload(model, config)
    with infinity.engine_of(model):
        assert torch.equal(model.scale.detach().clone(), torch.full((64,), 0.5))
        assert model(torch.ones(1, 64)).isfinite().all()
