"""transformers.Trainer and accelerate, plain and offloaded: equal to the bit in fp32."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import infinity
from infinity.errors import ConfigError, InfinityError
from infinity.integrations.hf import prepare_accelerator, prepare_trainer
from tests.support.offloading import small_tiers


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of a fixed seed, some of whose labels do not count."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 50, (count, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def make_model(
    dtype: torch.dtype = torch.float32, seed: int = 7, **options: Any
) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0,
        eos_token_id=0, **options,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)  # Dropout is on: randomness has to agree too.


def make_lora(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.1)
    return get_peft_model(make_model(dtype, **options), config)


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    options = {
        "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 11,
    } | options  # fmt: skip
    return TrainingArguments(output_dir=str(directory), **options)


def make_trainer(model: Any, directory: Path, **options: Any) -> Trainer:
    args = arguments(directory, **options)
    return Trainer(model=model, args=args, train_dataset=Tokens(40, 1), eval_dataset=Tokens(6, 2))


def swap(directory: Path, **precision: str) -> dict[str, Any]:
    return {"tiers": small_tiers(directory / "swap"), "precision": precision}


def history(trainer: Trainer) -> list[dict[str, Any]]:
    """What was logged of every step and evaluation, without times."""
    keys = "step", "loss", "eval_loss", "grad_norm", "learning_rate"
    return [{k: row[k] for k in keys if k in row} for row in trainer.state.log_history]


@pytest.mark.parametrize("make", [make_model, make_lora], ids=["full", "lora"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.0, "gradient_checkpointing": True}])
def test_trainer_gives_the_same_run(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Losses, norms, learning rates, evaluations; the saved model."""
    plain = make_trainer(make(), tmp_path / "plain", **options)
    plain.train()
    plain.save_model()
    model = infinity.offload(make(), swap(tmp_path))
    # The plain loop draws the numbers of dropout in the order of the plain trainer.
    mine = prepare_trainer(make_trainer(model, tmp_path / "mine", **options), layer_major=False)
    mine.train()
    mine.save_model()
    assert isinstance(mine, Trainer) and isinstance(mine.optimizer, infinity.AdamW)
    rows = history(mine)
    assert rows == history(plain)
    assert (
        sum("grad_norm" in row for row in rows) == 6
        and sum("eval_loss" in row for row in rows) == 2
    )
    assert mine.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    engine = infinity.engine_of(model)
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(engine.read_parameter(name), parameter), name
    saved = sorted(path.name for path in (tmp_path / "mine").glob("*.safetensors"))
    assert saved == [f"{'adapter_model' if make is make_lora else 'model'}.safetensors"]
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "mine").iterdir()} == names
    engine.close()
    if make is make_model:
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    else:
        from peft import PeftModel

        again = PeftModel.from_pretrained(make_model(), tmp_path / "mine")
    with torch.no_grad():
        batch = {"input_ids": Tokens(2, 5).ids}
        assert torch.equal(again.eval()(**batch).logits, plain.model.eval()(**batch).logits)


@pytest.mark.parametrize("make", [make_model, make_lora], ids=["full", "lora"])
def test_resumed_it_is_the_same_run(make: Any, tmp_path: Path) -> None:
    """In bf16: the exported weights alone would lose the masters' low halves."""
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}

    def trainer(name: str, **more: Any) -> Trainer:
        model = make(torch.bfloat16)
        infinity.offload(model, swap(tmp_path / name, compute="bfloat16"))
        return prepare_trainer(make_trainer(model, tmp_path / name / "out", **options, **more))

    def finish(trainer: Trainer) -> dict[str, torch.Tensor]:
        engine = infinity.engine_of(trainer.model)
        state = {n: engine.read_parameter(n, master=True) for n in engine.parameter_names()}
        engine.close()
        return state

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = trainer("whole")
    whole.train()
    cut = trainer("cut")

    def stop(*unused: Any, **more: Any) -> None:
        if cut.state.global_step == 4:
            cut.control.should_training_stop = True

    step = cut.training_step
    cut.training_step = lambda *a, **k: (stop(), step(*a, **k))[1]
    cut.train()
    finish(cut)
    folders = sorted(path.name for path in (tmp_path / "cut" / "out").glob("checkpoint-*"))
    assert folders[-1] == "checkpoint-4" and len(folders) == 2
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=True)
    assert history(resumed) == history(whole)
    expected, actual = finish(whole), finish(resumed)
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []


def test_a_second_run_in_one_directory_overwrites_as_trainer_does(tmp_path: Path) -> None:
    """Its state is the second run's; where it cannot be written, the first run's is still there."""
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no", "max_steps": 2}
    state = tmp_path / "out" / "checkpoint-2" / "infinity"
    for lr in (1e-2, 1e-3):
        model = infinity.offload(make_model(), swap(tmp_path) | {"checkpoint": {}})
        trainer = make_trainer(model, tmp_path / "out", learning_rate=lr, **options)
        prepare_trainer(trainer).train()
        assert [path.name for path in state.iterdir()] == ["step-00000002"]
        (group, _) = trainer.optimizer.param_groups
        group["initial_lr"] = 0.0
        loaded = infinity.checkpoint.load(state, model, trainer.optimizer)
        assert loaded.step == 2 and group["initial_lr"] == lr
        if lr == 1e-3:
            with pytest.raises(ConfigError, match="gradient|extra|expected"):
                group["odd"] = object()  # What no file can hold.
                trainer._save_optimizer_and_scheduler(str(state.parent))
            assert infinity.checkpoint.load(state, model, trainer.optimizer).step == 2
        infinity.engine_of(model).close()


def test_the_trainer_may_be_given_the_optimizer(tmp_path: Path) -> None:
    model = infinity.offload(make_model(), swap(tmp_path))
    optimizer = infinity.AdamW(model, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100)
    trainer = Trainer(
        model=model, args=arguments(tmp_path / "out", eval_strategy="no", max_steps=2),
        train_dataset=Tokens(8, 1), optimizers=(optimizer, scheduler),
    )  # fmt: skip
    prepare_trainer(trainer).train()
    assert trainer.optimizer is optimizer and history(trainer)[0]["learning_rate"] == 1.5e-3
    infinity.engine_of(model).close()


class SlowTokens(Tokens):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        return super().__getitem__(index)


def test_time_that_data_take_has_a_counter(tmp_path: Path) -> None:
    engine = infinity.engine_of(model := infinity.offload(make_model(), swap(tmp_path)))
    args = arguments(tmp_path / "out", eval_strategy="no", max_steps=2)
    trainer = prepare_trainer(Trainer(model=model, args=args, train_dataset=SlowTokens(8, 1)))
    trainer.train()
    assert engine.counters.snapshot()["data_wait_s"] > 2 * 4 * 0.05
    engine.close()


def test_prepare_offloads_with_a_configuration(tmp_path: Path) -> None:
    trainer = make_trainer(make_model(), tmp_path / "out", max_steps=1, eval_strategy="no")
    with pytest.raises(InfinityError, match="not offloaded"):
        prepare_trainer(trainer)
    prepare_trainer(trainer, swap(tmp_path)).train()
    with pytest.raises(ConfigError, match="already"):
        prepare_trainer(trainer, swap(tmp_path))
    prepare_trainer(trainer).evaluate()
    infinity.engine_of(trainer.model).close()


@pytest.mark.parametrize(
    ("options", "said"),
    [({"bf16": True}, "computes in float32"), ({"optim": "adafactor"}, "adamw_torch"),
     ({"torch_compile": True}, "compile the model's blocks")],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_named(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    trainer = make_trainer(make_model(), tmp_path / "out", **options)
    with pytest.raises(ConfigError, match=said):
        prepare_trainer(trainer, swap(tmp_path, compute="float32"))
    assert not (tmp_path / "swap").exists(), "nothing was touched"


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model=model, args=arguments(tmp_path / "o"), train_dataset=Tokens(8, 1),
                      eval_dataset=Tokens(2, 1), optimizers=(plain, None))  # fmt: skip
    with pytest.raises(ConfigError, match="got SGD"):
        prepare_trainer(trainer, swap(tmp_path))


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    plain = make_trainer(make_model(), tmp_path / "out", max_steps=1, save_strategy="steps",
                         save_steps=1, eval_strategy="no")  # fmt: skip
    plain.train()
    trainer = make_trainer(make_model(), tmp_path / "out", max_steps=2, eval_strategy="no")
    prepare_trainer(trainer, swap(tmp_path))
    with pytest.raises(ConfigError, match="another trainer"):
        trainer.train(resume_from_checkpoint=True)
    infinity.engine_of(trainer.model).close()


def loop(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, steps: int
) -> list[float]:
    """An accelerate loop as its documentation has it."""
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.item())
        if len(seen) >= steps * 3:
            break
    return seen


def test_accelerate_loop_is_the_same_and_resumes(tmp_path: Path) -> None:
    def plain(accelerator: Accelerator) -> tuple[Any, Any]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        return accelerator.prepare(model, optimizer)

    def mine(accelerator: Accelerator) -> tuple[Any, Any]:
        model = infinity.offload(make_model(), swap(tmp_path))
        return prepare_accelerator(accelerator, model, infinity.AdamW(model, lr=1e-2))

    runs = {}
    for make in (plain, mine):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = make(accelerator)
        loader = accelerator.prepare(DataLoader(Tokens(16, 1), batch_size=2))
        model.train()
        torch.manual_seed(5)
        runs[make] = loop(accelerator, model, optimizer, loader, 2)
        accelerator.save_state(str(tmp_path / make.__name__))
        runs[make] += loop(accelerator, model, optimizer, loader, 2)
        accelerator.load_state(str(tmp_path / make.__name__))
        runs[make] += loop(accelerator, model, optimizer, loader, 2)
    assert runs[mine] == runs[plain] and len(runs[mine]) == 18
    assert runs[mine][6:12] == runs[mine][12:], "resumed, it is the same again"
    assert not list((tmp_path / "mine").glob("*.safetensors"))
    infinity.engine_of(model).close()
