"""Frozen weights in a checkpoint's own files, over ranks.

Two ranks with one batch train as one rank does: the mean of two equal gradients is exact. So a rank
alone, which tests/parity/test_in_place.py compares with plain PyTorch, is the reference.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.checkpoint import weight_source
from infinity.config.schema.inputs import AdapterConfig
from infinity.errors import InfinityError
from infinity.testing import SimulatedDevice
from infinity.tools.training.adapter import attach_adapter, save_adapter
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled
from tests.support.quantized import tiny_causal_lm, write_quantized

from .processes import run_ranks

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj", "kv_b_proj"]}
BASES = {  # Architecture and layout.
    "bf16": ("llama", "bf16"),
    "nf4": ("llama", "nf4"),
    "fp8": ("deepseek-v3", "fp8"),
    "int4": ("deepseek-v3", "int4"),
    "mxfp4": ("gpt-oss", "mxfp4"),
    "fp4": ("deepseek-v3", "fp4-experts"),
}


@dataclass(frozen=True)
class Case:
    """One way of training over a base. `tile`, `updates`: as of `schedule`; `frozen`: of `placement`;
    `adapters`: where their weights, masters and moments rest."""

    stage: int = 3
    layer_major: bool = False
    tile: Any = None
    frozen: str = "auto"
    exchange: str = "one_sided"
    steps: int = 2
    capacity: str = "24MiB"
    device_capacity: str = "auto"
    is_simulated: bool = False
    shard_over: str = "all"
    updates: str = "auto"
    adapters: str = "auto"
    experts: tuple[str, ...] = ()  # Trained in full.

    @property
    def device(self) -> SimulatedDevice | None:
        is_simulated = self.is_simulated or self.exchange == "collective"
        return SimulatedDevice(3) if is_simulated else None


@dataclass
class Run:
    """Losses and adapters of a rank, and what its engine counted."""

    seen: dict[str, Tensor]
    counters: dict[str, float]
    num_in_files: int
    tiled: list[str]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("bases")
    for name, (architecture, layout) in BASES.items():
        write_quantized(tiny_causal_lm(architecture), directory / name, layout)
    return {name: directory / name for name in BASES}


def model_over(base: Path, case: Case, swap: Path, **options: Any) -> Any:
    with infinity.init_empty_weights():
        architecture = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    if case.experts:
        options_of = AdapterConfig(targets=("o_proj",), experts_full=case.experts)
        model = attach_adapter(model, [(options_of, 7)], weight_source(base))
    else:
        torch.manual_seed(7)
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    config: dict[str, Any] = {
        "distributed": {
            "zero_stage": case.stage, "budgets": "rank", "exchange": case.exchange,
            "shard_over": case.shard_over,
        },
        "tiers": {
            "host": {"capacity": case.capacity, "huge_pages": False},
            "device": {"capacity": case.device_capacity},
            "nvme": [{"path": str(swap)}],
        },
        "placement": {"gradients": "host", "frozen": case.frozen},
        "schedule": {"updates": case.updates} | ({} if case.tile is None else {"tile": case.tile}),
    }  # fmt: skip
    if case.adapters != "auto":
        config["placement"] |= dict.fromkeys(("parameters", "master", "moments"), case.adapters)
    options = {"weights": base, "device": case.device, **options}
    infinity.offload(model, config, **options)
    return model


def step(
    model: Any, optimizer: Any, number: int, case: Case, shape: tuple[int, int] = (2, 12)
) -> dict[str, Tensor]:
    def loss_of(batch: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    generator = torch.Generator().manual_seed(number)
    batches = [torch.randint(0, 96, shape, generator=generator) for _ in range(2)]
    if case.layer_major:
        losses = infinity.forward_backward(model, loss_of, batches)
    else:
        losses = []
        for batch in batches:
            losses.append(loss_of(batch))
            losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return {f"loss {number}.{i}": loss.detach().clone() for i, loss in enumerate(losses)}


def trained(model: Any) -> dict[str, Tensor]:
    engine = infinity.engine_of(model)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: engine.read_parameter(name) for name in engine.parameter_names() if name in names}


def train(base: Path, case: Case, directory: str) -> Run:
    torch.set_num_threads(1)
    model = model_over(base, case, Path(directory, "swap"))
    engine = infinity.engine_of(model)
    with closing(engine):
        optimizer, seen = infinity.AdamW(model, lr=1e-2), {}
        for number in range(case.steps):
            seen |= step(model, optimizer, number, case)
        num_in_files = sum(param.unit.stored is not None for param in engine.params)
        counters, tiled = engine.counters.snapshot(), list(engine.tiled_params)
        return Run(seen | trained(model), counters, num_in_files, tiled)


@cache
def trained_alone(base: Path, case: Case) -> dict[str, Tensor]:
    """Losses and adapters of a rank alone, which has no stage."""
    with tempfile.TemporaryDirectory() as directory:
        return train(base, case, directory).seen


def train_all(rank: int, wanted: list[tuple[Path, Case]]) -> list[Run]:
    return [train(base, case, tempfile.gettempdir()) for base, case in wanted]


def assert_as_alone(wanted: list[tuple[Path, Case]], count: int = 2) -> list[list[Run]]:
    """Every rank has the bits of a rank alone. Returns the runs by rank."""
    of_ranks = run_ranks(count, train_all, wanted)
    for at, (base, case) in enumerate(wanted):
        alone = trained_alone(base, replace(case, stage=Case.stage))
        for runs in of_ranks:
            assert_same(alone, runs[at].seen, is_ordered=False)
            assert (runs[at].num_in_files > 0) == (case.frozen != "copy")
    return of_ranks


@pytest.mark.parametrize(
    ("name", "exchange"),
    sampled(
        product(BASES, ["one_sided", "collective"]),
        # Devices put INT4 together in another test.
        lambda case: case in [("bf16", "one_sided"), ("mxfp4", "collective")],
    ),
)
def test_ranks_train_over_every_layout_as_one_rank_does(
    bases: dict[str, Path], name: str, exchange: str
) -> None:
    """Of devices, each rank reads its part: the bytes go over a rank's link as they are stored, and
    are decoded behind the all-gather."""
    is_collective = exchange == "collective"
    ways = [Case(exchange=exchange, steps=3 if is_collective else 2)]
    for runs in assert_as_alone([(bases[name], way) for way in ways]):
        for run in runs:
            assert not is_collective or run.counters["ranks_gathered_nbytes"] > 0, run.counters


def test_chosen_experts_train_in_full_as_on_one_rank(bases: dict[str, Path]) -> None:
    experts = ("model.layers.1.mlp.experts.3", "model.layers.2.mlp.experts.0")
    ways = [Case(experts=experts, layer_major=True), Case(experts=experts, exchange="collective")]
    for runs in assert_as_alone([(bases["int4"], way) for way in ways]):
        assert all(sum(".tiles." in name for name in run.seen) == 4 for run in runs)


@pytest.mark.parametrize(
    ("stage", "layer_major"),
    sampled(product([1, 2, 3], [False, True]), lambda case: case == (3, True)),
)
def test_a_base_in_its_files_gives_the_bits_of_a_copied_one(
    bases: dict[str, Path], stage: int, layer_major: bool
) -> None:
    """Micro-batch by micro-batch or block by block. No byte of the base is written to the swap."""
    base = bases["int4"]
    ways = [
        Case(stage, layer_major=layer_major, frozen=frozen) for frozen in ("copy", "checkpoint")
    ]
    for copied, in_files in assert_as_alone([(base, way) for way in ways]):
        assert_same(copied.seen, in_files.seen)
        written = [run.counters["nvme_write_nbytes"] for run in (in_files, copied)]
        assert written[1] - written[0] > base_nbytes(base) / 2, written
        assert copied.counters.get("shard_read_nbytes", 0) == 0


def test_devices_put_stored_bytes_together_before_they_have_space_to_decode_them(
    bases: dict[str, Path],
) -> None:
    """The decoded weights of a block fit beside the stored bytes of the next, not beside its own."""
    case = Case(exchange="collective", device_capacity="3088KiB", tile=0, steps=5)
    ways = [case, replace(case, layer_major=True, steps=3)]
    for runs in assert_as_alone([(bases["int4"], way) for way in ways]):
        for run in runs:
            assert run.counters["fetches_staged"] > 0, run.counters
            assert run.counters["ranks_gathered_nbytes"] > 0, run.counters


TILED = Case(tile="64KiB")
COLLECTIVE = replace(TILED, exchange="collective", steps=4)
LAYER_MAJOR = replace(COLLECTIVE, layer_major=True, steps=3)
TILES = {"kept": [("int4", TILED), ("mxfp4", LAYER_MAJOR)], "rest": [("int4", COLLECTIVE)]}


@pytest.mark.parametrize("job", sampled(TILES, "kept".__eq__))
def test_tiles_in_files_train_over_ranks_as_on_one(bases: dict[str, Path], job: str) -> None:
    """One-sided, and put together by devices: also layer-major, where tiles of experts are fetched
    below their block."""
    wanted = TILES[job]
    for runs in assert_as_alone([(bases[name], case) for name, case in wanted]):
        for run, (_, case) in zip(runs, wanted, strict=True):
            assert any("experts" in name for name in run.tiled)
            is_collective = case.exchange == "collective"
            assert (run.counters.get("ranks_collectives", 0) > 0) == is_collective


Saved = dict[str, Any]


def save_adapters(
    rank: int, base: Path, cases: list[Case], directory: str
) -> list[tuple[Saved, float]]:
    """The adapter's files as PEFT writes them on this rank, and as `save_adapter` does; and the
    bytes of the base that were read for them and for a checkpoint."""
    return [save_adapter_of(rank, base, case, Path(directory, str(number)))
            for number, case in enumerate(cases)]  # fmt: skip


def save_adapter_of(rank: int, base: Path, case: Case, directory: Path) -> tuple[Saved, float]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as swap:
        model = model_over(base, case, Path(swap, "swap"))
        engine = infinity.engine_of(model)
        with closing(engine):
            optimizer = infinity.AdamW(model, lr=1e-2)
            step(model, optimizer, 0, case)
            engine.weight_cache.forget()  # As if other weights had needed its memory.
            before = engine.counters.snapshot()["shard_read_nbytes"]
            own = directory / str(rank)
            model.save_pretrained(own / "peft")
            save_adapter(model, own / "ours")
            infinity.checkpoint.save(directory / "runs", model, optimizer)
            nbytes = engine.counters.snapshot()["shard_read_nbytes"] - before
        files = own.glob("*/adapter_*")
        return {f"{path.parent.name}/{path.name}": content_of(path) for path in files}, nbytes


def content_of(path: Path) -> Any:
    """The bytes; of a JSON file its values, whose lists PEFT makes of sets, in any order."""
    if path.suffix != ".json":
        return path.read_bytes()
    values = json.loads(path.read_text())
    return {key: sorted(v) if isinstance(v, list) else v for key, v in values.items()}


def test_ranks_save_the_adapter_of_one_rank_and_read_no_byte_of_the_base(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base, cases = bases["int4"], [Case(), Case(exchange="collective")]
    [(alone, _)] = save_adapters(0, base, cases[:1], str(tmp_path / "alone"))
    assert len(alone) == 4
    for of_rank in run_ranks(2, save_adapters, base, cases, str(tmp_path / "ranks")):
        for files, nbytes in of_rank:
            assert files == alone and nbytes == 0


def base_nbytes(base: Path) -> int:
    return sum(path.stat().st_size for path in base.glob("*.safetensors"))


def save_and_go_on(rank: int, base: Path, case: Case, runs: str) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and a third step by another engine, which finds the base by it."""
    torch.set_num_threads(1)
    swap = Path(tempfile.gettempdir(), "swap")
    model, seen = model_over(base, case, swap), {}
    with closing(infinity.engine_of(model)):
        optimizer = infinity.AdamW(model, lr=1e-2)
        for number in range(2):
            seen |= step(model, optimizer, number, case)
        infinity.checkpoint.save(runs, model, optimizer)
    return seen | go_on(rank, base, case, runs, 1)


def go_on(rank: int, base: Path, case: Case, runs: str, num_steps: int) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    swap, seen = Path(tempfile.gettempdir(), "swap"), {}
    model = model_over(base, case, swap, weights=None, resume=runs)
    with closing(infinity.engine_of(model)):
        optimizer = infinity.AdamW(model, lr=1e-2)
        loaded = infinity.checkpoint.load(runs, model, optimizer)
        for number in range(loaded.step, loaded.step + num_steps):
            seen |= step(model, optimizer, number, case)
        return seen | trained(model)


def test_a_checkpoint_of_ranks_refers_to_the_base_and_is_resumed_by_any_number_of_them(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base, runs = bases["int4"], tmp_path / "runs"
    case = Case(steps=3, exchange="collective")
    alone = train(base, case, str(tmp_path)).seen
    for seen in run_ranks(2, save_and_go_on, base, case, str(runs)):
        assert_same(alone, seen, is_ordered=False)
    (saved,) = runs.iterdir()
    assert sum(path.stat().st_size for path in saved.rglob("*")) < base_nbytes(base) / 2
    checksums = [json.loads(path.read_text())["files"] for path in saved.glob("*/shards.json")]
    assert len(checksums) == 2 and all(of_rank[0]["checksums"] for of_rank in checksums)
    two_steps = train(base, replace(case, steps=2), str(tmp_path)).seen
    of_three = run_ranks(3, go_on, base, Case(2), str(runs), 0)
    for seen in [*of_three, go_on(0, base, case, str(runs), 0)]:
        assert_same({name: two_steps[name] for name in seen}, seen, is_ordered=False)
    last = go_on(0, base, case, str(runs), 1)
    assert_same({name: alone[name] for name in last}, last, is_ordered=False)


def error_after(rank: int, bases: str, change: str, case: Case) -> tuple[str, str]:
    """The class and the text of the error of a step after a shard has changed: that of all ranks,
    or, "gone", that of the last one, which has files of its own and loses one."""
    base = Path(bases, str(rank) if change == "gone" else "0")
    model = model_over(base, case, Path(tempfile.gettempdir(), "swap"))
    engine, caught = infinity.engine_of(model), ("", "")
    try:
        with closing(engine):
            optimizer = infinity.AdamW(model, lr=1e-2)
            for number in range(4):
                step(model, optimizer, number, case)
            engine.ranks.barrier("the file changes")
            shard = min(base.glob("*.safetensors"))
            if change == "gone" and rank == engine.ranks.num_ranks - 1:
                os.truncate(shard, 0)  # The open file has no bytes either.
                shard.unlink()
            elif change == "other bytes" and rank == 0:
                shard.write_bytes(shard.read_bytes()[:4096] + bytes(shard.stat().st_size - 4096))
            try:
                engine.ranks.barrier(
                    "the file has changed"
                )  # A rank that left it may fail at once.
                engine.weight_cache.forget()  # As if other weights had needed its memory.
                step(model, optimizer, 4, case)
            except InfinityError as error:
                caught = type(error).__name__, str(error)
                raise  # The engine gives it to the other ranks when it closes.
    except InfinityError:  # Closing a simulated device raises its own.
        pass
    return caught


@pytest.mark.parametrize("exchange", sampled(["one_sided", "collective"], "one_sided".__eq__))
def test_a_shard_with_other_bytes_is_named_on_every_rank(
    bases: dict[str, Path], tmp_path: Path, exchange: str
) -> None:
    shutil.copytree(bases["int4"], tmp_path / "0")
    shard = str(min((tmp_path / "0").glob("*.safetensors")))
    case = Case(exchange=exchange)
    for _, error in run_ranks(2, error_after, str(tmp_path), "other bytes", case):
        # The second where no byte of it was read before.
        assert shard in error and re.search("bytes are not those|was modified since", error)


@pytest.mark.parametrize(
    ("exchange", "count"),
    sampled(product(["one_sided", "collective"], [3, 2]), ("collective", 2).__eq__),
)
def test_a_shard_that_one_rank_loses_ends_every_rank_with_its_name(
    bases: dict[str, Path], tmp_path: Path, exchange: str, count: int
) -> None:
    """The rank that has lost it raises a StorageError, also for a read that an all-gather needs."""
    for rank in range(count):
        shutil.copytree(bases["int4"], tmp_path / str(rank))
    case = Case(exchange=exchange, device_capacity="3088KiB" if count == 2 else "auto")
    errors = run_ranks(count, error_after, str(tmp_path), "gone", case)
    lost = str(min(Path(tmp_path, "0").glob("*.safetensors"))).replace("/0/", f"/{count - 1}/")
    for kind, error in errors:
        assert lost in error and "it cannot be found any more" in error, errors
        assert kind in ("RankError", "StorageError")
    assert errors[-1][0] == "StorageError"
    assert all(f"rank {count - 1}" in error for _, error in errors[:-1]), errors


def start_over(rank: int, directory: str) -> str:
    with pytest.raises(InfinityError) as caught:
        model_over(Path(directory, str(rank)), Case(), Path(tempfile.gettempdir(), "swap"))
    return str(caught.value)


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    for rank, layout in enumerate(("bf16", "nf4")):
        write_quantized(tiny_causal_lm("llama"), tmp_path / str(rank), layout)
    errors = run_ranks(2, start_over, str(tmp_path))
    assert all("rank 1 has something else than rank 0" in error for error in errors)


def reads_of_a_step(rank: int, base: Path, case: Case) -> float:
    """The bytes that this rank reads of the base in a step, when memory has what it keeps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = model_over(base, case, Path(directory, "swap"))
        engine = infinity.engine_of(model)
        with closing(engine):
            optimizer, counts = infinity.AdamW(model, lr=1e-2), [0.0]
            for number in range(4):
                step(model, optimizer, number, case, (1, 2))  # No byte depends on tokens.
                counts.append(engine.counters.snapshot()["shard_read_nbytes"])
            return counts[4] - counts[3]


def test_ranks_keep_parts_of_their_own_and_read_less_of_the_base(tmp_path: Path) -> None:
    """With three quarters of the base, a rank alone reads the rest in both directions of a step."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=20, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=96, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "base")
    base, nbytes = tmp_path / "base", base_nbytes(tmp_path / "base")
    case = Case(
        exchange="collective",
        layer_major=True,
        capacity=f"{3 * nbytes // 4 >> 10}KiB",
        device_capacity="12MiB",
    )
    alone = reads_of_a_step(0, base, replace(case, exchange="one_sided", is_simulated=True))
    of_ranks = run_ranks(2, reads_of_a_step, base, case)
    assert alone > nbytes / 3
    assert of_ranks == [0, 0], "their memory keeps a half each"
