"""Where the state lives never changes the result: several steps on every placement.

Training here has everything an ordinary run has: gradient accumulation, global-norm clipping that
acts in some steps and not in others, a learning-rate schedule, groups with and without weight
decay.

fp32: per-step losses, gradients, clip norms and final weights are the bits of plain PyTorch with
`torch.optim.AdamW(fused=True)` and `torch.nn.utils.clip_grad_norm_`.

bf16 compute: the bits are the same on every placement, and the bits of a reference written in plain
PyTorch: bf16 weights, gradients summed in fp32, torch's fused AdamW on an fp32 master.

How the cases are chosen. A kind of state (parameters, master, moments, gradients) rests on the
device, on the host, on NVMe, or is split over host and NVMe. There are sixteen ways to run: storage
engine, prefetch or not, device, when updates are carried out. Cases are the rows of an orthogonal
array: whatever is wrong with up to three of a case's properties together has a case that shows it.
All of the state on one tier, in fp32, is run in every way, on NVMe for eight steps. `make test` has
the rows that show each two properties, in bf16 all and in fp32 a quarter, and every second way: all of
these on NVMe, and half of them on other places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import infinity
from infinity.testing.simulated_device import SimulatedDevice
from tests.support import models
from tests.support.bits import same_bits
from tests.support.exhaustive import sampled
from tests.support.offloading import KINDS, offloaded, swap_config

from .harness import (
    Plan,
    Record,
    Side,
    assert_same_run,
    plain_run,
    run,
    seed_everything,
    smallest_host_nbytes,
)
from .zoo import ZOO, Batch, Entry, configuration, constructor, seeded

MANY_STEPS, STEPS = 8, 4
MAX_NORM = 1.155
VOCAB = 96


# --- what is trained --------------------------------------------------------------------------


def _gpt2(seed: int) -> nn.Module:
    options = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 32,
               "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    make = constructor(transformers.GPT2LMHeadModel, lambda: configuration("gpt2", **options))
    return seeded(make)(seed)


def _decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.TinyDecoder(width=48, layers=4, heads=4, vocab=VOCAB).train()


def _ids(seed: int) -> Tensor:
    # Four batches in turn: something that can be learnt, so that losses and norms move.
    return torch.randint(4, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed % 4))


def _gpt2_batch(seed: int) -> Batch:
    return {"input_ids": _ids(seed), "labels": _ids(seed)}


def _decoder_batch(seed: int) -> Batch:
    return {"ids": _ids(seed), "labels": _ids(seed)}


MODELS: dict[str, Entry] = {
    "gpt2": replace(ZOO["gpt2"], build=_gpt2, batch=_gpt2_batch),
    "decoder": replace(ZOO["TinyDecoder"], build=_decoder, batch=_decoder_batch),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups as in every recipe: no decay for vectors, and a learning rate of their own."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


PLAN = Plan(steps=STEPS, accumulation=2, max_norm=MAX_NORM, lr=1e-2, scheduled=True)


@cache
def reference(model: str, steps: int = STEPS) -> Record:
    return plain_run(MODELS[model], replace(PLAN, steps=steps), groups=groups)


@pytest.mark.parametrize("steps", [STEPS, MANY_STEPS])
@pytest.mark.parametrize("model", MODELS)
def test_the_reference_is_not_idle(model: str, steps: int) -> None:
    """The reference learns, and the clip threshold lies among its norms."""
    record = reference(model, steps)
    assert len(record.norms) == steps and len(record.losses) == 2 * steps
    clipped = sum(bool(norm > MAX_NORM) for norm in record.norms)
    assert 2 <= clipped < steps
    assert sum(record.losses[-4:]) < 0.95 * sum(record.losses[:4])  # Of all four batches.


# --- where and how ----------------------------------------------------------------------------

PLACES: dict[str, list[str]] = {
    "device": ["device"],
    "host": ["host"],
    "nvme": ["nvme"],
    "split": ["host", "nvme"],
}


@dataclass(frozen=True)
class Way:
    """How the same placement may be run."""

    engine: str
    prefetch: bool
    simulated: bool
    updates: str

    def __str__(self) -> str:
        device = "simulated" if self.simulated else "cpu"
        fetch = "prefetch" if self.prefetch else "demand"
        return f"{self.engine}-{fetch}-{device}-{self.updates}"


# Of updates that are not at the step, by the storage engine.
LATER = {"io_uring": "deferred", "threads": "both_passes"}
WAYS = [
    Way(engine, prefetch, simulated, updates)
    for engine in LATER
    for prefetch in (True, False)
    for simulated in (False, True)
    for updates in (LATER[engine], "at_step")
]
# Every second way: any two properties occur in all combinations with each engine.
HALF = [way for index, way in enumerate(WAYS) if index.bit_count() % 2 == 0]
# The other places have a part of these each.
OTHERS = {"split": HALF[:2], "host": HALF[4:5], "device": HALF[5:6]}


@dataclass(frozen=True)
class Case:
    """One placement in one way; `places` is by kind."""

    places: tuple[tuple[str, str], ...]
    way: Way
    model: str = "decoder"
    is_sampled: bool = field(default=True, compare=False)  # `make test` has it.

    def __str__(self) -> str:
        return f"{'-'.join(place for _, place in self.places)}-{self.way}-{self.model}"


def orthogonal_array() -> Iterator[tuple[int, ...]]:
    """64 rows of six numbers below 4; in any three columns each of the 64 combinations is there once.

    They are the words of the hexacode, (a, b, c, f(1), f(w), f(w * w)) with f(x) = a x^2 + b x + c
    over the field of four elements, here 0, 1, w = 2 and w * w = 3 (Conway and Sloane, "Sphere
    Packings, Lattices and Groups", chapter 3). Any three places of a word determine it.
    """
    for a, b, c in itertools.product(range(4), repeat=3):
        yield a, b, c, *(TIMES[TIMES[a][x]][x] ^ TIMES[b][x] ^ c for x in (1, 2, 3))


TIMES = ((0, 0, 0, 0), (0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))


def is_sampled(row: Sequence[int]) -> bool:
    """Whether the row is one of 28 in which any two columns have each of the 16 combinations. The
    rows are those of two subspaces of 16 words each; no two columns depend on each other in both."""
    a, b, c = row[:3]
    return c in (b, a ^ TIMES[2][b])


def cases(kinds: Sequence[str], uniform: Sequence[str] = (), part: int = 1) -> list[Case]:
    """The rows of the array, and all state on each of the `uniform` places in every way.

    Columns are the places of up to four kinds, and the two halves of a way. A column that is left
    chooses the model. Of the sampled rows every `part`-th is kept.
    """
    found: dict[Case, bool] = {}
    for place in uniform:
        # Without drives a storage engine has nothing to do.
        ways = WAYS if "nvme" in PLACES[place] else WAYS[len(WAYS) // 2 :]
        kept = HALF if place == "nvme" else OTHERS[place]
        found |= {Case(tuple((kind, place) for kind in kinds), way): way in kept for way in ways}
    num_kept = 0
    for row in orthogonal_array():
        num_kept += is_sampled(row)
        *columns, first, second = row
        places = tuple((kind, list(PLACES)[at]) for kind, at in zip(kinds, columns, strict=False))
        is_gpt2 = len(kinds) < len(columns) and columns[-1] == 0
        model = "gpt2" if is_gpt2 else "decoder"
        case = Case(places, WAYS[4 * first + second], model)
        is_kept = is_sampled(row) and num_kept % part == 0
        found[case] = found.get(case, False) or is_kept
    return [replace(case, is_sampled=is_kept) for case, is_kept in found.items()]


FP32_CASES = cases(["parameters", "moments", "gradients"], uniform=list(PLACES), part=4)


def test_any_three_properties_of_a_case_occur_in_all_combinations() -> None:
    sample = [row for row in orthogonal_array() if is_sampled(row)]
    for pair in itertools.combinations(range(6), 2):
        assert len({tuple(row[at] for at in pair) for row in sample}) == 16
    for names in itertools.combinations(("prefetch", "simulated", "updates"), 2):
        found, every = (
            {(way.engine, *(getattr(way, name) for name in names)) for way in ways}
            for ways in (HALF, WAYS)
        )
        assert found == every
    for columns in itertools.combinations(range(6), 3):
        assert len({tuple(row[at] for at in columns) for row in orthogonal_array()}) == 64
    assert {case.places for case in FP32_CASES} == {
        tuple(zip(("parameters", "moments", "gradients"), places, strict=True))
        for places in itertools.product(PLACES, repeat=3)
    }
    for kind, place, way in itertools.product(range(3), PLACES, WAYS):
        assert any(c.places[kind][1] == place and c.way == way for c in FP32_CASES)


def splits(model: nn.Module, placement: dict[str, list[str]]) -> bool:
    """Whether one of the kinds that may be split lies on both tiers. (Of several split kinds the
    one that is placed first does.)"""
    lies_on = infinity.engine_of(model).placed_nbytes()
    asked = [kind for kind in KINDS if placement[kind] == PLACES["split"]]
    return not asked or any(len(lies_on[kind]) == 2 for kind in asked)


def config_of(case: Case, directory: Path, **options: Any) -> dict[str, Any]:
    """The case's configuration, with a host budget in which a split kind really splits: from the
    least that works, more by quarters of a split kind until it does."""
    placement = {kind: PLACES[place] for kind, place in case.places}
    config = swap_config(
        directory, placement=placement, engine=case.way.engine, prefetch=case.way.prefetch,
        updates=case.way.updates,
        **options,
    )  # fmt: skip
    entry, placement = MODELS[case.model], config["placement"]
    can_split = any(place == "split" for _, place in case.places)
    away = {kind: [tier for tier in order if tier != "host"] for kind, order in placement.items()}
    without_host = {**config, "placement": {kind: away[kind] or placement[kind] for kind in KINDS}}
    smallest = smallest_host_nbytes(lambda: entry.build(0), without_host, device_of(case))
    numel = sum(parameter.numel() for parameter in entry.build(0).parameters())
    for budget in range(smallest, smallest + 32 * numel, numel):
        config["tiers"]["host"]["capacity"] = budget
        if not can_split:
            return config
        with offloaded(entry.build(0), config, device=device_of(case)) as model:
            if splits(model, placement):
                return config
    raise AssertionError(f"{case} never splits")


def device_of(case: Case) -> SimulatedDevice | None:
    return SimulatedDevice(seed=len(str(case)), delay_s=1e-4) if case.way.simulated else None


def check_places(model: nn.Module, case: Case) -> None:
    """Every kind rests where the case places it."""
    lies_on = infinity.engine_of(model).placed_nbytes()
    for kind, place in case.places:
        assert set(lies_on[kind]) <= set(PLACES[place]), f"{kind} lies on {lies_on[kind]}"


def skip_without(engine: str, io_engines: frozenset[str]) -> None:
    if engine not in io_engines:
        pytest.skip(f"{engine} is forbidden on this machine")


def params(cases: list[Case]) -> list[Any]:
    return sampled(cases, lambda case: case.is_sampled)


@pytest.mark.parametrize("case", params(FP32_CASES), ids=str)
def test_fp32_has_the_bits_of_plain_pytorch(
    case: Case, swap_directory: Path, io_engines: frozenset[str]
) -> None:
    skip_without(case.way.engine, io_engines)
    entry = MODELS[case.model]
    steps = MANY_STEPS if {place for _, place in case.places} == {"nvme"} else STEPS
    plan = replace(PLAN, steps=steps)
    with offloaded(
        entry.build(0), config_of(case, swap_directory), device=device_of(case)
    ) as model:
        check_places(model, case)
        record = run(entry, Side(model), plan, groups=groups)
        assert_same_run(reference(case.model, steps), record)


LISTS = [
    ["device", "host"], ["device", "nvme"], ["device", "host", "nvme"], ["nvme", "host"],
    ["host", "device"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "order"),
    sampled(
        ((kind, order) for kind in (None, "parameters", "moments", "gradients") for order in LISTS),
        lambda case: case[0] is None,
    ),
)
def test_lists_of_tiers_fill_in_order(
    order: list[str], kind: str | None, swap_directory: Path
) -> None:
    """Lists that begin on the device, with too little space there for all of it."""
    entry = MODELS["decoder"]
    placement = {k: order if kind in (None, k) else ["nvme"] for k in KINDS}
    numel = sum(parameter.numel() for parameter in entry.build(0).parameters())
    config = swap_config(
        swap_directory, placement=placement, host_nbytes="4MiB", device_nbytes=2 * numel
    )
    if order[0] == "host":
        config["tiers"]["host"]["capacity"] = 2 * numel + smallest_host_nbytes(
            lambda: entry.build(0), swap_config(swap_directory, placement="nvme")
        )
        config["tiers"]["device"]["capacity"] = "16MiB"
    with offloaded(entry.build(0), config) as model:
        assert_same_run(reference("decoder"), run(entry, Side(model), PLAN, groups=groups))


def test_several_compute_threads_and_several_drives(
    tmp_path: Path, io_engines: frozenset[str]
) -> None:
    """With two compute threads on both sides, and stripes over two paths of different weight.

    The model is wide enough here (96) for its matrix products and its updates to be split among
    threads.
    """

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return models.TinyDecoder(width=96, layers=4, heads=4, vocab=256).train()

    entry = replace(MODELS["decoder"], build=build)
    plan = replace(PLAN, steps=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = plain_run(entry, plan, groups=groups)
        for engine in sorted(io_engines):
            config = swap_config(tmp_path / engine, placement="nvme", engine=engine)
            config["tiers"]["nvme"].append({"path": str(tmp_path / "second"), "weight": 2.5})
            with offloaded(entry.build(0), config) as model:
                assert_same_run(expected, run(entry, Side(model), plan, groups=groups))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", ["192KiB", "1MiB"])  # All others have 64 KiB.
def test_the_chunk_of_the_update_does_not_matter(chunk: str, swap_directory: Path) -> None:
    entry = MODELS["decoder"]
    config = swap_config(swap_directory, placement="nvme", update_chunk=chunk)
    with offloaded(entry.build(0), config, units="auto") as model:
        assert_same_run(reference("decoder"), run(entry, Side(model), PLAN, groups=groups))


# --- bf16 -------------------------------------------------------------------------------------


def half_up(wide: Tensor) -> Tensor:
    """fp32 to bf16, halves away from zero: the weight of a split master."""
    bits = wide.detach().contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@cache
def bf16_reference() -> Record:
    """bf16 weights with an fp32 master, in plain PyTorch.

    The master starts as the model's fp32 weights. The gradients of each micro-batch, bf16, are
    added up in fp32; the norm is taken and the clip factor applied in fp32; the fused AdamW updates
    the master, which is rounded to bf16 for the next forward.
    """
    entry, record = MODELS["decoder"], Record()
    master = entry.build(0)
    model = entry.build(0).bfloat16()
    pairs = list(zip(model.parameters(), master.parameters(), strict=True))
    with torch.no_grad():
        for weight, wide in pairs:
            weight.copy_(half_up(wide))
    optimizer = torch.optim.AdamW(
        groups(master), lr=PLAN.lr, weight_decay=PLAN.weight_decay, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
    for step in range(STEPS):
        for micro in range(PLAN.accumulation):
            seed = 1000 + step * PLAN.accumulation + micro
            seed_everything(seed)
            loss = entry.loss(model, entry.batch(seed)) / PLAN.accumulation
            loss.backward()
            record.losses.append(loss.detach().clone())
            for weight, wide in pairs:
                assert weight.grad is not None
                gradient = weight.grad.float()
                wide.grad = gradient if wide.grad is None else wide.grad + gradient
                weight.grad = None
        record.norms.append(torch.nn.utils.clip_grad_norm_(master.parameters(), MAX_NORM).clone())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, wide in pairs:
                weight.copy_(half_up(wide))
    record.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return record


@pytest.mark.parametrize("case", params(cases(KINDS)), ids=str)
def test_bf16_has_the_same_bits_on_every_placement(
    case: Case, swap_directory: Path, io_engines: frozenset[str]
) -> None:
    """Losses, clip norms, bf16 weights and the fp32 master against the reference in plain
    PyTorch."""
    skip_without(case.way.engine, io_engines)
    entry, expected = MODELS["decoder"], bf16_reference()
    config = config_of(case, swap_directory, compute="bfloat16")
    with offloaded(entry.build(0), config, device=device_of(case)) as model:
        check_places(model, case)
        record = run(entry, Side(model), PLAN, groups=groups)
        engine = infinity.engine_of(model)
        for name, weight in expected.weights.items():
            master = engine.read_parameter(name, master=True)
            assert master.dtype is torch.float32
            assert same_bits(half_up(master), weight), name
    assert all(map(same_bits, expected.losses, record.losses))
    assert all(map(same_bits, expected.norms, record.norms))
    assert expected.weights.keys() == record.weights.keys()
    for name, weight in expected.weights.items():
        assert same_bits(weight, record.weights[name]), name
