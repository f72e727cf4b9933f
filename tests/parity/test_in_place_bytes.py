"""Bytes that move over a base in its own files, by the engine's counters and by the kernel's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import infinity
from infinity.modules.tiling.experts import TiledExperts
from tests.support.hooks import harmless
from tests.support.quantized import read_headers, tiny_causal_lm, write_quantized

from .in_place import Base, at_least, config_of, loss_of, over

IDS = torch.arange(24).view(2, 12)


def adapted(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"]))


class Moved(dict[str, int]):
    """Bytes since the measure was made: `shards` of the base, `read` and `written` by the engine on
    all files, `kernel_read` and `kernel_written` of this process (proc(5))."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        super().__init__(self._now())

    def _now(self) -> dict[str, int]:
        counters = self._engine.counters.snapshot()
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return {
            "shards": int(counters.get("shard_read_nbytes", 0)),
            "read": int(counters.get("nvme_read_nbytes", 0)),
            "written": int(counters.get("nvme_write_nbytes", 0)),
            "kernel_read": int(lines["read_bytes"]), "kernel_written": int(lines["write_bytes"]),
        }  # fmt: skip

    def since(self) -> dict[str, int]:
        now = self._now()
        return {name: now[name] - self[name] for name in now}


def tight(base: Base, directory: Path) -> dict[str, Any]:
    """The least host memory, in which nothing of the base is kept, and swap for the adapter."""
    places = dict.fromkeys(("master", "moments", "gradients", "activations"), "host")
    config = config_of(
        directory, tiers={"host": {"capacity": "least"}}, schedule={"tile": 0}, placement=places
    )
    return at_least(base, config, simulated=False, adapt=adapted)


def test_a_step_reads_the_base_twice_and_writes_no_more_than_the_adapter(tmp_path: Path) -> None:
    """Within a percent, for one micro-batch and for three; a checkpoint, the saved adapter and the
    start read no byte of it. The kernel counts as the engine does."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 768}
    write_quantized(tiny_causal_lm("llama", **sizes), tmp_path / "base", "nf4")
    base = Base.at(tmp_path / "base")
    config = tight(base, tmp_path)
    is_on_a_drive = os.major(os.stat(tmp_path).st_dev) != 0
    for num_batches in (1, 3):
        with over(base, config, adapted) as (model, engine):
            assert Moved(engine)["shards"] == 0
            optimizer = infinity.AdamW(model, lr=1e-2)
            trained = [each for each in model.parameters() if each.requires_grad]
            adapter_nbytes = sum(each.nbytes + 4096 for each in trained)  # In whole pages.
            for _ in range(2):
                before = Moved(engine)
                infinity.forward_backward(model, partial(loss_of, model), [IDS] * num_batches)
                optimizer.step()
                optimizer.zero_grad()
                moved = before.since()
            assert moved["shards"] == pytest.approx(2 * base.nbytes, rel=0.01)
            assert moved["read"] - moved["shards"] <= 3 * adapter_nbytes
            assert moved["written"] <= adapter_nbytes
            before_saving = Moved(engine)
            infinity.checkpoint.save(tmp_path / f"runs{num_batches}", model, optimizer)
            model.save_pretrained(tmp_path / f"adapter{num_batches}")
            saved = before_saving.since()
            assert saved["shards"] == 0 and saved["read"] <= 3 * adapter_nbytes
            if is_on_a_drive:
                assert moved["kernel_read"] == pytest.approx(moved["read"], rel=0.01)
                assert moved["kernel_written"] <= 2 * adapter_nbytes
                assert saved["kernel_read"] <= 3 * adapter_nbytes


@contextmanager
def routed_experts(model: Any) -> Iterator[list[int]]:
    """The number of experts that each call of a module of experts was sent tokens for."""
    counts: list[int] = []
    hooks = [
        module.register_forward_pre_hook(
            harmless(lambda _, args: counts.append(len(set(args[1].flatten().tolist()))))
        )
        for module in model.modules()
        if isinstance(module, TiledExperts)
    ]
    yield counts
    for hook in hooks:
        hook.remove()


def test_evaluation_and_generation_read_only_the_experts_that_tokens_chose(tmp_path: Path) -> None:
    write_quantized(
        tiny_causal_lm("kimi-k2", n_routed_experts=32, n_group=1), tmp_path / "base", "int4"
    )
    base = Base.at(tmp_path / "base")
    config = config_of(tmp_path, schedule={"tile": "64KiB"}, tiers={"host": {"capacity": "2MiB"}})
    places = read_headers(base.quantized)
    in_experts = {name: place[4] for name, place in places.items() if ".experts." in name}
    expert_nbytes = sum(n for name, n in in_experts.items() if "layers.1.mlp.experts.0." in name)
    rest_nbytes = base.nbytes - sum(in_experts.values())
    with over(base, config, adapted) as (model, engine):
        model.eval()
        ids = torch.arange(3).view(1, 3)
        with torch.no_grad():
            model(input_ids=ids)  # What is kept from here on is read no more.
        for call, num_calls in (
            (lambda: model(input_ids=ids), 1),
            (lambda: model.generate(input_ids=ids, max_new_tokens=3, do_sample=False), 3),
        ):
            with routed_experts(model) as counts, torch.no_grad():
                before = Moved(engine)
                call()
                read_nbytes = before.since()["shards"]
            num_layers = 2
            assert len(counts) == num_calls * num_layers
            assert max(counts) < 32 // 2
            pages = 3 * 4096  # An expert's tensors are read in whole pages.
            most = sum(counts) * (expert_nbytes + pages) + num_calls * rest_nbytes
            assert 0 < read_nbytes <= most < num_calls * base.nbytes
