"""`infinity train` with "embed": the bits of SentenceTransformerTrainer in memory, after a run has
died, too; what is written is a SentenceTransformer."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from typer.testing import CliRunner

from infinity.errors import ConfigError
from infinity.tools.cli import app
from infinity.tools.training.job_data import split_rows
from tests.integrations.test_sentence_transformers import SMALL, losses, st, steps, vectors
from tests.integrations.test_trl import datasets, texts, tokenizer
from tests.support.exhaustive import sampled

from . import plain
from .jobs import lines_of, metrics, run, run_and_kill
from .record_jobs import adapter_job, write

modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
BERT = BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
QWEN3 = Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False)
A, B, C = (texts(30, start) for start in (0, 3, 5))
PAIRS = [{"anchor": a, "positive": b} for a, b in zip(A, B, strict=True)]
TRIPLETS = [row | {"negative": c} for row, c in zip(PAIRS, C, strict=True)]
BESIDE = [{"sentence1": a, "sentence2": b} for a, b in zip(A, B, strict=True)]
SCORED = [row | {"score": i / 30} for i, row in enumerate(BESIDE)]
LABELLED = [row | {"label": i % 2} for i, row in enumerate(BESIDE)]
RANKING = "MultipleNegativesRankingLoss"
# A directory, the targets of an adapter, a loss with its options, and records.
CASES: list[tuple[str, list[str], str, dict[str, float], list[Any]]] = [
    ("bert", [], RANKING, {}, PAIRS),
    ("bert", ["query"], f"Cached{RANKING}", {"mini_batch_size": 2}, TRIPLETS),
    ("qwen", ["q_proj", "v_proj"], RANKING, {"scale": 10.0}, PAIRS),
    ("qwen", [], "TripletLoss", {"triplet_margin": 2}, TRIPLETS),
    ("causal", ["q_proj"], "CoSENTLoss", {}, SCORED),
    ("causal", [], "ContrastiveLoss", {"margin": 0.7}, LABELLED),
    ("masked", [], "AnglELoss", {}, SCORED),
    ("masked", ["value"], "OnlineContrastiveLoss", {}, LABELLED),
    ("bert", [], "CosineSimilarityLoss", {}, SCORED),
    ("bert", [], "MultipleNegativesSymmetricRankingLoss", {}, PAIRS),
    ("bert", [], "CachedMultipleNegativesSymmetricRankingLoss", {}, PAIRS),
]  # fmt: skip


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with modules of sentence-transformers, and with another head and no such modules."""
    place = tmp_path_factory.mktemp("bases")
    torch.manual_seed(1)
    for name, model in {
        "bert": BertModel(BERT), "masked": BertForMaskedLM(BERT),
        "qwen": Qwen3Model(QWEN3), "causal": Qwen3ForCausalLM(QWEN3),
    }.items():  # fmt: skip
        model.save_pretrained(place / name)
        tokenizer().save_pretrained(place / name)
    for name, rest in {
        "bert": [modules.Pooling(32, "mean")],
        "qwen": [modules.Pooling(32, "lasttoken"), modules.Normalize()],
        "dense": [modules.Pooling(32, "mean"), modules.Dense(32, 16)],
    }.items():
        first = modules.Transformer(str(place / ("bert" if name == "dense" else name)))
        whole = st.SentenceTransformer(modules=[first, *rest], device="cpu")
        whole.save_pretrained(str(place / name), create_model_card=False)
    return place


def job(tmp_path: Path, base: Path, records: list[Any], loss: str = RANKING) -> dict[str, Any]:
    table = adapter_job(tmp_path, base, records, length=6, steps=4)
    table["train"] |= {"method": "embed", "batch_size": 4, "embed": {"loss": loss}}
    return table


def in_memory(table: dict[str, Any], rows: list[Any], held_out: Any = None) -> tuple[Any, Any]:
    """The same run by sentence-transformers and PEFT alone: its model and its trainer."""
    told, made = table["train"]["embed"], list[Any]()
    model = st.SentenceTransformer(table["model"]["path"], device="cpu")
    model.max_seq_length = table["data"]["sequence_length"]
    if targets := table.get("adapter", {}).get("targets"):
        torch.manual_seed(5)
        model.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    loss = getattr(losses, told["loss"])(model, **told.get("options", {}))
    held_out = held_out and datasets.Dataset.from_list(held_out)

    def trainer(**options: Any) -> Any:
        made.append(st.SentenceTransformerTrainer(loss=loss, eval_dataset=held_out, **options))
        return made[0]

    plain.KINDS["embed"] = trainer, st.SentenceTransformerTrainingArguments
    options = {"eval_strategy": "steps", "eval_steps": 3} if held_out else {}
    plain.train(
        table, model, Path(table["output"]["directory"]).with_name("plain"),
        datasets.Dataset.from_list(rows), tokenizer(), prompts=told.get("prompts"),
        per_device_eval_batch_size=4, **options,
    )  # fmt: skip
    return model, made[0]


@pytest.mark.parametrize(("tier", "case"), [*zip(["host", "nvme"] * 6, CASES, strict=False)])
def test_a_loss_has_the_bits_of_its_trainer_and_the_output_its_embeddings(
    tmp_path: Path, directories: Path, tier: str, case: Any
) -> None:
    """Losses and norms of every step, on each tier; sentence-transformers loads what is written."""
    name, targets, loss, options, records = case
    table = job(tmp_path, directories / name, records, loss)
    table["train"]["embed"] |= {"options": options}
    if "anchor" in records[0]:
        table["train"]["embed"] |= {"prompts": {"anchor": "panama "}}
    table["adapter"]["targets"] = targets
    if not targets:
        del table["adapter"]
        kinds = ("parameters", "master", "moments", "gradients")
        table["placement"] = {kind: [tier] for kind in kinds}
    said = run(table)["printed"]
    model, trainer = in_memory(table, records)
    assert metrics(table) == steps(trainer) and len(steps(trainer)) == 4
    output = table["output"]["directory"]
    found = st.SentenceTransformer(output, device="cpu")
    assert f"SentenceTransformer({output!r})" in said
    assert torch.equal(vectors(found), vectors(model)) and found.max_seq_length == 64
    before = st.SentenceTransformer(table["model"]["path"], device="cpu")
    assert not torch.equal(vectors(found), vectors(before))
    assert [type(part) for part in found] == [type(part) for part in before]


def test_a_run_that_was_killed_in_a_second_epoch_goes_on_as_if_it_had_not_been(
    tmp_path: Path, directories: Path, processes: list[Any]
) -> None:
    """Losses, norms and held-out losses are those of a run in memory that never stopped."""
    table = job(tmp_path, directories / "bert", PAIRS)
    table["adapter"]["targets"] = ["query", "value"]
    table["data"]["held_out"] = 0.2
    table["train"] |= {"steps": 7, "eval_every": 3}
    table["checkpoint"] = {"every": 4}
    (tmp_path / "job.json").write_text(json.dumps(table))
    run_and_kill(tmp_path, 5, processes, "job.json")
    assert run(table, resume=True)["resumed_at"] == 4
    parts = split_rows(len(PAIRS), held_out=0.2, seed=0, shuffle=True)
    model, trainer = in_memory(table, *([PAIRS[i] for i in part] for part in parts))
    assert metrics(table) == steps(trainer)
    held = [line["held_out_loss"] for line in lines_of(table["output"]["directory"])]
    log = trainer.state.log_history
    assert [held[2], held[5]] == [row["eval_loss"] for row in log if "eval_loss" in row][:2]
    found = st.SentenceTransformer(table["output"]["directory"], device="cpu")
    assert torch.equal(vectors(found), vectors(model))


@pytest.mark.parametrize(
    ("name", "records"),
    sampled([("bert", PAIRS), ("causal", SCORED)], lambda case: case[0] == "bert"),
)
def test_a_new_file_is_planned_and_trains(
    tmp_path: Path, directories: Path, name: str, records: list[Any]
) -> None:
    file, data = tmp_path / "job.toml", write(tmp_path / "data.jsonl", records)
    made = CliRunner().invoke(
        app, ["new", str(directories / name), "--data", str(data), "-o", str(file)]
    )
    assert made.exit_code == 0, made.output
    table = tomllib.loads(file.read_text())
    loss = RANKING if records is PAIRS else "CoSENTLoss"
    assert table["train"]["embed"] == {"loss": loss} and "schedule" not in table
    planned = CliRunner().invoke(app, ["plan", str(file), "--json"])
    assert planned.exit_code == 0, planned.output
    batch = json.loads(planned.output)["batch"]
    assert batch["num_micro_batches"] == 2 * table["train"]["gradient_accumulation_steps"]
    table["train"] |= {"steps": 1, "warmup_steps": 0}
    run(table)
    assert metrics(table)[0][0] > 0  # A loss that compares records, of a batch that has several.
    assert len(st.SentenceTransformer(table["output"]["directory"], device="cpu")) == 2


@pytest.mark.parametrize(
    ("sections", "records", "message"),
    [
        ({"train": {"embed": {"loss": "DenoisingAutoEncoderLoss"}}}, PAIRS, "train.embed.loss"),
        ({"train": {"embed": {"loss": RANKING, "options": {"margin": 1}}}}, PAIRS, "margin"),
        ({"train": {"embed": {"loss": RANKING, "prompts": {"query": "q"}}}}, PAIRS, "query is no column"),
        ({"train": {"embed": {"loss": "CoSENTLoss"}}}, PAIRS, "2 texts and a score"),
        ({"train": {"batch_size": 1}}, PAIRS, "compares the records of a batch"),
        ({"train": {"embed": {"loss": "TripletLoss"}}}, PAIRS, "3 texts and no score"),
        ({}, SCORED, "2 or more texts and no score"),
        ({}, [*PAIRS[:9], {"anchor": "a", "positive": " "}], "record 10: positive: it has no token"),
        ({}, [{"text": "a plan"}] * 9, "expected anchor and positive"),
        (
            {"model": {"path": "causal"}, "train": {"method": "sft", "embed": None}}, PAIRS,
            'set train.method = "embed"',
        ),
        ({"schedule": {"micro_batch": 2}}, PAIRS, "compares the records of a batch"),
        ({"data": {"packing": True}}, PAIRS, "takes each record by itself"),
        ({"data": {"tokenizer": "bytes"}}, PAIRS, "modules and tokenizer in model.path"),
        ({"model": {"path": "dense"}}, PAIRS, "Pooling, Dense and 2.linear.weight; expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused(
    tmp_path: Path, directories: Path, sections: dict[str, Any], records: list[Any], message: str
) -> None:
    table = job(tmp_path, directories / sections.get("model", {}).get("path", "bert"), records)
    del table["adapter"]
    for name, keys in sections.items():
        if name != "model":
            table[name] = table.get(name, {}) | keys
    with pytest.raises(ConfigError, match=message):
        run(table)
    assert not (tmp_path / "swap").exists()
