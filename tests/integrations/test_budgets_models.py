"""The budget that a refusal names trains, evaluates and saves: over many architectures, under the
configuration's defaults, and for every way in which weights come. A byte less is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import infinity
from infinity.errors import CapacityError
from tests.parity.zoo import ZOO, Entry, seeded
from tests.support.exhaustive import sampled

ARCHITECTURES = (
    "t5", "bart", "mamba", "falcon", "gpt_neo", "mamba2", "jamba", "rwkv", "bloom", "opt", "phi3",
    "gemma3n_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "bert",
    "deberta_v2", "vit", "llava", "whisper",
)  # fmt: skip
SOME = ("t5", "bart", "mamba", "falcon", "gpt_neo", "mixtral")


class Job:
    """One architecture in a directory of its own, whose weights come in one way."""

    def __init__(self, name: str, way: str, directory: Path, **more: Any) -> None:
        self.entry: Entry = ZOO[name]
        self.way, self.directory, self.more = way, directory, more

    def config(self, capacity: str) -> dict[str, Any]:
        nvme = [{"path": str(self.directory / "swap"), "capacity": "64MiB"}]
        host = {"capacity": capacity, "huge_pages": False}
        return {"tiers": {"host": host, "nvme": nvme}, **self.more}

    def in_memory(self) -> Any:
        assert self.entry.construct is not None
        return seeded(self.entry.construct)(0)

    def files(self) -> Path:
        path = self.directory / "files"
        if not path.exists():
            self.in_memory().save_pretrained(path)
        return path

    def checkpoint(self) -> Path:
        """A checkpoint of the model after two steps."""
        path = self.directory / "run"
        if path.exists():
            return next(path.iterdir())
        model = infinity.offload(self.in_memory(), self.config("24MiB"))
        with infinity.engine_of(model):
            optimizer = infinity.AdamW(model, lr=1e-3)
            self.take_steps(model, optimizer, 2)
            return infinity.checkpoint.save(path, model, optimizer)

    def offloaded(self, config: dict[str, Any]) -> Any:
        if self.way == "in memory":
            return infinity.offload(self.in_memory(), config)
        options = {
            "random": lambda: {"seed": 3},
            "adapter": lambda: {"seed": 3},
            "files": lambda: {"weights": self.files()},
            "adapter over files": lambda: {"weights": self.files()},
            "resume": lambda: {"resume": self.checkpoint()},
        }[self.way]()
        assert self.entry.construct is not None
        torch.manual_seed(0)  # Small parameters keep their constructor's values.
        with infinity.init_empty_weights(config):
            model = self.entry.construct()
        if "adapter" in self.way:
            model = get_peft_model(model, LoraConfig(r=4, target_modules=linears_of(model)))
        return infinity.offload(model, config, **options)

    def take_steps(self, model: Any, optimizer: Any, count: int) -> None:
        model.train()
        for step in range(count):
            self.entry.loss(model, self.entry.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def run(self, capacity: str) -> list[Tensor]:
        """Three steps, an evaluation and a checkpoint: the loss and the parameters."""
        model = self.offloaded(self.config(capacity))
        with infinity.engine_of(model):
            optimizer = infinity.AdamW(model, lr=1e-3)
            if self.way == "resume":
                infinity.checkpoint.load(self.checkpoint(), model, optimizer)
            self.take_steps(model, optimizer, 2)
            model.eval()
            with torch.no_grad():
                loss = self.entry.loss(model, self.entry.batch(9))
            shutil.rmtree(self.directory / "saved", ignore_errors=True)
            infinity.checkpoint.save(self.directory / "saved", model, optimizer)
            self.take_steps(model, optimizer, 1)
            return [loss, *(parameter.detach().clone() for parameter in model.parameters())]


def linears_of(model: nn.Module) -> list[str]:
    """The linear layers that PEFT adapts in this model."""
    named = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    return [name for name in named if not name.endswith(("out_proj", "lm_head"))]


LARGER = (1.3, 2.4)  # Times the least: budgets that change no bit.


def check(run: Callable[[str], list[Tensor]], larger: Iterable[float] = LARGER) -> None:
    with pytest.raises(CapacityError, match="smallest host budget that works") as refused:
        run("4KiB")
    needed_nbytes = refused.value.needed_nbytes
    least = run(f"{needed_nbytes}B")
    for times in larger:
        assert all(map(torch.equal, least, run(f"{int(times * needed_nbytes)}B"))), times
    with pytest.raises(CapacityError, match="smallest host budget that works"):
        run(f"{needed_nbytes - 1}B")


@pytest.mark.parametrize(
    ("name", "larger"),
    sampled(
        product(ARCHITECTURES, LARGER),
        lambda case: ARCHITECTURES.index(case[0]) % 4 == 2 * LARGER.index(case[1]),
    ),
)
def test_the_named_budget_trains_a_random_model(name: str, larger: float, tmp_path: Path) -> None:
    check(Job(name, "random", tmp_path).run, [larger])


WAYS = {
    "files": "8bit", "adapter": "float32", "adapter over files": "8bit", "resume": "float32",
    "in memory": "8bit",
}  # fmt: skip


def is_sampled(case: tuple[str, str, float]) -> bool:
    """Each model by some ways, and each way with some models; the two larger budgets in turn."""
    name, way, larger = case
    row, column = SOME.index(name), list(WAYS).index(way)
    return (row + column) % 3 == 0 and larger == LARGER[(row + column) // 3 % 2]


@pytest.mark.parametrize(
    ("name", "way", "larger"), sampled(product(SOME, WAYS, LARGER), is_sampled)
)
def test_the_named_budget_trains_however_weights_come(
    name: str, way: str, larger: float, tmp_path: Path
) -> None:
    check(Job(name, way, tmp_path, precision={"moments": WAYS[way]}).run, [larger])


@pytest.mark.parametrize("name", sampled(SOME, SOME[::2].__contains__))
def test_the_named_budget_resumes_a_run_that_commits_each_step(name: str, tmp_path: Path) -> None:
    check(Job(name, "resume", tmp_path, checkpoint={"durability": "step"}).run)
