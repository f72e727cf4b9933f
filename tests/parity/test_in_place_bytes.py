"""Bytes that move over a base in its own files, by the engine's counters and by the kernel's;
and the work of the start over very many tensors."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.modules.tiling.experts import TiledExperts
from tests.support.exhaustive import sampled
from tests.support.hooks import harmless
from tests.support.quantized import (
    CONFIG_NAME,
    INDEX_NAME,
    read_headers,
    tiny_causal_lm,
    write_quantized,
)

from .in_place import Base, at_least, config_of, loss_of, over

IDS = torch.arange(24).view(2, 12)


def adapted(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["o_proj"]))


def process_io() -> dict[str, int]:
    """What the kernel counts for this process (proc(5))."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in lines}


class Moved(dict[str, int]):
    """Bytes since the measure was made: `shards` of the base, `read` and `written` by the engine on
    all files, `kernel_read` and `kernel_written` of this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        super().__init__(self._now())

    def _now(self) -> dict[str, int]:
        counters = self._engine.counters.snapshot()
        by_kernel = process_io()
        return {
            "shards": int(counters.get("shard_read_nbytes", 0)),
            "read": int(counters.get("nvme_read_nbytes", 0)),
            "written": int(counters.get("nvme_write_nbytes", 0)),
            "kernel_read": by_kernel["read_bytes"], "kernel_written": by_kernel["write_bytes"],
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
            for place in ("first", "saved"):  # The first one imports modules, from a drive.
                before_saving = Moved(engine)
                infinity.checkpoint.save(tmp_path / f"{place}{num_batches}", model, optimizer)
                model.save_pretrained(tmp_path / f"{place}-adapter{num_batches}")
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


@pytest.mark.parametrize("num_blocks", sampled([9, 13], (9).__eq__))
def test_memory_saves_the_reads_of_what_it_keeps(num_blocks: int, tmp_path: Path) -> None:
    """A sweep there and back over 16 blocks: what remains of the budget beside one block as stored
    and one as decoded is not read, in either direction."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "b")
    base = Base.at(tmp_path / "b")
    settings = config_of(tmp_path, tiers={"host": {"capacity": num_blocks * base.nbytes // 16}})
    with over(base, settings, adapted) as (model, engine):
        unit_nbytes = max(unit.stored.nbytes for unit in engine.store.units if unit.stored)
        kept_nbytes = engine.weight_cache._ahead._window_nbytes
        assert kept_nbytes >= (num_blocks - 5) * unit_nbytes
        ids = torch.arange(8).view(1, -1)
        for _ in range(3):
            before = Moved(engine)
            infinity.forward_backward(model, partial(loss_of, model), [ids])
        saved_nbytes = 2 * base.nbytes - before.since()["shards"]
        assert saved_nbytes >= 2 * (kept_nbytes - unit_nbytes)


def test_every_step_over_tiled_experts_reads_the_base_twice_less_what_is_kept(
    tmp_path: Path,
) -> None:
    """In a budget of a third of the base, for one micro-batch and for two. Tiles are read ahead
    in all but the first step, and a tile that is read ahead is not evicted for a decoded one."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 256}
    plain = tiny_causal_lm("deepseek-v3", n_routed_experts=32, **sizes)
    write_quantized(plain, tmp_path / "base", "int4")
    base = Base.at(tmp_path / "base")
    reads: list[list[int]] = []
    for num_micro_batches in (1, 2):
        config = config_of(
            tmp_path,
            tiers={"host": {"capacity": base.nbytes // 3}}, schedule={"tile": "512KiB"},
            placement=dict.fromkeys(("master", "moments", "gradients", "activations"), "host"),
        )  # fmt: skip
        with over(base, config, adapted) as (model, engine):
            ids = torch.arange(48).view(1, -1)
            start, counts = Moved(engine), [0]
            for _ in range(3):
                infinity.forward_backward(model, partial(loss_of, model), [ids] * num_micro_batches)
                counts.append(start.since()["shards"])
            kept_nbytes = engine.weight_cache._ahead._window_nbytes
            by_kernel = start.since()["kernel_read"]
        if by_kernel:  # A file system in memory has no drive.
            assert by_kernel == pytest.approx(counts[-1], rel=0.01)
        reads.append([after - before for before, after in pairwise(counts)])
    assert kept_nbytes > base.nbytes // 10
    # At least half of what could be kept is kept, in each direction.
    assert max(reads[0]) <= 2 * base.nbytes - kept_nbytes, reads
    assert reads[0] == pytest.approx(reads[1], rel=0.01), "whatever the number of micro-batches"


# -- The start: headers are read, and the work per tensor is constant ------------------------------

EXPERTS = 192  # Of three matrices each, of three tensors each.
LAYERS = 4


def write_again(source: Path, target: Path, num_layers: int) -> int:
    """Writes headers in which the last layer of a one-shard INT4 base stands so many times, over a
    file without blocks. Returns the number of tensors."""
    target.mkdir()
    (file,) = source.glob("*.safetensors")
    with file.open("rb") as opened:
        (nbytes,) = struct.unpack("<Q", opened.read(8))
        entries = json.loads(opened.read(nbytes))
    made: dict[str, Any] = {"__metadata__": entries.pop("__metadata__")}
    end = 0
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        for layer in range(1, num_layers + 1) if ".layers.1." in name else [0]:
            again = re.sub(r"\.layers\.1\.", f".layers.{layer}.", name)
            made[again] = {**entry, "data_offsets": [end, end + last - first]}
            end += last - first
    header = json.dumps(made).encode()
    with (target / file.name).open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + end)
    places = dict.fromkeys(list(made)[1:], file.name)
    (target / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((source / CONFIG_NAME).read_text())
    (target / CONFIG_NAME).write_text(json.dumps({**config, "num_hidden_layers": num_layers + 1}))
    return len(places)


class Counted:
    """Calls of functions, of Python and of C, and the bytes that system calls read, in a block."""

    num_calls = 0

    def __enter__(self) -> Counted:
        self._before = self._read_nbytes()
        sys.setprofile(self._count)
        return self

    def _count(self, _frame: Any, event: str, _argument: Any) -> None:
        self.num_calls += event in ("call", "c_call")

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.read_nbytes = self._read_nbytes() - self._before

    @staticmethod
    def _read_nbytes() -> int:
        return process_io()["rchar"]


def test_the_start_reads_headers_only_and_its_work_grows_with_their_number(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "n_routed_experts": EXPERTS, "n_group": 1}
    plain = tiny_causal_lm("kimi-k2", hidden_size=64, moe_intermediate_size=64, **sizes)
    write_quantized(plain, tmp_path / "one", "int4", num_shards=1)
    del plain
    found = []
    for num_layers in (1, LAYERS):
        directory = tmp_path / f"{num_layers} layers"
        num_tensors = write_again(tmp_path / "one", directory, num_layers)
        with Counted() as counted, over(Base.at(directory), config_of(tmp_path), adapted) as opened:
            sys.setprofile(None)
            _, engine = opened
            stored = [unit for unit in engine.store.units if unit.stored is not None]
            assert len(stored) >= num_layers
            assert engine.counters.snapshot().get("shard_read_nbytes", 0) == 0
        found.append((num_tensors, counted.num_calls))
    # The first run has also read what it imported.
    (shard,) = directory.glob("*.safetensors")
    with shard.open("rb") as file:
        (header_nbytes,) = struct.unpack("<Q", file.read(8))
    texts_nbytes = sum(each.stat().st_size for each in directory.glob("*.json"))
    # Some of it twice: for the places of the tensors, and for the identity of the files.
    assert counted.read_nbytes <= 3 * (header_nbytes + texts_nbytes) < 0.75 * shard.stat().st_size
    (few, calls_of_few), (many, calls_of_many) = found
    assert few > 1500 and many > 3.9 * few
    assert calls_of_many <= 1.1 * LAYERS * calls_of_few
