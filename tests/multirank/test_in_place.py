"""Frozen weights in a checkpoint's own files, over ranks.

Two ranks with one batch train as one rank does: the mean of two equal gradients is exact. So a rank
alone, which tests/parity/test_in_place.py compares with plain PyTorch, is the reference.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.testing import SimulatedDevice
from infinity.testing.quantized import tiny_causal_lm, write_quantized
from tests.support.bits import assert_same

from .processes import run_ranks

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj", "kv_b_proj"]}
BASES = {  # Architecture and layout.
    "bf16": ("llama", "bf16"),
    "nf4": ("llama", "nf4"),
    "fp8": ("deepseek-v3", "fp8"),
    "int4": ("deepseek-v3", "int4"),
    "mxfp4": ("gpt-oss", "mxfp4"),
    "fp4": ("deepseek-v3", "fp4-experts"),
}


@dataclass(frozen=True)
class Case:
    """One way of training over a base. `tile`: as of `schedule.tile`; `frozen`: of `placement`."""

    stage: int = 3
    layer_major: bool = False
    tile: Any = None
    frozen: str = "auto"
    exchange: str = "one_sided"
    steps: int = 2
    capacity: str = "64MiB"

    @property
    def device(self) -> SimulatedDevice | None:
        return SimulatedDevice(3) if self.exchange == "collective" else None


@dataclass
class Run:
    """Losses and adapters of a rank, and what its engine counted."""

    seen: dict[str, Tensor]
    counters: dict[str, float]
    num_in_files: int


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("bases")
    for name, (architecture, layout) in BASES.items():
        write_quantized(tiny_causal_lm(architecture), directory / name, layout)
    return {name: directory / name for name in BASES}


def model_over(base: Path, case: Case, swap: Path, **options: Any) -> Any:
    with infinity.init_empty_weights():
        architecture = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    torch.manual_seed(7)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    config: dict[str, Any] = {
        "distributed": {"zero_stage": case.stage, "budgets": "rank", "exchange": case.exchange},
        "tiers": {"host": {"capacity": case.capacity}, "nvme": [{"path": str(swap)}]},
        "placement": {"gradients": "host", "frozen": case.frozen},
        "schedule": {} if case.tile is None else {"tile": case.tile},
    }
    options = {"weights": base, "device": case.device, **options}
    infinity.offload(model, config, **options)
    return model


def step(model: Any, optimizer: Any, number: int, case: Case) -> dict[str, Tensor]:
    def loss_of(batch: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    generator = torch.Generator().manual_seed(number)
    batches = [torch.randint(0, 96, (2, 12), generator=generator) for _ in range(2)]
    if case.layer_major:
        losses = infinity.forward_backward(model, loss_of, batches)
    else:
        losses = []
        for batch in batches:
            losses.append(loss_of(batch))
            losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return {f"loss {number}.{i}": loss.detach().clone() for i, loss in enumerate(losses)}


def trained(model: Any) -> dict[str, Tensor]:
    engine = infinity.engine_of(model)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: engine.read_parameter(name) for name in engine.parameter_names() if name in names}


def train(base: Path, case: Case, directory: str) -> Run:
    torch.set_num_threads(1)
    model = model_over(base, case, Path(directory, "swap"))
    engine = infinity.engine_of(model)
    with closing(engine):
        optimizer, seen = infinity.AdamW(model, lr=1e-2), {}
        for number in range(case.steps):
            seen |= step(model, optimizer, number, case)
        num_in_files = sum(param.unit.stored is not None for param in engine.params)
        return Run(seen | trained(model), engine.counters.snapshot(), num_in_files)


def train_all(rank: int, wanted: list[tuple[Path, Case]]) -> list[Run]:
    return [train(base, case, tempfile.gettempdir()) for base, case in wanted]


def assert_as_alone(wanted: list[tuple[Path, Case]], count: int = 2) -> list[list[Run]]:
    """Every rank has the bits of a rank alone. Returns the runs by rank."""
    of_ranks = run_ranks(count, train_all, wanted)
    for at, (base, case) in enumerate(wanted):
        with tempfile.TemporaryDirectory() as directory:
            alone = train(base, case, directory)
        for runs in of_ranks:
            assert_same(alone.seen, runs[at].seen, is_ordered=False)
            assert (runs[at].num_in_files > 0) == (case.frozen != "copy")
    return of_ranks


def test_ranks_train_over_every_layout_as_one_rank_does(bases: dict[str, Path]) -> None:
    assert_as_alone([(base, Case()) for base in bases.values()])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_base_in_its_files_gives_the_bits_of_a_copied_one(
    bases: dict[str, Path], stage: int
) -> None:
    """Micro-batch by micro-batch and block by block. No byte of the base is written to the swap."""
    base = bases["int4"]
    ways = [
        Case(stage, layer_major=layer_major, frozen=frozen)
        for layer_major in (False, True)
        for frozen in ("copy", "checkpoint")
    ]
    for runs in assert_as_alone([(base, way) for way in ways]):
        for copied, in_files in (runs[:2], runs[2:]):
            assert_same(copied.seen, in_files.seen)
            written = [run.counters["nvme_write_nbytes"] for run in (in_files, copied)]
            assert written[1] - written[0] > base_nbytes(base) / 2, written
            assert copied.counters.get("shard_read_nbytes", 0) == 0


def test_tiles_in_files_train_over_ranks_as_on_one(bases: dict[str, Path]) -> None:
    assert_as_alone([(bases[name], Case(tile="64KiB")) for name in ("int4", "mxfp4")])


def base_nbytes(base: Path) -> int:
    return sum(path.stat().st_size for path in base.glob("*.safetensors"))
