"""Trains LoRA over bitsandbytes' own 4-bit modules, in memory and offloaded, and compares the bits.

    python -m pip install --no-deps --target /tmp/packages bitsandbytes
    PYTHONPATH=.:/tmp/packages python scripts/bitsandbytes_modules.py

transformers loads an NF4 directory as `Linear4bit` modules; the engine streams their packed bytes
as they are. Losses, gradients and adapters must have the same bits. Bytes read are printed beside
those of the packed weights. Not a part of the test suite: with bitsandbytes installed, PEFT and
transformers take other paths.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

import infinity
from tests.support.quantized import tiny_causal_lm, write_quantized

STEPS, MICRO_BATCHES = 4, 3
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 16}


def loaded(directory: Path) -> Any:
    """The model with Linear4bit modules, and the same adapter every time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, device_map="cpu")
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Linear4bit" in kinds, kinds
    torch.manual_seed(7)
    # In evaluation bitsandbytes packs weights anew for the CPU.
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"])).train()


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 96, (2, 12), generator=generator) for _ in range(MICRO_BATCHES)]


def train(model: Any, optimizer: Any, layer_major: bool = False) -> dict[str, torch.Tensor]:
    """Returns losses, gradients of the last step and adapters."""

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss / MICRO_BATCHES

    seen: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        if layer_major:
            losses = infinity.forward_backward(model, loss_of, batches(step))
        else:
            losses = []
            for batch in batches(step):
                losses.append(loss_of(batch))
                losses[-1].backward()
        seen |= {f"loss {step}.{at}": loss.detach().clone() for at, loss in enumerate(losses)}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        seen |= {f"gradient of {name}": p.grad.clone() for name, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: p.detach().clone() for name, p in trained.items()}


def offloaded(directory: Path, swap: Path, layer_major: bool) -> tuple[dict[str, Any], float]:
    """Returns what was seen, and the bytes read per step over the bytes of the packed weights."""
    model = loaded(directory)
    frozen_nbytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    infinity.offload(model, {
        "tiers": {"host": {"capacity": "2MiB"}, "nvme": [{"path": str(swap)}]},
        "placement": {"parameters": "nvme"}
        | dict.fromkeys(("master", "moments", "gradients"), "host"),
    })  # fmt: skip
    try:
        engine = infinity.engine_of(model)
        before = engine.counters.snapshot().get("nvme_read_nbytes", 0)
        seen = train(model, infinity.AdamW(model, lr=1e-2), layer_major)
        read_nbytes = engine.counters.snapshot()["nvme_read_nbytes"] - before
    finally:
        infinity.close(model)
    return seen, read_nbytes / STEPS / frozen_nbytes


def main() -> int:
    packages = ("bitsandbytes", "transformers", "peft", "torch")
    print(", ".join(f"{name} {version(name)}" for name in packages))
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "nf4")
        write_quantized(tiny_causal_lm("llama", **SIZES), directory, "nf4")
        model = loaded(directory)
        trained = [p for p in model.parameters() if p.requires_grad]
        expected = train(model, torch.optim.AdamW(trained, lr=1e-2, fused=True))
        for layer_major in (False, True):
            seen, ratio = offloaded(directory, Path(scratch, f"swap{layer_major}"), layer_major)
            assert seen.keys() == expected.keys()
            differing = [name for name in expected if not torch.equal(expected[name], seen[name])]
            failed += bool(differing)
            order = "layer-major" if layer_major else "batch by batch"
            print(
                f"{order}: {len(differing)} of {len(expected)} tensors differ; "
                f"a step reads {ratio:.2f} times the stored base"
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
