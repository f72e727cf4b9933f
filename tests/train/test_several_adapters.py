"""`infinity train` with several `[[adapter]]`: each has the bits of a run of its own."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from infinity.config import SwapConfig
from infinity.errors import CapacityError, ConfigError, CorruptionError
from infinity.plan.directory import read_directory
from infinity.simulate.job import batch_of
from infinity.tools.plan.subject import batch_for, planned_model
from infinity.tools.training.adapter import auto_targets
from infinity.tools.training.settle import settle
from tests.support.bits import assert_same
from tests.support.forked import COMMAND, Script

from .jobs import lines_of
from .test_adapter import run, save_base, table  # noqa: F401

KEPT = ("step", "loss", "grad_norm", "held_out_loss", "learning_rate", "num_tokens", "epoch")


@pytest.fixture
def several(table: dict[str, Any], tmp_path: Path) -> dict[str, Any]:  # noqa: F811
    """Three adapters of other ranks, rates, seeds and data; one ends early."""
    other = "".join(f"{i} times three is {3 * i}\n" for i in range(500))
    (tmp_path / "other.txt").write_text(other)
    save_base(tmp_path / "base")
    table["adapter"] = [
        {"name": "wide", "rank": 8, "dropout": 0.2, "lr": 0.02, "seed": 1},
        {"name": "dora", "rank": 2, "method": "dora", "data": str(tmp_path / "other.txt"),
         "output": str(tmp_path / "elsewhere")},
        {"name": "plain", "rank": 4, "targets": ["q_proj", "v_proj"], "seed": 3},
    ]  # fmt: skip
    table["train"] |= {"schedule": "linear", "eval_every": 2, "eval_batches": 2}
    return table


def alone(table: dict[str, Any], tmp_path: Path) -> dict[str, tuple[Any, Any, Any]]:  # noqa: F811
    """What each adapter's own run leaves, in a directory of its own."""
    found = {}
    for adapter, config in zip(table["adapter"], SwapConfig.load(table).of_adapters(), strict=True):
        own = config.to_dict()
        own["output"]["directory"] = str(tmp_path / f"alone-{adapter['name']}")
        run(own)
        found[adapter["name"]] = left_by(Path(own["output"]["directory"]))
    return found


def left_by(directory: Path) -> tuple[Any, Any, Any]:
    described = json.loads((directory / "adapter_config.json").read_text())
    return (
        [{key: line[key] for key in KEPT} for line in lines_of(directory)],
        load_file(directory / "adapter_model.safetensors"),
        described,
    )


def places(table: dict[str, Any]) -> dict[str, Path]:  # noqa: F811
    configs = SwapConfig.load(table).of_adapters()
    return {str(c.adapter and c.adapter.name): c.output.directory for c in configs}


def compare(table: dict[str, Any], expected: dict[str, tuple[Any, Any, Any]]) -> None:  # noqa: F811
    for name, place in places(table).items():
        found = left_by(place)
        assert found[0] == expected[name][0], name
        assert_same(expected[name][1], found[1], is_ordered=False)
        for described in (found[2], expected[name][2]):
            for key in ("target_modules", "exclude_modules"):
                described[key] = sorted(described[key] or ())
        assert found[2] == expected[name][2]


def test_killed_and_resumed_every_adapter_has_the_bits_of_its_own_run(
    several: dict[str, Any], tmp_path: Path, processes: list[Any]
) -> None:
    """kill -9 between checkpoints of different adapters: each goes on from its own last one. One
    adapter learns nothing and is stopped early by its evaluations while the others go on."""
    several["adapter"][2]["lr"] = 0.0
    several["train"] |= {"steps": 9, "early_stopping_patience": 1}
    several["checkpoint"] = {"every": 2, "keep": 1}
    expected = alone(several, tmp_path)
    assert [len(expected[name][0]) for name in ("wide", "dora", "plain")] == [9, 9, 4]
    job = tmp_path / "job.json"
    job.write_text(json.dumps(several))
    for steps in (4, 6):
        process = Script(KILLED + COMMAND, steps, "train", job, "--resume")
        processes.append(process)
        assert process.wait() == -signal.SIGKILL
    summary = run(several, resume=True)
    assert summary["resumed_at"] == 8 and summary["others"]["dora"]["resumed_at"] == 4
    assert sorted(summary["others"]) == ["dora", "plain"]
    assert summary["others"]["plain"]["stopped_early"]
    rows = summary["printed"].rpartition("its checkpoints")[2]  # Behind the last command.
    assert all(f"{name} step {step} loss " in rows for name, step in (("wide", 9), ("plain", 4)))
    compare(several, expected)
    assert {line["adapter"] for line in lines_of(places(several)["dora"])} == {"dora"}


def test_a_damaged_checkpoint_of_one_of_several_is_got_round_as_it_says(
    several: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    """Two have names that are in "lora_", of which PEFT would warn."""
    several["adapter"][0]["name"], several["adapter"][2]["name"] = "lora", "a"
    several["train"] |= {"steps": 2, "eval_every": 0}
    several["checkpoint"] = {"every": 1}
    run(several)
    newest = places(several)["dora"] / "checkpoints/step-00000002"
    (newest / "manifest.json").write_text("{}")
    with pytest.raises(CorruptionError, match=f"remove {newest}, and --resume goes on"):
        run(several, resume=True)
    shutil.rmtree(newest)
    assert run(several, resume=True)["others"]["dora"]["resumed_at"] == 1
    assert not [warning for warning in recwarn if "prefix" in str(warning.message)]


# The second adapter ends its process before the checkpoint of a step, and after that of the first.
KILLED = """
import os, signal, sys
from infinity.tools.training.checkpoints import RunCheckpoints
last, after_step = int(sys.argv.pop(1)), RunCheckpoints.after_step

def kill(checkpoints, step):
    if step >= last and checkpoints._config.adapter.name == "dora":
        os.kill(os.getpid(), signal.SIGKILL)
    after_step(checkpoints, step)

RunCheckpoints.after_step = kill
"""


def test_an_adapter_too_many_is_named_with_the_number_that_fits(
    several: dict[str, Any], tmp_path: Path
) -> None:
    """By the error of the tier, before a byte of the base is read."""
    several["adapter"] = [{"name": f"a{n}", "rank": 4} for n in range(3)] + [
        {"name": "large", "rank": 4096}
    ]
    several["tiers"] = {"host": {"capacity": "6MiB", "huge_pages": False}}
    several["output"]["notify"] = f"cat > {tmp_path / 'told.json'}"
    with pytest.raises(CapacityError, match="'large' does not fit: the first 3 of 4 would"):
        run(several)
    assert json.loads((tmp_path / "told.json").read_text())["event"] == "failure"


def test_data_that_cannot_be_trained_on_are_named_with_their_adapter(
    several: dict[str, Any], tmp_path: Path
) -> None:
    """And told to those whom the file names, although no run is there."""
    (tmp_path / "other.txt").write_text("short")
    several["output"]["notify"] = f"cat > {tmp_path / 'told.json'}"
    with pytest.raises(ConfigError, match="adapter 'dora': the data has too little to train on"):
        run(several)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["event"] == "failure" and "before a step: adapter 'dora'" in told["text"]


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"adapter": [{"name": "a"}, {"name": "a"}]}, r"adapters\[1\].name: expected another name"),
        ({"adapter": [{"name": "a"}, {}]}, r"adapters\[1\].name: .* for each of several; got None"),
        ({"adapter": [{"name": "a"}, {"name": "b", "output": "output/a"}]}, "of its own for each"),
        ({"adapter": {"lr": 0.1}}, r"belongs to \[\[adapter\]\]"),
        ({"adapter": [{"name": "a", "experts": True}]}, "PEFT has one for experts"),
        *[
            ({"train": {"steps": 1, "batch_size": 1, **of}}, 'expected "sft" with several')
            for of in (
                {"method": "dpo"}, {"method": "reward"},
                {"method": "classify", "labels": ["no", "yes"]},
            )
        ],
        ({"adapter": [{"name": "base_layer"}, {"name": "b"}]}, r"\[0\].name: .* PEFT calls parts"),
        ({"adapter": [{"name": "a"}, {"name": "lora_A"}]}, r"\[1\].name: .* PEFT calls parts"),
        ({"adapter": [{"name": "a"}, {"name": "q_proj"}]}, "has a part called 'q_proj'"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_train_together_are_refused(
    several: dict[str, Any], change: dict[str, Any], refused: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=refused):
        run(several | change)


def test_a_plan_counts_the_parameters_and_batches_of_all(
    several: dict[str, Any], tmp_path: Path
) -> None:
    """Each adapter has its own method and targets, and PEFT's parameters. A token passes one."""
    config = settle(SwapConfig.load(several))
    train = config.train
    assert train is not None and train.gradient_accumulation_steps * train.batch_size == 4
    assert batch_of(config).num_tokens == 3 * 4 * batch_of(config).sequence_length
    asked = batch_for(config, None, None, 2 * train.gradient_accumulation_steps)
    assert asked.num_tokens * asked.num_micro_batches == 2 * 3 * 4 * asked.sequence_length
    planned, _ = planned_model(config, read_directory(tmp_path / "base"), None, None, None)
    trained = 0
    for options in several["adapter"]:
        made: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        targets = options.get("targets", auto_targets(made))
        lora = peft.LoraConfig(
            r=options["rank"], use_dora=options.get("method") == "dora", target_modules=targets
        )
        trained += peft.get_peft_model(made, lora).num_parameters(only_trainable=True)
    assert planned.frozen and planned.frozen.trained_params == trained
    assert sum(work.trained_params for work in planned.hooked_modules) == trained // 3
