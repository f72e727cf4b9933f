"""What ranks do in the tests: one loop, over an offloaded model or over a plain one.

`expected` trains plain PyTorch in one process and adds up what each rank would have given, in the
order that docs/design/0005-between-ranks.md promises; then every number of ranks can be
compared bit by bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity
from infinity.ops.exact import split
from infinity.sizes import MIB
from infinity.testing import SimulatedDevice
from infinity.tiers.host import HostPool
from tests.support.bits import differences
from tests.support.lion import PlainLion
from tests.support.offloading import units_in_use

from .models import Blocks, DeepBlocks, EmptyBlocks, Experts, WideBlocks, batch, loss_of

MODELS = {
    "blocks": Blocks, "deep": DeepBlocks, "empty": EmptyBlocks, "experts": Experts, "wide": WideBlocks,
}  # fmt: skip
LR = 1e-2
MOMENTUM = 0.9
NVME = dict.fromkeys(("parameters", "master", "moments", "gradients"), "nvme")
MIXED = {"parameters": "device", "master": "nvme", "moments": "host", "gradients": "nvme"}


@dataclass(frozen=True)
class Case:
    """One way of training. `lazy_ranks` have no batch in the last step; `is_shared`: all ranks have
    the batches of rank 0; `drops`: ranks leave out the blocks of `dropped_blocks`, of which each
    rank leaves out every so many."""

    stage: int = 3
    placement: dict[str, str] = field(default_factory=dict)
    model: str = "blocks"
    steps: int = 3
    accumulation: int = 1
    max_norm: float | None = None
    compute: str = "float32"
    skips: bool = False
    drops: int = 0
    lazy_ranks: tuple[int, ...] = ()
    is_shared: bool = False
    simulated: bool = False
    layer_major: bool = False
    micro_batch: int | None = None
    tile: int | None = None
    moments: str = "float32"
    optimizer: str = "adamw"  # Or another name, with a momentum if it is "momentum".
    reduce_buffer: int | str = "auto"
    reduce_dtype: str = "auto"
    budgets: str = "node"
    capacity: str | int = "48MiB"
    huge_pages: bool = False  # To have them takes longer than all else about a small model.
    exchange: str = "auto"
    shard_over: str = "all"
    update_on: tuple[str, ...] = ("auto",)  # By rank, in turn: what "auto" may come to.
    updates: str = "auto"
    update_chunk: str | None = None

    def __str__(self) -> str:
        where = "-".join(sorted(set(self.placement.values()))) or "host"
        return f"stage{self.stage}-{where}-{self.model}-{self.compute}"


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[case.model]()


def dropped_blocks(rank: int, step: int, num_blocks: int, every: int = 2) -> tuple[int, ...]:
    """Rank 0 uses every block, and each other rank leaves out every second one, or every so many,
    the same in all steps. No rank uses the last block after the first step."""
    dropped = {block for block in range(num_blocks) if rank and block % every == rank % every}
    return tuple(sorted(dropped | {num_blocks - 1} if step else dropped - {num_blocks - 1}))


def micro_batches(case: Case, rank: int, step: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Batches of a rank in a step, and the blocks it leaves out."""
    if step == case.steps - 1 and rank in case.lazy_ranks:
        return
    for micro in range(case.accumulation):
        seed = 1000 * step + 10 * rank * (not case.is_shared) + micro
        skip = (seed % 3, (rank + micro) % 3) if case.skips else ()
        if case.drops:
            skip = dropped_blocks(rank, step, MODELS[case.model].num_blocks, case.drops)
        yield batch(seed, MODELS[case.model].width), skip


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    placed: dict[str, dict[str, int]] = field(default_factory=dict)


def offload_case(
    case: Case, swap: Path, *, checkpoint: dict[str, Any] | None = None, resume: Any = None
) -> nn.Module:
    config: dict[str, Any] = {
        "distributed": {
            "zero_stage": case.stage,
            "budgets": case.budgets,
            "reduce_buffer": case.reduce_buffer,
            "reduce_dtype": case.reduce_dtype,
            "exchange": case.exchange,
            "shard_over": case.shard_over,
        },
        "tiers": {
            "host": {"capacity": case.capacity, "huge_pages": case.huge_pages},
            "device": {"kind": "cpu"},
        },
        "placement": {"master": "host", "moments": "host", "parameters": "host"} | case.placement,
        "precision": {"compute": case.compute, "moments": case.moments},
        "optimizer": {"name": case.optimizer},
    }
    if case.optimizer == "momentum":
        config["optimizer"] = {"name": "sgd", "momentum": MOMENTUM}
    rank = dist.get_rank() if dist.is_initialized() else 0
    config["schedule"] = {
        "update_on": case.update_on[rank % len(case.update_on)],
        "micro_batch": case.micro_batch,
        "updates": case.updates,
    }
    if case.tile is not None:
        config["schedule"]["tile"] = case.tile
    if case.update_chunk is not None:
        config["schedule"]["update_chunk"] = case.update_chunk
    if "nvme" in case.placement.values():
        config["tiers"]["nvme"] = [{"path": str(swap), "capacity": "64MiB"}]
    if checkpoint is not None:
        config["checkpoint"] = checkpoint
    device = SimulatedDevice(7) if case.simulated else None
    return infinity.offload(build(case), config, device=device, resume=resume)


def train(rank: int, case: Case) -> Run:
    """Trains over the ranks of this job."""
    model = offload_case(case, Path(tempfile.gettempdir(), "swap"))
    try:
        return train_model(model, rank, case)
    finally:
        infinity.engine_of(model).close()


def make_optimizer(model: nn.Module, case: Case, **options: Any) -> Any:
    if case.optimizer == "momentum":
        return infinity.SGD(model, lr=LR, momentum=MOMENTUM, **options)
    classes = {"adamw": infinity.AdamW, "adam": infinity.Adam, "sgd": infinity.SGD}
    return classes.get(case.optimizer, infinity.Lion)(model, lr=LR, **options)


def plain_optimizer(parameters: Iterable[Any], case: Case) -> torch.optim.Optimizer:
    if case.optimizer == "lion":
        return PlainLion(parameters, lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    if case.optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, fused=True)
    classes: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    return classes.get(case.optimizer, torch.optim.SGD)(parameters, lr=LR, fused=True)


def read_when_needed(engine: Any) -> None:
    """From now on state of shards is read when an update needs it, not before."""
    updates = getattr(engine.updater, "deferred", None)
    if updates is not None:
        updates._read_expected = updates._pending.expected  # Asked once, it waits for others.


def take_all(pool: HostPool) -> None:
    """Frees everything that can be given back or reclaimed."""
    while pool._reclaim(MIB):
        pass


def counted_in_a_step(
    model: nn.Module, rank: int, case: Case, names: Iterable[str]
) -> dict[str, float]:
    """What a step with its updates adds to these counters, the mean of the third and the fourth. No
    weights are fetched ahead of the pass that uses them, and no state is read ahead: of how many
    units it is, and how far they come, depends on what the step has left to the forward."""
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=LR)
    read_when_needed(engine)
    engine.weight_cache.prefetch_anew = lambda: None  # type: ignore[method-assign]
    seen: list[dict[str, float]] = []
    for step in range(4):
        one_step(model, optimizer, rank, case, step)
        engine.store.pending.await_all()
        dist.barrier()
        seen.append(engine.counters.snapshot())
        dist.barrier()
    return {name: (seen[3].get(name, 0) - seen[1].get(name, 0)) / 2 for name in names}


def train_model(model: nn.Module, rank: int, case: Case) -> Run:
    optimizer = make_optimizer(model, case, max_grad_norm=case.max_norm)
    run = Run()
    for step in range(case.steps):
        run.losses += one_step(model, optimizer, rank, case, step)
        if optimizer.grad_norm is not None:
            run.norms.append(optimizer.grad_norm.item())
    engine = infinity.engine_of(model)
    assert not units_in_use(engine)
    run.weights = read_weights(model)
    run.counters, run.placed = engine.counters.snapshot(), engine.placed_nbytes()
    return run


def one_step(model: nn.Module, optimizer: Any, rank: int, case: Case, step: int) -> list[float]:
    """The losses of its micro-batches."""
    dtype, batches = getattr(torch, case.compute), micro_batches(case, rank, step)

    def forward(batch: tuple[Tensor, tuple[int, ...]]) -> Tensor:
        return loss_of(model, batch[0].to(dtype), batch[1])

    if case.layer_major:
        losses = infinity.forward_backward(model, forward, batches)
    else:
        losses = []
        for each in batches:
            losses.append(forward(each))
            losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item() for loss in losses]


def train_through_changes(
    model: Any, optimizer: Any, train: Callable[[int], object], saved: Path
) -> list[dict[str, Tensor]]:
    """Steps with what changes state otherwise in between. Returns the weights after a few with
    weights that are set, with an older checkpoint that is loaded, and with memory that is taken,
    within a pass, too."""
    found = []
    for step in range(3):
        train(step)
    path = infinity.checkpoint.save(saved, model, optimizer)
    for step in (3, 4):
        train(step)
    with infinity.gather(model.blocks, modify=True), torch.no_grad():  # Masters change, too.
        for parameter in model.blocks.parameters():
            parameter.mul_(0.5)
    for step in (5, 11):  # The first may take back what was begun before weights were written.
        train(step)
    found.append(read_weights(model))
    infinity.checkpoint.load(path, model, optimizer)  # Moments change, too.
    for step in (6, 7):
        train(step)
    found.append(read_weights(model))
    train(8)
    pool = infinity.engine_of(model).pool
    take_all(pool)
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: take_all(pool))
    for step in (9, 10):
        train(step)
    handle.remove()
    return [*found, read_weights(model)]


def read_weights(model: nn.Module) -> dict[str, Tensor]:
    engine = infinity.engine_of(model)
    return {name: engine.read_parameter(name) for name in engine.parameter_names()}


def train_all(rank: int, cases: list[Case]) -> list[Run]:
    return [train(rank, case) for case in cases]


# -- The reference -------------------------------------------------------------------------------


_computed: dict[tuple[str, int], list[Run]] = {}


def expected(case: Case, count: int) -> list[Run]:
    """The runs of `count` ranks, in this process, by plain PyTorch: computed once, to be read."""
    key = repr(case), count
    if key not in _computed:
        _computed[key] = _compute(case, count)
    return _computed[key]


def _compute(case: Case, count: int) -> list[Run]:
    model = build(case).to(getattr(torch, case.compute))
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    wide = dict(MODELS[case.model]().named_parameters())
    masters = {n: nn.Parameter(wide[n].detach().clone()) for n in parameters}
    _round(parameters, masters)
    optimizer = plain_optimizer(masters.values(), case)
    runs = [Run() for _ in range(count)]
    for step in range(case.steps):
        given: dict[str, list[tuple[int, int, Tensor]]] = {name: [] for name in parameters}
        # Stage 1 adds up the gradients of a rank before it gives them away, the others after.
        sums_first = case.stage == 1 or case.layer_major
        for rank, run in enumerate(runs):
            numbers = dict.fromkeys(parameters, 0)
            for x, skip in micro_batches(case, rank, step):
                loss = loss_of(model, x.to(getattr(torch, case.compute)), skip)
                loss.backward()
                run.losses.append(loss.item())
                for name, parameter in parameters.items():
                    if parameter.grad is None:
                        continue
                    _give(given[name], rank, numbers, name, parameter.grad.float(), sums_first)
                model.zero_grad()
        if case.reduce_dtype != "auto":
            for name, rounded in given.items():
                dtype = getattr(torch, case.reduce_dtype)
                given[name] = [(number, rank, g.to(dtype).float()) for number, rank, g in rounded]
        for name, master in masters.items():
            master.grad = None
            for number in sorted({number for number, _, _ in given[name]}):
                of_rank = {rank: g * (1.0 / count) for n, rank, g in given[name] if n == number}
                total = by_tree([of_rank.get(rank) for rank in range(count)])
                master.grad = total if master.grad is None else master.grad + total
        if case.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), case.max_norm)
            for run in runs:
                run.norms.append(norm.item())
        optimizer.step()
        _round(parameters, masters)
    for run in runs:
        run.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return runs


def by_tree(parts: list[Tensor | None]) -> Tensor:
    """Neighbours are added, and the sums of neighbours; who has nothing is passed over."""
    while len(parts) > 1:
        pairs = [parts[at : at + 2] for at in range(0, len(parts), 2)]
        there = [[part for part in pair if part is not None] for pair in pairs]
        parts = [sum(pair[1:], pair[0]) if pair else None for pair in there]
    assert parts[0] is not None
    return parts[0]


def _give(
    given: list[tuple[int, int, Tensor]],
    rank: int,
    numbers: dict[str, int],
    name: str,
    gradient: Tensor,
    sums_first: bool,
) -> None:
    if sums_first and given and given[-1][1] == rank:
        given[-1] = (0, rank, given[-1][2] + gradient)
    else:
        given.append((numbers[name], rank, gradient.clone()))
    numbers[name] += 1


def _round(parameters: dict[str, nn.Parameter], masters: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            wide = masters[name].detach()
            if parameter.dtype is torch.bfloat16:
                parameter.copy_(split(wide.flatten())[0].view_as(parameter))
            else:
                parameter.copy_(wide)


def assert_same_run(found: Run, wanted: Run, what: str) -> None:
    assert found.losses == wanted.losses, what
    compared = {name: found.weights[name] for name in wanted.weights}
    assert not (lines := differences(wanted.weights, compared)), f"{what}: {lines[:3]}"
