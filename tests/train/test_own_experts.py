"""Experts that are trained in full over a frozen base (`adapter.experts_full`).

The comparison is plain PyTorch: the decoded base in memory with transformers' loop over experts
("eager"), in which the chosen rows of the packed weights are parameters of their own.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.checkpoint import load, save, weight_source
from infinity.config import SwapConfig
from infinity.config.schema.inputs import AdapterConfig
from infinity.errors import ConfigError, UnsupportedError
from infinity.integrations.server_layouts import PREFIX
from infinity.modules.tiling.experts import TiledExperts
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tools.chat import open_writer
from infinity.tools.convert.rewrite import write_directory
from infinity.tools.scoring import program as scoring
from infinity.tools.scoring.program import Request
from infinity.tools.serving.export import write_passport
from infinity.tools.training import model as models
from infinity.tools.training.adapter import attach_adapter
from infinity.tools.training.merge import plan_merge
from infinity.tools.training.settle import settle
from tests.parity.in_place import batches, config_of, loss_of
from tests.parity.test_placements import half_up
from tests.support.bits import assert_same
from tests.support.forked import COMMAND, Script
from tests.support.quantized import tiny_causal_lm, write_decoded, write_quantized

from .plain import train as train_plainly
from .test_adapter import metrics, run, table  # noqa: F401

STEPS = 4
# Experts in each layer that has some: the other layers run as their class does.
CHOSEN = {
    "kimi-k2": ["model.layers.2.mlp.experts.5", "model.layers.1.mlp.experts.3"],
    "gpt-oss": [f"model.layers.{n}.mlp.experts.{n}" for n in (0, 1, 2)],
}
LORA = {"rank": 4, "alpha": 8, "targets": ["o_proj"]}


class _HalfUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: torch.Tensor) -> torch.Tensor:
        return half_up(master)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.float()


class Rows(nn.Module):
    """Some rows of a frozen weight, as fp32 parameters."""

    def __init__(self, weight: torch.Tensor, numbers: list[int]) -> None:
        super().__init__()
        self.numbers = numbers
        self.masters = nn.ParameterList(weight[n].detach().float().clone() for n in numbers)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        rows = [m if weight.dtype is torch.float32 else _HalfUp.apply(m) for m in self.masters]
        return weight.index_copy(0, torch.tensor(self.numbers), torch.stack(rows))


def with_rows(model: Any, names: list[str]) -> Any:
    """The model with these experts unfrozen, and all else frozen."""
    model.set_experts_implementation("eager")
    model.requires_grad_(False)
    numbers: dict[str, list[int]] = {}
    for name in sorted(names):
        path, _, number = name.rpartition(".")
        numbers.setdefault(path, []).append(int(number))
    for path, own in numbers.items():
        module = model.get_submodule(path)
        for leaf in list(module._parameters):
            rows = Rows(module._parameters[leaf], own)
            parametrize.register_parametrization(module, leaf, rows, unsafe=True)
    return model


def rows_of(model: Any) -> dict[str, torch.Tensor]:
    """The chosen rows by the names of the model: "...experts.3.gate_up_proj"."""
    return {
        f"{name}.{number}.{leaf}".removeprefix(PREFIX): master.detach()
        for name, module in model.named_modules()
        for leaf, made in (getattr(module, "parametrizations", None) or {}).items()
        for number, master in zip(made[0].numbers, made[0].masters, strict=True)
    }


@cache
def _base(directory: Path, architecture: str, layout: str) -> tuple[Path, Path]:
    own = directory / f"{architecture}-{layout}"
    write_quantized(tiny_causal_lm(architecture, vocab_size=256), own / "base", layout)
    write_decoded(own / "base", own / "decoded")
    return own / "base", own / "decoded"


@pytest.fixture
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.getbasetemp() / "own-experts"
    return lambda architecture, layout: _base(place, architecture, layout)


def _steps(
    model: Any, optimizer: Any, steps: Any, seen: dict[str, Any], layer_major: bool = False
) -> None:
    for step in steps:
        if layer_major:
            losses = infinity.forward_backward(model, lambda b: loss_of(model, b), batches(step, 2))
        else:
            losses = [loss_of(model, batch) for batch in batches(step, 2)]
            for loss in losses:
                loss.backward()
        if isinstance(optimizer, torch.optim.AdamW):
            trained = [p for p in model.parameters() if p.requires_grad]
            nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        seen |= {f"loss {step}.{n}": loss.detach().clone() for n, loss in enumerate(losses)}


@cache
def _expected(decoded: Path, architecture: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=dtype)
    model = with_rows(model, CHOSEN[architecture])
    torch.manual_seed(7)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["o_proj"])
    model = peft.get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or ".masters." in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    seen: dict[str, torch.Tensor] = {}
    _steps(model, torch.optim.AdamW(trained, lr=1e-2, fused=True), range(STEPS), seen)
    seen |= {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}
    return seen | rows_of(model)


def _own(engine: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for tiled in engine.tiled_params.values():
        for start, handle in zip(tiled.starts, tiled.handles, strict=False):
            if handle.requires_grad:
                path, _, leaf = tiled.name.removeprefix(PREFIX).rpartition(".")
                value = engine.read_parameter(handle.name_in_model, master=True)[0]
                yield f"{path}.{start}.{leaf}", value
    for name, _ in model.named_parameters():
        if "lora_" in name:
            yield name, engine.read_parameter(name)


@pytest.mark.parametrize(
    ("architecture", "layout", "dtype", "tier", "layer_major", "device"),
    [
        ("kimi-k2", "int4", torch.bfloat16, "nvme", True, False),
        ("kimi-k2", "int4", torch.float32, "host", False, True),
        ("gpt-oss", "bf16", torch.bfloat16, "host", False, False),
        ("gpt-oss", "mxfp4", torch.float32, "nvme", True, True),
    ],
)
def test_chosen_experts_train_as_the_same_experts_unfrozen_in_memory(
    base_of: Any, tmp_path: Path, architecture: str, layout: str, dtype: torch.dtype, tier: str,
    layer_major: bool, device: bool,
) -> None:  # fmt: skip
    """Beside LoRA, wherever state rests, on a device, in both orders, and after a checkpoint; the base's bytes
    are read in place, but those of the chosen experts."""
    base, decoded = base_of(architecture, layout)
    placement = dict.fromkeys(("parameters", "master", "moments", "gradients"), tier)
    seen: dict[str, torch.Tensor] = {}
    for part in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        with infinity.init_empty_weights():
            described = AutoConfig.from_pretrained(base)
            model: Any = AutoModelForCausalLM.from_config(described, dtype=dtype)
        model.set_experts_implementation("eager")
        options = AdapterConfig(**LORA, experts_full=tuple(CHOSEN[architecture]))
        model = attach_adapter(model, [(options, 7)], weight_source(base))
        simulated = SimulatedDevice(3) if device else None
        config = config_of(tmp_path, placement=placement)
        infinity.offload(model, config, weights=base, device=simulated)
        engine = infinity.engine_of(model)
        own = [unit for unit in engine.store.units if ".experts.tiles." in unit.name]
        assert {bool(unit.stored) for unit in own if not unit.state_numel} == {True}
        assert sum(unit.state_numel > 0 for unit in own) == len(CHOSEN[architecture])
        optimizer = infinity.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2, max_grad_norm=0.1
        )
        if part.start:
            load(tmp_path / "saved", model, optimizer)
        _steps(model, optimizer, part, seen, layer_major)
        save(tmp_path / "saved", model, optimizer, step=part.stop)
        found = seen | dict(_own(engine, model))
        infinity.close(model)
    assert_same(_expected(decoded, architecture, dtype), found, is_ordered=False)


# -- The command -----------------------------------------------------------------------------------


@pytest.fixture
def job(table: dict[str, Any], base_of: Any) -> dict[str, Any]:  # noqa: F811
    """A job over INT4 experts in fp32, without a LoRA adapter."""
    base, _ = base_of("kimi-k2", "int4")
    table["model"]["path"] = str(base)
    table["adapter"] = {"targets": [], "experts_full": CHOSEN["kimi-k2"]}
    return table | {"precision": {"compute": "float32"}, "checkpoint": {"every": 2}}


def plainly(job: dict[str, Any], decoded: Path, tmp_path: Path) -> tuple[Any, list[Any]]:
    model: Any = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    model = with_rows(model, CHOSEN["kimi-k2"]).train()
    steps = train_plainly(job, model, tmp_path / "plain")
    return model, [(loss, norm) for loss, norm, _ in steps]


# The loop of transformers, whose bits tiles have.
EAGER = """
from infinity.tools.training import model as models
empty_model = models.empty_model

def eager_model(*arguments, **options):
    model = empty_model(*arguments, **options)
    model.set_experts_implementation("eager")
    return model

models.empty_model = eager_model
"""
# Ends its process in the third step.
KILLED = """
import os, signal
from infinity.tools.training.program import Run
begin = Run.begin_step

def kill(run):
    if run.num_steps == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begin(run)

Run.begin_step = kill
"""


def test_a_run_of_experts_alone_killed_and_resumed_is_merged_to_what_trains_in_memory(
    job: dict[str, Any], base_of: Any, tmp_path: Path, processes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Losses, norms, the saved experts under the names of the checkpoint, the merged weights."""
    base, decoded = base_of("kimi-k2", "int4")
    expected, outcomes = plainly(job, decoded, tmp_path)
    (tmp_path / "job.json").write_text(json.dumps(job))
    process = Script(EAGER + KILLED + COMMAND, "train", tmp_path / "job.json")
    processes.append(process)
    assert process.wait() == -signal.SIGKILL
    monkeypatch.setattr(models, "empty_model", models.empty_model)  # Restored afterwards.
    exec(EAGER, {})
    assert run(job, resume=True)["resumed_at"] == 2
    assert metrics(job) == outcomes

    output = tmp_path / "output"
    saved, rows = load_file(output / "adapter_experts.safetensors"), rows_of(expected)
    stem = "model.layers.1.mlp.experts.3"
    gate, up = rows[f"{stem}.gate_up_proj"].chunk(2)
    for leaf, value in {"gate": gate, "up": up, "down": rows[f"{stem}.down_proj"]}.items():
        assert torch.equal(saved[f"{stem}.{leaf}_proj.weight"], value)
    assert len(saved) == 6 and not load_file(output / "adapter_model.safetensors")

    write_directory(plan_merge(base, output), tmp_path / "merged")
    merged, before = weight_source(tmp_path / "merged"), weight_source(decoded)
    for name in merged.names():
        value = saved[name].bfloat16() if name in saved else before.read(name)
        assert torch.equal(merged.read(name), value), name
    write_directory(plan_merge(base, output, to="keep"), tmp_path / "kept")
    writer = open_writer(tmp_path / "kept")
    assert len(writer.write([1, 2, 3], num_tokens=2, temperature=0, say=lambda _: None)) == 2
    writer.close()


def test_a_saved_run_goes_on_and_writes_texts_with_its_own_experts(
    job: dict[str, Any], base_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del job["checkpoint"]
    base, _ = base_of("kimi-k2", "int4")
    run(job)
    output, saved = tmp_path / "output", load_file(tmp_path / "output/adapter_experts.safetensors")
    writer = open_writer(output, {"precision": {"compute": "float32"}})
    engine = infinity.engine_of(writer.model)
    assert not any(parameter.requires_grad for parameter in writer.model.parameters())
    tiled = engine.tiled_params[f"{PREFIX}model.layers.1.mlp.experts.down_proj"]
    number = tiled.starts.index(3)
    value = engine.read_parameter(tiled.handles[number].name_in_model)[0]
    assert torch.equal(value, saved["model.layers.1.mlp.experts.3.down_proj.weight"])
    assert len(writer.write([1, 2, 3], num_tokens=2, temperature=0, say=lambda _: None)) == 2
    writer.close()

    more = job | {"adapter": {"resume": str(output)}, "output": {"directory": str(tmp_path / "b")}}
    more["optimizer"] = {"lr": 0.0}
    run(more)
    assert_same(saved, load_file(tmp_path / "b" / "adapter_experts.safetensors"))
    weights, moved, plain = tmp_path / "b" / "adapter_model.safetensors", {}, os.replace

    def move(source: Any, target: Any) -> None:
        moved[Path(target).name] = weights.exists()
        plain(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", move)
        run(more)
    assert moved["adapter_experts.safetensors"] is False, "a kill leaves no weights beside others"
    assert weights.exists()
    with pytest.raises(ConfigError, match="names 1 experts, and the saved adapter"):
        run(more | {"adapter": {"resume": str(output), "experts_full": CHOSEN["kimi-k2"][:1]}})
    with pytest.raises(UnsupportedError, match="infinity merge"):
        write_passport(output, base, tmp_path / "served", "vllm")
    with pytest.raises(ConfigError, match="one of several"):
        run(more | {"adapter": [{"name": "a", "resume": str(output)}, {"name": "b"}]})


# -- The census ------------------------------------------------------------------------------------


def _ends_between_census_and_rows(request: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on, and never over a file with other content."""
    assert request.routing
    request.routing.unlink()
    request.output.unlink()
    with monkeypatch.context() as context:
        context.setattr(scoring.ScoreRows, "end", lambda _: {}[0])
        with pytest.raises(KeyError):
            scoring.run(request)
    content = request.routing.read_text()
    request.routing.write_text("of the user")
    with pytest.raises(ConfigError, match="exists; give another name"):
        scoring.run(request)
    request.routing.write_text(content)
    scoring.run(request)
    assert request.routing.read_text() == content and request.output.exists()


def test_a_census_counts_what_the_router_of_a_plain_forward_chooses(
    job: dict[str, Any], base_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the data of the run's own file; a census that was ended goes on to the same file."""
    base, decoded = base_of("kimi-k2", "int4")
    job["adapter"] |= {"experts_full": "top 13%", "experts_census": str(tmp_path / "census.json")}
    (tmp_path / "job.toml").write_text(_toml(job))
    text = tmp_path / "text.txt"
    text.write_bytes(text.read_bytes()[:1000])
    request = Request(
        model=base, data=(tmp_path / "job.toml",), output=tmp_path / "scores.jsonl",
        routing=tmp_path / "census.json", sweep_tokens=256, dtype="float32",
    )  # fmt: skip
    scoring.run(request)
    own = tmp_path / "plain.jsonl.routing"  # Of the user: no census was asked for.
    own.mkdir()
    scoring.run(
        Request(**{**_fields(request), "output": tmp_path / "plain.jsonl", "routing": None})
    )
    own.rmdir()
    content = request.routing.read_text()
    monkeypatch.setattr(scoring.ScoreRows, "write", _fails_once(scoring.ScoreRows.write))
    again = Request(**{**_fields(request), "output": tmp_path / "b.jsonl"})
    request.routing.unlink()
    with pytest.raises(RuntimeError, match="ended"):
        scoring.run(again)
    assert scoring.run(again).resumed_at > 0
    assert request.routing.read_text() == content
    assert not list(tmp_path.glob("*.routing")), "sums that serve a resume go with it"
    with pytest.raises(ConfigError, match="exists"):
        scoring.run(again)
    _ends_between_census_and_rows(again, monkeypatch)

    census = json.loads(content)
    rows = [json.loads(line) for line in request.output.read_text().splitlines()]
    model: Any = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32).eval()
    counts = {name: torch.zeros(2, 8, dtype=torch.float64) for name in census["experts"]}

    def count(name: str, args: Any) -> None:
        chosen = nn.functional.one_hot(args[1], 8).double()
        weighed = chosen * args[2][..., None]
        counts[name] += torch.stack([chosen.sum((0, 1)), weighed.sum((0, 1))])

    for name in counts:
        hook = partial(lambda name, _, args: count(name, args), name)
        model.get_submodule(name).register_forward_pre_hook(hook)
    with torch.no_grad():
        for row in rows:
            model(input_ids=torch.tensor([row["tokens"]]), use_cache=False)
    for name, (choices, weights) in counts.items():
        assert census["experts"][name]["tokens"] == (choices / choices.sum()).tolist()
        found = torch.tensor(census["experts"][name]["gate"], dtype=torch.float64)
        torch.testing.assert_close(found, weights / weights.sum(), rtol=1e-6, atol=1e-8)

    shares = {
        f"{name}.{n}": share
        for name, own in census["experts"].items()
        for n, share in enumerate(own["gate"])
    }
    chosen = settle(SwapConfig.load(job)).adapter
    assert chosen and chosen.experts_full == tuple(sorted(shares, key=lambda n: -shares[n])[:2])
    first, last = census["experts"]
    census["experts"][first]["gate"].pop()
    for said in (f"{first} has 7 gate; expected 8", f"it has no '{last}' of this base"):
        request.routing.write_text(json.dumps(census))
        with pytest.raises(ConfigError, match=said):
            run(job)
        census["experts"] = {first: {"gate": [0.125] * 8}}


@pytest.mark.parametrize("percent", [7, 14, 29, 58, 100])
def test_a_share_of_a_hundred_experts_is_that_many(percent: int, tmp_path: Path) -> None:
    layers = {"m": {"gate": [0.01] * 100}}
    (tmp_path / "census.json").write_text(json.dumps({"experts": layers}))
    keys = {"experts_full": f"top {percent}%", "experts_census": str(tmp_path / "census.json")}
    adapter = settle(SwapConfig.load({"adapter": keys})).adapter
    assert adapter and len(adapter.experts_full or ()) == percent


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Request.__dataclass_fields__}


def _fails_once(write: Any) -> Any:
    calls = []

    def fails(rows: Any, some: Any) -> None:
        calls.append(None)
        write(rows, some[:1] if len(calls) == 2 else some)  # As a kill leaves it.
        if len(calls) == 2:
            raise RuntimeError("ended")

    return fails


def _toml(job: dict[str, Any]) -> str:
    """The job as a file of TOML, which JSON's texts, numbers and lists are."""
    lines = []
    for section, values in job.items():
        lines.append(f"[{section}]")
        lines += [
            f"{key} = {json.dumps(value)}" for key, value in values.items() if section != "tiers"
        ]
    tiers = job["tiers"]
    lines += ["[tiers.host]", 'capacity = "24MiB"', "huge_pages = false", "[[tiers.nvme]]"]
    return "\n".join([*lines, f'path = "{tiers["nvme"][0]["path"]}"'])


# -- Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "refused"),
    [
        ({"experts_full": "top 2%"}, "needs adapter.experts_census"),
        ({"experts_full": ["top 2%", "a.0"]}, "names of experts, or one share"),
        ({"experts_full": "top two"}, "names of experts, or one share"),
        ({"experts_full": "top 101%"}, "names of experts, or one share"),
        ({"experts_full": ["model.layers.1.mlp.experts.8"]}, "'model.layers.1.mlp.experts.8' is no "
         "expert .* from model.layers.1.mlp.experts.0 to model.layers.2.mlp.experts.7"),
        ({"experts_full": ["model.layers.1.mlp.experts.0"], "experts": True}, "expected false"),
        ({"experts_full": "top 1%", "experts_census": "census.json"}, "1 % of the 16 experts .* is "
         "less than one expert; expected at least 6.2 %"),
        ({"experts_full": "top 50%", "experts_census": "census.json"}, "made over another base, /x"),
        ({"experts_full": "top 50%", "experts_census": "text.txt"}, "no census of experts"),
        ({"experts_full": ["model.layers.1.mlp.experts.0"], "experts_census": "a"}, "is no census"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_refused_before_anything_is_read(
    job: dict[str, Any], tmp_path: Path, monkeypatch: Any, adapter: dict[str, Any], refused: str
) -> None:
    layers = [f"model.layers.{n}.mlp.experts" for n in (1, 2)]
    content = {
        "base": {"path": "/x"},
        "experts": {name: {"gate": [0.125] * 8, "tokens": [0.125] * 8} for name in layers},
    }
    (tmp_path / "census.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=refused):
        run(job | {"adapter": adapter})
    assert not (tmp_path / "swap").exists() and not (tmp_path / "output").exists()


def test_experts_that_preferences_or_several_adapters_would_share_are_refused(
    job: dict[str, Any], tmp_path: Path
) -> None:
    several = [{"name": "a", "experts_full": CHOSEN["kimi-k2"]}, {"name": "b"}]
    with pytest.raises(ConfigError, match="experts have weights once"):
        SwapConfig.load(job | {"adapter": several})
    job["train"]["method"] = "dpo"
    with pytest.raises(ConfigError, match="may compare with the model without its adapter"):
        run(job)


def test_a_model_without_an_engine_shows_no_tiles(base_of: Any) -> None:
    """Choosing experts changes no module before `infinity.offload`."""
    base, _ = base_of("kimi-k2", "int4")
    with infinity.init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    options = AdapterConfig(targets=(), experts_full=tuple(CHOSEN["kimi-k2"]))
    attach_adapter(model, [(options, 0)], weight_source(base))
    assert not any(isinstance(module, TiledExperts) for module in model.modules())
