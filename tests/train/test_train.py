"""`infinity train` end to end: the same bits as TRL in memory, and what it leaves behind."""

from __future__ import annotations

import errno
import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.config import SwapConfig
from infinity.engine.engine import Engine
from infinity.errors import (
    ConfigError,
    CorruptionError,
    InfinityError,
    NonFiniteError,
    StorageError,
)
from infinity.tools.training import program
from infinity.tools.training.trainer import MOST_SKIPPED, RunTrainer

from . import plain
from .jobs import GPT2, TEXT, job_table, lines_of


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """A small configuration, everything on nvme; tests change what they are about."""
    return job_table(tmp_path, placement={"gradients": "nvme"}, optimizer={"lr": 1e-2})


def run(table: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(summary, what was printed). The run must end well and leave the swap directory empty."""
    console = Console(file=io.StringIO(), width=200)
    summary, exit_code = program.train(SwapConfig.load(table), console=console)
    assert exit_code == 0
    assert swap_is_released(table)
    return summary.to_dict(), console.file.getvalue()


def swap_is_released(table: dict[str, Any]) -> bool:
    swaps = [Path(drive["path"]) for drive in table["tiers"].get("nvme", ())]
    return all(not swap.exists() or list(swap.iterdir()) == [] for swap in swaps)


def save_model(directory: Path, **options: Any) -> torch.nn.Module:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2), dtype=torch.float32)
    model.save_pretrained(directory, **options)
    return model


def metrics(table: dict[str, Any]) -> list[dict[str, Any]]:
    return lines_of(table["output"]["directory"])


def exported(table: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(table["output"]["directory"])
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("activation_checkpointing", "mlp_tokens"), [(False, None), (True, None), (True, 5)]
)
def test_a_run_is_bit_identical_to_trl_in_memory(
    tmp_path, table, activation_checkpointing, mlp_tokens
):
    """Losses of every step, gradient norms, learning rates and exported weights, in fp32.

    Method: the same checkpoint and text through TRL's SFTTrainer, with
    torch.optim.AdamW(fused=True), accumulation, warm-up, decay groups and clipping that bites.
    """
    model = save_model(tmp_path / "model")
    table["model"] = {"path": str(tmp_path / "model")}
    table["train"] |= {
        "steps": 6, "gradient_accumulation_steps": 2, "schedule": "cosine", "warmup_steps": 2,
        "activation_checkpointing": activation_checkpointing,
    }  # fmt: skip
    if mlp_tokens is not None:
        table["train"]["mlp_tokens"] = mlp_tokens
        infinity.slice_mlps(model, mlp_tokens)
    table["optimizer"] |= {"max_grad_norm": 0.5, "weight_decay": 0.1}
    run(table)
    # GPT2LMHeadModel does not name its loss; then Trainer counts tokens that are not predicted.
    model.loss_type = "ForCausalLM"
    expected = plain.train(table, model, tmp_path / "plain")

    got = [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in metrics(table)]
    assert got == expected
    assert max(norm for _, norm, _ in got) > 0.5
    for name, tensor in exported(table).items():
        assert torch.equal(tensor, model.get_parameter(name)), name


def test_same_seed_gives_the_same_run_wherever_the_state_is_and_another_does_not(table):
    summaries = []
    for placement in (
        {"gradients": "nvme"},
        {"parameters": "host", "master": "host", "moments": ["host", "nvme"]},
    ):
        table["placement"] = placement
        run(table)
        summaries.append((metrics(table), exported(table)))

    (one, weights), (other, other_weights) = summaries
    assert [line["loss"] for line in one] == [line["loss"] for line in other]
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    table["model"]["seed"] = 1
    run(table)
    assert not all(torch.equal(weights[name], exported(table)[name]) for name in weights)


def test_micro_batches_run_by_layers_are_plain_accumulation(table):
    """To the bit where no weight is tied. A part that does not divide the batch is refused."""
    table["model"]["config"]["tie_word_embeddings"] = False
    table["optimizer"]["max_grad_norm"] = 0.5
    table["train"].update(batch_size=2, gradient_accumulation_steps=2)
    run(table)
    plain, weights = [line["loss"] for line in metrics(table)], exported(table)

    table["train"].update(batch_size=4, gradient_accumulation_steps=1)
    table["schedule"] = {"micro_batch": 2}
    run(table)
    assert [line["loss"] for line in metrics(table)] == pytest.approx(plain, rel=1e-6)
    by_layers = exported(table)
    assert all(torch.equal(weights[name], by_layers[name]) for name in weights)

    table["train"].update(batch_size=5)
    with pytest.raises(ConfigError, match="expected a divisor of train.batch_size=5; got 2"):
        run(table)


def test_evaluations_pass_with_the_next_step_unless_something_needs_them_before(
    table, monkeypatch
) -> None:
    """`keep_best` and a checkpoint do: the numbers are the same."""
    passed: list[tuple[int, int]] = []
    sweep = Engine.sweep

    def counting(engine: Engine, losses: Any, calls: Any = ()) -> Any:
        passed.append((len(losses), len(calls)))
        return sweep(engine, losses, calls)

    monkeypatch.setattr(Engine, "sweep", counting)
    table["model"]["config"]["tie_word_embeddings"] = False
    table["train"] |= {"batch_size": 4, "steps": 6, "eval_every": 1, "eval_batches": 2}
    table["schedule"] = {"micro_batch": 2}
    table["checkpoint"] = {"every": 4}
    found = []
    for keeps_best in (False, True):
        table["train"]["keep_best"] = keeps_best
        passed.clear()
        summary, _ = run(table)
        own = passed.count((0, 4))
        assert (passed.count((2, 4)), own) == ((0, 6) if keeps_best else (3, 3)), passed
        found.append(
            [(line["step"], line["loss"], line["held_out_loss"]) for line in metrics(table)]
        )
        assert [loss for _, _, loss in found[-1]] == [e["loss"] for e in summary["held_out_losses"]]
        shutil.rmtree(table["output"]["directory"])
    assert found[0] == found[1] and [step for step, _, _ in found[0]] == [1, 2, 3, 4, 5, 6]


def test_the_step_before_one_that_fails_has_its_line(table, monkeypatch) -> None:
    """Also where its evaluation was to pass with the one that fails."""
    table["train"] |= {"batch_size": 4, "steps": 6, "eval_every": 1, "eval_batches": 2}
    table["schedule"] = {"micro_batch": 2}
    sweep = Engine.sweep

    def failing(engine: Engine, losses: Any, calls: Any = ()) -> Any:
        if losses and calls:
            raise InfinityError("of the test")
        return sweep(engine, losses, calls)

    monkeypatch.setattr(Engine, "sweep", failing)
    with pytest.raises(InfinityError, match="of the test"):
        run(table)
    lines = [(line["step"], line["held_out_loss"] is None) for line in metrics(table)]
    assert lines == [(1, False), (2, True)]


def test_every_step_has_its_line_and_the_summary_adds_them_up(table):
    table["train"] |= {"eval_every": 2, "eval_batches": 1}
    # Every step writes: else the second makes the updates of the first.
    table["placement"] |= {"moments": "nvme"}
    table["schedule"] = {"updates": "at_step"}
    summary, printed = run(table)
    lines = metrics(table)

    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["held_out_loss"] is None for line in lines] == [True, False, True, False]
    assert all(line["nvme_write_nbytes"] > 0 and line["elapsed_s"] > 0 for line in lines)
    assert sum(line["nvme_read_nbytes"] for line in lines) > 0
    assert summary["num_tokens"] == 4 * 2 * 32
    assert summary["links"]["nvme_read_nbytes"]["nbytes"] == sum(
        line["nvme_read_nbytes"] for line in lines
    )
    assert summary["peak_rss_nbytes"] > 0 and summary["loss_last"] < summary["loss_first"]
    saved = json.loads((Path(table["output"]["directory"]) / "summary.json").read_text())
    assert saved["loss_last"] == summary["loss_last"]
    for word in (
        "step 4/4",
        "held-out",
        "lr ",
        "norm ",
        "tokens/s",
        "GB/s",
        "host",
        "peak RSS",
        "next:",
    ):
        assert word in printed, word


def test_learning_goes_on_from_the_export(table, tmp_path):
    first, _ = run(table)
    (tmp_path / "output").rename(tmp_path / "before")
    table["model"] = {"path": str(tmp_path / "before")}
    second, _ = run(table)

    assert second["loss_first"] < first["loss_first"]


def test_export_is_sharded_as_asked(table):
    table["output"]["max_shard_size"] = "16KiB"
    run(table)

    directory = Path(table["output"]["directory"])
    assert len(list(directory.glob("model-*-of-*.safetensors"))) > 1
    assert (directory / "model.safetensors.index.json").is_file()
    assert exported(table)


def test_sharded_checkpoint_is_read(table, tmp_path):
    save_model(tmp_path / "model", max_shard_size="10KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    table["model"] = {"path": str(tmp_path / "model")}
    table["optimizer"]["lr"] = 0.0
    table["optimizer"]["weight_decay"] = 0.0
    run(table)

    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in exported(table).items():
        assert torch.equal(tensor, original.get_parameter(name)), name


def test_bfloat16_run_exports_bfloat16(table):
    table["precision"] = {"compute": "bfloat16"}
    summary, _ = run(table)

    config = json.loads((Path(table["output"]["directory"]) / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in exported(table).values()} == {torch.bfloat16}
    assert summary["loss_last"] < summary["loss_first"]


def test_sample_goes_on_from_the_prompt_and_is_the_same_again(table):
    table["train"]["sample"] = {"prompt": "7 and", "new_tokens": 6}
    samples = {run(table)[0]["sample"] for _ in range(2)}

    assert len(samples) == 1 and samples.pop().startswith("7 and")


def test_tokenizer_is_exported_with_the_model(table, tmp_path):
    import tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = {
        word: i for i, word in enumerate(["<unk>", "<eos>", "and", "are", *map(str, range(99))])
    }
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(tmp_path / "tokenizer")
    table["data"]["tokenizer"] = str(tmp_path / "tokenizer")
    table["train"]["sample"] = {"prompt": "7 and", "new_tokens": 4, "temperature": 0.0}
    summary, _ = run(table)

    again = AutoTokenizer.from_pretrained(table["output"]["directory"])
    assert again("7 and")["input_ids"] == [words["7"], words["and"]]
    assert summary["sample"].startswith("7 and")


def test_an_earlier_run_is_replaced(table):
    table["output"]["max_shard_size"] = "16KiB"
    run(table)
    table["output"]["max_shard_size"] = "1GiB"
    table["train"]["steps"] = 2
    run(table)

    names = {entry.name for entry in Path(table["output"]["directory"]).iterdir()}
    assert "model.safetensors" in names and "model.safetensors.index.json" not in names
    assert len(metrics(table)) == 2


def test_export_can_be_left_out(table):
    table["output"]["export"] = False
    run(table)
    assert not list(Path(table["output"]["directory"]).glob("*.safetensors"))


def poison(tmp_path: Path, name: str) -> None:
    model = save_model(tmp_path / "model")
    with torch.no_grad():
        model.get_parameter(name)[0] = float("inf")
    model.save_pretrained(tmp_path / "model")


def test_nonfinite_loss_stops_with_the_step_and_the_module(tmp_path, table):
    poison(tmp_path, "transformer.h.1.mlp.c_fc.weight")
    table["model"] = {"path": str(tmp_path / "model")}

    with pytest.raises(NonFiniteError, match="step 1, first produced by transformer.h.1.mlp.c_fc"):
        run(table)
    assert swap_is_released(table)
    assert not (tmp_path / "output" / "model.safetensors").exists()


def test_nonfinite_loss_later_exports_the_last_good_weights(tmp_path, table):
    """Weights after the failure are those of the step before it."""
    table["optimizer"] |= {"lr": 1e30, "max_grad_norm": "off", "weight_decay": 0.0}
    table["train"]["steps"] = 1
    run(table)
    good = exported(table)
    table["train"]["steps"] = 5

    with pytest.raises(NonFiniteError) as caught:
        run(table)

    assert caught.value.step == 2 and caught.value.unit
    assert len(metrics(table)) == 1
    assert all(torch.equal(good[name], tensor) for name, tensor in exported(table).items())


def spoil(monkeypatch: pytest.MonkeyPatch, losses: set[int], gradients: set[int]) -> None:
    """Makes losses or gradients of the steps after so many not finite."""

    def compute_loss(self: RunTrainer, *args: Any, **options: Any) -> Any:
        loss = super(RunTrainer, self).compute_loss(*args, **options)
        if self.state.global_step in losses:
            return loss * float("nan")
        if self.state.global_step in gradients:
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    monkeypatch.setattr(RunTrainer, "compute_loss", compute_loss, raising=False)


def test_nonfinite_gradient_stops_before_the_update(tmp_path, table, monkeypatch):
    table["train"]["steps"] = 2
    run(table)
    good = exported(table)
    spoil(monkeypatch, set(), {2, 3, 4})
    table["train"]["steps"] = 5

    with pytest.raises(NonFiniteError) as caught:
        run(table)

    assert caught.value.step == 3
    assert all(torch.equal(good[name], tensor) for name, tensor in exported(table).items())


def test_steps_that_are_not_finite_are_skipped_where_the_file_says_so(tmp_path, table, monkeypatch):
    """One for its loss, one for its gradients: the others make the steps that are left."""
    table["data"] |= {"shuffle": False, "held_out": 0.0}
    table["train"] |= {"steps": 5, "nonfinite": "skip"}
    spoil(monkeypatch, {1}, {3})
    summary, _ = run(table)
    skipped = [line["skipped"] is not None for line in metrics(table)]
    assert skipped == [False, True, False, True, False]
    assert summary["steps_skipped"] == 2 and summary["steps_done"] == 5
    lines = [line for line in metrics(table) if line["skipped"]]
    assert (
        "the loss" in lines[0]["skipped"] and "norm is not finite at step 4" in lines[1]["skipped"]
    )
    assert lines[0]["grad_norm"] is None, "its gradients were not measured"
    weights = exported(table)

    monkeypatch.undo()
    taken = "".join(TEXT[64 * batch : 64 * batch + 64] for batch in (0, 2, 4))
    (tmp_path / "text.txt").write_text(taken)
    table["train"]["steps"] = 3
    run(table)
    assert all(torch.equal(weights[name], tensor) for name, tensor in exported(table).items())


def test_nothing_but_steps_that_are_not_finite_is_an_error(table, monkeypatch):
    spoil(monkeypatch, set(range(40)), set())
    table["train"] |= {"steps": 40, "nonfinite": "skip"}
    with pytest.raises(NonFiniteError) as caught:
        run(table)
    assert caught.value.step == MOST_SKIPPED + 1 == 17


def change(**keys: Any) -> Any:
    """Sets dotted keys, written with __ for the dots."""

    def apply(table: dict[str, Any], tmp_path: Path) -> None:
        for key, value in keys.items():
            *path, last = key.split("__")
            place = table
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value

    return apply


def empty_text(table: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("")


def short_text(table: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 40)


def foreign_output(table: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "thesis.tex").write_text("do not lose")


def output_is_the_model(table: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path / "output")
    table["model"] = {"path": str(tmp_path / "output")}


def other_architecture(table: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    content = json.loads(file.read_text())
    content["n_embd"] = 32
    file.write_text(json.dumps(content))
    table["model"] = {"path": str(tmp_path / "model")}


def truncated_shard(table: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path / "model", max_shard_size="10KB")
    shard = max((tmp_path / "model").glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    table["model"] = {"path": str(tmp_path / "model")}


def quantized(table: dict[str, Any], tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"] = {"quant_method": "aqlm"}
    file.write_text(json.dumps(content))
    table["model"] = {"path": str(tmp_path / "model")}


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (empty_text, ConfigError, "no text in them"),
        (short_text, ConfigError, "1 sequence of data.sequence_length=32, 1 of them held out"),
        (change(data__paths=["/nowhere"]), ConfigError, "/nowhere does not exist"),
        (change(model__config=GPT2 | {"vocab_size": 100}), ConfigError, "vocabulary of 100"),
        (change(model__config=GPT2 | {"n_layers": 3}), ConfigError, "did you mean 'n_layer'"),
        (change(model__config={"model_type": "gpt3"}), ConfigError, "did you mean 'gpt"),
        (change(model__config=GPT2 | {"n_layer": "two"}), ConfigError, "n_layer"),
        (
            change(model__config={"model_type": "clip"}),
            ConfigError,
            "no class that generates text for 'clip'",
        ),
        (change(data__sequence_length=65), ConfigError, "exceeds the model's 64 positions"),
        (
            change(train__sample={"prompt": "x", "new_tokens": 64}),
            ConfigError,
            "1 tokens and new_tokens=64 exceed the model's 64 positions",
        ),
        (change(model={"path": "/nowhere"}), ConfigError, "/nowhere is no directory"),
        (foreign_output, ConfigError, r"files that no run of infinity wrote \('thesis.tex'\)"),
        (output_is_the_model, ConfigError, "output.directory and model.path are the same"),
        (other_architecture, ConfigError, "another size or architecture"),
        (truncated_shard, CorruptionError, "it is truncated"),
        (quantized, ConfigError, "quantized"),
        (change(output__directory="/proc/output"), StorageError, "/proc/output"),
    ],
)
def test_train_refuses_impossible_runs_before_it_makes_a_swap_file(
    tmp_path, table, spoil, error, message
):
    spoil(table, tmp_path)
    with pytest.raises(error, match=message):
        run(table)

    assert not (tmp_path / "swap").exists()
    if spoil is foreign_output:
        assert [entry.name for entry in (tmp_path / "output").iterdir()] == ["thesis.tex"]


def test_a_full_drive_costs_checkpoints_and_best_weights_and_not_the_run(table, monkeypatch):
    """One that cannot hold a checkpoint at the start is refused. A quota is like a full drive."""
    codes = itertools.cycle([errno.ENOSPC, errno.EDQUOT])

    def refuse(directory, nbytes, *, operation="export", **_):
        raise StorageError(next(codes), operation=operation, path=str(directory), nbytes=nbytes)

    table["checkpoint"] = {"every": 2}
    table["train"] |= {"eval_every": 2, "keep_best": True}
    table["tiers"].pop("nvme")  # A swap directory keeps the step.
    table["placement"] = dict.fromkeys(("parameters", "master", "moments", "gradients"), "host")
    with monkeypatch.context() as patch:
        patch.setattr("infinity.checkpoint.run.save.check_space", refuse)
        patch.setattr(
            "infinity.checkpoint.huggingface.export_weights.check_space",
            lambda path, nbytes: refuse(path, nbytes) if path.name == "best" else None,
        )
        summary, printed = run(table)
    for what in ("checkpoint of step", "best weights of step"):
        assert [f"no {what} {step}" in printed for step in (2, 4)] == [True, True]
    assert summary["best_step"] is None
    assert "No space left" in printed and "Disk quota exceeded" in printed
    assert summary["steps_done"] == 4 and summary["checkpoint"] is None
    card = (Path(summary["export_directory"]) / "README.md").read_text()
    assert "| trained | all weights |" in card and "base_model" not in card
    table["output"]["directory"] += "-2"
    monkeypatch.setattr("infinity.tools.training.job.check_space", refuse)
    with pytest.raises(StorageError, match="checkpoint"):
        run(table)
