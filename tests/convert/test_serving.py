"""An adapter for servers: what a server reads, and what it is found to serve.

The oracle is a server in this process over plain transformers and PEFT, whose copy of the adapter
is changed by hand.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, NemotronHConfig
from typer.testing import Result

import infinity
from infinity.engine.engine import Engine
from infinity.tools.convert.rewrite import write_directory
from infinity.tools.serving.sheet import ALL, SHEET_NAME, FaultSignature, Sheet
from infinity.tools.serving.verify import judge
from infinity.tools.training.merge import plan_merge
from infinity.tools.training.output import MARKER_NAME
from tests.support.commands import run_command
from tests.support.quantized import tiny_causal_lm
from tests.support.sampling_server import serving
from tests.train.jobs import job_table

from .test_merge import ATTENTION, EXPERTS, MLA, adapt, weights

NUM_EXPERTS, RANK = 4, 4
SMALL = {
    "hidden_size": 32, "head_dim": 16, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_experts": NUM_EXPERTS, "initializer_range": 0.2, "vocab_size": 256,
}  # fmt: skip
FACTORS = {"target_modules": ATTENTION, "target_parameters": EXPERTS}


def base_at(directory: Path, name: str, **changes: Any) -> Path:
    tiny_causal_lm(name, dtype=torch.float32, **changes).save_pretrained(directory)
    return directory


class Served:
    """The model that the server has. `say` chooses how it gives log-probabilities."""

    def __init__(self, base: Path, adapter: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        self.model: Any = peft.PeftModel.from_pretrained(model, adapter).eval()
        self.say = "echo"
        self.values = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.values[name])

    @torch.no_grad()
    def scores(self, ids: list[int], *, with_adapter: bool) -> torch.Tensor:
        model = self.model if with_adapter else self.model.get_base_model()
        if with_adapter:
            return self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        with self.model.disable_adapter():
            return model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        scores = self.scores(ids, with_adapter=body["model"] == "mine")
        values = [None, *(float(scores[i - 1, ids[i]]) for i in range(1, len(ids)))]
        choice: dict[str, Any] = {"text": ""}
        if self.say == "echo" and body.get("echo"):
            choice["logprobs"] = {"token_logprobs": [*values, -1.0]}
        elif self.say == "prompt_logprobs" and "prompt_logprobs" in body:
            rows = [{str(i): {"logprob": v}} for i, v in zip(ids, values, strict=True)]
            choice["prompt_logprobs"] = [None, *rows[1:]]
        elif self.say == "next token" and "n_probs" in body:
            top = scores[-1].topk(body["n_probs"])
            rows = [
                {"id": int(i), "logprob": float(v)}
                for v, i in zip(top.values, top.indices, strict=True)
            ]
            choice["logprobs"] = {"content": [{"id": rows[0]["id"], "top_logprobs": rows}]}
        return {"choices": [choice]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, an adapter whose experts matter, and its passport for PEFT."""
    directory = tmp_path_factory.mktemp("trained")
    base_at(directory / "base", "qwen3-moe", **SMALL)
    adapt(directory / "base", directory / "adapter", **FACTORS)
    (directory / "prompts").write_text("\n".join(f"{i} or {i * i}?" for i in range(8, 24)) + "\n")
    done = run_command(
        "export-adapter", directory / "adapter", "--for", "peft", "-o", directory / "out",
        "--prompts", directory / "prompts", "--base", directory / "base",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return directory


@pytest.fixture(scope="module")
def served(trained: Path) -> Iterator[tuple[Served, str]]:
    oracle = Served(trained / "base", trained / "out")

    def answer(path: str, body: Any) -> tuple[int, Any]:
        return 200, {"data": [{"id": "mine"}]} if body is None else oracle.answer(body)

    with serving(answer) as url:
        yield oracle, url


def verdict_on(url: str, trained: Path, *options: str) -> dict[str, Any]:
    done = run_command(
        "verify-served", url, "--sheet", trained / "out" / SHEET_NAME, "--json", *options
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (0 if found["outcome"] == "served" else 1)
    return found


# -- Mutants ---------------------------------------------------------------------------------------


def parameters(model: Any, *parts: str) -> list[torch.Tensor]:
    found = [p for n, p in model.named_parameters() if all(part in f".{n}" for part in parts)]
    assert found
    return found


def scale(factor: float, *parts: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for b in parameters(model, "lora_B", *parts):
            b.mul_(factor)

    return change


def transpose(*parts: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for b in parameters(model, "lora_B", *parts):
            b.copy_(b.T.contiguous().view(b.shape))

    return change


def experts_of(name: str) -> tuple[str, str]:
    """PEFT's names of the factors: the wrapper of down_proj is around that of gate_up_proj."""
    infix = ".base_layer" if name == "gate_up_proj" else ""
    return f".experts{infix}.lora_A.", f".experts{infix}.lora_B."


def permute(order: list[int], *names: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name in names:
            first, second = experts_of(name)
            for a in parameters(model, first):
                a.copy_(torch.cat([a.clone().chunk(NUM_EXPERTS)[i] for i in order]))
            for b in parameters(model, second):
                columns = b.clone().view(len(b), RANK, NUM_EXPERTS)
                b.copy_(torch.stack([columns[:, :, i] for i in order], dim=-1).view(b.shape))

    return change


def in_other_order(model: Any) -> None:
    for b in parameters(model, experts_of("down_proj")[1]):
        old = b.clone()
        for expert in range(NUM_EXPERTS):
            for rank in range(RANK):
                b[:, rank * NUM_EXPERTS + expert] = old[:, expert * RANK + rank]


def swap_halves(model: Any) -> None:
    for b in parameters(model, experts_of("gate_up_proj")[1]):
        b.copy_(b.clone().roll(len(b) // 2, dims=0))


def lose_half(model: Any) -> None:
    for name in ("gate_up_proj", "down_proj"):
        for b in parameters(model, experts_of(name)[1]):
            b.view(len(b), RANK, NUM_EXPERTS)[..., NUM_EXPERTS // 2 :] = 0


DOWN, UP = experts_of("down_proj")[1], experts_of("gate_up_proj")[1]
MUTANTS: dict[str, Callable[[Any], None]] = {
    "mlp.experts.down_proj: missing": scale(0, DOWN),
    "mlp.experts.gate_up_proj: missing": scale(0, UP),
    "mlp.experts.down_proj: columns of B read by expert, then rank": in_other_order,
    "mlp.experts.down_proj: experts shifted by one": permute([1, 2, 3, 0], "down_proj"),
    "routed experts: experts in reverse order": permute([3, 2, 1, 0], "gate_up_proj", "down_proj"),
    "routed experts: last half of the experts missing": lose_half,
    "mlp.experts.gate_up_proj: gate and up swapped": swap_halves,
    "self_attn.q_proj: B read as its transpose": transpose(".q_proj."),
    "self_attn.v_proj: scaled by 2": scale(2, ".v_proj."),
    "all modules: scaled by 0.5": scale(0.5),
    "layer 1: missing": scale(0, ".layers.1."),
    "layer 0: scaled by 0.25": scale(0.25, ".layers.0."),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_of_the_server_is_named(
    name: str, trained: Path, served: tuple[Served, str]
) -> None:
    oracle, url = served
    with torch.no_grad():
        MUTANTS[name](oracle.model)
    try:
        found = verdict_on(url, trained)
    finally:
        oracle.restore()
    sentence, _, said = found["sentence"].partition(" by 0.")
    wanted, _, factor = name.partition(" by 0.")
    assert (found["outcome"], sentence) == ("faulty", wanted), found
    # A scale between those of the sheet is interpolated.
    assert not factor or float(f"0.{said}") == pytest.approx(float(f"0.{factor}"), rel=0.1)


def test_the_adapter_itself_is_served_however_the_server_says_it(
    trained: Path, served: tuple[Served, str]
) -> None:
    oracle, url = served
    exact = verdict_on(url, trained, "--base-model", "the base")
    assert exact["outcome"] == "served" and exact["noise"] < 1e-3 < exact["effect"]
    assert exact["method"] == "echo" and not exact["hidden"]
    oracle.say = "prompt_logprobs"
    assert verdict_on(url, trained)["method"] == "prompt_logprobs"
    oracle.say = "next token"
    found = verdict_on(url, trained, "--model", "mine")
    assert (found["outcome"], found["method"]) == ("served", "next token")
    assert found["num_tokens"] < exact["num_tokens"]
    oracle.say = "nothing"
    done = run_command("verify-served", url, "--sheet", trained / "out" / SHEET_NAME)
    assert done.exit_code == 2 and "gives no log-probabilities of 'mine'" in done.output
    oracle.say = "echo"


def test_the_base_and_what_no_state_explains_are_told_apart(
    trained: Path, served: tuple[Served, str]
) -> None:
    oracle, url = served
    assert verdict_on(url, trained, "--model", "the base")["outcome"] == "ignored"
    with torch.no_grad():
        for parameter in parameters(oracle.model, "lora_B", ".k_proj."):
            parameter.copy_(torch.randn_like(parameter) * parameter.std())
    try:
        found = verdict_on(url, trained)
    finally:
        oracle.restore()
    assert found["outcome"] == "unexplained" and "self_attn.k_proj" in found["sentence"]


def test_of_an_sglang_that_was_asked_for_its_base_the_name_of_the_adapter_is_said(
    trained: Path, served: tuple[Served, str]
) -> None:
    """SGLang lists adapters by their names, and has its base under these."""
    oracle, _ = served
    models = [{"id": "b"}, {"id": "mine", "parent": "b"}]

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if body is None:
            return 200, {"data": [model | {"owned_by": "sglang"} for model in models]}
        return 200, oracle.answer(body | {"model": body["model"].partition(":")[2]})

    with serving(answer) as url:
        found = verdict_on(url, trained, "--model", "mine")
        assert found["outcome"] == "ignored" and "--model b:mine" in found["sentence"]
        assert verdict_on(url, trained, "--model", "b:mine")["outcome"] == "served"


def test_a_server_that_is_wrong_after_the_first_prompts_is_not_called_as_trained() -> None:
    """The states of faults are known for the first prompts alone."""
    base = np.random.default_rng(0).normal(-3, 1, (16, 5))
    change = np.random.default_rng(1).normal(0, 0.3, base.shape)
    known = [("halved", 0.5), ("doubled", 2.0)]
    faults = [FaultSignature(ALL, f, (base + n * change)[:4].tolist()) for f, n in known]
    adapter = (base + change).tolist()
    sheet = Sheet({}, {}, [[1] * 6] * 16, adapter, base.tolist(), {ALL: ["m"]}, faults)
    verdict = judge(sheet, [*adapter[:4], *base[4:].tolist()])
    assert verdict.outcome == "unexplained" and "later ones" in verdict.sentence


def test_over_another_base_nothing_is_called_as_trained() -> None:
    """Although what is served is nearer to the adapter than to its absence."""
    random = np.random.default_rng(0)
    base, change = random.normal(-3, 1, (16, 5)), random.normal(0, 1, (16, 5))
    other = base + random.normal(0, 0.25, base.shape)
    sheet = Sheet({}, {}, [[1] * 6] * 16, (base + change).tolist(), base.tolist(), {ALL: ["m"]}, [])
    verdict = judge(sheet, (other + change).tolist(), other.tolist())
    assert verdict.outcome == "unclear" and "serve that base, in its dtype" in verdict.sentence
    near = base + (other - base) / 100
    assert judge(sheet, (near + change).tolist(), near.tolist()).outcome == "served"


def test_a_sheet_has_digests_and_versions_and_is_refused_when_it_is_damaged(
    trained: Path, tmp_path: Path
) -> None:
    file = trained / "out" / SHEET_NAME
    sheet = Sheet.read(file)
    assert set(sheet.digests) == {"adapter", "base_table", "base_samples", "prompts"}
    assert sheet.versions["adapter_of_peft"] == peft.__version__
    assert len(sheet.prompts) == 16 and sheet.groups["layer 0"]
    table = json.loads(file.read_text())
    table["faults"][0]["log_probs"][0].pop()
    (tmp_path / "sheet.json").write_text(json.dumps(table))
    damaged = "not those of its prompts; expected the infinity_sheet.json"
    for name, said in (("sheet.json", damaged), ("none.json", "no file")):
        done = run_command("verify-served", "http://127.0.0.1:1", "--sheet", tmp_path / name)
        assert done.exit_code == 2 and said in done.output
    done = run_command("verify-served", "http://127.0.0.1:1", "--sheet", file)
    assert done.exit_code == 2 and "give the address at which it listens" in done.output
    assert "checkpoint" not in done.output
    for answer in ((404, "no such page"), (200, "<html>")):
        with serving(lambda *_, answer=answer: answer) as url:
            done = run_command("verify-served", url, "--sheet", file)
        assert done.exit_code == 2 and "expected an OpenAI-compatible server" in done.output


def test_adapter_and_base_pass_in_one_sweep_with_the_bits_of_two(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, plain = [], Engine.sweep
    receipt = {"after": 0, "threads": 1, "ranks": 1, "has_accepted": False, "device": "CPU",
               "tokens_sha256": "2f", "base": None, "versions": {}}  # fmt: skip
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    config = job_table(tmp_path, model={"path": str(trained / "base")})
    marker = {"program": "infinity train", "receipts": [receipt], "config": config}
    (adapter / MARKER_NAME).write_text(json.dumps(marker))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "sweep", lambda *args: counts.append(len(args[2])) or plain(*args))
        done = run_command(
            "export-adapter", adapter, "--for", "peft", "-o", tmp_path / "out",
            "--prompts", trained / "prompts", "--base", trained / "base", "--locate", "none",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    sheet = Sheet.read(tmp_path / "out" / SHEET_NAME)
    assert sheet.digests["data"] == "2f"
    assert counts == [2 * len(sheet.prompts)]
    adapter = {"adapter": {"resume": str(trained / "adapter")}}
    model = infinity.from_pretrained(trained / "base", adapter, is_frozen=True)
    for expected, context in (
        (sheet.adapter, nullcontext()),
        (sheet.base, model.disable_adapter()),
    ):
        with context:
            rows = [found.logprobs.tolist() for found in infinity.score(model, sheet.prompts)]
        assert [[round(value, 5) for value in row] for row in rows] == expected
    infinity.close(model)


# -- Layouts ---------------------------------------------------------------------------------------


def exported(
    directory: Path, name: str, server: str, options: dict[str, Any], **changes: Any
) -> Result:
    """Exports an adapter of a tiny model; the result of the command."""
    if not (directory / "base").exists():
        base_at(directory / "base", name, **changes)
        adapt(directory / "base", directory / "adapter", **options)
    return run_command(
        "export-adapter", directory / "adapter", "--for", server, "-o", directory / server,
        "--base", directory / "base", "--no-sheet",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-moe", {**FACTORS, "use_rslora": True}),
        ("deepseek-v3", {"target_modules": MLA, "target_parameters": EXPERTS}),
        ("deepseek-v3", {"target_modules": MLA[:-2], "target_parameters": EXPERTS}),
        ("llama", {"target_modules": "all-linear", "exclude_modules": ["lm_head"]}),
    ],
)
def test_each_stored_matrix_has_the_factors_of_its_merge(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """As vLLM and SGLang load: a pair under the name of the checkpoint, with one scale."""
    merged = None
    for server in ("sglang",) if "kv_b_proj" in options["target_modules"] else ("vllm", "sglang"):
        done = exported(tmp_path, name, server, options)
        assert done.exit_code == 0, done.output
        config = json.loads((tmp_path / server / "adapter_config.json").read_text())
        is_stabilised = config["use_rslora"]
        assert is_stabilised is (server == "vllm" and bool(options.get("use_rslora")))
        scale = config["lora_alpha"] / config["r"] ** (0.5 if is_stabilised else 1)
        tensors = load_file(tmp_path / server / "adapter_model.safetensors")
        if merged is None:
            write_directory(
                plan_merge(tmp_path / "base", tmp_path / "adapter"), tmp_path / "merged"
            )
            before, merged = weights(tmp_path / "base"), weights(tmp_path / "merged")
        changed = {key for key, value in merged.items() if not torch.equal(value, before[key])}
        modules = {key.removesuffix(".weight") for key in changed}
        assert config["target_modules"] == sorted({key.rpartition(".")[2] for key in modules})
        sides = [f"base_model.model.{key}.lora_{side}.weight" for key in modules for side in "AB"]
        assert sorted(tensors) == sorted(sides)
        for key in modules:
            a, b = (tensors[f"base_model.model.{key}.lora_{side}.weight"] for side in "AB")
            expected = merged[f"{key}.weight"] - before[f"{key}.weight"]
            assert torch.allclose(scale * b @ a, expected, atol=1e-6), key


def test_packed_experts_stay_packed_for_vllm_where_its_model_reads_them_so(tmp_path: Path) -> None:
    done = exported(tmp_path, "gpt-oss", "vllm", FACTORS)
    assert done.exit_code == 0, done.output
    files = (tmp_path / each / "adapter_model.safetensors" for each in ("vllm", "adapter"))
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_experts_are_stacked_under_the_names_of_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    done = exported(tmp_path, "qwen3-moe", "gguf", {**FACTORS, "use_rslora": True})
    assert done.exit_code == 0, done.output
    reader = gguf.GGUFReader(tmp_path / "gguf" / "adapter.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3moe" and fields["adapter.type"] == "lora"
    write_directory(plan_merge(tmp_path / "base", tmp_path / "adapter"), tmp_path / "merged")
    before, merged = weights(tmp_path / "base"), weights(tmp_path / "merged")
    tensors = {one.name: torch.tensor(one.data) for one in reader.tensors}
    names = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
    for ours, theirs in names.items():
        a, b = (tensors.pop(f"blk.1.{ours}.weight.lora_{side}") for side in "ab")
        for expert, delta in enumerate(fields["adapter.lora.alpha"] / RANK * b @ a):
            key = f"model.layers.1.mlp.experts.{expert}.{theirs}.weight"
            assert torch.allclose(delta, merged[key] - before[key], atol=1e-6)
    assert "blk.1.attn_q.weight.lora_a" in tensors


def test_rows_of_queries_and_keys_are_in_the_order_of_llama_cpp(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    done = exported(tmp_path, "llama", "gguf", {"target_modules": ["q_proj", "k_proj", "o_proj"]})
    assert done.exit_code == 0, done.output
    reader = gguf.GGUFReader(tmp_path / "gguf" / "adapter.gguf")
    tensors = {one.name: torch.tensor(one.data) for one in reader.tensors}
    plain = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for ours, theirs, heads in (("q", "q_proj", 4), ("k", "k_proj", 2), ("output", "o_proj", 0)):
        expected = plain[f"base_model.model.model.layers.0.self_attn.{theirs}.lora_B.weight"]
        if heads:  # The two halves of a head alternate.
            sides = expected.view(heads, 2, -1, RANK)
            expected = torch.stack([sides[:, 0], sides[:, 1]], dim=2).view(expected.shape)
        assert torch.equal(tensors[f"blk.0.attn_{ours}.weight.lora_b"], expected)


@pytest.mark.parametrize(
    ("name", "server", "options", "said"),
    [
        ("llama", "vllm", {"target_modules": ["q_proj"], "use_dora": True}, r"q_proj.*DoRA"),
        (
            "llama",
            "vllm",
            {"target_modules": ["q_proj"], "alora_invocation_tokens": [1]},
            "ALora",
        ),
        ("llama", "vllm", {"target_modules": ["q_proj", "lm_head"]}, "'lm_head': it is the head"),
        (
            "llama",
            "gguf",
            {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}},
            r"v_proj'.*: rank_pattern",
        ),
        ("llama", "vllm", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "to_save"),
        ("deepseek-v3", "vllm", {"target_modules": MLA}, "kv_b_proj'.*attention reads the matrix"),
        ("llama", "sglang", {"target_modules": ["q_proj"]}, "q_proj.*it needs 'v_proj' with it"),
        ("gpt-oss", "sglang", FACTORS, r"experts.down_proj'.*packed in the files of a gpt_oss"),
        ("gpt-oss", "gguf", FACTORS, "gpt_oss is not written as GGUF"),
        (
            "qwen3-moe",
            "vllm",
            {"target_modules": [], "target_parameters": EXPERTS[1:]},
            "down_proj.*it needs 'gate_proj' with it",
        ),
        (
            "qwen3-moe",
            "sglang",
            {"target_modules": [], "target_parameters": ["gate.weight"]},
            "gate': it routes tokens",
        ),
    ],
)
def test_what_a_server_would_drop_is_refused_by_name(
    name: str, server: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    done = exported(tmp_path, name, server, options)
    assert done.exit_code == 2 and not (tmp_path / server).exists()
    assert re.search(said, done.output) and "infinity merge" in done.output


def test_an_expert_without_a_gate_needs_none(tmp_path: Path) -> None:
    config = NemotronHConfig(
        layers_block_type=["mamba", "moe", "attention"], hidden_size=32, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=256, intermediate_size=24,
        ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=1, chunk_size=8,
        n_routed_experts=4, moe_intermediate_size=24, moe_shared_expert_intermediate_size=24,
        use_mamba_kernels=False,
    )  # fmt: skip
    for names, said in (
        (EXPERTS[1:], "it needs 'up_proj' with it"),
        (["up_proj", "down_proj"], ""),
    ):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / said[:2] / "base")
        places = [f"experts.{name.removeprefix('experts.')}" for name in names]
        options = {"target_modules": [], "target_parameters": places}
        adapt(tmp_path / said[:2] / "base", tmp_path / said[:2] / "adapter", **options)
        done = exported(tmp_path / said[:2], "nemotron_h", "vllm", options)
        assert (done.exit_code == 0) == (not said) and said in done.output, done.output


@pytest.mark.parametrize("version", [None, "0.18.1"])
def test_experts_of_a_peft_with_another_layout_are_refused(
    version: str | None, tmp_path: Path
) -> None:
    base_at(tmp_path / "base", "qwen3-moe", **SMALL)
    adapt(tmp_path / "base", tmp_path / "adapter", **FACTORS)
    file = tmp_path / "adapter" / "adapter_config.json"
    table = json.loads(file.read_text())
    assert table["peft_version"] == peft.__version__
    file.write_text(json.dumps(table | {"peft_version": version}))
    done = exported(tmp_path, "qwen3-moe", "vllm", FACTORS)
    assert done.exit_code == 2 and "in and out exchanged; expected PEFT 0.19" in done.output
