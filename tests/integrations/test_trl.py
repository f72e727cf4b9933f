"""TRL's trainers, plain and offloaded: equal to the bit in fp32, with all weights and with LoRA.

One module, because importing TRL takes as long as all of its tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.integrations.hf import prepare_trainer
from infinity.modules.handles.handle import Handle
from tests.support.exhaustive import sampled
from tests.support.offloading import small_tiers

trl = pytest.importorskip("trl", reason="pip install trl")
datasets = pytest.importorskip("datasets", reason="pip install datasets")

WORDS = [
    "a",
    "man",
    "a",
    "plan",
    "a",
    "canal",
    "panama",
    "was",
    "it",
    "a",
    "car",
    "or",
    "a",
    "cat",
    "i",
    "saw",
    "do",
    "geese",
    "see",
    "god",
]
LORA = LoraConfig(
    r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1,
    init_lora_weights=False,
)  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    known = ["<pad>", "<eos>", *dict.fromkeys(WORDS)]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(known)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<eos>"
    )


def make_model(
    *, lora: bool, tied: bool = False, dropout: float = 0.1, width: int = 32, layers: int = 2
) -> Any:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width // 2, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=1, bos_token_id=1, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return get_peft_model(model, dataclasses.replace(LORA, lora_dropout=dropout)) if lora else model


def texts(count: int, start: int) -> list[str]:
    return [" ".join(WORDS[(start + i) % 9 : (start + i) % 9 + 3 + i % 4]) for i in range(count)]


def common(directory: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(directory), "max_steps": 3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "seed": 11, "per_device_eval_batch_size": 2, "eval_steps": 2,
    } | options  # fmt: skip


def evaluated(directory: Path) -> dict[str, Any]:
    return common(directory, eval_strategy="steps")


def parts(columns: dict[str, Any]) -> dict[str, Any]:
    """To train on, and to evaluate on: the last batch is short."""
    held_out = {name: values[:5] for name, values in columns.items()}
    made = datasets.Dataset.from_dict
    return {"train_dataset": made(columns), "eval_dataset": made(held_out)}


def sft(model: Any, directory: Path, reference: Any, **more: Any) -> Any:
    return trl.SFTTrainer(
        model=model, args=trl.SFTConfig(max_length=16, **evaluated(directory)),
        processing_class=tokenizer(), **parts({"text": texts(24, 0)}), **more,
    )  # fmt: skip


def dpo(model: Any, directory: Path, reference: Any, **more: Any) -> Any:
    columns = {"prompt": texts(24, 0), "chosen": texts(24, 3), "rejected": texts(24, 5)}
    return trl.DPOTrainer(
        model=model, ref_model=reference, args=trl.DPOConfig(max_length=24, **evaluated(directory)),
        processing_class=tokenizer(), **parts(columns), **more,
    )  # fmt: skip


def kto(model: Any, directory: Path, reference: Any) -> Any:
    labels = [index % 3 > 0 for index in range(24)]
    columns = {"prompt": texts(24, 0), "completion": texts(24, 3), "label": labels}
    return trl.KTOTrainer(
        model=model, ref_model=reference, args=trl.KTOConfig(max_length=24, **evaluated(directory)),
        processing_class=tokenizer(), **parts(columns),
    )  # fmt: skip


def reward(model: Any, directory: Path, reference: Any) -> Any:
    """With a head of its own on the model's decoder."""
    columns = {"chosen": texts(24, 3), "rejected": texts(24, 5)}
    return trl.RewardTrainer(
        model=model, args=trl.RewardConfig(max_length=24, **evaluated(directory)),
        processing_class=tokenizer(), **parts(columns),
    )  # fmt: skip


def make_scorer() -> Any:
    torch.manual_seed(7)
    config = make_model(lora=False).config
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    lora = dataclasses.replace(LORA, lora_dropout=0.0, task_type="SEQ_CLS")
    return get_peft_model(model, lora)


def grpo(model: Any, directory: Path, reference: Any) -> Any:
    def score(completion_ids: list[list[int]], **unused: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    args = trl.GRPOConfig(num_generations=2, max_completion_length=4, beta=0.0, **common(directory))
    return trl.GRPOTrainer(
        model=model, args=args, reward_funcs=score, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(24, 0)}),
    )  # fmt: skip


def swap(directory: Path) -> dict[str, Any]:
    return {"tiers": small_tiers(directory)}


def in_memory() -> dict[str, Any]:
    return {"tiers": small_tiers(None)}


def history(trainer: Any) -> list[dict[str, Any]]:
    """What was logged of every step, without times."""
    timed = ("time", "runtime", "per_second", "flos")
    return [
        {k: v for k, v in row.items() if not any(word in k for word in timed)}
        for row in trainer.state.log_history
    ]


def same_as_plain(
    make_trainer: Callable[..., Any],
    make: Callable[[], Any],
    tmp_path: Path,
    *,
    has_reference: bool,
    layer_major: bool,
) -> Any:
    """Runs a trainer over plain and over offloaded models, and compares all that they log and every
    weight at the end. Returns the latter trainer."""
    reference = make() if has_reference else None
    plain = make_trainer(make(), tmp_path / "plain", reference)
    plain.train()
    if has_reference:
        reference = infinity.offload(make(), in_memory())
    model = infinity.offload(make(), swap(tmp_path / "swap"))
    trainer = make_trainer(model, tmp_path / "mine", reference)
    mine = prepare_trainer(trainer, layer_major=layer_major)
    mine.train()
    assert history(mine) == history(plain)
    engine = infinity.engine_of(model)
    found = dict(mine.model.named_parameters())  # With the reference adapter that TRL adds.
    found |= {name: engine.read_parameter(name) for name in engine.parameter_names()}
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(found[name], parameter), name
    for each in filter(None, (model, reference)):
        infinity.engine_of(each).close()
    return mine


@pytest.mark.parametrize("kind", ["full", "tied", "lora"])
@pytest.mark.parametrize("make_trainer", [sft, dpo, grpo])
def test_a_trainer_of_trl_gives_the_same_run(
    make_trainer: Callable[..., Any], kind: str, tmp_path: Path
) -> None:
    """The plain loop draws the numbers of dropout in the order of the plain trainer."""
    make = partial(make_model, lora=kind == "lora", tied=kind == "tied")
    has_reference = make_trainer is dpo and kind != "lora"
    mine = same_as_plain(
        make_trainer, make, tmp_path, has_reference=has_reference, layer_major=False
    )
    assert sum("grad_norm" in row for row in history(mine)) == 3


@pytest.mark.parametrize(
    ("make_trainer", "kind"),
    sampled(
        [(sft, "full"), (sft, "lora"), (dpo, "full"), (dpo, "lora"), (kto, "full"), (kto, "lora"),
         (reward, "scorer")],
        lambda case: case not in [(sft, "lora"), (dpo, "full"), (kto, "lora")],
    ),
)  # fmt: skip
def test_a_layer_major_run_of_trl_is_that_of_the_plain_trainer(
    make_trainer: Callable[..., Any], kind: str, tmp_path: Path
) -> None:
    """Token accuracies and rewards of every step and of an evaluation, too."""

    def make() -> Any:
        return make_scorer() if kind == "scorer" else make_model(lora=kind == "lora", dropout=0.0)

    has_reference = make_trainer in (dpo, kto) and kind == "full"
    mine = same_as_plain(
        make_trainer, make, tmp_path, has_reference=has_reference, layer_major=True
    )
    rows = history(mine)
    key = {sft: "mean_token_accuracy", reward: "accuracy"}.get(make_trainer, "rewards/chosen")
    assert sum(key in row for row in rows) == 3 and sum(f"eval_{key}" in row for row in rows) == 2
    assert mine._why_unswept is mine._said_unswept is None


def make_llama4(*, lora: bool = False) -> Any:
    """Llama 4's text model, with experts in every block."""
    torch.manual_seed(7)
    config = Llama4TextConfig(
        hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        interleave_moe_layer_step=1, attention_chunk_size=8, vocab_size=32,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    model = Llama4ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # The experts are zeros.
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return get_peft_model(model, dataclasses.replace(LORA, lora_dropout=0.0)) if lora else model


def named(model: Any) -> Any:
    """Adds the two names that TRL uses and that the classes of Llama 4 lack."""
    llama = model.get_base_model() if hasattr(model, "peft_config") else model
    llama.base_model_prefix, llama.config.num_experts = "model", llama.config.num_local_experts
    return model


@pytest.mark.parametrize("order", [None, False])
@pytest.mark.parametrize(("make_trainer", "lora"), [(sft, False), (sft, True), (dpo, False)])
def test_llama_4_trains_although_its_classes_lack_what_trl_asks_for(
    make_trainer: Callable[..., Any], lora: bool, order: bool | None, tmp_path: Path
) -> None:
    """`base_model` of transformers' Llama4ForCausalLM is the model itself, and its configuration
    has no `num_experts`. The reference is TRL's own trainer over a model with both names."""
    reference = named(make_llama4()) if make_trainer is dpo else None
    plain = make_trainer(named(make_llama4(lora=lora)), tmp_path / "plain", reference)
    plain.train()
    reference = infinity.offload(make_llama4(), in_memory()) if make_trainer is dpo else None
    model = infinity.offload(make_llama4(lora=lora), swap(tmp_path / "swap"))
    mine = prepare_trainer(make_trainer(model, tmp_path / "mine", reference), layer_major=order)
    mine.train()
    assert history(mine) == history(plain)
    assert any("aux_loss" in row for row in history(mine))
    engine = infinity.engine_of(model)
    found = {name: engine.read_parameter(name) for name in engine.parameter_names()}
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(found[name], parameter), name
    mine.save_model(str(tmp_path / "saved"))
    assert '"num_experts"' not in "".join(p.read_text() for p in tmp_path.glob("saved/*.json"))
    for each in filter(None, (model, reference)):
        infinity.engine_of(each).close()


def test_dpo_and_kto_read_their_base_as_often_as_sft(tmp_path: Path, trusted_tests: None) -> None:
    """Twice a step, as counted by the engine: policy and reference pass each block together, and so
    do all micro-batches."""
    options: dict[str, Any] = {"lora": True, "dropout": 0.0, "width": 128, "layers": 10}
    model = make_model(**options)
    base = sum(p.numel() * 4 for n, p in model.named_parameters() if ".layers." in n)
    read = {}
    runs = [(sft, None), (dpo, None), (kto, None), (dpo, False)]
    for make_trainer, order in runs:
        config = swap(tmp_path / "swap")
        config["tiers"]["host"]["capacity"] = "1800KiB"
        config |= {"placement": {"parameters": ["nvme"]}, "schedule": {"prefetch": False}}
        model = infinity.offload(make_model(**options), config)
        trainer = make_trainer(model, tmp_path / "out", None)
        trainer.args.gradient_accumulation_steps = 2
        trainer.args.max_steps, trainer.args.eval_strategy = 2, "no"
        counts: list[float] = []
        with infinity.engine_of(model) as engine:
            trainer.add_callback(CountsReads(engine, counts))
            prepare_trainer(trainer, layer_major=order).train()
        read[make_trainer.__name__, order] = counts[-1] - counts[-2]
    assert read["sft", None] <= 2.1 * base, (read, base)
    assert all(read[name, None] <= 1.03 * read["sft", None] for name in ("dpo", "kto")), read
    assert read["dpo", False] >= 1.3 * 2 * read["dpo", None], "the plain order is counted"


class CountsReads(TrainerCallback):
    def __init__(self, engine: Any, counts: list[float]) -> None:
        self.engine, self.counts = engine, counts

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.counts.append(self.engine.counters.snapshot()["nvme_read_nbytes"])


def test_a_trainer_of_an_offloaded_model_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    with infinity.engine_of(infinity.offload(make_model(lora=False), in_memory())) as engine:
        trainer = sft(engine.model, tmp_path / "a", None)
        with pytest.raises((UnsupportedError, ConfigError), match="prepare_trainer"):
            trainer.train()
    with (
        infinity.engine_of(infinity.offload(make_model(lora=False), in_memory())) as engine,
        pytest.raises(ConfigError, match="Give the adapter to infinity.from_pretrained"),
    ):
        prepare_trainer(sft(engine.model, tmp_path / "b", None, peft_config=LORA))


@pytest.mark.parametrize("make", [sft, dpo])
def test_an_adapter_that_the_trainer_attaches_to_an_offloaded_model_has_the_plain_bits(
    make: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a small parameter that has its value of the constructor alone."""
    model = make_model(lora=False, tied=True)
    model.save_pretrained(tmp_path / "m")

    class Scaled(type(model)):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.full((3,), 0.5))

    scaled = Scaled(model.config)
    scaled.load_state_dict(model.state_dict(), strict=False)
    plain = make(scaled, tmp_path / "plain", None, peft_config=LORA)
    plain.train()
    model = infinity.from_pretrained(tmp_path / "m", swap(tmp_path / "swap"), model_class=Scaled)
    trainer = prepare_trainer(make(model, tmp_path / "out", None, peft_config=LORA))
    trainer.train()
    assert history(trainer) == history(plain)
    with infinity.engine_of(trainer.model) as engine:
        for name, parameter in plain.model.named_parameters():
            assert torch.equal(engine.read_parameter(name), parameter), name
    assert caplog.text.count("is offloaded a second time") == 1


@pytest.mark.parametrize(
    "kind", ["changed weights", "another adapter", "an optimizer", "weights of a program"]
)
def test_an_adapter_of_the_trainer_is_refused_where_the_files_do_not_have_the_rest(
    kind: str, tmp_path: Path
) -> None:
    """The model stays offloaded."""
    plain = make_model(lora=False)
    plain.save_pretrained(tmp_path / "m")
    if kind == "weights of a program":
        model: Any = infinity.offload(plain, {**in_memory(), "model": {"path": tmp_path / "m"}})
    else:
        adapter = LORA if kind == "another adapter" else None
        model = infinity.from_pretrained(tmp_path / "m", in_memory(), adapter)
    if kind == "changed weights":
        with infinity.gather(model.lm_head, modify=True), torch.no_grad():
            model.lm_head.weight.mul_(2)
    if kind == "another adapter":
        model.add_adapter("late", LORA)
        model.set_adapter("late")
        trainer = sft(model, tmp_path / "out", None)
    else:
        own = infinity.AdamW(model) if kind == "an optimizer" else None
        trainer = sft(model, tmp_path / "out", None, peft_config=LORA, optimizers=(own, None))
    with pytest.raises(ConfigError, match="Give the adapter to infinity.from_pretrained"):
        prepare_trainer(trainer)
    assert not infinity.engine_of(model).is_closed
    infinity.close(model)


def test_a_trl_that_is_too_old_is_refused_before_the_model_is_offloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(lora=False)
    trainer = sft(model, tmp_path / "out", None)
    found = {"trl": "1.15.0", "transformers": transformers.__version__}
    monkeypatch.setattr("infinity.config.extras.version", found.__getitem__)
    with pytest.raises(ConfigError, match=r"of SFTTrainer needs trl>=1\.16,<2, got 1\.15\.0"):
        prepare_trainer(trainer, swap(tmp_path))
    assert not any(isinstance(each, Handle) for each in model.parameters())
