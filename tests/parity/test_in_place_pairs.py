"""How a base in its own files is read never changes a bit of the adapter that is trained over it.

A case has a layout, a place of the adapter's state, budgets, a window, drives, a cut of the experts,
an order of micro-batches, an engine, and an end of the run. `make test` has cases in which any two of
these properties occur together in all their values, over five of the bases; `make exhaustive` has
cases with any three, over all bases.
The comparison is plain PyTorch over the decoded weights (in_place.py).
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import pytest
import torch

import infinity
from infinity.modules.tiling.experts import TiledExperts
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import assert_same
from tests.support.exhaustive import covering, sampled
from tests.support.forked import Script, wait_until

from .in_place import CASES, MICRO_BATCHES, STEPS, Base, at_least, config_of, over, train

PROPERTIES: dict[str, list[Any]] = {
    "base": ["llama-bf16", "llama-nf4", "kimi-int4", "gpt-oss-mxfp4", "glm-fp8"],
    "state": ["nvme", "host", "device"],
    "device": ["cpu", "simulated", "simulated-least"],
    "host": ["ample", "least"],
    "window": ["auto", "96KiB"],
    "drives": [1, 2],
    "tile": [0, "128KiB"],  # Of the tiny models, only packed experts are larger.
    "prefetch": [True, False],
    "engine": ["io_uring", "threads"],
    "layer_major": [False, True],
    "end": ["none", "resumed", "killed"],
}
Case = dict[str, Any]
# By base: a worker that has a part of the cases makes few of the bases.
PAIRS = sorted(covering(PROPERTIES), key=lambda case: str(case["base"]))
TRIPLES = covering(PROPERTIES | {"base": list(CASES)}, strength=3)
MANY_STEPS = 10


def test_any_two_properties_of_the_cases_occur_in_all_combinations() -> None:
    for names in itertools.combinations(PROPERTIES, 2):
        found = {tuple(case[name] for name in names) for case in PAIRS}
        assert found == set(itertools.product(*(PROPERTIES[name] for name in names)))
    assert len(PAIRS) == 3 * len(PROPERTIES["base"])  # No fewer could have them.


def adapted(model: Any) -> Any:
    """With factors on attention and, where there are some, on packed experts."""
    model.set_experts_implementation("eager")
    has_experts = any(
        name.endswith("mlp.experts.down_proj") for name, _ in model.named_parameters()
    )
    on = ["experts.gate_up_proj", "experts.down_proj"] if has_experts else None
    torch.manual_seed(7)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["o_proj", "kv_b_proj"], target_parameters=on
    )
    return infinity.factored_experts(peft.get_peft_model(model, lora))


Bases = Callable[[str], Base]


@pytest.fixture(scope="module")
def bases() -> Iterator[Bases]:
    """Makes the base of a name, and its plain run, when it is first asked for."""
    with TemporaryDirectory() as directory:
        yield cache(lambda name: Base(name, Path(directory, name), adapted))


def spread(base: Base, directory: Path, num_drives: int) -> list[Path]:
    """Makes a directory whose shards are links to so many others in turn. Returns the drives."""
    drives = [directory / f"drive{number}" for number in range(num_drives)]
    for each in (*drives, directory / "base"):
        each.mkdir()
    for number, file in enumerate(sorted(base.quantized.glob("*.safetensors"))):
        place = shutil.copy(file, drives[number % num_drives])
        (directory / "base" / file.name).symlink_to(place)
    for file in base.quantized.glob("*.json"):
        shutil.copy(file, directory / "base")
    assert all(list(drive.iterdir()) for drive in drives)
    return drives


def configuration(case: Case, base: Base, directory: Path) -> dict[str, Any]:
    order = ["device", "nvme"] if case["state"] == "device" else [case["state"]]
    config = config_of(
        directory,
        placement=dict.fromkeys(("parameters", "master", "moments"), order)
        | {"frozen": "checkpoint"},
        schedule={name: case[name] for name in ("window", "tile", "prefetch")},
        io={"engine": case["engine"]},
    )
    drives = spread(base, directory, case["drives"])
    config["tiers"]["nvme"] = [{"path": str(drive / "swap")} for drive in drives]
    if case["host"] == "least":
        config["tiers"]["host"]["capacity"] = "least"
    if case["device"] == "simulated-least":
        config["tiers"]["device"] = {"capacity": "least"}
    return at_least(Base.at(directory / "base"), config, case["device"] != "cpu", adapted)


def run(
    case: Case, config: dict[str, Any], directory: Path, steps: range, saved: range = range(0)
) -> dict[str, torch.Tensor]:
    """Trains for `steps`, from the last checkpoint unless they are the first. Saves one after each
    step of `saved`."""
    options: dict[str, Any] = {"device": SimulatedDevice(3)} if case["device"] != "cpu" else {}
    if steps.start:
        options |= {"weights": None, "resume": directory / "runs"}
    seen = {}
    with over(Base.at(directory / "base"), config, adapted, **options) as (model, engine):
        frozen = [unit for unit in engine.store.units if not unit.state_numel]
        assert frozen and all(unit.stored is not None for unit in frozen)
        is_tiled = any(isinstance(module, TiledExperts) for module in model.modules())
        assert is_tiled == (case["tile"] != 0 and "llama" not in case["base"])
        optimizer = infinity.AdamW(model, lr=1e-2)
        if steps.start:
            assert (
                infinity.checkpoint.load(directory / "runs", model, optimizer).step == steps.start
            )
        for step in steps:
            seen |= train(
                model,
                optimizer,
                layer_major=case["layer_major"],
                steps=[step],
                num_batches=case.get("batches", MICRO_BATCHES),
            )
            if step in saved:
                infinity.checkpoint.save(directory / "runs", model, optimizer)
                print("saved", flush=True)
    return seen


KILLED = """
import json, sys
from pathlib import Path
from tests.parity.test_in_place_pairs import STEPS, run

case, config, directory = json.loads(sys.argv[1])
run(case, config, Path(directory), range(STEPS), saved=range(STEPS))
"""


def killed_after_a_step(case: Case, config: dict[str, Any], directory: Path) -> int:
    """Kills a run once it has saved a step. Returns the steps that its last checkpoint has."""
    script = Script(KILLED, json.dumps([case, config, str(directory)]))
    wait_until(lambda: "saved\n" in script.stdout.read_text(), script)
    script.kill()
    script.wait()
    return len([path for path in (directory / "runs").iterdir() if path.is_dir()])


def train_to_its_end(
    case: Case, base: Base, directory: Path, num_steps: int
) -> dict[str, torch.Tensor]:
    """Trains as the case says. Returns what the last process saw, and the losses of one before it."""
    config = configuration(case, base, directory)
    seen: dict[str, torch.Tensor] = {}
    done = 0
    if case["end"] == "resumed":
        done = num_steps // 2
        seen = run(case, config, directory, range(done), saved=range(done - 1, done))
    elif case["end"] == "killed":
        done = killed_after_a_step(case, config, directory)
    losses = {name: loss for name, loss in seen.items() if name.startswith("loss")}
    return losses | run(case, config, directory, range(done, num_steps))


def check(case: Case, base: Base, directory: Path, num_steps: int = STEPS) -> None:
    seen = train_to_its_end(case, base, directory, num_steps)
    expected = base.expected
    if case["end"] == "killed":  # Its losses died with it.
        expected = {name: value for name, value in expected.items() if name in seen}
        assert f"loss {num_steps - 1}.0" in seen and len(seen) > 4 * MICRO_BATCHES
    assert_same(expected, seen, is_ordered=False)
    assert Base.at(directory / "base").digest() == base.digest(), "nothing is written to the base"


@pytest.mark.parametrize(
    "case",
    [*PAIRS, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in TRIPLES)],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_an_adapter_has_the_bits_of_plain_pytorch(
    case: Case, bases: Bases, tmp_path: Path, io_engines: frozenset[str]
) -> None:
    if case["engine"] not in io_engines:
        pytest.skip(f"{case['engine']} is forbidden on this machine")
    check(case, bases(case["base"]), tmp_path)


@pytest.mark.parametrize("base", sampled(CASES, "deepseek-fp4".__eq__))
def test_ten_steps_over_each_codec_have_the_bits_of_plain_pytorch(
    base: str, tmp_path: Path
) -> None:
    """Resumed in the middle, on two drives, layer-major."""
    case = {
        "base": base, "state": "nvme", "device": "simulated", "host": "ample", "window": "96KiB",
        "drives": 2, "tile": 0, "prefetch": True, "engine": "threads", "layer_major": True,
        "end": "resumed", "batches": 1,
    }  # fmt: skip
    plain = Base(base, tmp_path / "plain", adapted, MANY_STEPS, 1)
    check(case, plain, tmp_path, MANY_STEPS)
