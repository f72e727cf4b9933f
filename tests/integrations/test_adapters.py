"""Adapters over a frozen base: what is read, written and kept of either."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.checkpoint import load, save
from infinity.engine import lay_out
from infinity.errors import InfinityError
from infinity.modules.reading import discover
from tests.support.offloading import small_tiers

IDS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
KINDS = ("parameters", "master", "moments", "gradients")


def lora(seed: int = 0) -> Any:
    """A small Llama with adapters at two of its projections, none of them zero."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512,
    )  # fmt: skip
    wanted = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(config), wanted)


def swap(directory: Path, host: str = "12MiB", **schedule: Any) -> dict[str, Any]:
    """All state on the drive, however much host memory there is."""
    return {
        "placement": {kind: ["nvme"] for kind in KINDS},
        "tiers": small_tiers(directory / "swap", host),
        "schedule": schedule,
    }


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_nbytes(model: nn.Module) -> int:
    """Of the adapters, in whole pages for each block."""
    return sum(
        -(-sum(4 * p.numel() for p in layer.parameters() if p.requires_grad) // 4096) * 4096
        for layer in model.base_model.model.model.layers  # type: ignore[union-attr]
    )


class Reads:
    """Bytes that were asked of the drive since this was asked last."""

    def __init__(self, model: nn.Module) -> None:
        self._counters = infinity.engine_of(model).counters
        self._seen = 0.0
        self()

    def __call__(self) -> float:
        before, self._seen = self._seen, self._counters.snapshot().get("nvme_read_nbytes", 0)
        return self._seen - before


def test_trainable_and_frozen_parameters_are_separate_units() -> None:
    mixed = discover.discover_units(lora())
    for _, members in mixed.units:
        assert len({found.parameter.requires_grad for found in members}) == 1
    names = [name for name, _ in mixed.units]
    assert len(set(names)) == len(names)
    trained = lora().requires_grad_(True)
    assert (
        len(discover.discover_units(trained).units) == len(names) - 4
    )  # The adapters of four blocks.


@pytest.mark.parametrize("updates", ["deferred", "at_step"])
def test_an_update_of_adapters_reads_no_base(updates: str, tmp_path: Path) -> None:
    """Twice in a step, for the forward and the backward, when nothing stays in memory."""
    plain = lora()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    model = infinity.offload(lora(), swap(tmp_path, "640KiB", updates=updates))
    with infinity.engine_of(model) as engine:
        optimizer = infinity.AdamW(model, lr=1e-2)
        assert train(model, optimizer, 3) == train(plain, reference, 3)
        engine.flush()
        reads = Reads(model)
        train(model, optimizer, 1)
        engine.flush()
        base = sum(4 * p.numel() for p in plain.parameters())
        state = 8 * trained_nbytes(plain)  # Weights twice, gradients and moments; no masters.
        assert reads() < 2 * base + state + 64 * 4096


@pytest.mark.parametrize("host", ["640KiB", "12MiB"], ids=["tight", "roomy"])
def test_saving_an_adapter_reads_the_adapter_alone(host: str, tmp_path: Path) -> None:
    plain = lora()
    plain.save_pretrained(tmp_path / "plain")
    model = infinity.offload(lora(), swap(tmp_path, host))
    with infinity.engine_of(model) as engine, torch.no_grad():
        model(input_ids=IDS)  # There is an order of uses to be mistaken for a pass.
        engine.weight_cache.forget()
        reads = Reads(model)
        values = model.state_dict()
        assert list(values) == list(plain.state_dict()) and reads() == 0
        model.save_pretrained(tmp_path / "mine")
        assert reads() <= trained_nbytes(plain)
    files = [tmp_path / side / "adapter_model.safetensors" for side in ("plain", "mine")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_saving_a_frozen_adapter_reads_nothing_of_the_base(tmp_path: Path) -> None:
    def two() -> Any:
        model = lora()
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        return model

    plain = two()
    model = infinity.offload(two(), swap(tmp_path, "640KiB"))
    with infinity.engine_of(model) as engine:
        with torch.no_grad():
            model(input_ids=IDS)
            engine.weight_cache.forget()
            reads = Reads(model)
            model.save_pretrained(tmp_path / "mine", selected_adapters=["second"])
        second = [p for name, p in plain.named_parameters() if ".second." in name]
        pages = len(engine.store.units) * 4096
        assert 0 < reads() <= sum(4 * p.numel() for p in second) + pages
        assert train(model, infinity.AdamW(model, lr=1e-2), 2) == train(
            plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), 2
        )


def test_an_adapter_is_loaded_onto_an_offloaded_model(tmp_path: Path) -> None:
    other, plain = lora(1), lora()
    wanted = get_peft_model_state_dict(other)
    set_peft_model_state_dict(plain, wanted, ignore_mismatched_sizes=True)
    model = infinity.offload(lora(), swap(tmp_path))
    with infinity.engine_of(model) as engine, torch.no_grad():
        engine.weight_cache.forget()
        reads = Reads(model)
        set_peft_model_state_dict(model, wanted, ignore_mismatched_sizes=True)
        found = get_peft_model_state_dict(model)
        assert reads() <= 3 * trained_nbytes(plain)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)


def test_values_of_a_state_dict_are_tensors_like_any(tmp_path: Path) -> None:
    plain = lora().state_dict()
    model = infinity.offload(lora(), swap(tmp_path, tile="64KiB"))
    with infinity.engine_of(model):
        values = model.state_dict()
        name = next(name for name in values if "lora_A" in name)
        copies = {
            "deepcopy": copy.deepcopy(values),
            "clone": {key: value.clone() for key, value in values.items()},
            "numpy": {key: torch.from_numpy(value.numpy()) for key, value in values.items()},
        }
        stream = io.BytesIO()
        torch.save(values, stream)
        stream.seek(0)
        copies["torch.save"] = torch.load(stream)
        safetensors.torch.save_file(dict(model.state_dict()), tmp_path / "all.safetensors")
        copies["safetensors"] = safetensors.torch.load_file(tmp_path / "all.safetensors")
        for way, found in copies.items():
            assert list(found) == list(plain) or way == "safetensors"
            for key, value in plain.items():
                assert type(found[key]) is torch.Tensor, (way, key)
                assert torch.equal(found[key], value), (way, key)
        value = values[name]
        assert value.shape == plain[name].shape and not value.requires_grad
        assert torch.equal(value.to(torch.float64), plain[name].double())
        assert repr(value) == repr(plain[name])
        weight = torch.ones_like(plain[name], requires_grad=True)
        (value * weight).sum().backward()
        assert torch.equal(weight.grad, plain[name])  # type: ignore[arg-type]
        with pytest.raises(InfinityError, match=r"clone\(\)"):
            nn.Parameter(value)
        other = lora(1)
        other.load_state_dict(values)
        assert all(torch.equal(other.state_dict()[key], value) for key, value in plain.items())


def test_values_of_a_state_dict_are_those_of_now(tmp_path: Path) -> None:
    model = infinity.offload(lora(), swap(tmp_path))
    with infinity.engine_of(model) as engine:
        values = model.state_dict()
        name = next(name for name in values if "lora_A" in name)
        with infinity.gather(model, modify=True), torch.no_grad():
            model.get_parameter(name).fill_(3.0)
        assert values[name].eq(3.0).all()
        before = values[name].clone()
        reads = Reads(model)
        model.load_state_dict(values)  # Its own: nothing is to be done.
        assert reads() == 0
        try:
            with torch.no_grad():
                values[name].zero_()  # The parameter's, as in plain PyTorch, or refused.
            assert not engine.read_parameter(name).any()
        except InfinityError:
            assert torch.equal(engine.read_parameter(name), before)


def test_a_checkpoint_of_units_that_were_mixed_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier releases wrote them: adapters and base of a block in one unit."""

    def mixed(model: nn.Module, rule: Any, **options: Any) -> discover.ModelLayout:
        layout = discover.discover_units(model, rule, **options)
        units: dict[tuple[int, ...], tuple[str, list[discover.FoundParam]]] = {}
        for name, members in layout.units:
            units.setdefault(tuple(members[0].hooked_modules), (name, []))[1].extend(members)
        return replace(layout, units=list(units.values()))

    config = swap(tmp_path) | {
        "checkpoint": {"durability": "step", "directory": str(tmp_path / "c")}
    }
    monkeypatch.setattr(lay_out, "discover_units", mixed)
    model = infinity.offload(lora(), config)
    optimizer = infinity.AdamW(model, lr=1e-2)
    train(model, optimizer, 2)
    save(tmp_path / "c" / "two", model, optimizer, step=2)
    wanted = train(model, optimizer, 2)
    infinity.engine_of(model).close()
    monkeypatch.undo()
    model = infinity.offload(lora(), config)
    with infinity.engine_of(model):
        optimizer = infinity.AdamW(model, lr=1e-2)
        assert load(tmp_path / "c" / "two", model, optimizer).step == 2
        assert train(model, optimizer, 2) == wanted
