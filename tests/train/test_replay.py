"""`infinity replay`: honest steps have the bits of the run on any placement; of 22 planted changes
each is found, and its place is named."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader
from infinity.checkpoint.run.load import Loaded
from infinity.config import JobConfig, SwapConfig
from infinity.errors import ConfigError
from infinity.tools.training import program
from infinity.tools.training.checkpoints import changes_of_settings
from infinity.tools.training.metrics import MetricsFile
from infinity.tools.training.output import config_of_run
from infinity.tools.training.program import Run
from infinity.tools.training.replay import Replay, replay
from infinity.tools.training.trainer import RunTrainer
from tests.support.commands import run_command
from tests.support.damaged import edit_manifest
from tests.support.exhaustive import sampled
from tests.support.offloading import small_tiers
from tests.support.quantized import read_headers, tiny_causal_lm, write_quantized

LAST = 10
# Of these layers the identity of a base samples 0, 1, 3 and 5.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 256}
IN_LAYER_2 = "model.layers.2.mlp.up_proj"
ELSEWHERE = (
    'placement.master="host"', 'placement.moments="nvme"', 'placement.gradients="host"',
    'placement.activations="nvme"', "tiers.host.capacity=48MiB", "io.engine=threads",
)  # fmt: skip


class Made(NamedTuple):
    """A run in a directory, with its base and its data."""

    run: Path
    base: Path
    data: Path


@pytest.fixture(scope="module")
def over_awq(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """An adapter with dropout over a quantised base, with evaluations and checkpoints, and without
    digests of the state, which come where there is time."""
    place = tmp_path_factory.mktemp("awq")
    write_quantized(tiny_causal_lm("llama", **SHAPE), place / "base", "awq")
    return _train(place, {
        "adapter": {"rank": 4, "dropout": 0.1},
        "checkpoint": {"every": 4, "keep": 3, "directory": str(place / "run/checkpoints")},
        "placement": {"activations": ["host"]},
    }, share=1e-12)  # fmt: skip


@pytest.fixture(scope="module")
def in_full(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All weights of a model in bf16, on drives, with a digest of the state for each step."""
    place = tmp_path_factory.mktemp("full")
    tiny_causal_lm("llama", **SHAPE).save_pretrained(place / "base")
    return _train(place, {}, share=1e12)


def _train(
    place: Path,
    sections: dict[str, Any],
    *,
    share: float,
    steps: int = LAST,
    method: str = "sft",
    rows: Sequence[Any] = (),
) -> Made:
    if method == "sft":
        rows = [{"text": f"{i} and {i * i} are {i**3}" * (1 + i % 3)} for i in range(90)]
    data = place / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {
        "tiers": small_tiers(place / "swap", "32MiB"),
        "model": {"path": str(place / "base"), "seed": 5},
        "data": {"paths": [str(data)], "sequence_length": 32, "held_out": 0.1},
        "train": {
            "method": method, "steps": steps, "batch_size": 2, "gradient_accumulation_steps": 2, "eval_every": 3,
            "schedule": "cosine", "warmup_steps": min(2, steps - 1), "eval_batches": 1,
            "threads": 1 if share < 1 else "auto", "keep_best": share < 1,
        },
        "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5},
        "output": {"directory": str(place / "run")},
    } | sections  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_DIGEST_SHARE", share)
        _, code = program.train(SwapConfig.load(table), console=_silent())
    assert code == 0
    return Made(place / "run", place / "base", data)


def _silent() -> Console:
    return Console(file=io.StringIO())


# -- Honest steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["over_awq", "in_full"])
def test_ten_honest_steps_have_the_bits_of_the_run_elsewhere(kind, request) -> None:
    """From the start, on another placement: 20 steps of two runs, the checkpoints on the way, and
    the exported weights."""
    made = request.getfixturevalue(kind)
    before = _files(made.run.parent)
    found = replay(made.run, overrides=ELSEWHERE, begin="start", console=_silent())
    assert found["differences"] == [] and found["is_equal"] and found["after"] == 0
    counts = found["compared"]
    for key in ("rows", "random", "loss", "grad_norm", "gradients", "learning_rate"):
        assert counts[key] == LAST, key
    assert counts["held_out_loss"] == LAST
    assert counts.get("state", 0) == (LAST if kind == "in_full" else 0)
    saved = {"step-00000004", "step-00000008", "step-00000010"} if kind == "over_awq" else set()
    weights = "adapter_model.safetensors" if kind == "over_awq" else "model.safetensors"
    assert saved | {weights} <= counts.keys()
    assert _files(made.run.parent) == before, "a replay leaves everything as it was"


def _files(place: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns if p.is_file() else 0 for p in place.rglob("*")}


def test_a_step_is_replayed_from_the_checkpoint_before_it_by_the_command(over_awq) -> None:
    run = over_awq.run
    done = run_command("replay", run, "--step", 6, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert (found["after"], found["step"], found["compared"]["loss"]) == (4, 6, 2)
    done = run_command("replay", run, "--step", 6, "--set", "optimizer.eps=1e-6")
    assert done.exit_code == 1
    assert "DIFFERS: settings: optimizer.eps is 1e-06 and was 1e-08" in done.stdout


def test_one_of_several_adapters_and_one_that_goes_on_from_a_saved_one_are_replayed_alone(
    over_awq, tmp_path
) -> None:
    rows = [{"prompt": f"{i} and", "chosen": f" {i * i}", "rejected": " none"} for i in range(20)]
    several = {"adapter": [{"name": "x", "rank": 4}, {"name": "y", "rank": 2, "lr": 5e-3}]}
    saved = {"adapter": {"resume": str(over_awq.run)}}
    for name, sections, method in (("several", several, "sft"), ("saved", saved, "dpo")):
        (place := tmp_path / name).mkdir()
        (place / "base").symlink_to(over_awq.base)
        _train(place, sections, share=1e12, steps=3, method=method, rows=rows)
    for run in ("several/run/y", "saved/run"):
        found = replay(tmp_path / run, overrides=ELSEWHERE, console=_silent())
        assert found["is_equal"], found
        counts = found["compared"]
        assert (counts["state"], counts["random"], counts["adapter_model.safetensors"]) == (3, 3, 1)


def test_what_a_server_samples_is_not_computed_again(over_awq, tmp_path) -> None:
    run = Path(shutil.copytree(over_awq.run, tmp_path / "run"))
    grpo = {"rewards": ["rewards:length"], "sampler": "http://localhost:1"}
    grpo["max_completion_length"] = 8
    for key, value in (
        ("grpo", grpo), ("method", "grpo"), ("eval_every", 0), ("keep_best", False)
    ):  # fmt: skip
        _in_marker("config", "train", key, value=value)(Made(run, run, run), None)
    with pytest.raises(
        ConfigError, match=r"grpo\.sampler: http://localhost:1 samples other tokens"
    ):
        replay(run, console=_silent())


def test_a_step_that_the_run_has_not_made_is_refused(over_awq, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no line of step 11.*its steps, 1 to 10"):
        replay(over_awq.run, 11, console=_silent())
    with pytest.raises(ConfigError, match="no output directory of a run"):
        replay(tmp_path, console=_silent())
    run = Path(shutil.copytree(over_awq.run, tmp_path / "run"))
    _in_marker("receipts", 0, "threads", value="2")(Made(run, run, run), None)
    with pytest.raises(ConfigError, match="infinity-run.json cannot be used: threads"):
        replay(run, console=_silent())
    _in_marker("receipts", value=[])(Made(run, run, run), None)
    with pytest.raises(ConfigError, match="left no receipt"):
        replay(run, console=_silent())


def test_what_a_killed_replay_has_left_is_removed_and_what_a_living_one_has_stays(
    over_awq, monkeypatch
) -> None:
    run, said = over_awq.run, []
    (run / ".replay/run").mkdir(parents=True)
    (run / ".replay/run/.tokens-of-a-killed-one").touch()
    go = Replay.go

    def go_beside_another(self: Any, directory: Path) -> None:
        with pytest.raises(ConfigError, match=r"\.replay is in use by process"):
            replay(run, 6, console=_silent())
        said.append(sorted(os.listdir(run / ".replay/run")))
        go(self, directory)

    monkeypatch.setattr(Replay, "go", go_beside_another)
    assert replay(run, 6, console=_silent())["is_equal"]
    assert said == [[".infinity-run.lock"]]
    assert not (run / ".replay").exists() and not (run.parent / "swap/.replay").exists()


def test_what_rounds_stays_that_of_the_run_and_other_tiles_are_noted(over_awq, tmp_path) -> None:
    run = Path(shutil.copytree(over_awq.run, tmp_path / "run"))
    _in_marker("receipts", 0, "tiles", value=3)(Made(run, run, run), None)
    _in_marker("config", "schedule", "tile", value=2**20)(Made(run, run, run), None)
    table = json.loads((run / "infinity-run.json").read_text())["config"]
    table["tiers"]["nvme"] = [{"path": str(tmp_path / "swap")}]
    table["schedule"] |= {"tile": 0, "experts": "exact", "micro_batch": 1, "prefetch": False}
    table["distributed"]["reduce_dtype"] = "bfloat16"
    seen: list[JobConfig] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "set_up", lambda run: seen.append(run._config) or Run.set_up(run))
        found = replay(run, 6, places=SwapConfig.load(table), console=_silent())
    assert found["is_equal"]
    assert [note.partition(";")[0] for note in found["notes"]] == ["tiles: 0 here, 3 in the run"]
    kept = seen[0].schedule
    assert (kept.tile, kept.experts, kept.micro_batch, kept.prefetch) == (
        2**20,
        "auto",
        2,
        False,
    )
    assert seen[0].distributed.reduce_dtype == "auto"


def test_the_tiles_of_a_run_are_in_its_receipt_and_those_of_its_replay(tmp_path) -> None:
    shape = SHAPE | {"hidden_size": 128, "vocab_size": 512}
    tiny_causal_lm("llama", **shape).save_pretrained(tmp_path / "base")
    made = _train(tmp_path, {"schedule": {"tile": "64KiB"}}, share=1e-12, steps=1)
    (receipt,) = json.loads((made.run / "infinity-run.json").read_text())["receipts"]
    assert receipt["tiles"] >= 4, "of the embedding and the head at the least"
    _in_marker("config", "schedule", "tile", value="auto")(made, None)
    found = replay(made.run, console=_silent())
    assert found["is_equal"] and not found["notes"], "more memory does not cut otherwise"


def test_a_checkpoint_that_the_run_removes_meanwhile_is_none(
    over_awq, tmp_path, monkeypatch
) -> None:
    run = Path(shutil.copytree(over_awq.run, tmp_path / "run"))
    _in_marker("config", "checkpoint", "directory", value=None)(Made(run, run, run), None)
    _before_step(4, lambda _: shutil.rmtree(run / "checkpoints/step-00000004"))(None, monkeypatch)
    found = replay(run, 5, begin="start", console=_silent())
    assert found["is_equal"] and "step-00000004" not in found["compared"]


def test_an_error_beside_a_difference_that_does_not_explain_it_is_raised(
    over_awq, tmp_path, monkeypatch
) -> None:
    run = Path(shutil.copytree(over_awq.run, tmp_path / "run"))
    _in_marker("receipts", 0, "versions", "torch", value="2.0")(Made(run, run, run), None)

    def go(self: Any, directory: Path) -> None:
        raise ConfigError("no space for this")

    monkeypatch.setattr(Replay, "go", go)
    with pytest.raises(ConfigError, match="no space for this"):
        replay(run, 6, console=_silent())


def test_steps_before_accepted_changes_and_a_checkpoint_of_no_run_are_refused(
    over_awq, tmp_path
) -> None:
    run = Path(shutil.copytree(over_awq.run, tmp_path / "run"))
    (receipt,) = json.loads((run / "infinity-run.json").read_text())["receipts"]
    receipts = [receipt, receipt | {"after": 8, "has_accepted": True}]
    _in_marker("receipts", value=receipts)(Made(run, run, run), None)
    for step, begin in ((6, None), (10, "start"), (8, None)):
        with pytest.raises(ConfigError, match="settings before step 8 are lost"):
            replay(run, step, begin=begin, console=_silent())
    assert replay(run, 10, console=_silent())["after"] == 8
    with pytest.raises(ConfigError, match="was not written by `infinity train`"):
        changes_of_settings(Loaded(run, 3, {"run": {}}), config_of_run(run))
    _in_marker("receipts", 0, "base", value=[1])(Made(run, run, run), None)
    with pytest.raises(ConfigError, match="infinity-run.json cannot be used: base"):
        replay(run, 10, console=_silent())


def test_a_step_computed_again_after_a_crash_is_compared_with_its_first_line(tmp_path) -> None:
    path, said = tmp_path / "metrics.jsonl", []
    first = MetricsFile(path, say=said.append)
    for step in (1, 2, 3):
        first.append(step, json.dumps({"step": step, "loss": 1 / step, "rows": ["a", "b"]}))
    first.close()
    again = MetricsFile(path, resumed_at=1, say=said.append)
    again.append(2, json.dumps({"step": 2, "loss": 0.5, "rows": ["a", "b"]}))
    assert said == []
    again.append(3, json.dumps({"step": 3, "loss": 0.25, "rows": ["a", "c"]}))
    again.close()
    # Rank 0 of another number of ranks has other rows, and has drawn other numbers.
    for rows, norms in ((["a", "b"], "x"), (["a"], None)):
        file = MetricsFile(
            tmp_path / "of_ranks", say=said.append, resumed_at=1 if norms is None else 0
        )
        for step in (1, 2):
            line = {"step": step, "loss": 1.0, "rows": rows, "random": rows[-1], "gradients": norms}
            file.append(step, json.dumps(line))
        file.close()
    assert said == [
        "warning: step 3 is computed again, and not as before: row 1 of the step's 2 differs, 1 of "
        f"them in all; the loss is 0.25 and was {1 / 3}"
    ]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


# -- Planted changes -------------------------------------------------------------------------------


def _flip(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def _flipped(name: str) -> Callable[..., list[str]]:
    """The lowest bit of the last element of a tensor of the base."""

    def plant(made: Made, _: Any) -> list[str]:
        dtype, _, file, start, nbytes = read_headers(made.base)[name]
        _flip(file, start + nbytes - (2 if dtype in ("BF16", "F16") else 4))
        return []

    return plant


def _reformed(made: Made, _: Any) -> list[str]:
    """A layer is stored transposed in name: its header says another shape."""
    for file in made.base.glob("*.safetensors"):
        tensors = load_file(file)
        if f"{IN_LAYER_2}.scales" in tensors:
            tensors[f"{IN_LAYER_2}.scales"] = tensors[f"{IN_LAYER_2}.scales"].to(torch.bfloat16)
            save_file(tensors, file, metadata={"format": "pt"})
    return []


def _in_data(edit: Callable[[list[str]], object]) -> Callable[..., list[str]]:
    def plant(made: Made, _: Any) -> list[str]:
        lines = made.data.read_text().splitlines()
        edit(lines)
        made.data.write_text("".join(line + "\n" for line in lines))
        return []

    return plant


def _letter(lines: list[str]) -> None:
    lines[7] = lines[7].replace("and", "end", 1)


def _swap(lines: list[str]) -> None:
    lines[3], lines[4] = lines[4], lines[3]


def _in_marker(*place: str | int, value: Any) -> Callable[..., list[str]]:
    def plant(made: Made, _: Any) -> list[str]:
        marker = made.run / "infinity-run.json"
        content = inner = json.loads(marker.read_text())
        for part in place[:-1]:
            inner = inner[part]
        assert inner[place[-1]] != value
        inner[place[-1]] = value
        marker.write_text(json.dumps(content))
        return []

    return plant


def _in_line(step: int, key: str, change: Callable[[Any], Any]) -> Callable[..., list[str]]:
    def plant(made: Made, _: Any) -> list[str]:
        path = made.run / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[step - 1][key] = change(lines[step - 1][key])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return []

    return plant


def _in_checkpoint(ending: str, *, is_forged: bool) -> Callable[..., list[str]]:
    """A bit of the first tensor with this ending, in the checkpoint of step 8; with its digest."""

    def plant(made: Made, _: Any) -> list[str]:
        checkpoint = made.run / "checkpoints/step-00000008"
        for file in sorted(checkpoint.glob("unit-*.safetensors")):
            with SafetensorsReader(file) as reader:
                name = next((n for n in sorted(reader.tensors) if n.endswith(ending)), None)
                if name is None:
                    continue
                place = reader.tensors[name].offset_nbytes
            _flip(file, place)
            if is_forged:
                edit_manifest(checkpoint, partial(_redigest, file, name))
            return []
        raise AssertionError(f"no tensor ends with {ending}")

    return plant


def _redigest(file: Path, name: str, body: dict[str, Any]) -> None:
    (entry,) = [found for found in body["files"] if found["name"] == file.name]
    for extent in entry["extents"]:
        if extent["name"] == name:
            content = file.read_bytes()[extent["offset_nbytes"] :][: extent["nbytes"]]
            extent["sha256"] = hashlib.sha256(content).hexdigest()


def _export(made: Made, _: Any) -> list[str]:
    file = made.run / "adapter_model.safetensors"
    _flip(file, file.stat().st_size - 4)
    return []


def _before_step(number: int, act: Callable[[Any], None]) -> Callable[..., list[str]]:
    """What a fault of this machine would do, while step `number` begins."""

    def plant(made: Made, patch: pytest.MonkeyPatch) -> list[str]:
        begin = Replay.begin_step

        def begin_step(run: Any) -> None:
            begin(run)
            if run.num_steps + 1 == number:
                act(run)

        patch.setattr(Replay, "begin_step", begin_step)
        return []

    return plant


def _weight(run: Any) -> None:
    """A bit of one weight of the adapter."""
    weight = next(p for name, p in run.model.named_parameters() if "lora_A" in name)
    with torch.no_grad():
        value = weight.detach().clone()
        value.view(-1).view(torch.int32)[0] ^= 1 << 20
        weight.copy_(value)


def _draw(run: Any) -> None:
    torch.rand(1)


def _draw_in_python(run: Any) -> None:
    random.random()


def _token(made: Made, patch: pytest.MonkeyPatch) -> list[str]:
    """One token of one row of the second micro-batch of step 3."""
    batches = RunTrainer.get_batch_samples

    def get_batch_samples(trainer: Any, *args: Any, **options: Any) -> Any:
        found = batches(trainer, *args, **options)
        if trainer.state.global_step == 2:
            found[0][1]["input_ids"][1, 3] ^= 1
        return found

    patch.setattr(RunTrainer, "get_batch_samples", get_batch_samples)
    return []


PLANTED: dict[str, tuple[Callable[..., list[str]], int, int | None, str, str]] = {
    # change -> (how, the step that is replayed, the step that differs, what, in words)
    "a code of the base": (_flipped(f"{IN_LAYER_2}.qweight"), 2, None, "bytes", r"layers\.2"),
    "a scale": (_flipped(f"{IN_LAYER_2}.scales"), 2, None, "bytes", r"layers\.2"),
    "a zero point": (_flipped(f"{IN_LAYER_2}.qzeros"), 2, None, "bytes", r"layers\.2"),
    "a plain weight": (_flipped("model.norm.weight"), 2, None, "base", "other values"),
    "a dtype of the base": (_reformed, 2, None, "base", "dtypes"),
    "a letter of a row": (_in_data(_letter), 2, None, "data", "SHA-256"),
    "the order of rows": (_in_data(_swap), 2, None, "data", "SHA-256"),
    "another teacher": (
        _in_marker("receipts", 0, "others", value={"teacher": "0"}), 2, None, "data", "teacher is",
    ),
    "a lost row": (_in_data(lambda lines: lines.pop(5)), 2, None, "data", "SHA-256"),
    "a token of a batch": (_token, 4, 3, "rows", "row 3 of the step's 4"),
    "the seed": (_in_marker("config", "train", "seed", value=9), 4, 1, "random", "generators"),
    "the seed of the order": (
        _in_marker("config", "data", "seed", value=9), 4, None, "data", "SHA-256",
    ),
    "the seed, with a checkpoint": (
        _in_marker("config", "train", "seed", value=9), 6, None, "settings", "train.seed is 9",
    ),
    "the seed of the adapter": (
        _in_marker("config", "model", "seed", value=6), 2, 1, "grad_norm", "is .* and was",
    ),
    "the learning rate": (
        _in_marker("config", "optimizer", "lr", value=0.011), 4, 2, "learning_rate",
        r"is 0\.0055 and was 0\.005",
    ),
    "a moment's decay": (
        _in_marker("config", "optimizer", "betas", value=[0.9, 0.998]), 6, None, "settings",
        "betas",
    ),
    "a version": (
        _in_marker("receipts", 0, "versions", "torch", value="2.0"), 6, None, "versions",
        "torch is .* and was 2.0",
    ),
    "a bit of a loss": (
        _in_line(3, "loss", lambda loss: math.nextafter(loss, 9.0)), 4, 3, "loss", "and was",
    ),
    "a saved weight": (_in_checkpoint(".weight", is_forged=False), 9, None, "bytes", "SHA-256"),
    "a saved moment": (_in_checkpoint(".exp_avg", is_forged=False), 9, None, "bytes", "SHA-256"),
    "a forged moment": (
        _in_checkpoint(".exp_avg_sq", is_forged=True), 10, 10, "step-00000010", "exp_avg_sq",
    ),
    "a forged weight": (
        _in_checkpoint(".weight", is_forged=True), 10, 10, "step-00000010", r"lora_A.*weight",
    ),
    "an exported weight": (_export, 10, 10, "adapter_model.safetensors", "lora_"),
    "a weight in memory": (_before_step(3, _weight), 4, 3, "gradients", "norms"),
    "a number drawn": (_before_step(2, _draw), 4, 2, "random", "generators"),
    "a number drawn by Python": (_before_step(2, _draw_in_python), 4, 2, "random", "generators"),
}  # fmt: skip


# The first of those of which the same is said, in the same step.
FIRST_PLANTED = {planted[2:]: change for change, planted in reversed(PLANTED.items())}


@pytest.mark.parametrize("change", sampled(PLANTED, [*FIRST_PLANTED.values()].__contains__))
def test_a_planted_change_is_found_and_named(change, over_awq, tmp_path, monkeypatch) -> None:
    plant, step, at, what, text = PLANTED[change]
    made = Made(tmp_path / "run", tmp_path / "base", tmp_path / "rows.jsonl")
    shutil.copytree(over_awq.run, made.run)
    shutil.copytree(over_awq.base, made.base)
    shutil.copyfile(over_awq.data, made.data)
    _in_marker("config", "checkpoint", "directory", value=None)(made, None)
    plant(made, monkeypatch)
    found = replay(
        made.run, step, console=_silent(),
        overrides=[
            f"model.path={made.base}", f'data.paths=["{made.data}"]',
            f'tiers.nvme=[{{path="{tmp_path / "swap"}"}}]',
        ],
    )  # fmt: skip
    assert not found["is_equal"]
    rows = [(row["step"], row["what"]) for row in found["differences"]]
    assert (at, what) in rows and rows[0][0] == at, found["differences"]
    said = found["differences"][rows.index((at, what))]["text"]
    assert re.search(text, said), said


def test_a_flipped_bit_of_a_base_that_is_copied_shows_in_the_first_digest_of_the_state(
    in_full, over_awq, tmp_path
) -> None:
    """Weights that are trained, and frozen ones. A base that is read in its files has no part."""
    (tmp_path / "base").symlink_to(over_awq.base)
    sections = {"adapter": {"rank": 4}, "placement": {"frozen": "copy"}}
    copied = _train(tmp_path, sections, share=1e12, steps=1)
    for number, (made, name) in enumerate(((in_full, "weight"), (copied, "scales"))):
        base = Path(shutil.copytree(made.base, tmp_path / f"base-{number}"))
        _flipped(f"{IN_LAYER_2}.{name}")(Made(made.run, base, made.data), None)
        found = replay(made.run, 1, overrides=[f"model.path={base}"], console=_silent())
        assert "state" in {row["what"] for row in found["differences"]}, found["differences"]
    found = replay(made.run, overrides=["placement.frozen=checkpoint"], console=_silent())
    assert found["is_equal"] and "state" not in found["compared"]
