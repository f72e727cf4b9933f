"""The budget that a refusal names trains, evaluates and saves: over many architectures, for every way
in which weights come, and around weights in use. A byte less is refused, and more changes no bit."""

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
from tests.support.offloading import small_tiers

ARCHITECTURES = (
    "t5", "bart", "mamba", "falcon", "gpt_neo", "mamba2", "jamba", "rwkv", "bloom", "opt", "phi3",
    "gemma3n_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "bert",
    "deberta_v2", "vit", "llava", "whisper", "llama-tied", "gpt2", "gpt_neox",
)  # fmt: skip
SOME = ("llama", "t5", "bart", "mamba", "falcon", "gpt_neo", "mixtral")


class Job:
    """One architecture in a directory of its own, whose weights come in one way. `more` is what its
    configuration has beside the tiers."""

    def __init__(self, name: str, way: str, directory: Path, **more: Any) -> None:
        self.entry: Entry = ZOO[name]
        self.way, self.directory, self.more = way, directory, more
        self.targets: Any = None  # Of adapters; None is each linear layer.

    def config(self, capacity: str) -> dict[str, Any]:
        return {"tiers": small_tiers(self.directory / "swap", capacity), **self.more}

    def in_memory(self) -> Any:
        assert self.entry.construct is not None
        return seeded(self.entry.construct)(0)

    def files(self) -> Path:
        path = self.directory / "files"
        if not path.exists():
            self.in_memory().save_pretrained(path)
        return path

    def function(self) -> Callable[[str], Tensor]:
        values = dict(self.in_memory().named_parameters())
        return lambda name: values[name].detach()

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
        options: dict[str, Any] = {
            "random": lambda: {"seed": 3},
            "adapter": lambda: {"seed": 3},
            "files": lambda: {"weights": self.files()},
            "function": lambda: {"weights": self.function()},
            "adapter over files": lambda: {"weights": self.files()},
            "resume": lambda: {"resume": self.checkpoint()},
        }[self.way]()
        assert self.entry.construct is not None
        torch.manual_seed(0)  # Small parameters keep their constructor's values.
        with infinity.init_empty_weights(config):
            model: Any = self.entry.construct()
        if "adapter" in self.way:
            lora = LoraConfig(r=4, target_modules=self.targets or linears_of(model))
            model = get_peft_model(model, lora)
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


PRECISIONS = (
    {"compute": "float32", "moments": "float32"}, {"compute": "bfloat16", "moments": "float32"},
    {"compute": "bfloat16", "moments": "8bit"}, {"moments": "8bit"},
)  # fmt: skip
OF_FILES = ("in memory", "files", "function", "adapter", "adapter over files", "resume")
SOURCES = [*((name, "random") for name in ARCHITECTURES), *product(SOME, OF_FILES)]


def turn_of(name: str, way: str) -> int:
    """Counts architectures, or for some of them the ways: precisions and budgets come in turn."""
    return ARCHITECTURES.index(name) if way == "random" else SOME.index(name) + OF_FILES.index(way)


def has_turn(case: tuple[str, str, float]) -> bool:
    """Every second architecture; of some architectures each by some ways, each way with some."""
    name, way, larger = case
    turn, every = turn_of(name, way), 2 if way == "random" else 3
    return turn % every == 0 and larger == LARGER[turn // every % 2]


@pytest.mark.parametrize(
    ("name", "way", "larger"),
    sampled(((*source, larger) for source in SOURCES for larger in LARGER), has_turn),
)
def test_the_budget_that_a_refusal_names_trains(
    name: str, way: str, larger: float, tmp_path: Path
) -> None:
    turn = turn_of(name, way) // 2
    precision = PRECISIONS[turn % len(PRECISIONS)]
    if way == "random":  # The inputs of some are numbers in fp32.
        precision = {"moments": precision["moments"]}
    schedule = {"tile": "auto" if larger == LARGER[0] else 0}
    check(Job(name, way, tmp_path, precision=precision, schedule=schedule).run, [larger])


def test_an_adapter_on_a_router_trains_in_the_named_budget(tmp_path: Path) -> None:
    """The frozen weight of a router gets a new version in the forward: it is compared with its
    file, which takes no more room than its use."""
    job = Job("mixtral", "adapter over files", tmp_path, schedule={"tile": 0})
    job.targets = "all-linear"
    check(job.run, LARGER[:1])


@pytest.mark.parametrize(
    ("name", "durability"), [("mixtral", "none"), ("gpt2", "checkpoint"), ("t5", "step")]
)
def test_the_named_budget_resumes_a_run_of_any_durability(
    name: str, durability: str, tmp_path: Path
) -> None:
    check(Job(name, "resume", tmp_path, checkpoint={"durability": durability}).run, LARGER[:1])


class Scaled(nn.Module):
    """A parameter that is in use while the modules inside run."""

    def __init__(self, width: int, *inside: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, width))
        self.inside = nn.Sequential(*inside)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x * self.scale).tanh()


@pytest.mark.parametrize("others", ["nvme", "host"])
def test_the_named_budget_trains_around_weights_in_use_and_holds_two_units(
    others: str, tmp_path: Path
) -> None:
    """The optimizer's ring ("nvme"), and units left in memory ("host"), once divided what was free."""
    placement = {"parameters": "nvme"} | dict.fromkeys(("master", "moments", "gradients"), others)

    def run(capacity: str) -> list[Tensor]:
        torch.manual_seed(0)
        inner = Scaled(96, nn.Linear(96, 96))
        model = Scaled(96, nn.Linear(96, 256), nn.Linear(256, 96), inner)
        inner.scale.requires_grad_(False)
        tiers = small_tiers(tmp_path / "swap", capacity)
        config = {"tiers": tiers, "schedule": {"tile": 0}, "placement": placement}
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

    check(run)
