"""Reading and setting sharded weights from outside: gather, export, load, models built on meta."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity
from infinity.errors import InfinityError
from infinity.state.partition import STAGES
from infinity.testing import SimulatedDevice
from tests.support.offloading import small_tiers

from .models import batch, loss_of
from .processes import run_ranks
from .work import (
    LR,
    MIXED,
    NVME,
    Case,
    build,
    make_optimizer,
    offload_case,
    one_step,
    read_weights,
    train_model,
)


def _look(rank: int, stage: int, compute: str, swap: str) -> dict[str, Any]:
    """Uses of a model that rank 0 makes alone, and those that all ranks make."""
    case = Case(stage, MIXED, compute=compute, steps=1)
    model = offload_case(case, Path(swap))
    engine = infinity.engine_of(model)
    fresh = {name: engine.read_parameter(name, master=True) for name in engine.parameter_names()}
    given = {n: p for n, p in build(case).named_parameters() if p.requires_grad}
    seen = {"initial": all(torch.equal(fresh[n], given[n]) for n in given)}
    run = train_model(model, rank, case)
    if rank == 0:  # The others go on meanwhile, to the next point that all pass.
        with infinity.gather(model):
            seen["gather"] = all(
                torch.equal(p, run.weights[n]) for n, p in model.named_parameters()
            )
        files = infinity.checkpoint.export_safetensors(model, Path(swap).parent / f"out-{stage}")
        from safetensors.torch import load_file

        exported = {name: t for file in files for name, t in load_file(file).items()}
        seen["export"] = all(torch.equal(exported[n], w) for n, w in run.weights.items())
    with infinity.gather(model.head, modify=True), torch.no_grad():
        model.head.weight.fill_(0.5)
        model.blocks[0][0].weight  # noqa: B018  A handle: reading its name changes nothing.
    wanted = dict(run.weights)
    wanted["head.weight"] = torch.full_like(wanted["head.weight"], 0.5)
    seen["modify"] = _same(read_weights(model), wanted)
    state = {name: tensor + 1 for name, tensor in wanted.items()}
    model.load_state_dict(state)
    seen["load_state_dict"] = _same(read_weights(model), state)
    with infinity.gather(model), infinity.gather(model.head, modify=True), torch.no_grad():
        model.head.bias.zero_()
    seen["nested"] = not read_weights(model)["head.bias"].any()
    wide = engine.read_parameter("blocks.0.0.weight", master=True)
    seen["master"] = torch.equal(
        wide.to(state["blocks.0.0.weight"].dtype), state["blocks.0.0.weight"]
    )
    begun = [] if rank == 0 else [dist.barrier()]

    def read(name: str) -> Tensor:
        if not begun:
            begun.append(dist.barrier())
            time.sleep(0.2)  # The others come to the lock.
        return engine.read_parameter(name)

    infinity.checkpoint.export_safetensors(model, Path(swap).parent / f"all-{stage}", read=read)
    engine.close()
    return seen


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_weights_are_read_and_set_as_on_one_rank(tmp_path: Path) -> None:
    for stage in STAGES:
        compute = "bfloat16" if stage == 3 else "float32"
        for rank, seen in enumerate(run_ranks(3, _look, stage, compute, str(tmp_path / "swap"))):
            assert all(seen.values()), (stage, rank, seen)
            assert rank != 0 or {"gather", "export"} <= seen.keys()


def _fail_while_setting(rank: int, stage: int) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Rank 1 fails in a block that sets weights. What is said, and weights then and a step later."""
    case = Case(stage, steps=1)
    model = offload_case(case, Path("unused"))
    optimizer, said = make_optimizer(model, case), ""
    try:
        with infinity.gather(model.head, modify=True), torch.no_grad():
            model.head.weight.fill_(0.5)
            if rank == 1:
                raise ValueError("of the test")
    except (ValueError, InfinityError) as error:
        said = f"{type(error).__name__}: {error}"
    then = read_weights(model)
    one_step(model, optimizer, rank, case, 0)
    after = read_weights(model)
    infinity.close(model)
    return said, then, after


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_while_weights_are_set_is_one_of_all_ranks_and_leaves_them_alike(
    stage: int,
) -> None:
    found = run_ranks(3, _fail_while_setting, stage)
    assert found[1][0] == "ValueError: of the test"
    for rank in (0, 2):
        assert found[rank][0].startswith("InfinityError: setting weights failed on rank 1")
    for _, *weights in found[1:]:
        assert all(map(_same, weights, found[0][1:]))


def _moments(rank: int, stage: int, moments: str, swap: str) -> dict[str, Any]:
    """`optimizer.state[p]`: read by rank 0 alone while the others begin the next step; by all."""
    case = Case(stage, MIXED, compute="bfloat16", steps=2, moments=moments)
    model = offload_case(case, Path(swap))
    optimizer = make_optimizer(model, case)
    seen: dict[str, Any] = {}

    def read() -> dict[str, dict[str, Tensor]]:
        return {
            name: {key: value.clone() for key, value in optimizer.state[p].items()}
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    def collected() -> dict[str, dict[str, Tensor]]:
        whole = infinity.checkpoint.optimizer_state_dict(model, optimizer).get("state", {})
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        return dict(zip(trained, whole.values(), strict=bool(whole)))

    one_step(model, optimizer, rank, case, 0)
    wanted = collected()
    if rank == 0:
        found = read()
        seen["alone"] = all(_same(found[name], wanted[name]) for name in wanted)
        seen["any"] = any(bool(value["exp_avg"].any()) for value in found.values())
    one_step(model, optimizer, rank, case, 1)
    found = read()
    wanted = collected()
    seen["all"] = all(_same(found[name], wanted[name]) for name in wanted)
    seen["sums"] = sum(value["exp_avg_sq"].double().sum().item() for value in found.values())
    infinity.engine_of(model).close()
    return seen


def test_moments_are_read_on_any_rank(tmp_path: Path) -> None:
    for stage in STAGES:
        moments = "8bit" if stage == 2 else "float32"
        ranks = run_ranks(3, _moments, stage, moments, str(tmp_path / f"swap-{stage}"))
        assert len({seen["sums"] for seen in ranks}) == 1 and ranks[0]["sums"] > 0
        for rank, seen in enumerate(ranks):
            assert all(seen.values()), (stage, rank, seen)
            assert rank != 0 or {"alone", "any"} <= seen.keys()


def _from_meta(rank: int, swap: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    config = {
        "tiers": small_tiers(swap, "48MiB"),
        "placement": NVME,
    }
    with infinity.init_empty_weights(config):
        model = Meta()
    assert model.layers[0].weight.is_meta and not model.layers[0].bias.is_meta
    infinity.offload(model, config, seed=3)
    found = read_weights(model)
    infinity.engine_of(model).close()
    given = {name: torch.full_like(tensor, 2.0) for name, tensor in found.items()}
    torch.manual_seed(rank)  # Small parameters are drawn, and replaced by those that are given.
    with infinity.init_empty_weights(config):
        model = Meta()
    infinity.offload(model, config, weights=given.__getitem__)
    again = read_weights(model)
    infinity.engine_of(model).close()
    assert not list(Path(swap).glob(f"rank-{rank}")), "the rank's swap directory is removed"
    return found, again


class Meta(nn.Module):
    """Parameters above the size that `infinity.init_empty_weights` keeps real."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(3))


def test_a_model_built_on_meta_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    swap = str(tmp_path / "swap")
    [(alone, _)] = run_ranks(1, _from_meta, swap)
    for found, again in run_ranks(2, _from_meta, swap):
        assert _same(found, alone)
        assert all(bool((tensor == 2.0).all()) for tensor in again.values())


class Halves(nn.Module):
    """Half of a layer's neurons; the other rank of the mesh's "tp" has the rest."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 7, bias=False)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        reduced = self.down(torch.tanh(self.up(_SumGradient.apply(x, self.group))))
        return x + _Sum.apply(reduced, self.group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Sum.forward(ctx, gradient, ctx.group), None


class Divided(nn.Module):
    """A first layer that both ranks of "tp" have, and blocks of which each has a half."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(7, 7)
        torch.manual_seed(mesh.get_local_rank())
        self.blocks = nn.ModuleList(Halves(mesh.get_group()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _over_a_mesh(rank: int, swap: str) -> list[dict[str, Any]]:
    """Four ranks: two of data parallel, each of two that compute one layer. Without and with
    sharded layer inputs."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    return [_train_divided(rank, mesh, swap, group) for group in (None, mesh["tp"])]


def _train_divided(rank: int, mesh: Any, swap: str, group: Any) -> dict[str, Any]:
    model = Divided(mesh["tp"])
    config = {
        "tiers": {"host": {"capacity": "64MiB", "huge_pages": False}, "nvme": [{"path": swap}]},
        "placement": {"activations": "nvme"},
    }
    device = SimulatedDevice(rank)
    infinity.offload(model, config, group=mesh["dp"], model_parallel_group=group, device=device)
    engine = infinity.engine_of(model)
    part = engine.ranks.partition
    assert (part.rank, part.count) == (mesh["dp"].get_local_rank(), 2)
    optimizer = infinity.AdamW(model, lr=LR)

    def loss_of(seed: int) -> Tensor:
        return model(batch(seed, 7)[:3]).square().mean()

    losses: list[Tensor] = []
    for step in range(2):
        seed = 100 * step + 10 * part.rank
        losses += infinity.forward_backward(model, loss_of, [seed, seed + 1])
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {
        "losses": [loss.item() for loss in losses],
        "weights": read_weights(model),
        "nbytes": engine.counters.snapshot()["activation_out_nbytes"],
    }
    if group is not None:
        engine.share_activations(group.get_group())
        try:  # Each rank has a batch of its own.
            infinity.forward_backward(model, loss_of, [rank])
        except InfinityError as error:
            found["refused"] = str(error)
    engine.close()
    return found


def test_layer_inputs_are_sharded_over_the_ranks_that_compute_one_layer(tmp_path: Path) -> None:
    """State over the mesh's data-parallel ranks, layer inputs over the others: same bits, and half
    of the bytes. A layer input has 3 x 7 elements, so that a part ends within one."""
    for whole, parts in run_ranks(4, _over_a_mesh, str(tmp_path / "swap")):
        assert parts["losses"] == whole["losses"]
        assert _same(parts["weights"], whole["weights"])
        assert parts["nbytes"] == whole["nbytes"] / 2 > 0
        assert "another layer input than rank 0" in parts["refused"]


def _train_the_head(rank: int, stage: int) -> dict[str, Tensor]:
    """Some units have gradients that no optimizer takes, and one rank alone evaluates."""
    model = offload_case(Case(stage), None)  # type: ignore[arg-type]
    optimizer = infinity.AdamW(model.head.parameters(), lr=LR)
    for step in range(3):
        if rank == 0:
            with torch.no_grad():
                loss_of(model, batch(step, model.width))
        loss_of(model, batch(step, model.width)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = read_weights(model)
    infinity.engine_of(model).close()
    return weights


def test_a_part_of_the_model_trains_alone() -> None:
    """All ranks have one batch: halving and adding twice is exact, so one rank has these bits."""
    [wanted] = run_ranks(1, _train_the_head, 3)
    given = dict(build(Case()).named_parameters())
    assert torch.equal(wanted["blocks.0.0.weight"], given["blocks.0.0.weight"])
    assert not torch.equal(wanted["head.weight"], given["head.weight"])
    for stage in STAGES:
        for found in run_ranks(2, _train_the_head, stage):
            assert _same(found, wanted), stage


def _zero_in_place(rank: int, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    """Rank 0 alone uses the last block, and only before its gradient is made zero."""
    model = offload_case(Case(stage), None)  # type: ignore[arg-type]
    optimizer = infinity.AdamW(model, lr=LR, max_grad_norm=1.0)
    norms = []
    for step in range(3):
        loss_of(model, batch(step, model.width), () if rank == 0 else (2,)).backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch(step, model.width), (2,)).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
        optimizer.zero_grad(set_to_none=step == 1)
    weights = read_weights(model)
    infinity.engine_of(model).close()
    return weights, norms


def test_a_gradient_of_zeros_decays_its_weight() -> None:
    """Only those that some rank had a gradient of: here what one rank alone would have."""
    [(wanted, norms)] = run_ranks(1, _zero_in_place, 3)
    assert not torch.equal(
        wanted["blocks.2.0.weight"], build(Case()).get_parameter("blocks.2.0.weight")
    )
    for stage in STAGES:
        for found, their_norms in run_ranks(2, _zero_in_place, stage):
            assert all(torch.allclose(found[n], w, atol=1e-6) for n, w in wanted.items()), stage
            assert torch.allclose(torch.tensor(their_norms), torch.tensor(norms), rtol=1e-6)
