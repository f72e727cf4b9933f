"""Frozen weights that rest in a checkpoint's own files train as decoded weights in memory do.

The comparison is plain PyTorch: the same transformers model with the decoded weights in memory,
the same adapter (on experts as factors, `infinity.factored_experts`), `torch.optim.AdamW`. Losses, gradients, adapters and moments have the same bits.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.testing.quantized import tiny_causal_lm, write_decoded, write_quantized
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import assert_same
from tests.support.exhaustive import in_turn
from tests.support.forked import Script, wait_until

STEPS, MICRO_BATCHES = 3, 3
# Architecture, layout, projections with an adapter.
CASES = {
    "llama-bf16": ("llama", "bf16"),
    "llama-nf4": ("llama", "nf4"),
    "deepseek-fp8": ("deepseek-v3", "fp8"),
    "deepseek-int4": ("deepseek-v3", "int4"),
    "qwen3-moe-fp8": ("qwen3-moe", "fp8-bf16-scales"),
    "gpt-oss-mxfp4": ("gpt-oss", "mxfp4"),
    "glm-int4": ("glm4-moe", "int4"),
    "deepseek-fp4": ("deepseek-v3", "fp4-experts"),
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj", "kv_b_proj"]}


class Base:
    """A quantised directory, and the losses and adapters of the plain run over its weights."""

    def __init__(self, case: str, directory: Path) -> None:
        architecture, layout = CASES[case]
        self.quantized, self.decoded = directory / "base", directory / "decoded"
        write_quantized(tiny_causal_lm(architecture), self.quantized, layout)
        write_decoded(self.quantized, self.decoded)
        model = AutoModelForCausalLM.from_pretrained(self.decoded, dtype=torch.bfloat16)
        model = infinity.factored_experts(adapted(model))
        trained = [p for p in model.parameters() if p.requires_grad]
        self.expected = train(model, torch.optim.AdamW(trained, lr=1e-2, fused=True))

    @classmethod
    def at(cls, quantized: Path) -> Base:
        """A directory that is there already, without a plain run."""
        base = cls.__new__(cls)
        base.quantized = quantized
        return base

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.quantized.glob("*.safetensors"))

    def digest(self) -> list[bytes]:
        files = sorted(self.quantized.iterdir())
        return [hashlib.sha256(path.read_bytes()).digest() for path in files]


def adapted(model: Any) -> Any:
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA))


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 96, (2, 12), generator=generator) for _ in range(MICRO_BATCHES)]


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss / MICRO_BATCHES


def train(
    model: Any, optimizer: Any, *, layer_major: bool = False, steps: Any = range(STEPS)
) -> dict[str, torch.Tensor]:
    """Returns losses, gradients of the last step, and adapters with their moments."""
    seen: dict[str, torch.Tensor] = {}
    for step in steps:
        if layer_major:
            losses = infinity.forward_backward(model, lambda b: loss_of(model, b), batches(step))
        else:
            losses = []
            for batch in batches(step):
                losses.append(loss_of(model, batch))
                losses[-1].backward()
        for index, loss in enumerate(losses):
            seen[f"loss {step}.{index}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                seen[f"gradient of {name}"] = parameter.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            seen[name] = parameter.detach().clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                seen[f"{kind} of {name}"] = optimizer.state[parameter][kind].detach().clone()
    return seen


FEW = ("deepseek-int4", "gpt-oss-mxfp4")  # Per-expert names and packed ones.


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(request.param, tmp_path_factory.mktemp("base"))


def config_of(directory: Path, **sections: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tiers": {"host": {"capacity": "64MiB"}, "nvme": [{"path": str(directory / "swap")}]},
        "placement": {"gradients": "host"},
    }
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **deepcopy(values)}
    return config


@contextmanager
def over(base: Base, config: dict[str, Any], **options: Any) -> Iterator[tuple[Any, Any]]:
    """The adapter over the base in place: the model and its engine."""
    with infinity.init_empty_weights():
        architecture = AutoConfig.from_pretrained(base.quantized)
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    model = adapted(model)
    infinity.offload(model, config, **{"weights": base.quantized, **options})
    try:
        yield model, infinity.engine_of(model)
    finally:
        infinity.close(model)


WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "nvme": ({}, False),
    "least": ({"tiers": {"host": {"capacity": "least"}}, "schedule": {"tile": 0}}, False),
    "device": ({}, True),
    "threads": ({"schedule": {"prefetch": False}, "io": {"engine": "threads"}}, False),
    "host": ({"placement": dict.fromkeys(("parameters", "master", "moments"), "host")}, False),
    "window": ({"schedule": {"window": "96KiB"}}, False),
    "copied": ({"placement": {"frozen": "copy"}}, False),
    "device-least": (
        {"tiers": {"device": {"capacity": "least"}}, "schedule": {"tile": 0}}, True,
    ),
    # The stored bytes of the next block fit the device, its decoded weights do not.
    "device-staged": (
        {"tiers": {"device": {"capacity": "least", "spare": 512 << 10}}, "schedule": {"tile": 0}},
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("base", "way"),
    in_turn(CASES, ["nvme", "least", "device"])
    + [
        (FEW[0], way)
        for way in ("threads", "host", "window", "copied", "device-least", "device-staged")
    ],
    indirect=["base"],
)
def test_an_adapter_trains_as_over_decoded_weights_in_memory(
    base: Base, tmp_path: Path, way: str
) -> None:
    sections, simulated = WAYS[way]
    before = base.digest()
    options = {"device": SimulatedDevice(3)} if simulated else {}
    config = at_least(base, config_of(tmp_path, **sections), simulated)
    with over(base, config, **options) as (model, engine):
        is_copied = sections.get("placement", {}).get("frozen") == "copy"
        frozen = [unit for unit in engine.store.units if not unit.state_numel]
        assert all((unit.stored is None) == is_copied for unit in frozen) and frozen
        seen = train(model, infinity.AdamW(model, lr=1e-2))
        assert (engine.counters.snapshot().get("fetches_staged", 0) > 0) == (way == "device-staged")
    assert_same(base.expected, seen, is_ordered=False)
    assert base.digest() == before


@pytest.mark.parametrize("base", FEW, indirect=True)
def test_tiles_in_place_train_as_tiles_of_copied_weights(base: Base, tmp_path: Path) -> None:
    """Tiles round as tiles do (docs/design/0007-tiling.md); where they rest changes no bit."""
    seen = []
    for frozen in ("copy", "checkpoint"):
        config = config_of(tmp_path, placement={"frozen": frozen}, schedule={"tile": "64KiB"})
        with over(base, config) as (model, engine):
            assert engine.tiled_params
            stored = [unit for unit in engine.store.units if unit.stored is not None]
            assert bool(stored) == (frozen == "checkpoint")
            seen.append(train(model, infinity.AdamW(model, lr=1e-2)))
    assert_same(*seen, is_ordered=False)


def at_least(base: Base, config: dict[str, Any], simulated: bool) -> dict[str, Any]:
    """Replaces the capacity "least" by the smallest one that the engine names, and "spare"."""
    for tier in config["tiers"].values():
        if isinstance(tier, dict) and tier.get("capacity") == "least":
            tier["capacity"], spare = "256KiB", tier.pop("spare", 0)
            options = {"device": SimulatedDevice(3)} if simulated else {}
            with pytest.raises(infinity.CapacityError) as refused, over(base, config, **options):
                pass
            tier["capacity"] = refused.value.needed_nbytes + spare
    return config


@pytest.mark.parametrize("base", FEW, indirect=True)
def test_layer_major_reads_the_base_twice_however_many_micro_batches(
    base: Base, tmp_path: Path
) -> None:
    """And gives the bits of layer-major over copied weights, whose sums have an order of their own."""
    with over(base, config_of(tmp_path, placement={"frozen": "copy"})) as (model, _):
        expected = train(model, infinity.AdamW(model, lr=1e-2), layer_major=True)
    with over(base, config_of(tmp_path)) as (model, engine):
        seen = train(model, infinity.AdamW(model, lr=1e-2), layer_major=True)
        num_fetches = engine.counters.snapshot()["fetches"]
        num_units = len(engine.store.units)
    assert_same(expected, seen, is_ordered=False)
    assert num_fetches <= STEPS * (2 * num_units + 2 * MICRO_BATCHES * 8)


@pytest.mark.parametrize("base", FEW, indirect=True)
def test_no_byte_of_the_base_is_written_or_saved(base: Base, tmp_path: Path) -> None:
    with over(base, config_of(tmp_path)) as (model, engine):
        assert engine.counters.snapshot().get("shard_read_nbytes", 0) == 0, (
            "start-up reads headers only"
        )
        optimizer = infinity.AdamW(model, lr=1e-2)
        train(model, optimizer)
        before = engine.counters.snapshot().get("shard_read_nbytes", 0)
        saved = infinity.checkpoint.save(tmp_path / "runs", model, optimizer)
        model.save_pretrained(tmp_path / "adapter")
        assert engine.counters.snapshot().get("shard_read_nbytes", 0) == before
    assert sum(path.stat().st_size for path in saved.iterdir()) < base.nbytes
    loaded = AutoModelForCausalLM.from_pretrained(base.decoded, dtype=torch.bfloat16)
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter", is_trainable=True)
    for name, parameter in loaded.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, base.expected[name]), name


@pytest.mark.parametrize("base", FEW, indirect=True)
def test_a_run_goes_on_exactly_from_its_checkpoint(base: Base, tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint={"keep": 1})
    with over(base, config) as (model, _):
        optimizer = infinity.AdamW(model, lr=1e-2)
        first = train(model, optimizer, steps=range(2))
        infinity.checkpoint.save(tmp_path / "runs", model, optimizer)
    with over(base, config, weights=None, resume=tmp_path / "runs") as (model, _):
        optimizer = infinity.AdamW(model, lr=1e-2)
        infinity.checkpoint.load(tmp_path / "runs", model, optimizer)
        second = train(model, optimizer, steps=range(2, STEPS))
    losses = {name: value for name, value in first.items() if name.startswith("loss")}
    assert_same(base.expected, losses | second, is_ordered=False)


@pytest.mark.parametrize("base", FEW[:1], indirect=True)
def test_shards_and_swap_files_on_several_drives_change_no_bit(base: Base, tmp_path: Path) -> None:
    """Two directories stand for drives: shards are links to them in turn, and each has swap files."""
    drives = [tmp_path / "first", tmp_path / "second"]
    spread = tmp_path / "base"
    for directory in (*drives, spread):
        directory.mkdir()
    for number, file in enumerate(sorted(base.quantized.iterdir())):
        if file.suffix == ".safetensors":
            place = drives[number % 2] / file.name
            shutil.copy(file, place)
            (spread / file.name).symlink_to(place)
        else:
            shutil.copy(file, spread)
    assert all(list(drive.iterdir()) for drive in drives), "shards on both"
    config = config_of(tmp_path)
    config["tiers"]["nvme"] = [{"path": str(drive / "swap")} for drive in drives]
    with over(Base.at(spread), config) as (model, _):
        seen = train(model, infinity.AdamW(model, lr=1e-2))
    assert_same(seen, base.expected)


@pytest.mark.parametrize("base", FEW[:1], indirect=True)
def test_memory_for_decoded_weights_is_given_up_while_they_are_in_use(
    base: Base, tmp_path: Path
) -> None:
    """As an allocation does that finds no other memory. No bit changes, and every block is freed."""
    with over(base, config_of(tmp_path)) as (model, engine):
        decoding = engine.weight_cache._moves.decoding
        assert decoding._zone is not None
        given_up: list[bool] = []
        mlp = model.get_submodule("base_model.model.model.layers.1.mlp")
        mlp.register_forward_pre_hook(
            lambda *_: given_up.append(engine.weight_cache.give_up_zone())
        )
        seen = train(model, infinity.AdamW(model, lr=1e-2))
        assert given_up[0] and not any(given_up[1:]) and decoding._zone is None
    assert_same(seen, base.expected)


KILLED = """
import sys
from pathlib import Path
import infinity
from tests.parity.test_in_place import STEPS, Base, config_of, over, train

directory = Path(sys.argv[2])
with over(Base.at(Path(sys.argv[1])), config_of(directory)) as (model, _):
    optimizer = infinity.AdamW(model, lr=1e-2)
    for step in range(STEPS):
        train(model, optimizer, steps=[step])
        infinity.checkpoint.save(directory / "runs", model, optimizer)
        print("saved", flush=True)
"""


@pytest.mark.parametrize("base", FEW[:1], indirect=True)
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_a_killed_run_goes_on_to_the_same_bits(base: Base, tmp_path: Path, delay_s: float) -> None:
    before = base.digest()
    killed = Script(KILLED, base.quantized, tmp_path)
    wait_until(lambda: "saved\n" in killed.stdout.read_text(), killed)
    with suppress(subprocess.TimeoutExpired):
        killed.wait(delay_s)
    killed.kill()
    killed.wait()
    config = config_of(tmp_path)
    with over(base, config, weights=None, resume=tmp_path / "runs") as (model, _):
        optimizer = infinity.AdamW(model, lr=1e-2)
        loaded = infinity.checkpoint.load(tmp_path / "runs", model, optimizer)
        assert 1 <= loaded.step <= STEPS
        seen = train(model, optimizer, steps=range(loaded.step, STEPS))
    for name in seen:
        assert torch.equal(seen[name], base.expected[name]), name
    assert base.digest() == before


@pytest.mark.parametrize("num_blocks", [9, 13])
def test_memory_saves_the_reads_of_what_it_keeps(num_blocks: int, tmp_path: Path) -> None:
    """A sweep there and back over 16 blocks: what remains of the budget beside one block as stored
    and one as decoded is not read, in either direction."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "b")
    with infinity.init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(model, lora)
    base_nbytes = (tmp_path / "b" / "model.safetensors").stat().st_size
    settings = config_of(tmp_path, tiers={"host": {"capacity": num_blocks * base_nbytes // 16}})
    infinity.offload(model, settings, weights=tmp_path / "b")
    try:
        engine = infinity.engine_of(model)
        unit_nbytes = max(unit.stored.nbytes for unit in engine.store.units if unit.stored)
        kept_nbytes = engine.weight_cache._window_nbytes
        assert kept_nbytes >= (num_blocks - 5) * unit_nbytes
        ids = torch.arange(8).view(1, -1)
        for _ in range(3):
            before = engine.counters.snapshot().get("shard_read_nbytes", 0)
            infinity.forward_backward(model, lambda each: loss_of(model, each), [ids])
        read_nbytes = engine.counters.snapshot()["shard_read_nbytes"] - before
        saved_nbytes = 2 * base_nbytes - read_nbytes
        assert saved_nbytes >= 2 * (kept_nbytes - unit_nbytes)
    finally:
        infinity.close(model)


def kernel_read_nbytes() -> int:
    """Bytes that the kernel has fetched from drives for this process (proc(5))."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def test_every_step_over_tiled_experts_reads_the_base_twice_less_what_is_kept(
    tmp_path: Path,
) -> None:
    """In a budget of a third of the base, for one micro-batch and for three. Tiles are read ahead
    in all but the first step, and a tile that is read ahead is not evicted for a decoded one."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "moe_intermediate_size": 256}
    base = tmp_path / "base"
    plain = tiny_causal_lm("deepseek-v3", n_routed_experts=64, **sizes)
    write_quantized(plain, base, "int4")
    base_nbytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    budget_nbytes = base_nbytes // 3
    reads: list[list[int]] = []
    for num_micro_batches in (1, 3):
        with infinity.init_empty_weights():
            architecture = AutoConfig.from_pretrained(base)
            model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
        lora = peft.LoraConfig(r=2, target_modules=["o_proj"])
        model = peft.get_peft_model(model, lora)
        config = config_of(
            tmp_path,
            tiers={"host": {"capacity": budget_nbytes}}, schedule={"tile": "1MiB"},
            placement=dict.fromkeys(("master", "moments", "gradients", "activations"), "host"),
        )  # fmt: skip
        infinity.offload(model, config, weights=base)
        try:
            engine = infinity.engine_of(model)
            ids = torch.arange(96).view(1, -1)
            counts, by_kernel = [0], kernel_read_nbytes()
            for _ in range(3):
                infinity.forward_backward(model, partial(loss_of, model), [ids] * num_micro_batches)
                counts.append(int(engine.counters.snapshot()["shard_read_nbytes"]))
            kept_nbytes = engine.weight_cache._window_nbytes
            by_kernel = kernel_read_nbytes() - by_kernel
        finally:
            infinity.close(model)
        if by_kernel:  # A file system in memory has no drive.
            assert by_kernel == pytest.approx(counts[-1], rel=0.01)
        reads.append([after - before for before, after in pairwise(counts)])
    assert kept_nbytes > base_nbytes // 10
    # At least half of what could be kept is kept, in each direction.
    assert max(reads[0]) <= 2 * base_nbytes - kept_nbytes, reads
    assert reads[0] == pytest.approx(reads[1], rel=0.01), "whatever the number of micro-batches"
