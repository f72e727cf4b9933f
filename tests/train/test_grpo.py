"""`infinity train` with method = "grpo" or "rloo": the losses of plain TRL, a server that samples,
a run that goes on after it has died, and what is refused before weights are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeForCausalLM,
)

from infinity.checkpoint import weight_source
from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.integrations import rollouts
from infinity.integrations.rollouts import AdapterReward
from infinity.integrations.sampler import ServerSampler
from infinity.integrations.server_layouts import over_its_base
from infinity.tools.training import program
from infinity.tools.training.base_identity import identify, write_identity
from infinity.tools.training.chat import CHATML
from infinity.tools.training.tokenizers import ByteTokenizer
from tests.support.quantized import tiny_causal_lm
from tests.support.sampling_server import SamplingServer
from tests.train.jobs import lines_of, write_job

STEPS, PROMPTS = 4, [f"{i} squared is " for i in range(12)]
JOB = """
[tiers]
host = {{capacity = "48MiB"}}
device = {{kind = "cpu"}}
[model]
path = "{base}"
{adapter}
[data]
paths = ["prompts.jsonl"]
sequence_length = 64
held_out = 0
[output]
directory = "output"
export = false
[optimizer]
lr = 1e-2
weight_decay = 0.0
max_grad_norm = "off"
[train]
method = "{method}"
steps = 4
batch_size = 2
gradient_accumulation_steps = 2
threads = 1
[train.grpo]
{grpo}
{rest}
"""
ADAPTER = '[adapter]\nresume = "{base}/../adapter"'
DIFFERENCE = "sampling/sampling_logp_difference/"


def num_ones(
    completion_ids: list[list[int]], label: list[int | None], **unused: Any
) -> list[float]:
    """The reward: of the bits of the tokens, as far from a column of the records as they may."""
    pairs = zip(completion_ids, label, strict=True)
    return [sum(map(int.bit_count, ids)) - 0.5 * (number or 0) for ids, number in pairs]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an adapter beside it."""
    directory = tmp_path_factory.mktemp("grpo") / "base"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip
    model.save_pretrained(directory)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model, config).save_pretrained(directory.parent / "adapter")
    return directory


def rows_of(*, is_chat: bool) -> list[dict[str, Any]]:
    prompts: Any = [[{"role": "user", "content": p[0]}] for p in PROMPTS] if is_chat else PROMPTS
    return [{"prompt": prompt, "label": i % 5} for i, prompt in enumerate(prompts)]


def judge_at(directory: Path, base: Path, seed: int = 5) -> Path:
    """A reward model."""
    torch.manual_seed(seed)
    config = LlamaConfig.from_pretrained(base, num_labels=1, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(directory)
    ByteTokenizer().for_records().save_pretrained(directory)
    return directory


def judging_adapter_at(directory: Path, base: Path, seed: int = 5, *, num_labels: int = 1) -> Any:
    """A reward model over the base: saves an adapter and a head, and returns the whole of it."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=2, target_modules=["k_proj", "down_proj"], init_lora_weights=False, task_type="SEQ_CLS"
    )
    model: Any = LlamaForSequenceClassification.from_pretrained(base, num_labels=num_labels)
    judge = peft.get_peft_model(model, config).eval()
    judge.save_pretrained(directory)
    tokenizer = ByteTokenizer().for_records()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    whole = judge.get_base_model()
    whole.config._name_or_path = str(directory)  # Where TRL looks for the tokenizer.
    return whole


def job_of(directory: Path, base: Path, *, method: str = "grpo", adapter: str = ADAPTER,
           rest: str = "", is_chat: bool = False, **grpo: Any) -> Path:  # fmt: skip
    usual = {"num_generations": 2, "max_completion_length": 4}
    usual["rewards"] = [f"{__name__}:{num_ones.__name__}"]
    options = "\n".join(f"{k} = {json.dumps(v)}" for k, v in (usual | grpo).items())
    adapter = adapter.format(base=base)
    text = JOB.format(base=base, method=method, adapter=adapter, grpo=options, rest=rest)
    directory.mkdir(parents=True, exist_ok=True)
    write_job(directory, text)
    rows = [json.dumps(row) for row in rows_of(is_chat=is_chat)]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return directory / "job.toml"


def train(job: Path, **options: Any) -> list[dict[str, Any]]:
    program.train(SwapConfig.load(job), **options)
    return lines_of(job.parent / "output")


def plain(
    base: Path,
    method: str,
    rows: Any,
    reward: Any,
    *,
    lora: bool,
    beta: float,
    directory: Path,
    rank: int = 0,
) -> list[Any]:
    """What plain TRL logs."""
    torch.set_num_threads(1)
    model: Any = LlamaForCausalLM.from_pretrained(base)
    if lora:
        model = peft.PeftModel.from_pretrained(model, base.parent / "adapter", is_trainable=True)
    kind = {"grpo": "GRPO", "rloo": "RLOO"}[method]
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(directory), max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.0, max_grad_norm=0.0,
        lr_scheduler_type="constant", optim="adamw_torch_fused", logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, bf16=False, seed=0, data_seed=0,
        num_generations=2, max_completion_length=4, beta=beta, remove_unused_columns=False,
    )  # fmt: skip
    tokenizer = ByteTokenizer().for_records()
    tokenizer.chat_template = CHATML
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=args, reward_funcs=reward, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    torch.manual_seed(rank)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    ("method", "lora", "options"),
    [
        ("grpo", True, {"beta": 0.1}),
        ("grpo", False, {"is_chat": True}),
        pytest.param("grpo", False, {"beta": 0.1}, marks=pytest.mark.exhaustive),
        ("rloo", True, {"beta": 0.1}),
        ("grpo", True, {"reward_model": "../judge", "rewards": []}),
        pytest.param(
            "grpo", True, {"reward_model": "../adapter", "rewards": [], "beta": 0.1},
            marks=pytest.mark.exhaustive,
        ),
        ("rloo", True, {"reward_model": "../adapter", "beta": 0.1, "is_chat": True}),
        ("grpo", True, {"reward_model": "../adapter", "rewards": []}),
    ],
)  # fmt: skip
def test_a_run_is_that_of_plain_trl(
    method: str, lora: bool, options: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    beta = options.get("beta", 0.0)
    reward: Any = num_ones
    options = dict(options)
    if (which := options.get("reward_model")) == "../judge":
        reward = options["reward_model"] = str(judge_at(tmp_path / "judge", base))
    elif which:
        options["reward_model"] = str(tmp_path / "judge")
        judge = judging_adapter_at(tmp_path / "judge", base)
        reward = [num_ones, judge] if "rewards" not in options else judge
    rows = rows_of(is_chat=options.get("is_chat", False))
    expected = plain(base, method, rows, reward, lora=lora, beta=beta, directory=tmp_path / "plain")
    if which == "../adapter":  # It gets ChatML, as in the training of a reward model.
        (tmp_path / "judge" / "chat_template.jinja").unlink()
    job = job_of(tmp_path, base, method=method, adapter=ADAPTER * lora, **options)
    lines = train(job)
    assert len(lines) == len(expected) == STEPS
    for line, row in zip(lines, expected, strict=True):
        for name in ("loss", "reward", "entropy", *(["kl"] if beta else [])):
            assert line[name] == row[name], (name, line, row)
    assert len({line["reward"] for line in lines}) > 1
    seen = sum(line["num_tokens"] for line in lines)
    assert seen == expected[-1]["num_tokens"] and isinstance(seen, int)


def test_an_adapter_over_the_same_base_rewards_in_the_sweep_of_the_log_probabilities(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_call, were_scored = AdapterReward.__call__, []

    def call(self: AdapterReward, *prompts: Any, **options: Any) -> list[float]:
        were_scored.append(self.rewards is not None)
        return plain_call(self, *prompts, **options)

    monkeypatch.setattr(AdapterReward, "__call__", call)
    judging_adapter_at(tmp_path / "judge", base)
    other = replace(identify(weight_source(base)), samples_sha256="0" * 64)
    write_identity(other, tmp_path / "judge")
    adapter = f"{ADAPTER}\nany_base = true"
    options = {"rewards": [], "reward_model": str(tmp_path / "judge"), "adapter": adapter}
    train(job_of(tmp_path / "beside", base, beta=0.1, **options))
    job = job_of(tmp_path / "two", base, method="rloo", beta=0.1, **options)
    job.write_text(job.read_text().replace("accumulation_steps = 2", "accumulation_steps = 4"))
    with monkeypatch.context() as patched:  # Eight calls in two sweeps. The second has space.
        patched.setattr(rollouts, "MOST_BATCHES", 6)
        train(job)
    assert were_scored == [True] * 2 * STEPS
    train(job_of(tmp_path / "alone", base, **options))  # Asks for no log-probabilities.
    assert were_scored == [True] * 2 * STEPS + [False] * STEPS


def test_a_step_may_learn_fewer_prompts_than_a_batch_has_completions(
    base: Path, tmp_path: Path
) -> None:
    """The reward gets a column that the first record does not have."""
    job = job_of(tmp_path, base, num_generations=4)
    job.write_text(job.read_text().replace("batch_size = 2", "batch_size = 4"))
    rows = [{"prompt": "a"}, {"prompt": "b", "label": 2}, {"prompt": "c", "label": 3}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert [line["step"] for line in train(job)] == [1, 2, 3, 4]


def server_of(base: Path, **faults: Any) -> SamplingServer:
    return SamplingServer(lambda: LlamaForCausalLM.from_pretrained(base), **faults)


def test_a_server_samples_and_a_run_that_it_has_ended_goes_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lines of a run that nothing has interrupted. It removes the adapter that a killed
    one has left, not that of a living one."""
    left = tmp_path / "again" / "output" / "sampler"
    rest, lines = "[checkpoint]\nevery = 2", []
    with server_of(base).running() as url:
        job = job_of(tmp_path / "whole", base, rest=rest, sampler=url)
        lines.append(train(job))
    with server_of(base, dies_after=5).running() as url:
        job = job_of(tmp_path / "again", base, rest=rest, sampler=url)
        with (
            monkeypatch.context() as patched,
            pytest.raises(ConfigError, match="does not answer: .* from its last checkpoint"),
        ):
            patched.setattr(ServerSampler, "_forget", lambda _: None)
            train(job)
        assert len(lines_of(job.parent / "output")) == 2 and len([*left.iterdir()]) == 3
    alive = left / next(left.iterdir()).name.replace(f"-{os.getpid()}-", "-1-")
    alive.mkdir()
    with server_of(base).running() as url:  # At another address.
        job = job_of(tmp_path / "again", base, rest=rest, sampler=url)
        lines.append(train(job, resume=True))
    assert [*left.iterdir()] == [alive]
    for whole, again in zip(*lines, strict=True):
        for name in ("loss", "reward", "entropy", DIFFERENCE + "mean", DIFFERENCE + "max"):
            assert whole[name] == again[name], name
        assert whole[DIFFERENCE + "max"] < 1e-5


@pytest.mark.parametrize("make", [judge_at, judging_adapter_at])
def test_a_run_goes_on_with_a_reward_model_that_was_moved_and_not_with_another(
    make: Callable[..., Any], base: Path, tmp_path: Path
) -> None:
    rest = "[checkpoint]\nevery = 2"
    for name, seed in (("judge", 5), ("moved", 5), ("other", 6)):
        make(tmp_path / name, base, seed)
        job = job_of(tmp_path, base, rest=rest, rewards=[], reward_model=str(tmp_path / name))
        if name == "other":
            with pytest.raises(ConfigError, match="the SHA-256 of the reward model"):
                train(job, resume=True)
        else:
            assert len(train(job, resume=name == "moved")) == STEPS


def short(prompts: list[str], trainer_state: Any, **unused: Any) -> Any:
    return [1.0] * (len(prompts) - trainer_state.global_step)


async def raising(label: list[int], trainer_state: Any, **unused: Any) -> Any:
    return [1.0 / (1 - trainer_state.global_step) for _ in label]


@pytest.mark.parametrize(("reward", "said"), [
    (short, "ValueError: The reward function 'short' returned 3 rewards, but 4"),
    (raising, r"ZeroDivisionError: .* \(.*test_grpo.py:\d+\)"),
])  # fmt: skip
def test_a_reward_that_fails_is_named_with_its_step_and_its_prompts(
    reward: Any, said: str, base: Path, tmp_path: Path
) -> None:
    job = job_of(tmp_path, base, rewards=[f"{__name__}:{reward.__name__}"])
    what = f"{reward.__name__} fails in step 2, of the prompts '. squared is ', '. squared is ': "
    with pytest.raises(ConfigError, match=what + said):
        train(job)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": "http://127.0.0.1:1"}, "does not answer"),
        ({"sampler": "vllm"}, 'sampler: expected "transformers" or http'),
        ({"sampler": "http://127.0.0.1:1", "adapter": ""}, "this run trains all weights"),
        (
            {"sampler": "http://127.0.0.1:1", "method": "rloo"},
            'expected "transformers" with method = "rloo"',
        ),
        ({"method": "sft"}, r'expected \[train.grpo\] with method = "grpo" or "rloo"'),
        ({"num_generations": 3}, "num_generations|divisible"),
        ({"max_completion_length": 52}, "expected 1 to 12: data.sequence_length=64"),
        ({"rewards": ["nowhere:at_all"]}, "train.grpo.rewards: nowhere:at_all: No module"),
        ({"rewards": ["json:at_all"]}, "module 'json' has no attribute 'at_all'; expected module:"),
        ({"rewards": ["json.decoder"]}, "rewards: json.decoder: it is a module; expected module:"),
        ({"rewards": ["broken:reward"]}, "rewards: broken:reward: .*line 1.*; expected module:"),
        ({"rewards": []}, "expected rewards, reward_model or both"),
        ({"max_completion_length": 64}, "max_completion_length: expected at most 63: a prompt"),
        ({"reward_model": "nowhere"}, "expected a directory of a model; got "),
        ({"reward_model": "output"}, "output.directory and train.grpo.reward_model are the same"),
    ],
)
def test_what_cannot_be_is_refused_before_a_tier_is_touched(
    options: dict[str, Any],
    said: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "broken.py").write_text("def reward(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = job_of(tmp_path, base, **options)
    with pytest.raises(ConfigError, match=said):
        train(job)
    assert not (tmp_path / "output" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("change", "said"), [
    ({"adapter": ""}, "is an adapter, which scores over the frozen base of .adapter.; expected"),
    ({"num_labels": 2}, "gives 2 scores; expected one"),
    ({"layers": 1}, r"has 'base_model.model.model.layers.1.* beside them"),
    ({"width": 8}, "score.weight' has shape .1, 8., expected .1, 16."),
    ({"token": "other"}, "reward_model: .*judge has another tokenizer than bytes; expected the"),
])  # fmt: skip
def test_a_rewarding_adapter_that_does_not_fit_is_refused(
    change: dict[str, Any], said: str, base: Path, tmp_path: Path
) -> None:
    judging_adapter_at(tmp_path / "judge", base, num_labels=change.get("num_labels", 1))
    if "width" in change:
        file = tmp_path / "judge" / "adapter_model.safetensors"
        values = load_file(file)
        values["base_model.model.score.weight"] = torch.zeros(1, change["width"])
        save_file(values, file)
    if "token" in change:
        tokenizer = ByteTokenizer().for_records()
        tokenizer.add_tokens([change["token"]])
        tokenizer.save_pretrained(tmp_path / "judge")
    if "layers" in change:
        file = tmp_path / "judge" / "adapter_config.json"
        table = json.loads(file.read_text()) | {"layers_to_transform": [0]}
        file.write_text(json.dumps(table))
    options = {"rewards": [], "reward_model": str(tmp_path / "judge")}
    job = job_of(tmp_path, base, adapter=change.get("adapter", ADAPTER), **options)
    with pytest.raises(ConfigError, match=said):
        train(job)
    assert not (tmp_path / "output" / "metrics.jsonl").exists()


def test_a_server_gets_each_expert_by_its_name_in_the_checkpoint(tmp_path: Path) -> None:
    """PEFT packs experts in a way that vLLM refuses, or reads as something else without a word.
    Over a base in bfloat16 its factors stay in float32."""
    model = tiny_causal_lm(
        "qwen3-moe", dtype=torch.float32, num_hidden_layers=2, num_experts=4, vocab_size=256
    )
    model.config.dtype = torch.bfloat16
    model.save_pretrained(tmp_path / "base")
    served = SamplingServer(
        lambda: Qwen3MoeForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    )
    with served.running() as url:
        adapter = '[adapter]\nrank = 4\nexperts = true\n[precision]\ncompute = "float32"'
        job = job_of(tmp_path / "job", tmp_path / "base", adapter=adapter, sampler=url, beta=0.1)
        lines = train(job)
    assert lines[-1]["kl"] > 1e-4
    assert all(line[DIFFERENCE + "max"] < 1e-4 for line in lines), lines


def test_experts_over_a_base_that_is_no_directory_are_not_handed_over(tmp_path: Path) -> None:
    model = tiny_causal_lm("qwen3-moe", num_hidden_layers=1, num_experts=4)
    config = peft.LoraConfig(target_parameters=["experts.down_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match=r"experts by the names of the checkpoint.*DIRECTORY"):
        over_its_base(tmp_path, peft.get_peft_model(model, config))
