"""A tiny quantised base in its own files, the plain run over its decoded weights, and runs over it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.offloading import small_tiers
from tests.support.quantized import tiny_causal_lm, write_decoded, write_quantized

STEPS, MICRO_BATCHES = 3, 2
# Architecture and layout.
CASES = {
    "llama-bf16": ("llama", "bf16"),
    "llama-nf4": ("llama", "nf4"),
    "llama-int4": ("llama", "int4-dense"),
    "deepseek-fp8": ("deepseek-v3", "fp8"),
    "deepseek-int4": ("deepseek-v3", "int4"),
    "deepseek-fp4": ("deepseek-v3", "fp4-experts"),
    "kimi-fp8": ("kimi-k2", "fp8"),
    "kimi-int4": ("kimi-k2", "int4"),
    "kimi-mxfp4": ("kimi-k2", "mxfp4-packed"),
    "qwen3-moe-fp8": ("qwen3-moe", "fp8-bf16-scales"),
    "gpt-oss-mxfp4": ("gpt-oss", "mxfp4"),
    "glm-fp8": ("glm4-moe", "fp8"),
    "glm-int4": ("glm4-moe", "int4"),
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj", "kv_b_proj"]}


Adapt = Callable[[Any], Any]


class Base:
    """A quantised directory, and the losses and adapters of the plain run over its weights."""

    def __init__(
        self,
        case: str,
        directory: Path,
        adapt: Adapt | None = None,
        num_steps: int = STEPS,
        num_batches: int = MICRO_BATCHES,
    ) -> None:
        architecture, layout = CASES.get(case) or case.split("/")
        self.quantized, self.decoded = directory / "base", directory / "decoded"
        write_quantized(tiny_causal_lm(architecture), self.quantized, layout)
        write_decoded(self.quantized, self.decoded)
        model = AutoModelForCausalLM.from_pretrained(self.decoded, dtype=torch.bfloat16)
        model = infinity.factored_experts((adapt or adapted)(model))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        self.expected = train(model, optimizer, steps=range(num_steps), num_batches=num_batches)

    @classmethod
    def at(cls, quantized: Path) -> Base:
        """A directory that is there already, without a plain run."""
        base = cls.__new__(cls)
        base.quantized = quantized
        return base

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.quantized.glob("*.safetensors"))

    def digest(self) -> list[bytes]:
        files = sorted(self.quantized.iterdir())
        return [hashlib.sha256(path.read_bytes()).digest() for path in files]


def adapted(model: Any) -> Any:
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def batches(step: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 96, (2, 12), generator=generator) for _ in range(count)]


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss / MICRO_BATCHES


def train(
    model: Any,
    optimizer: Any,
    *,
    layer_major: bool = False,
    steps: Any = range(STEPS),
    num_batches: int = MICRO_BATCHES,
) -> dict[str, torch.Tensor]:
    """Returns losses, gradients of the last step, and adapters with their moments."""
    seen: dict[str, torch.Tensor] = {}
    for step in steps:
        if layer_major:
            losses = infinity.forward_backward(
                model, lambda b: loss_of(model, b), batches(step, num_batches)
            )
        else:
            losses = []
            for batch in batches(step, num_batches):
                losses.append(loss_of(model, batch))
                losses[-1].backward()
        for index, loss in enumerate(losses):
            seen[f"loss {step}.{index}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                seen[f"gradient of {name}"] = parameter.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            seen[name] = parameter.detach().clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                seen[f"{kind} of {name}"] = optimizer.state[parameter][kind].detach().clone()
    return seen


def config_of(directory: Path, **sections: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tiers": small_tiers(directory / "swap", "24MiB"),
        "placement": {"gradients": "host"},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **deepcopy(values)}
    return config


@contextmanager
def over(
    base: Base, config: dict[str, Any], adapt: Adapt | None = None, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """The adapter over the base in place: the model and its engine."""
    with infinity.init_empty_weights():
        architecture = AutoConfig.from_pretrained(base.quantized)
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    model = (adapt or adapted)(model)
    infinity.offload(model, config, **{"weights": base.quantized, **options})
    try:
        yield model, infinity.engine_of(model)
    finally:
        infinity.close(model)


def at_least(
    base: Base, config: dict[str, Any], simulated: bool, adapt: Adapt | None = None
) -> dict[str, Any]:
    """Replaces each capacity "least" by the smallest one that the engine names, the host's first."""
    config = deepcopy(config)
    tiers = config["tiers"]
    asked = [name for name in ("host", "device") if tiers.get(name, {}).get("capacity") == "least"]
    for name in asked:
        tiers[name]["capacity"] = "auto"
    for name in asked:
        tiers[name]["capacity"] = "256KiB"
        options = {"device": SimulatedDevice(3)} if simulated else {}
        with pytest.raises(infinity.CapacityError) as refused:
            over(base, config, adapt, **options).__enter__()
        tiers[name]["capacity"] = refused.value.needed_nbytes
    return config
