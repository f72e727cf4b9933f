"""sentence-transformers: its trainer and losses over an offloaded transformer have the bits of the
run in memory, with two changed lines, or none under `infinity run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

import infinity
from infinity.integrations.hf import prepare_trainer
from infinity.tools.drop_in import DropIn

from .test_trl import datasets, swap, texts, tokenizer

st = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
losses = pytest.importorskip("sentence_transformers.losses")
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
PAIRS = {"anchor": texts(24, 0), "positive": texts(24, 3)}
SCORED = PAIRS | {"score": [i / 24 for i in range(24)]}
LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ranking": (losses.MultipleNegativesRankingLoss, PAIRS),
    "cached": (
        lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2), PAIRS
    ),
    "cosine": (losses.CosineSimilarityLoss, SCORED),
}  # fmt: skip


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An encoder, and a decoder as large embedding models are."""
    place = tmp_path_factory.mktemp("embedding")
    torch.manual_seed(1)
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    for name, model in {
        "bert": BertModel(BertConfig(**SMALL, **dropout)),
        "llama": LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=2)),
    }.items():
        model.save_pretrained(place / f"{name}-plain")
        tokenizer().save_pretrained(place / f"{name}-plain")
        made = st.SentenceTransformer(str(place / f"{name}-plain"), device="cpu")
        made.save_pretrained(str(place / name))
    return {name: place / name for name in ("bert", "llama")}


def trainer_over(model: Any, loss: str, directory: Path, **options: Any) -> Any:
    make, columns = LOSSES[loss]
    args = st.SentenceTransformerTrainingArguments(
        str(directory), max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )  # fmt: skip
    data = datasets.Dataset.from_dict(columns)
    return st.SentenceTransformerTrainer(model, args, train_dataset=data, loss=make(model))


def opened(directory: Path, *, lora: bool = False) -> Any:
    model = st.SentenceTransformer(str(directory), device="cpu")
    if lora:
        torch.manual_seed(3)
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def steps(trainer: Any) -> list[tuple[float, float]]:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def vectors(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.encode(texts(5, 1), convert_to_tensor=True)
    return found


@pytest.mark.parametrize(
    ("name", "loss", "lora"),
    [("bert", "ranking", False), ("bert", "cached", False), ("llama", "cosine", False),
     ("llama", "ranking", True)],
)  # fmt: skip
def test_a_loss_of_sentence_transformers_gives_the_same_run(
    directories: dict[str, Path], name: str, loss: str, lora: bool, tmp_path: Path
) -> None:
    """Losses and norms of every step, the embeddings, and those of what is saved."""
    plain = trainer_over(opened(directories[name], lora=lora), loss, tmp_path / "plain")
    plain.train()
    model = opened(directories[name], lora=lora)
    trainer = trainer_over(model, loss, tmp_path / "mine")
    trainer = prepare_trainer(trainer, swap(tmp_path / "swap"))
    trainer.train()
    assert steps(trainer) == steps(plain) and len(steps(plain)) == 4
    assert torch.equal(vectors(model), vectors(plain.model))
    trainer.save_model(str(tmp_path / "saved"))
    infinity.engine_of(model).close()
    assert (tmp_path / "saved" / "modules.json").is_file()
    assert torch.equal(vectors(opened(tmp_path / "saved")), vectors(plain.model))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_program_runs_as_it_is_and_goes_on_from_its_checkpoint(
    directories: dict[str, Path], lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `infinity run` the transformer is built without memory and read from its directory."""
    plain = trainer_over(opened(directories["llama"], lora=lora), "ranking", tmp_path / "plain")
    plain.train()
    monkeypatch.setattr("infinity.modules.reading.empty_weights._KEPT_NBYTES", 0)
    drop_in = DropIn(swap(tmp_path / "swap"))
    for resumed in (False, True):
        with drop_in.installed():
            model = opened(directories["llama"], lora=lora)
            assert any(parameter.is_meta for parameter in model.parameters())
            trainer = trainer_over(
                model, "ranking", tmp_path / "mine", save_strategy="steps", save_steps=2
            )
            checkpoint = str(tmp_path / "mine" / "checkpoint-2") if resumed else None
            trainer.train(resume_from_checkpoint=checkpoint)
        assert steps(trainer) == steps(plain)
        assert torch.equal(vectors(model), vectors(plain.model))
        infinity.engine_of(model).close()
