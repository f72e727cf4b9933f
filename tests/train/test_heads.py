"""`infinity train` with a head over sequences: "reward" and "classify" have the bits of TRL and
transformers, go on after they have died, and leave what PEFT and `infinity score` read."""

from __future__ import annotations

import copy
import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    T5Config,
    XLNetConfig,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typer.testing import CliRunner

from infinity.errors import ConfigError
from infinity.tools.cli import app
from infinity.tools.convert.rewrite import write_directory
from infinity.tools.scoring import program as scoring
from infinity.tools.training.chat import CHATML
from infinity.tools.training.job_data import measure
from infinity.tools.training.merge import plan_merge
from infinity.tools.training.tokenizers import ByteTokenizer
from tests.support.bits import aligned, assert_same
from tests.support.quantized import tiny_causal_lm, write_quantized

from . import plain
from .jobs import lines_of, run_and_kill
from .record_jobs import adapter_job, write
from .test_records import CHAT, PREFERENCES, as_messages, base, metrics, run  # noqa: F401

LABELS = ("even", "odd", "zero")
TEXTS = [{"text": f"the number {i}", "label": i % 2 if i % 3 else LABELS[i % 2]} for i in range(40)]
MARGINS = [record | {"margin": i / 8} for i, record in enumerate(PREFERENCES)]


@pytest.fixture
def table(tmp_path: Path, base: Path) -> dict[str, Any]:  # noqa: F811
    found = adapter_job(tmp_path, base, PREFERENCES, length=128, steps=4)
    found["train"] |= {"method": "reward"}
    return found


def classifying(table: dict[str, Any]) -> dict[str, Any]:
    table["train"] |= {"method": "classify", "labels": LABELS}
    write(Path(table["data"]["paths"][0]), TEXTS)
    return table


def made_plainly(table: dict[str, Any], targets: tuple[str, ...] = ("q_proj", "v_proj")) -> Any:
    """The model as transformers and PEFT make it."""
    is_reward = table["train"]["method"] == "reward"
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(
        table["model"]["path"], num_labels=1 if is_reward else len(LABELS)
    )
    if "adapter" not in table:
        return model
    torch.manual_seed(5)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=[*targets])
    return peft.get_peft_model(model, lora)


@pytest.mark.parametrize(
    ("records", "is_full"),
    [
        (PREFERENCES, True), (MARGINS, False),
        ([as_messages(record) for record in PREFERENCES], False), (TEXTS, True), (TEXTS, False),
    ],
    ids=["texts", "margins", "messages", "labels", "labels-lora"],
)  # fmt: skip
def test_a_head_is_trained_with_the_bits_of_the_plain_trainer(
    tmp_path: Path, table: dict[str, Any], records: list[Any], is_full: bool, monkeypatch: Any
) -> None:
    """Losses and norms of every step, and every weight, which transformers and PEFT load."""
    if is_full:
        del table["adapter"]
    if records is TEXTS:
        table = classifying(table)
    write(tmp_path / "data.jsonl", records)
    run(table)
    model, tokenizer = made_plainly(table), ByteTokenizer().for_records()
    tokenizer.chat_template = CHATML
    monkeypatch.setattr(ByteTokenizer, "for_records", lambda self: tokenizer)
    data = datasets.Dataset.from_list(records if records is not TEXTS else [
        {"label": i % 2, **tokenizer(record["text"])} for i, record in enumerate(TEXTS)
    ])  # fmt: skip
    if records is TEXTS:
        model.config.pad_token_id = tokenizer.pad_token_id
    steps = plain.train(table, model, tmp_path / "plain", data)
    assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]
    output = tmp_path / "output"
    count = 3 if records is TEXTS else 1
    torch.manual_seed(5)  # Of the head that PEFT keeps beside the trained one.
    source = table["model"]["path"] if not is_full else output
    found = AutoModelForSequenceClassification.from_pretrained(source, num_labels=count)
    if not is_full:
        found = peft.PeftModel.from_pretrained(found, output)
    weights = dict(found.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name
    if records is TEXTS and is_full:
        assert found.config.id2label == dict(enumerate(LABELS))


def test_a_classifier_that_was_killed_goes_on_as_if_it_had_not_been(
    tmp_path: Path, table: dict[str, Any], processes: list[Any]
) -> None:
    """Losses, norms and evaluations of every step, and the adapter with its head."""
    table = classifying(table)
    table["data"]["held_out"] = 0.2
    table["train"] |= {"steps": 8, "eval_every": 3, "eval_batches": 2}
    table["checkpoint"] = {"every": 2}
    whole = table | {"output": {"directory": str(tmp_path / "whole")}}
    run(whole)
    (tmp_path / "job.json").write_text(json.dumps(table))
    run_and_kill(tmp_path, 5, processes, "job.json")
    with pytest.raises(ConfigError, match=r"train\.labels is"):
        run(changed_train(table, labels=LABELS[::-1]), resume=True)
    assert run(table, resume=True)["resumed_at"] == 4
    assert metrics(table) == metrics(whole)
    kept, again = (
        [line["held_out_loss"] for line in lines_of(each["output"]["directory"])]
        for each in (whole, table)
    )
    assert [loss is not None for loss in kept] == [False, False, True] * 2 + [False, True]
    assert kept == again
    both = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("output", "whole")
    ]
    assert_same(*both)
    assert any("score" in name for name in both[0])


def changed_train(table: dict[str, Any], **options: Any) -> dict[str, Any]:
    return table | {"train": table["train"] | options}


@pytest.mark.parametrize("has_pad", [False, True])
@pytest.mark.parametrize("method", ["sft", "reward", "classify"])
def test_a_tokenizer_without_an_end_is_refused_by_what_it_lacks(
    table: dict[str, Any], method: str, has_pad: bool
) -> None:
    if method == "classify":
        table = classifying(table)
    table["train"]["method"] = method
    tokenizer, path = ByteTokenizer().for_records(), Path(table["model"]["path"])
    tokenizer.eos_token = None
    if method == "sft":
        write(Path(table["data"]["paths"][0]), [{"text": "one two"}] * 40)
    if not has_pad:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    table["data"]["tokenizer"] = str(path)
    if method == "classify" and has_pad:  # Its texts have no end.
        run(table)
        return
    said = "has no eos_token" if has_pad else f"{path} has neither eos_token nor pad_token"
    with pytest.raises(ConfigError, match=said):
        run(table)


@pytest.mark.parametrize("is_full", [False, True], ids=["lora", "full"])
def test_a_trained_reward_model_is_what_score_reads(
    tmp_path: Path, table: dict[str, Any], is_full: bool
) -> None:
    """The scores are those of a plain forward, and the chosen answers get the higher ones."""
    tokenizer = ByteTokenizer().for_records()
    tokenizer.save_pretrained(table["model"]["path"])
    if is_full:
        del table["adapter"]
    table["train"] |= {"steps": 12, "batch_size": 8}
    commands = run(table)["printed"]
    output, model = tmp_path / "output", Path(table["model"]["path"])
    assert "infinity score" in commands and "infinity chat" not in commands
    answers = [
        {"prompt": record["prompt"], "completion": record[name]}
        for record in PREFERENCES[:6] for name in ("chosen", "rejected")
    ]  # fmt: skip
    data = write(tmp_path / "answers.jsonl", answers)
    request = scoring.Request(
        model=output if is_full else model, data=(data,), output=tmp_path / "scores.jsonl",
        adapter=None if is_full else output, dtype="float32",
    )  # fmt: skip
    scoring.run(request)
    rows = [json.loads(line) for line in request.output.read_text().splitlines()]
    found = AutoModelForSequenceClassification.from_pretrained(
        request.model, num_labels=1, pad_token_id=0, dtype=torch.float32
    )
    found = aligned(found if is_full else peft.PeftModel.from_pretrained(found, output)).eval()
    with torch.no_grad():
        plainly = [found(torch.tensor([row["tokens"]])).logits[0].tolist() for row in rows]
    assert [row["scores"] for row in rows] == plainly
    assert sum(row[0] for row in plainly[::2]) > sum(row[0] for row in plainly[1::2])
    with pytest.raises(ConfigError, match="scores sequences, not tokens"):
        scoring.run(replace(request, top_k=1, output=tmp_path / "other.jsonl"))


NAMED = [record | {"label": LABELS[i % 2]} for i, record in enumerate(TEXTS)]


@pytest.mark.parametrize(
    ("records", "options", "train"),
    [
        pytest.param(
            NAMED,
            [],
            {"method": "classify", "labels": ["even", "odd"]},
            marks=pytest.mark.exhaustive,
        ),
        (PREFERENCES, ["--full"], {"method": "dpo"}),
    ],
    ids=["classify", "dpo-full"],
)
def test_a_new_file_is_planned_and_trains(
    tmp_path: Path, table: dict[str, Any], records: Any, options: list[str], train: dict[str, Any]
) -> None:
    path, file = Path(table["model"]["path"]), tmp_path / "new.toml"
    ByteTokenizer().for_records().save_pretrained(path)
    write(data := tmp_path / "data.jsonl", records)
    command = ["new", str(path), "--data", str(data), "-o", str(file), *options]
    made = CliRunner().invoke(app, command)
    assert made.exit_code == 0, made.output
    planned = CliRunner().invoke(app, ["plan", str(file), "--json"])
    assert planned.exit_code == 0 and json.loads(planned.output)["answer"]["fits"], planned.output
    table = tomllib.loads(file.read_text())
    assert train.items() <= table["train"].items()
    table["train"] |= {"steps": 1, "warmup_steps": 0, "eval_every": 0}
    run(table)
    assert metrics(table)[0][0] > 0


def test_a_quantised_base_and_an_encoder_get_a_head(tmp_path: Path, table: dict[str, Any]) -> None:
    """The linear layers of the blocks have the adapter, and what lies behind them has not."""
    table = classifying(table)
    table["adapter"]["targets"] = ["auto"]
    table["data"]["sequence_length"] = 64
    table["train"]["gradient_accumulation_steps"] = 1
    bert = BertConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(bert).save_pretrained(tmp_path / "bert")
    write_quantized(tiny_causal_lm("llama", vocab_size=256), tmp_path / "awq", "awq")
    for name, part in (("bert", "output.dense"), ("awq", "gate_proj")):
        table["model"]["path"] = str(tmp_path / name)
        table["output"]["directory"] = str(tmp_path / f"{name}-out")
        run(table)
        saved = json.loads((tmp_path / f"{name}-out" / "adapter_config.json").read_text())
        assert part in saved["target_modules"] and saved["task_type"] == "SEQ_CLS"
        assert not {"dense", "classifier", "score", "pooler.dense"} & {*saved["target_modules"]}
        values = load_file(tmp_path / f"{name}-out" / "adapter_model.safetensors")
        (head,) = (value for key, value in values.items() if key.endswith(
            ("model.score.weight", "model.classifier.weight")
        ))  # fmt: skip
        assert head.shape[0] == len(LABELS)
        if name == "bert":
            model = made_plainly(table, saved["target_modules"])
            data = datasets.Dataset.from_list([
                {"label": i % 2, **ByteTokenizer().for_records()(record["text"])}
                for i, record in enumerate(TEXTS)
            ])  # fmt: skip
            steps = plain.train(table, model, tmp_path / "plain", data)
            assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]


WITH_DECODERS = {
    "t5": T5Config(
        vocab_size=256, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    ),
    "bart": BartConfig(
        vocab_size=256, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=2, eos_token_id=1,
        decoder_start_token_id=1,
    ),
    "xlnet": XLNetConfig(
        vocab_size=256, d_model=32, n_layer=2, n_head=2, d_inner=48, dropout=0.0, pad_token_id=0,
        summary_last_dropout=0.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "is_full"), [("t5", False), ("bart", True), ("xlnet", False)])
def test_an_encoder_with_a_decoder_and_one_without_a_last_position_learn_as_plainly(
    name: str, is_full: bool, tmp_path: Path, table: dict[str, Any]
) -> None:
    """A tokenizer ends each text, as those of T5 and BART do: their heads read that token."""
    table, path = classifying(table), Path(table["model"]["path"])
    table["adapter"]["targets"] = ["auto"]
    table["data"]["sequence_length"] = 64
    if is_full:
        del table["adapter"]
    shutil.rmtree(path)
    torch.manual_seed(3)
    AutoModel.from_config(WITH_DECODERS[name]).save_pretrained(path)
    tokenizer, end = copy.deepcopy(ByteTokenizer().for_records()), bytes_to_unicode()[1]
    tokenizer.eos_token = end
    post = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 1)])
    tokenizer.backend_tokenizer.post_processor = post
    tokenizer.save_pretrained(path)
    run(table)
    torch.manual_seed(5)
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(LABELS))
    if not is_full:
        saved = json.loads((tmp_path / "output" / "adapter_config.json").read_text())
        targets = {key: saved[key] for key in ("target_modules", "modules_to_save")}
        torch.manual_seed(5)
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, **targets)
        model = peft.get_peft_model(model, lora)
    data = datasets.Dataset.from_list([
        {"label": i % 2, **tokenizer(record["text"])} for i, record in enumerate(TEXTS)
    ])  # fmt: skip
    steps = plain.train(table, model, tmp_path / "plain", data, tokenizer)
    assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]
    if name == "xlnet":
        return
    endless = TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.backend_tokenizer.post_processor = endless
    tokenizer.save_pretrained(path)
    with pytest.raises(ConfigError, match=r"record 1 .* has 0 end tokens \(1\), at which the head"):
        run(table)
    text = write(tmp_path / "text.jsonl", TEXTS[:1])
    request = scoring.Request(
        model=tmp_path / "output" if is_full else path, data=(text,), output=tmp_path / "s.jsonl",
        adapter=None if is_full else tmp_path / "output",
    )  # fmt: skip
    if is_full:
        tokenizer.save_pretrained(request.model)
    with pytest.raises(ConfigError, match=r"record 1 has no end token \(1\)"):
        scoring.run(request)


def test_the_types_of_tokens_are_no_more_tokens() -> None:
    """BERT's tokenizer writes a type for each."""
    ids = {"input_ids": [[1, 2, 3]], "token_type_ids": [[0, 0, 0]], "label": [0]}
    assert measure(datasets.Dataset.from_dict(ids), (), 8)[:2] == (3, 3)


def test_an_adapter_has_all_that_its_base_lacks(tmp_path: Path, table: dict[str, Any]) -> None:
    """DeBERTa's base has no pooler. `infinity score` and PEFT agree, whatever the seed of a load;
    a text may have one token."""
    table = classifying(table)
    table["adapter"]["targets"] = ["auto"]
    path, output = Path(table["model"]["path"]), tmp_path / "output"
    DebertaV2Model(DebertaV2Config(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=256, type_vocab_size=0,
        pooler_hidden_size=32, pooler_dropout=0.0,
    )).save_pretrained(path)  # fmt: skip
    ByteTokenizer().for_records().save_pretrained(path)
    run(table)
    data = write(tmp_path / "texts.jsonl", [{"text": "the number 3"}, {"text": "a"}])
    request = scoring.Request(
        model=path, data=(data,), output=tmp_path / "s.jsonl", adapter=output, dtype="float32"
    )
    scoring.run(request)
    rows = [json.loads(line) for line in request.output.read_text().splitlines()]
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(LABELS))
        model = peft.PeftModel.from_pretrained(model, output).eval()
        for parameter in model.parameters():  # Mapped files: products of a row round by alignment.
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            plainly = [model(torch.tensor([row["tokens"]])).logits[0].tolist() for row in rows]
        assert [row["scores"] for row in rows] == plainly
    with pytest.raises(ConfigError, match=r"lacks '.*', which the adapter has: there is no tensor"):
        plan_merge(path, output)


@pytest.mark.parametrize(
    ("train", "records", "message"),
    [
        ({"labels": ("a", "b")}, None, 'expected labels with method = "classify"'),
        ({"method": "classify"}, None, 'expected labels with method = "classify"'),
        ({"method": "classify", "labels": ("a", "a")}, None, "at least two, each once"),
        ({"sample": {"prompt": "a"}}, None, "writes no text"),
        ({}, TEXTS, "expected chosen and rejected"),
        ({"method": "sft"}, PREFERENCES, 'set train.method = "dpo" or "reward"'),
        ({"method": "classify", "labels": LABELS}, CHAT, "record 1: label: expected one of"),
        (
            {"method": "classify", "labels": LABELS}, [{"text": "a", "label": 3}],
            "record 1: label: expected one of .* from 0 to 2; got 3",
        ),
        (
            {"method": "classify", "labels": ("2", "1", "0")}, [{"text": "a", "label": 0}],
            "record 1: label: expected '0' in quotes",
        ),
        (
            {"method": "classify", "labels": LABELS}, [*TEXTS[:2], {"text": "", "label": 0}],
            "record 3: text: it has no token",
        ),
    ],
)  # fmt: skip
def test_what_a_head_cannot_learn_is_refused(
    tmp_path: Path, table: dict[str, Any], train: dict[str, Any], records: Any, message: str
) -> None:
    table["train"] |= train
    if records:
        write(tmp_path / "data.jsonl", records)
    with pytest.raises(ConfigError, match=message):
        run(table)
    assert not (tmp_path / "swap").exists()


def test_another_head_or_an_adapter_of_text_is_refused(
    tmp_path: Path, table: dict[str, Any]
) -> None:
    write(tmp_path / "data.jsonl", TEXTS)
    sft = table | {"adapter": {"rank": 2}, "output": {"directory": str(tmp_path / "sft")}}
    run(changed_train(sft, method="sft", steps=1))
    table["adapter"] = {"resume": str(tmp_path / "sft")}
    with pytest.raises(ConfigError, match="is for CAUSAL_LM, and a Llama.* is for SEQ_CLS"):
        run(classifying(table))
    del table["adapter"]
    run(changed_train(classifying(table), steps=1))
    table["model"]["path"], table["output"] = table["output"]["directory"], {"directory": "other"}
    with pytest.raises(ConfigError, match="knows even, odd, zero, in this order"):
        run(changed_train(table, labels=LABELS[::-1]))
    table["adapter"], table["output"] = {"rank": 2}, {"directory": str(tmp_path / "over")}
    run(changed_train(table, steps=1))
    merged = tmp_path / "merged"
    write_directory(plan_merge(Path(table["model"]["path"]), tmp_path / "over"), merged)
    model = AutoModelForSequenceClassification.from_pretrained(table["model"]["path"])
    model = peft.PeftModel.from_pretrained(model, tmp_path / "over").merge_and_unload()
    assert_same(load_file(merged / "model.safetensors"), model.state_dict())
