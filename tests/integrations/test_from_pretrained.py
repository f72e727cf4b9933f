"""A model in one call, and a program that is run as it is."""

from __future__ import annotations

import json
import logging
import pickle
import runpy
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import infinity
from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.tools.chat import open_writer
from infinity.tools.drop_in import DropIn
from infinity.tools.pretrained import choose_config
from tests.support.commands import run_command
from tests.support.offloading import small_tiers
from tests.support.quantized import tiny_causal_lm

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAPTER = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
ZERO = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "nvme"},
        "offload_optimizer": {"device": "cpu"},
    },
    "bf16": {"enabled": "auto"},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    "train_batch_size": 8,
}
PROGRAM = """
import sys
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
args = SFTConfig("out", max_steps=2, warmup_steps=0.5, report_to=[], use_cpu=True, disable_tqdm=True,
                 **({"deepspeed": "zero.json"} if sys.argv[1:] else {}))
trainer = SFTTrainer("./model", args, peft_config=LoraConfig(target_modules="all-linear"),
                     train_dataset=load_dataset("json", data_files="chat.jsonl", split="train"))
trainer.train()
trainer.save_model()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    runpy.run_path(str(EXAMPLES / "make_model.py"))["make"](str(directory / "m"), 32, 2)
    return directory / "m"


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.arange(32).view(2, 16)
    loss: torch.Tensor = model(ids, labels=ids).loss.detach()
    infinity.close(model)
    return loss


def test_one_call_gives_the_model_of_four_lines(made: Path, tmp_path: Path) -> None:
    """The adapter is that of the seed, and the program's own random numbers go on."""
    swap = {"tiers": small_tiers(tmp_path / "swap")}
    with infinity.init_empty_weights(swap):
        config = AutoConfig.from_pretrained(made)
        by_hand: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(5)
    by_hand = get_peft_model(by_hand, LoraConfig(**ADAPTER))
    with torch.no_grad():
        for name, parameter in by_hand.named_parameters():
            if "lora_B" in name:  # A value that shows the adapter in the loss.
                parameter.fill_(0.1)
    infinity.offload(by_hand, swap, weights=made)
    expected = loss_of(by_hand)
    state = torch.get_rng_state()
    model = infinity.from_pretrained(made, swap, LoraConfig(**ADAPTER), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    with infinity.gather(model, modify=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    assert model.generation_config.eos_token_id == 256 and model.config.name_or_path == str(made)
    assert torch.equal(loss_of(model), expected)


def test_the_file_of_a_run_gives_its_adapter_and_options_their_model(
    made: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[tiers.host]\ncapacity = "64MiB"\n[adapter]\nrank = 4\n')
    model = infinity.from_pretrained(made, file, dtype="float32")
    assert model.peft_config["default"].r == 4 and model.dtype is torch.float32
    infinity.close(model)
    with pytest.raises(ConfigError, match="leave one of them out"):
        infinity.from_pretrained(made, file, LoraConfig(**ADAPTER))
    head = infinity.from_pretrained(
        made, {}, model_class=AutoModelForSequenceClassification, num_labels=3
    )
    assert head.num_labels == 3 and head.score.out_features == 3
    infinity.close(head)
    for options, said in (({"device_map": "auto"}, "places"), ({"dtype": "float16"}, "float16")):
        with pytest.raises(ConfigError, match=said):
            infinity.from_pretrained(made, {}, **options)


def test_without_a_file_it_takes_memory_and_says_so(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine whose memory is too small for the state gets a swap directory."""
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, "infinity"):
        infinity.close(infinity.from_pretrained(made))
    assert "state on host;" in caplog.text and not (tmp_path / "m-swap").exists()
    table = json.loads((made / "config.json").read_text())
    (tmp_path / "large").mkdir()
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000, "head_dim": 256}
    (tmp_path / "large" / "config.json").write_text(json.dumps(table | wide))
    monkeypatch.setattr("infinity.tools.plan.draft.available_host_nbytes", lambda: 3 << 29)
    config = choose_config(Path("large"))
    assert config.tiers.nvme[0].path == tmp_path / "large-swap"
    assert config.placement.moments == ("host", "nvme")


def test_configurations_of_deepspeed_and_of_accelerate_are_translated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "zero.json").write_text(json.dumps(ZERO))
    plugin = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "nvme",
              "offload_optimizer_device": "cpu"}  # fmt: skip
    start = {"distributed_type": "DEEPSPEED", "mixed_precision": "no"}
    for name, table in (("named", {"deepspeed_config_file": "zero.json"}), ("plain", plugin)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**start, "deepspeed_config": table}))
    found = [SwapConfig.load(tmp_path / f"{name}.json") for name in ("zero", "named", "plain")]
    for config in found:
        assert config.placement.parameters == ("nvme",) and config.placement.master == ("host",)
        assert config.tiers.nvme[0].path == tmp_path / "nvme"
    assert caplog.text.count("is a DeepSpeed configuration") == 3
    with pytest.raises(ConfigError, match="accelerate configuration of FSDP"):
        SwapConfig.load({"distributed_type": "FSDP"})
    with pytest.raises(ConfigError, match="amp"):
        SwapConfig.load({**ZERO, "amp": {"enabled": True}})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", [[], ["deepspeed"]], ids=["chosen", "deepspeed"])
def test_a_program_of_trl_runs_as_it_is(
    arguments: list[str], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model by name, `peft_config`, TRL's own bf16 and `deepspeed=`: no line is changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").symlink_to(made)
    record = made / ".cache/huggingface/download/config.json.metadata"  # Of `hf download`.
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(f"{'0123456789' * 4}\netag\n1.0\n")
    (tmp_path / "chat.jsonl").symlink_to(EXAMPLES / "chat.jsonl")
    (tmp_path / "zero.json").write_text(json.dumps(ZERO))
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr("sys.argv", ["program.py", *arguments])
    drop_in = DropIn()
    with drop_in.installed():
        ran = runpy.run_path("program.py", run_name="__main__")
    assert drop_in.offloaded == [str(Path("model"))]
    engine = infinity.engine_of(ran["trainer"].model)
    assert bool(engine.config.tiers.nvme) is bool(arguments)
    chosen = "constant_with_warmup" if arguments else "linear"
    assert ran["trainer"].args.lr_scheduler_type == chosen
    for wrong, said in (
        ({"optimizer": {"params": {"lr": 3}}}, "is 3, and learning_rate of the arguments is 5e-05"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, r"adam_beta2 of .* is \[0.9, 0.999\]"),
        ({"train_batch_size": 9}, "train_batch_size is 9, and .* of the arguments is 8"),
        ({"scheduler": {"params": {"warmup_num_steps": 3}}}, "is 3, and warmup_steps .* is 2"),
        ({"scheduler": {"params": {"total_num_steps": 9}}}, "is 9, and max_steps .* is 4"),
    ):
        with DropIn().installed(), pytest.raises(ConfigError, match=said):
            args = TrainingArguments("out", max_steps=4, warmup_steps=0.5, deepspeed=wrong)
            Trainer(torch.nn.Linear(1, 1), args, train_dataset=[{"x": 1}]).train()
    for count in (0, 1):  # Without a warm-up, transformers writes 1. The first batch is asked for.
        wish = {"scheduler": {"params": {"warmup_num_steps": count}}}
        with DropIn().installed(), pytest.raises(ValueError, match="was empty"):
            args = TrainingArguments("out", max_steps=4, deepspeed=wish)
            Trainer(torch.nn.Linear(1, 1), args, train_dataset=[{"x": 1}]).train()
    assert b"infinity" not in pickle.dumps(args)  # As training_args.bin.
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(value.any() for name, value in adapter.items() if "lora_B" in name)
    card = (tmp_path / "out" / "README.md").read_text()
    rows = ("base | m, commit 012345678901 of the hub", "trained | lora of rank 8", "time | ")
    assert [row for row in rows if f"| {row}" not in card] == [] and "base_model" not in card, card
    engine.close()
    assert isinstance(AutoModelForCausalLM.from_pretrained(made).lm_head.weight.sum().item(), float)


def losses_of(model: Any, directory: Path) -> list[float]:
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(32).view(4, 8)]
    args = TrainingArguments(
        str(directory), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("kept_nbytes", [0, 64 << 10])
def test_what_a_program_writes_before_the_trainer_is_kept_and_two_trainers_follow(
    kept_nbytes: int, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.modules.reading.empty_weights._KEPT_NBYTES", kept_nbytes)

    def losses() -> list[float]:
        model: Any = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
        head, *norms = (torch.randn(259, 32), torch.full((32,), 0.5), torch.full((32,), 2.0))
        with torch.no_grad():
            model.lm_head.weight.copy_(head)
        model.load_state_dict({"model.norm.weight": norms[0]}, strict=False)
        model.model.layers[0].input_layernorm.weight = torch.nn.Parameter(norms[1])
        return [*losses_of(model, tmp_path / "out"), *losses_of(model, tmp_path / "out")]

    torch.manual_seed(0)
    expected = losses()
    torch.manual_seed(0)
    with DropIn({"tiers": small_tiers(tmp_path / "swap")}).installed():
        assert losses() == expected


def test_a_part_of_a_small_weight_or_buffer_written_before_the_trainer_is_kept(
    tmp_path: Path,
) -> None:
    """Also past autograd, by `.data`."""
    base = tiny_causal_lm("deepseek-v3", dtype=torch.float32, vocab_size=259)
    for layer in base.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.uniform_()
    base.save_pretrained(tmp_path / "base")

    def losses() -> list[float]:
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        first, second, third = model.model.layers
        with torch.no_grad():
            first.input_layernorm.weight.mul_(3)
            second.mlp.gate.e_score_correction_bias[0] = 2
        third.mlp.gate.e_score_correction_bias.data = torch.arange(8.0)
        third.input_layernorm.weight.data[:9] = 7
        model.model.norm.weight.data = torch.linspace(0, 1, 192)
        return losses_of(model, tmp_path / "out")

    torch.manual_seed(0)
    expected = losses()
    torch.manual_seed(0)
    with DropIn({"tiers": small_tiers(tmp_path / "swap")}).installed():
        assert losses() == expected


def test_a_part_of_a_new_head_written_before_its_value_is_refused(
    made: Path, tmp_path: Path
) -> None:
    for write in (lambda head: head[0].fill_(1), lambda head: head.data.fill_(1)):
        with DropIn({}).installed():
            model: Any = AutoModelForSequenceClassification.from_pretrained(made)
            with torch.no_grad():
                write(model.score.weight)
            with pytest.raises(ConfigError, match=r"'score\.weight' was changed before it had"):
                losses_of(model, tmp_path / "out")


def test_a_model_that_no_trainer_trains_says_what_to_do(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "plain.py").write_text("import torch; torch.nn.Linear(2, 2)")
    assert run_command("run", tmp_path / "plain.py").exit_code == 0
    assert "plain.py: `infinity run` has offloaded no model" in caplog.text
    with DropIn().installed():
        model = AutoModelForCausalLM.from_pretrained(made)
    with pytest.raises(ConfigError, match=r"infinity\.from_pretrained"):
        model(torch.arange(4).view(1, 4))


def test_a_conversation_that_fills_the_positions_of_the_model_begins_anew(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer that is cut off says so, and so does the next line."""
    shutil.copytree(made, tmp_path / "m")
    table = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(table | {"max_position_embeddings": 64}))
    said = run_command(
        "chat", tmp_path / "m", "--temperature", 0, "--system", "Be brief", input="aaaa\nbb\n\n"
    )
    assert said.exit_code == 0, said.output
    assert "fills the model's 64 positions, so it begins anew" in said.stderr
    assert "the text ends here: it fills the model's 64 positions" in caplog.text
    long = run_command("chat", tmp_path / "m", input=f"{'a' * 80}\n\n")
    assert long.exit_code == 2 and "shorten the text" in long.output


def test_a_text_is_that_of_the_model_in_memory(made: Path, tmp_path: Path) -> None:
    """Of a directory of weights, and of an adapter that names it; nothing is trained."""
    plain: Any = AutoModelForCausalLM.from_pretrained(made)
    adapted = get_peft_model(plain, LoraConfig(**ADAPTER))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    ids, texts = [84, 104, 101, 32], []
    for directory in (made, tmp_path / "adapter"):
        pieces: list[str] = []
        writer = open_writer(directory, {"tiers": {"host": {"capacity": "64MiB"}}})
        new = writer.write(ids, num_tokens=12, temperature=0, say=pieces.append)
        assert "moments" not in infinity.describe(writer.model).resting
        writer.model.generation_config.eos_token_id = new[3]
        end = new.index(new[3])
        assert writer.write(ids, num_tokens=12, temperature=0, say=lambda _: None) == new[:end]
        writer.model.config.max_position_embeddings = 5
        assert len(writer.write(ids, num_tokens=12, temperature=0, say=lambda _: None)) <= 1
        with pytest.raises(ConfigError, match="fewer tokens than the model's 5 positions, got 5"):
            writer.write([*ids, 1], num_tokens=12, temperature=0, say=lambda _: None)
        writer.close()
        with torch.no_grad(), adapted.disable_adapter() if directory == made else nullcontext():
            prompt = torch.tensor([ids])
            expected = adapted.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
            )
        assert new == expected[0, len(ids) :].tolist()
        assert "".join(pieces) == writer.tokenizer.decode(new)
        texts.append(new)
    assert texts[0] != texts[1], "the adapter is there"
