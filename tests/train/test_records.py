"""`infinity train` over records: conversations, completions, preferences, texts, in any format."""

from __future__ import annotations

import contextvars
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.tools.training.chat import CHATML
from infinity.tools.training.records import load_records
from infinity.tools.training.tokenizers import ByteTokenizer

from . import plain
from .jobs import metrics, run
from .record_jobs import MODEL, adapter_job, rows_of, write

CHAT = [
    {"messages": [
        {"role": "user", "content": f"what is {i} squared?"},
        {"role": "assistant", "content": str(i * i)},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes" * (i % 3 + 1)},
    ]}
    for i in range(40)
]  # fmt: skip
COMPLETIONS = [{"prompt": f"{i} squared is ", "completion": str(i * i)} for i in range(40)]
PREFERENCES = [
    {"prompt": f"{i} squared is ", "chosen": str(i * i), "rejected": str(i + 7)} for i in range(40)
]
TEXTS = [{"text": f"{i} and {i * i}"} for i in range(40)]


def as_messages(record: dict[str, str]) -> dict[str, Any]:
    role = {"prompt": "user"}
    return {k: [{"role": role.get(k, "assistant"), "content": v}] for k, v in record.items()}


LORA = peft.LoraConfig(
    task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(MODEL, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def table(tmp_path: Path, base: Path) -> dict[str, Any]:
    """An adapter over conversations; tests change what they are about."""
    return adapter_job(tmp_path, base, CHAT, length=128, steps=6)


def adapted(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(5)
    return peft.get_peft_model(model, LORA)


@pytest.mark.parametrize(
    ("records", "options"),
    [
        (CHAT, {"assistant_only_loss": True}),
        (CHAT, {"assistant_only_loss": True, "packing": True}),
        (COMPLETIONS, {}),
        (TEXTS, {}),
        (PREFERENCES, {"beta": 0.2}),
        ([as_messages(record) for record in COMPLETIONS], {}),
        ([as_messages(record) for record in PREFERENCES], {"beta": 0.2}),
    ],
    ids=["conversations", "packed", "completions", "texts", "preferences", "asked", "preferred"],
)
def test_a_run_over_records_has_the_bits_of_trl_and_peft_in_memory(
    tmp_path, table, base, records, options, monkeypatch
) -> None:
    """Losses and norms of every step, and the adapter. TRL gets the records as they are."""
    write(tmp_path / "data.jsonl", records)
    if "beta" in options:
        table["train"] |= {"method": "dpo", "dpo_beta": options["beta"]}
    table["data"]["packing"] = options.get("packing", False)
    if options.get("packing"):
        table["train"] |= {"batch_size": 1, "steps": 3}
    run(table)
    model = adapted(base)
    tokenizer = ByteTokenizer().for_records()
    tokenizer.chat_template = CHATML
    monkeypatch.setattr(ByteTokenizer, "for_records", lambda self: tokenizer)
    data = datasets.Dataset.from_list(records)
    steps = plain.train(table, model, tmp_path / "plain", data, **options)
    assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]
    saved = load_file(tmp_path / "output" / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(model, adapter_name="default")
    assert saved.keys() == expected.keys() and saved
    for name, value in saved.items():
        assert torch.equal(value, expected[name]), name


def test_a_token_of_a_preference_counts_once(tmp_path, table) -> None:
    """A prompt of 4 bytes twice, answers of 3 and 2, and the end of each."""
    records = [{"prompt": "aaaa", "chosen": "bbb", "rejected": "cc"}] * 8
    write(tmp_path / "data.jsonl", records)
    table["train"] |= {"method": "dpo", "steps": 1}
    train = SwapConfig.load(table).train
    run(table)
    [line] = (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()
    num_records = train.batch_size * train.gradient_accumulation_steps
    assert json.loads(line)["num_tokens"] == num_records * (2 * 4 + 3 + 2 + 2)


def test_all_weights_learn_preferences_against_the_model_before_training(
    tmp_path, table, base, monkeypatch
) -> None:
    """The reference is offloaded, too: nothing of the run loads a model into memory. A run that
    goes on refuses another one."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a whole model was loaded")

    write(tmp_path / "data.jsonl", PREFERENCES)
    del table["adapter"]
    table["train"] |= {"method": "dpo", "steps": 3}
    table["checkpoint"] = {"directory": str(tmp_path / "checkpoints"), "every": 3}
    with monkeypatch.context() as patch:
        patch.setattr("trl.trainer.dpo_trainer.create_model_from_path", refuse)
        run(table)
    model = AutoModelForCausalLM.from_pretrained(base)
    steps = plain.train(table, model, tmp_path / "plain", datasets.Dataset.from_list(PREFERENCES))
    assert metrics(table) == [(loss, norm) for loss, norm, _ in steps]
    table["model"]["path"] = table["output"]["directory"]
    table["output"] = {"directory": str(tmp_path / "on")}
    with pytest.raises(ConfigError, match="the SHA-256 of the base "):
        run(table, resume=True)


def test_packed_records_do_not_see_each_other(tmp_path, table) -> None:
    """The first loss of four in one sequence is that of a batch of four."""
    write(tmp_path / "data.jsonl", CHAT[:4])
    table["data"] |= {"sequence_length": 512, "shuffle": False}
    table["data"]["sequence_length"] = 256
    table["train"] |= {"steps": 1, "batch_size": 4, "gradient_accumulation_steps": 1}
    write(tmp_path / "data.jsonl", COMPLETIONS[:4])
    run(table)
    apart = metrics(table)
    table["data"]["packing"] = True
    table["train"]["batch_size"] = 1
    run(table)
    assert metrics(table)[0] == pytest.approx(apart[0], rel=1e-4)


def test_every_format_gives_the_same_rows(tmp_path, table) -> None:
    table["data"] |= {"tokenizer": "bytes"}
    found = {"jsonl": rows_of(table)}
    records = datasets.Dataset.from_list(CHAT)
    (tmp_path / "data.json").write_text(json.dumps(CHAT))
    records.to_parquet(tmp_path / "data.parquet")
    records.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": records}).save_to_disk(tmp_path / "splits")
    (tmp_path / "many").mkdir()
    write(tmp_path / "many" / "a.jsonl", CHAT[:15])
    write(tmp_path / "many" / "b.jsonl", CHAT[15:])
    for name in ("data.json", "data.parquet", "saved", "splits", "many"):
        table["data"]["paths"] = [str(tmp_path / name)]
        found[name] = rows_of(table)
    assert len(found["jsonl"][0]) == 40
    assert all(rows == found["jsonl"] for rows in found.values()), found.keys()


PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Writes the last message of the assistant with a sign that earlier ones lose, as reasoning models.
FORGETTING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}*{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "B"},
    {"role": "user", "content": "c"}, {"role": "assistant", "content": "D"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, [("[user]a\n[assistant]B\n[user]c\n[assistant]D\n", "B\nD\n")]),
        (MARKED, [("[user]a\n[assistant]B!\n[user]c\n[assistant]D!\n", "B!D!")]),
        (
            FORGETTING,
            [("[user]a\n[assistant]*B\n", "*B\n"),
             ("[user]a\n[assistant]B\n[user]c\n[assistant]*D\n", "*D\n")],
        ),
        (
            None,
            [("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
              "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nD<|im_end|>\n",
              "B<|im_end|>\nD<|im_end|>\n")],
        ),
    ],
    ids=["plain", "marked", "forgetting", "none"],
)  # fmt: skip
def test_the_template_decides_what_is_learned(tmp_path, table, template, expected) -> None:
    write(tmp_path / "data.jsonl", [{"messages": TALK}])
    table["train"]["batch_size"] = 1
    assert rows_of(table, template)[0] == expected
    table["data"]["assistant_only_loss"] = False
    whole = rows_of(table, template)[0]
    assert len(whole) == 1 and whole[0][0] == whole[0][1]


SHAREGPT = [
    {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]}
]  # fmt: skip
ALPACA = [{"instruction": "a?", "input": "", "output": "b"}]
ALPACA_INPUT = [{"instruction": "a", "input": "?", "output": "b"}]


@pytest.mark.parametrize(
    ("records", "asked"), [(SHAREGPT, "a?"), (ALPACA, "a?"), (ALPACA_INPUT, "a\n\n?")]
)
def test_records_of_sharegpt_and_alpaca_are_read_as_conversations(tmp_path, records, asked) -> None:
    found = load_records([write(tmp_path / "records.jsonl", records)])
    assert found.column_names == ["messages"]
    assert found[0]["messages"] == [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("name", "broken", "said"),
    [("b.jsonl", '{"text": "a"}\n{oops\n', "b.jsonl:2 is no JSON"), ("b.json", '[{"a":', "b.json ca")],
)  # fmt: skip
def test_an_empty_file_does_not_hide_a_broken_one(tmp_path, name, broken, said) -> None:
    empty, other = tmp_path / name.replace("b.", "a."), tmp_path / name
    empty.touch()
    other.write_text(broken)
    with pytest.raises(ConfigError, match=said) as caught:
        load_records([empty, other])
    assert "is empty" not in str(caught.value) and empty.name not in str(caught.value)


def test_only_what_completes_a_prompt_is_learned(tmp_path, table) -> None:
    write(tmp_path / "data.jsonl", COMPLETIONS)
    rows, _ = rows_of(table)
    assert rows[3] == ("3 squared is 9\0", "9\0")
    table["data"]["assistant_only_loss"] = False
    assert rows_of(table)[0][3] == ("3 squared is 9\0", "3 squared is 9\0")


def test_a_long_conversation_is_cut_and_one_without_an_answer_is_left_out(
    tmp_path, table, caplog
) -> None:
    silent = {"messages": [{"role": "user", "content": "hello?"}]}
    write(tmp_path / "data.jsonl", [*CHAT[:3], silent])
    table["data"]["sequence_length"] = 70
    rows, _ = rows_of(table)
    assert [len(text) for text, _ in rows] == [70] * 3
    assert "1 conversations have no assistant" in caplog.text
    assert "end-of-turn token" not in caplog.text, "<|im_end|> is learned, in several tokens"
    table["data"]["sequence_length"] = 16  # Ends before the first answer.
    with pytest.raises(ConfigError, match="0 are left .* raise data.sequence_length"):
        rows_of(table)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "data.jsonl:2 is no JSON: .* Repair or remove that line"),
        ("[1]", "data.jsonl:2 is no object"),
        ('{"messages": [{"content": "a"}]}', r"record 2: messages\[0\]: expected an object with"),
        ('{"messages": []}', r'record 2: expected a list "messages" that is not empty'),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_place(tmp_path, table, line, said) -> None:
    path = write(tmp_path / "data.jsonl", CHAT[:1])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=said):
        run(table)
    assert not (tmp_path / "swap").exists()


@pytest.mark.parametrize(
    ("records", "data", "train", "said"),
    [
        ([{"asked": "a", "told": "b"}] * 4, {}, {}, "have the columns asked, told; exp"),
        (PREFERENCES, {}, {}, 'holds preferences, which .* set train.method = "dpo"'),
        (CHAT, {}, {"method": "dpo"}, "holds conversations, which .* expected chosen and rejected"),
        (CHAT, {"max_bytes": "1kB"}, {}, "data.max_bytes limits text"),
        ([], {}, {}, "data.jsonl is empty; expected records: messages"),
        (CHAT[:1], {}, {}, "1 record, 0 of them held out: 1 are left for train.batch_size=2"),
        (
            CHAT,
            {"eval_paths": ["{tmp}/text.txt"]},
            {},
            r"data.eval_paths: .* holds plain text, and data.paths .* holds conversations",
        ),
        (CHAT, {"paths": ["{tmp}/data.jsonl", "{tmp}/text.txt"]}, {}, "holds records and .* not"),
        (CHAT, {"paths": ["{tmp}/text.txt"]}, {"method": "dpo"}, "text.txt is text; train.method"),
        (CHAT, {}, {"report_to": ["wandb"]}, "wandb is not installed.*pip install wandb"),
    ],
)
def test_data_that_the_run_cannot_learn_is_refused_before_a_swap_file(
    tmp_path, table, records, data, train, said
) -> None:
    write(tmp_path / "data.jsonl", records)
    (tmp_path / "text.txt").write_text("text " * 100)
    table["data"] |= json.loads(json.dumps(data).replace("{tmp}", str(tmp_path)))
    table["train"] |= train
    with pytest.raises(ConfigError, match=said):
        run(table)
    assert not (tmp_path / "swap").exists()


def test_a_token_without_an_embedding_is_refused(tmp_path, table) -> None:
    small = LlamaConfig(**MODEL.to_diff_dict() | {"vocab_size": 100})
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"token 124 \(b'|'\) .* vocabulary of 100"):
        run(table)
    assert not (tmp_path / "swap").exists()


def test_epochs_count_the_steps(table) -> None:
    del table["train"]["steps"]
    table["train"]["epochs"] = 1.5
    assert run(table)["steps_asked"] == 15
    assert len(metrics(table)) == 15


def test_a_file_of_its_own_is_evaluated_on_and_the_best_weights_are_kept(tmp_path, table) -> None:
    """The loss on other records rises at some point of a rate that is too high; the run ends."""
    write(tmp_path / "eval.jsonl", CHAT[30:])
    write(tmp_path / "data.jsonl", CHAT[:8])
    table["data"]["eval_paths"] = [str(tmp_path / "eval.jsonl")]
    table["train"] |= {
        "steps": 60, "eval_every": 2, "early_stopping_patience": 2, "keep_best": True,
        "eval_batches": 2,
    }  # fmt: skip
    table["optimizer"]["lr"] = 0.1
    summary = run(table)
    losses = {each["step"]: each["loss"] for each in summary["held_out_losses"]}
    best = min(losses, key=lambda step: losses[step])
    assert summary["stopped_early"] and summary["best_step"] == best
    assert summary["steps_done"] == best + 2 * 2 < 60
    kept = load_file(tmp_path / "output" / "best" / "adapter_model.safetensors")
    table["train"] |= {"steps": best, "early_stopping_patience": 0, "keep_best": False}
    run(table)
    last = load_file(tmp_path / "output" / "adapter_model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in last.items())


def test_trackers_get_losses_rates_evaluations_and_bytes(tmp_path, table) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path / "eval.jsonl", CHAT[30:])
    table["data"]["eval_paths"] = [str(tmp_path / "eval.jsonl")]
    table["train"] |= {"steps": 4, "eval_every": 2, "report_to": "tensorboard", "log_every": 2}
    run(table)
    (file,) = (tmp_path / "output").rglob("*tfevents*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    losses = {each.step: each.value for each in events.Scalars("train/loss")}
    own = [loss for loss, _ in metrics(table)]
    assert losses == pytest.approx({1: own[0], 2: own[1], 4: (own[2] + own[3]) / 2}, rel=1e-6)
    assert [each.step for each in events.Scalars("eval/loss")] == [2, 4]
    tags = events.Tags()["scalars"]
    assert {"train/learning_rate", "train/grad_norm", "train/tokens_per_s"} <= set(tags)
    assert {"train/read_gb_per_s", "train/stall_share", "train/epoch"} <= set(tags)


def test_trackio_gets_the_run_of_a_project_by_its_directory(tmp_path, table, monkeypatch) -> None:
    calls: dict[str, Any] = {"logged": []}
    trackio = types.ModuleType("trackio")
    trackio.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    trackio.__version__ = "0.43.0"
    trackio.config = type("Config", (dict,), {"update": lambda self, other, **_: None})()
    trackio.context_vars = types.SimpleNamespace(current_space_id=contextvars.ContextVar("space"))
    trackio.context_vars.current_space_id.set(None)
    trackio.init = lambda **options: calls.update(options)
    trackio.log = lambda values, **_: calls["logged"].append(values)
    trackio.finish = lambda: calls.update(finished=True)
    trackio.log_system = trackio.log_artifact = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    table["train"] |= {"steps": 2, "report_to": "trackio"}
    run(table)
    assert calls["project"] == "infinity" and calls["name"] == "output"
    assert calls["space_id"] is None, "nothing leaves the machine"
    losses = [each["train/loss"] for each in calls["logged"] if "train/loss" in each]
    assert losses == pytest.approx([loss for loss, _ in metrics(table)], rel=1e-6)
    assert calls["finished"]


def test_a_resumed_run_keeps_the_patience_and_the_place_in_its_epoch(tmp_path, table) -> None:
    """Stopped between two evaluations without a new lowest loss, in the second epoch."""
    write(tmp_path / "eval.jsonl", CHAT[30:])
    write(tmp_path / "data.jsonl", CHAT[:9])
    table["data"]["eval_paths"] = [str(tmp_path / "eval.jsonl")]
    table["train"] |= {
        "steps": 40, "eval_every": 1, "early_stopping_patience": 3, "eval_batches": 2,
        "keep_best": True,
    }  # fmt: skip
    table["adapter"]["dropout"] = 0.2
    table["optimizer"]["lr"] = 0.2
    table["checkpoint"] = {"every": 1, "keep": 40}
    whole = run(table)
    assert whole["stopped_early"]
    lines = metrics(table)
    last_but_one = tmp_path / "output" / "checkpoints" / f"step-{whole['steps_done'] - 1:08d}"
    table["output"] = {"directory": str(tmp_path / "again")}
    again = run(table, resume_from=last_but_one)
    assert again["stopped_early"] and again["steps_done"] == 1
    assert again["best_step"] is None  # The best weights are in the first directory.
    # Once more: the run is at its end, unless it gets more patience.
    table["output"] = {"directory": str(tmp_path / "output")}
    ended = run(table, resume=True)
    assert ended["steps_done"] == 0 and ended["best_step"] == whole["best_step"]
    table["train"] |= {"early_stopping_patience": 4}
    assert run(table, resume=True)["steps_done"] >= 1
    # Two evaluations in a row had no lower loss when the step was saved: nothing had been stopped.
    table["train"] |= {"early_stopping_patience": 2}
    table["output"] = {"directory": str(tmp_path / "less")}
    less = run(table, resume_from=last_but_one)
    assert less["stopped_early"] and less["steps_done"] == 0
    assert "patience=2 evaluations in a row without a new lowest loss" in less["printed"]
    assert "had been stopped" not in less["printed"]
    table["train"] |= {"early_stopping_patience": 3}
    third = tmp_path / "output" / "checkpoints" / "step-00000003"
    table["output"] = {"directory": str(tmp_path / "third")}
    run(table, resume_from=third)
    assert metrics(table) == lines[3:]
