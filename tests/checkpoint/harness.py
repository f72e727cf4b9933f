"""Tiny runs that can be saved at a step and gone on with elsewhere, and what is compared of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint.run.format import TABLE_NAME
from infinity.checkpoint.run.links import plan_adoption
from infinity.config import SwapConfig
from infinity.engine.build import build
from tests.fault.harness import swap_config
from tests.support.bits import assert_same
from tests.support.models import ConvNet, Frozen, Mlp, TiedAcross

MAX_NORM = 0.5
# Updates in the backward, which no step takes back: the norm of no step is so large.
EARLY: dict[str, Any] = {"updates": "both_passes", "max_norm": 1e6}


class Net(nn.Module):
    """A tiny model in a compute dtype, with dropout after it: the loss draws random numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = {
            "bf16-tiny": lambda: Mlp(width=40, layers=1).to(torch.bfloat16),
            "fp32": lambda: Mlp(width=96, layers=4),
            "bf16": lambda: Mlp(width=96, layers=4).to(torch.bfloat16),
            "bf16-large": lambda: Mlp(width=256, layers=4).to(torch.bfloat16),
            "fp16": lambda: Mlp(width=96, layers=4).to(torch.float16),
            "conv": lambda: ConvNet(channels_last=True),
            "frozen": Frozen,
            "tied": TiedAcross,
            "mixed": _mixed,
        }  # fmt: skip
        self.inner = made[kind]()
        self.dropout = nn.Dropout(0.25)

    def forward(self, seed: int) -> Tensor:
        inputs = self.inner.inputs(seed)
        first = next(self.inner.parameters())
        if first.dtype is not torch.float32:
            inputs = {name: value.to(first.dtype) for name, value in inputs.items()}
        answer = self.inner(**inputs)
        # Every generator that a checkpoint keeps has a say.
        scale = 1 + random.random() + numpy.random.random() / 2
        return self.dropout(answer.float()).square().mean() * scale


class _Mixed(Mlp):
    """bf16 blocks, and a norm in fp32 inside each."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = x + block[2](block[1](block[0](x.float()).to(torch.bfloat16)))
        return self.head(x)


def _mixed() -> nn.Module:
    model = _Mixed(width=96, layers=3).to(torch.bfloat16)
    for block in model.blocks:
        block[0].float()
    return model


@dataclass(eq=False)
class Run:
    """A model, its optimizer and its scheduler, offloaded."""

    model: nn.Module
    optimizer: infinity.AdamW
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def steps(self, first: int, stop: int) -> list[tuple[float, float]]:
        """Losses and gradient norms of the steps."""
        return [self.step(number) for number in range(first, stop)]

    def step(self, number: int) -> tuple[float, float]:
        loss = self.model(number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        assert self.optimizer.grad_norm is not None
        return loss.item(), self.optimizer.grad_norm.item()

    def save(self, directory: Path, **options: Any) -> Path:
        return infinity.checkpoint.save(
            directory, self.model, self.optimizer, scheduler=self.scheduler, **options
        )

    def commit(self, **options: Any) -> Path:
        return infinity.checkpoint.commit(
            self.model, self.optimizer, scheduler=self.scheduler, **options
        )

    def load(self, path: Path) -> Any:
        return infinity.checkpoint.load(path, self.model, self.optimizer, scheduler=self.scheduler)

    def state(self) -> dict[str, Tensor]:
        """fp32 values of all parameters, and the buffers."""
        engine = infinity.engine_of(self.model)
        found = {n: engine.read_parameter(n, master=True) for n in engine.parameter_names()}
        return found | {n: b.detach().clone() for n, b in self.model.named_buffers()}


@contextmanager
def run(
    kind: str,
    swap: Path,
    *,
    seed: int = 0,
    engine: str = "threads",
    device: Any = None,
    wrap_storage: Any = None,
    resume: Path | None = None,
    max_norm: float = MAX_NORM,
    **options: Any,
) -> Iterator[Run]:
    """A run whose state and generators are those of `seed`; its tiers are released at the end.

    `wrap_storage` decorates the storage engine. `resume` will be loaded next.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    config = swap_config(swap, **options)
    config["io"]["engine"] = engine
    model = Net(kind).train()
    swap_tier = SwapConfig.load(config)
    build(
        model,
        swap_tier,
        weights=None,
        seed=0,
        units="auto",
        device=device,
        wrap_storage=wrap_storage,
        adopted=plan_adoption(swap_tier, resume) if resume is not None else None,
    )
    try:
        decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        rest = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}]
        optimizer = infinity.AdamW(groups, lr=1e-2, max_grad_norm=max_norm)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        yield Run(model, optimizer, scheduler)
    finally:
        infinity.engine_of(model).close()


def durable(directory: Path, **options: Any) -> dict[str, Any]:
    """A `[checkpoint]` section, by which state on NVMe is linked."""
    return {"directory": str(directory), **options}


def table(path: Path) -> list[dict[str, Any]]:
    """The rows of linked state of a checkpoint, by state kind of a unit."""
    rows: list[dict[str, Any]] = json.loads((path / TABLE_NAME).read_text())["pieces"]
    return rows


def is_linked(path: Path) -> bool:
    return (path / TABLE_NAME).exists()


def is_intact(path: Path) -> bool:
    """Whether every byte of a checkpoint, or of all in a directory, is what was written."""
    return all(found.is_intact for found in infinity.checkpoint.inspect(str(path), verify=True))


def goes_on(swap: Path, path: Path, step: int, expected: Any, kind: str = "bf16") -> None:
    """Another run that loads the checkpoint is at the step, and has the expected outcomes."""
    with run(kind, swap, seed=5) as resumed:
        assert resumed.load(path).step == step
        assert resumed.steps(step, step + len(expected)) == expected


def has_state(
    swap: Path, path: Path, expected: dict[str, Tensor], kind: str = "bf16", **options: Any
) -> None:
    """Another run that loads the checkpoint has these values."""
    with run(kind, swap, seed=4, **options) as resumed:
        resumed.load(path)
        assert_same(expected, resumed.state())


def flip(path: Path, at: int) -> None:
    """Changes a bit of a byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << at % 8)]))


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
