"""Experts of a tile as one product (`schedule.experts = "grouped"`).

One result for every size of tiles, placement and number of micro-batches that share a product.
The CPU's products in bfloat16 go by rows, as those of a GPU do (tests/gpu), so it stands for one
here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import infinity
from infinity.modules.autograd.threads import Modes
from infinity.modules.tiling import experts_call
from infinity.modules.tiling.experts import TiledExperts, tile_of
from infinity.modules.tiling.experts_call import ExpertsCall, go_backward, go_forward, products
from infinity.ops.experts import Pairs, add_rows_, try_rows, weighted
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import same_bits
from tests.support.offloading import offloaded

from .test_layer_major_experts import (
    EXPERTS,
    KINDS,
    SIZES,
    build,
    cut_config,
    expert_nbytes,
    layer_major_steps,
)
from .zoo import configuration


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches share products, as on a GPU whose trial has shown that they may."""
    monkeypatch.setattr(experts_call, "are_rows_apart", lambda *_, **__: True)


def bf16(kind: str, implementation: str = "grouped_mm", **options: Any) -> Any:
    model = build(kind, **options).to(torch.bfloat16)
    getattr(model, "get_base_model", lambda: model)().set_experts_implementation(implementation)
    return model


def run(
    model: Any, directory: Path, kind: str, experts: int, count: int = 5, device: Any = None,
    **options: Any,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """Losses, and weights after two steps."""
    placement = options.pop("placement", {})
    config = cut_config(directory, kind, experts, **options)
    if experts < EXPERTS:
        itemsize = next(model.parameters()).dtype.itemsize
        config["schedule"]["tile"] = max(experts * expert_nbytes(kind) * itemsize // 4, 64 << 10)
    config["placement"].update(placement)
    names = [name for name, _ in model.named_parameters()]
    with offloaded(model, config, device=device):
        losses = layer_major_steps(model, count, 2)
        engine = infinity.engine_of(model)
        tiles = {len(each.tiles) for each in model.modules() if isinstance(each, TiledExperts)}
        assert tiles == {-(-EXPERTS // experts)}
        return losses, {name: engine.read_parameter(name).clone() for name in names}


def assert_equal(found: Any, wanted: Any) -> None:
    assert all(map(same_bits, found[0], wanted[0]))
    for name, value in wanted[1].items():
        assert same_bits(found[1][name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_tiles_placement_or_shared_products(
    kind: str, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run has a product for each micro-batch, as have those that wait on a drive. Each kind
    leaves out another way of the three that share products."""
    grouped = {"schedule": {"experts": "grouped"}}
    alone = run(bf16(kind), swap_directory, kind, 2, **copy.deepcopy(grouped))
    shared = {"count": 0}
    join = experts_call._joined

    def note(calls: Any) -> ExpertsCall:
        shared["count"] += 1
        return join(calls)

    monkeypatch.setattr(experts_call, "_joined", note)
    monkeypatch.setattr(experts_call, "are_rows_apart", lambda *_, **__: True)
    ways: list[Any] = [
        (1, None, "device"), (3, SimulatedDevice(7), "device"),
        (EXPERTS, SimulatedDevice(7), "device"), (2, SimulatedDevice(7), "nvme"),
    ]  # fmt: skip
    del ways[list(KINDS).index(kind)]
    for experts, device, waiting in ways:
        shared["count"] = 0
        found = run(
            bf16(kind), swap_directory, kind, experts, device=device,
            placement={"experts": waiting}, **copy.deepcopy(grouped),
        )  # fmt: skip
        assert_equal(found, alone)
        assert (shared["count"] > 0) == (waiting == "device")


def test_experts_that_train_have_a_gradient_of_each_micro_batch(
    swap_directory: Path, apart: None
) -> None:
    """Forwards share products; the gradients of weights are summed in the order of plain steps."""
    runs = [
        run(
            bf16("qwen3_moe", adapters=False, layers=1), swap_directory, "qwen3_moe", experts,
            host_nbytes="16MiB", schedule={"experts": "grouped"},
        )
        for experts in (1, 3)
    ]  # fmt: skip
    assert_equal(*runs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapters", [True, False])
def test_rows_have_the_bits_of_transformers_grouped_product(kind: str, adapters: bool) -> None:
    model = bf16(kind, adapters=adapters)
    experts = next(each for each in model.modules() if hasattr(each, "has_post_expert_norm"))
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(EXPERTS, (40, 1), generator=generator)
    hidden = torch.randn(40, 64, generator=generator).bfloat16()
    weights = torch.rand(40, 1, generator=generator).bfloat16()
    wanted = experts(hidden, indices, weights)
    pairs = Pairs(indices, EXPERTS)
    Pairs.read([pairs])
    rows = products(
        experts, {}, hidden[pairs.tokens],
        pairs=pairs, experts=slice(0, EXPERTS), first=0, num_joined=1,
    )  # fmt: skip
    found = torch.zeros_like(hidden)
    add_rows_(found, pairs.tokens, rows * weights[pairs.tokens])
    assert same_bits(found, wanted)


def test_it_agrees_with_the_loop_to_rounding(swap_directory: Path, apart: None) -> None:
    """Also for a model that asks for the loop; "auto" follows the model and the device."""
    losses = {
        (implementation, mode): run(
            build_as("qwen3_moe", implementation), swap_directory, "qwen3_moe", 2, 2,
            schedule={"experts": mode},
        )[0]
        for implementation in ("eager", "grouped_mm") for mode in ("exact", "grouped", "auto")
    }  # fmt: skip
    for implementation in ("eager", "grouped_mm"):
        exact, auto = losses[implementation, "exact"], losses[implementation, "auto"]
        assert all(map(same_bits, exact, auto))
        torch.testing.assert_close(losses[implementation, "grouped"], exact, rtol=1e-5, atol=1e-6)


def build_as(kind: str, implementation: str) -> Any:
    model = build(kind, layers=1)
    model.get_base_model().set_experts_implementation(implementation)
    return model


class Operations(TorchDispatchMode):
    """Counts the operations that a device would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["grouped", "exact"])
def test_launches_of_a_tile_go_by_rows_not_by_experts(mode: str, apart: None) -> None:
    """Rows of several micro-batches pass in as many parts as each alone would have, or a few more.
    The loop launches more for more experts."""
    counts = {}
    for num_experts, num_calls in ((4, 1), (32, 1), (32, 8)):
        with Operations() as operations:
            both_directions(calls_of(num_experts, num_calls, mode))
        counts[num_experts, num_calls] = operations.count
    if mode == "grouped":
        assert counts[32, 1] == counts[4, 1]
        assert counts[32, 8] < 1.5 * 8 * counts[4, 1]
    else:
        assert counts[32, 1] > 4 * counts[4, 1]


def both_directions(calls: Sequence[tuple[ExpertsCall, Any]]) -> list[torch.Tensor | None]:
    """Runs calls together. Returns outputs, and gradients of hidden states and routing weights."""
    found: list[torch.Tensor | None] = []
    with ExitStack() as stack:
        for call, values in calls:
            stack.enter_context(call.with_arguments(*values))
        go_forward([call for call, _ in calls])
        for call, values in calls:
            found.append(call.arguments.sum())
            call.begin_backward(torch.ones_like(values[0]), (True, True))
        go_backward([call for call, _ in calls], is_for_leaves=False)
        for call, _ in calls:
            found += call.arguments.gradients()
    return found


def calls_of(
    num_experts: int, count: int, mode: str, device: str = "cpu"
) -> list[tuple[ExpertsCall, Any]]:
    config = configuration("mixtral", **{**SIZES, "num_local_experts": num_experts})
    config._experts_implementation = "eager"
    module = MixtralExperts(config).bfloat16().requires_grad_(False).to(device)
    tile: Any = tile_of(module, 0, num_experts)
    tile._parameters.update(module._parameters)
    for parameter in tile._parameters.values():
        torch.nn.init.normal_(parameter, std=0.1)
    tile.products = mode
    calls: list[tuple[ExpertsCall, Any]] = []
    for _ in range(count):
        indices = torch.stack([torch.randperm(num_experts)[:2] for _ in range(64)])
        values = [torch.randn(64, 64).bfloat16(), indices, torch.rand(64, 2).bfloat16()]
        values = [value.to(device) for value in values]
        modes = Modes.now(torch.device(device))
        calls.append((ExpertsCall([tile], (0, num_experts), [], None, modes), values))
    return calls


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("is_trained", [True, False])
def test_the_trial_of_a_device_notices_rows_that_depend_on_others(
    is_transposed: bool, is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(dtype: torch.dtype) -> bool:
        options = {"is_transposed": is_transposed, "is_trained": is_trained}
        return try_rows((64, 96), dtype, torch.device("cpu"), **options)

    assert tried(torch.bfloat16)
    product = functional.grouped_mm

    def rounded(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = product(rows, *args, **kwargs)
        return out * (1 + 2**-7) if len(rows) > 500 else out

    monkeypatch.setattr(functional, "grouped_mm", rounded)
    assert not tried(torch.bfloat16)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_rows_times_weights_have_the_bits_of_separate_operations(dtypes: tuple[str, str]) -> None:
    of_rows, of_weights = (getattr(torch, name) for name in dtypes)
    values = torch.randn(50, 70).to(of_rows), torch.rand(50, 1).to(of_weights)
    gradient = torch.randn(50, 70).bfloat16()
    results = []
    for product in (weighted, lambda rows, weights, dtype: (rows * weights).to(dtype)):
        leaves = [value.clone().requires_grad_() for value in values]
        out = product(*leaves, torch.bfloat16)
        results.append([out, *torch.autograd.grad([out], leaves, [gradient])])
    assert all(map(same_bits, *results))
