"""Operators too large for the device budget, run as tiles: the same numbers, in a smaller budget.

Two comparisons. A model that is only tiled, without an engine, against the same model untiled:
outputs and the gradients of weights are the same bits, because no sum of theirs is split; the
gradient of a linear layer's input is a sum over tiles, and differs by no more than rounding allows.
Then the engine with tiles against the model that is only tiled, trained by PyTorch alone: all bits
are equal.

The bound. For y = sum of K products in floating point with unit roundoff u, whatever the order,
|y - exact| <= gamma * (sum of the products' magnitudes) with gamma = K u / (1 - K u) (Higham,
"Accuracy and Stability of Numerical Algorithms", section 3.1). Two orders differ by twice that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import infinity
from infinity.checkpoint import export_safetensors, weight_source
from infinity.checkpoint import load as load_checkpoint
from infinity.checkpoint import save as save_checkpoint
from infinity.errors import CapacityError, ConfigError, InfinityError
from infinity.modules.tiling.layers import Tiled, TiledEmbedding, TiledLinear
from infinity.modules.tiling.split import Tiling, named_parameters_of
from infinity.ops.exact import split
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences, same_bits
from tests.support.exhaustive import sampled
from tests.support.models import TinyDecoder
from tests.support.offloading import offloaded, swap_config

from .harness import (
    Plan,
    Record,
    Side,
    assert_same_run,
    held_units,
    plain_run,
    run,
    smallest_host_nbytes,
)
from .zoo import ZOO, Entry

LIMIT_NBYTES = 64 << 10
VOCAB = 448  # Of width 128: three tiles of 128 rows and one of 64.


def cut(model: nn.Module, limit_nbytes: int = LIMIT_NBYTES) -> nn.Module:
    """The model with tiles and without an engine."""
    Tiling(model, lambda parameter: parameter.element_size()).cut(limit_nbytes)
    return model


def decoder(seed: int = 0) -> nn.Module:
    """Tied embedding and head, and blocks with linear layers of one and of several tiles."""
    torch.manual_seed(seed)
    return TinyDecoder(width=128, layers=2, heads=4, vocab=VOCAB).train()


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids}


WHOLE: Entry = replace(ZOO["TinyDecoder"], build=decoder, batch=batch)
TILED: Entry = replace(WHOLE, build=lambda seed: cut(decoder(seed)))
PLAN = Plan(steps=3, accumulation=2, max_norm=0.5, lr=1e-3, scheduled=True)


def tiled_config(directory: Path | None, *, tile: Any = LIMIT_NBYTES, **options: Any) -> Any:
    schedule = {"tile": tile, **options.pop("schedule", {})}
    return swap_config(directory, schedule=schedule, **options)


# --- the operators ----------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "shape"),
    [(64, 320, (2, 12)), (256, 1024, (40,)), (128, 512, (2, 3, 5))],
)
def test_a_linear_layer(
    num_inputs: int, num_outputs: int, shape: tuple[int, ...], dtype: torch.dtype, has_bias: bool
) -> None:
    torch.manual_seed(1)
    whole = nn.Linear(num_inputs, num_outputs, bias=has_bias, dtype=dtype)
    tiled = nn.Linear(num_inputs, num_outputs, bias=has_bias, dtype=dtype)
    tiled.load_state_dict(whole.state_dict())
    row_nbytes = (num_inputs + has_bias) * dtype.itemsize
    Tiling(tiled, lambda p: p.element_size()).cut(64 * row_nbytes)
    assert isinstance(tiled, TiledLinear) and len(tiled.tiles) == num_outputs // 64
    x = torch.randn(*shape, num_inputs).to(dtype)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = whole(other), tiled(mine)
    # The bits of the rows by themselves, whatever this machine's BLAS makes of a larger matrix.
    rows = whole.weight.detach().split(64)
    biases = whole.bias.detach().split(64) if has_bias else [None] * len(rows)
    with torch.no_grad():
        by_rows = [F.linear(x, row, bias) for row, bias in zip(rows, biases, strict=True)]
    assert same_bits(torch.cat(by_rows, -1), actual.detach())
    torch.testing.assert_close(actual, expected)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    actual.backward(gradient)
    for name in ("weight", "bias")[: 1 + has_bias]:
        parts = [getattr(tile, name).grad for tile in tiled.tiles]
        torch.testing.assert_close(getattr(whole, name).grad, torch.cat(parts))
    # The products of a sum, and then what is rounded between tiles; bf16 products are summed in
    # fp32 within a tile and rounded to bf16 after it, so with its roundoff the bound holds too.
    roundoff = torch.finfo(dtype).eps / 2
    num_terms = num_outputs if dtype is torch.float32 else len(tiled.tiles) + 2
    gamma = num_terms * roundoff / (1 - num_terms * roundoff)
    magnitudes = gradient.double().abs() @ whole.weight.detach().double().abs()
    assert mine.grad is not None and other.grad is not None
    gap = (mine.grad.double() - other.grad.double()).abs()
    assert bool((gap <= 2 * gamma * magnitudes).all())
    exact = gradient.double() @ whole.weight.detach().double()
    assert bool(((mine.grad.double() - exact).abs() <= gamma * magnitudes).all())


def test_an_embedding_with_padding() -> None:
    torch.manual_seed(1)
    whole = nn.Embedding(500, 64, padding_idx=130)
    tiled = nn.Embedding(500, 64, padding_idx=130)
    tiled.load_state_dict(whole.state_dict())
    cut(tiled, 128 * 64 * 4)
    assert isinstance(tiled, TiledEmbedding)
    assert [tile.padding_idx for tile in tiled.tiles] == [None, 2, None, None]
    ids = torch.tensor([[0, 127, 128, 130, 499, 0], [383, 384, 130, 255, 256, 0]])
    expected, actual = whole(ids), tiled(ids)
    assert same_bits(expected, actual)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    actual.backward(gradient)
    assert whole.weight.grad is not None
    assert same_bits(whole.weight.grad, torch.cat([tile.weight.grad for tile in tiled.tiles]))
    assert not whole.weight.grad[130].any()
    for outside in (-1, 500):
        with pytest.raises(IndexError):
            tiled(torch.tensor([3, outside]))


def test_gradients_of_gradients_and_autocast() -> None:
    torch.manual_seed(1)
    whole, tiled = nn.Linear(64, 192), nn.Linear(64, 192)
    tiled.load_state_dict(whole.state_dict())
    cut(tiled, 64 * 65 * 4)
    found = []
    for module in (whole, tiled):
        x = torch.linspace(-1, 1, 4 * 64).view(4, 64).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).tanh().sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tiled(x).dtype is torch.bfloat16
        torch.testing.assert_close(whole(x), tiled(x))
    with torch.no_grad():
        torch.testing.assert_close(whole(x), tiled(x))


def test_the_output_of_one_tile_is_in_memory_at_a_time() -> None:
    """Beside the full output, which the caller keeps."""
    tiled = cut(nn.Linear(64, 64 * 16), 64 * 65 * 4)
    alive: list[Any] = []
    most = 0

    def count(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(output))
        most = max(most, sum(reference() is not None for reference in alive))

    for tile in tiled.tiles:  # type: ignore[union-attr]
        tile.register_forward_hook(count)
    output = tiled(torch.randn(8, 64))
    assert most <= 2 and output.requires_grad  # The one before goes when the next is there.


# --- the engine -------------------------------------------------------------------------------


def reference() -> Record:
    return plain_run(TILED, PLAN)


def engine_run(config: Any, *, device: Any = None) -> Record:
    with offloaded(decoder(), config, device=device) as model:
        assert isinstance(model.head, TiledLinear) and isinstance(model.tokens, TiledEmbedding)
        assert len(model.head.tiles) == 4
        assert model.head.tiles[0].weight is model.tokens.tiles[0].weight
        return run(WHOLE, Side(model), PLAN)


@pytest.fixture(scope="module")
def expected() -> Record:
    return reference()


@pytest.mark.parametrize(
    ("placement", "prefetch", "simulated", "updates", "engine"),
    sampled(
        [
            (*way, engine)
            for way in [
                ("nvme", True, False, "deferred"),
                ("nvme", False, True, "at_step"),
                ("host", True, True, "deferred"),
                ("device", True, False, "at_step"),
                ({"parameters": ["host", "nvme"], "moments": ["nvme"]}, True, True, "deferred"),
            ]
            for engine in ("threads", "io_uring")
        ],
        # The threads of one way; where nothing moves, both engines do nothing.
        lambda case: case[-1] == ("threads" if case[1:3] == (False, True) else "io_uring"),
    ),
)
def test_the_same_bits_wherever_tiles_rest(
    expected: Record, swap_directory: Path, io_engines: frozenset[str], placement: Any,
    prefetch: bool, simulated: bool, updates: str, engine: str,
) -> None:  # fmt: skip
    if engine not in io_engines:
        pytest.skip(f"{engine} does not open here")
    config = tiled_config(
        swap_directory, placement=placement, prefetch=prefetch, updates=updates, engine=engine,
        host_nbytes="16MiB",
    )  # fmt: skip
    assert_same_run(expected, engine_run(config, device=SimulatedDevice(3) if simulated else None))


def test_training_is_close_to_that_of_the_untiled_model(expected: Record) -> None:
    """Not a bit test: sums of three steps' gradients of inputs were made in another order."""
    whole = plain_run(WHOLE, PLAN)
    torch.testing.assert_close(expected.losses, whole.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(expected.norms, whole.norms, rtol=1e-4, atol=1e-6)


class Residual(nn.Sequential):
    """A block with the input added."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Wide(nn.Module):
    """Blocks whose one linear layer is most of the model."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Residual(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2)
        )
        self.out = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


def wide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Wide()


def wide_batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(6, 256, generator=torch.Generator().manual_seed(seed))}


WIDE: Entry = replace(ZOO["Mlp"], build=wide, batch=wide_batch, loss=lambda m, b: m(**b))


def test_a_layer_four_times_the_window_trains(swap_directory: Path) -> None:
    layer_nbytes = 256 * 256 * 4
    window_nbytes = layer_nbytes // 4 + (16 << 10)  # And the bias, norm and small units in use.
    config = tiled_config(
        swap_directory, tile="auto", device_nbytes=window_nbytes, host_nbytes="4MiB"
    )
    device = SimulatedDevice(5)
    with offloaded(wide(), config, device=device) as model:
        tiles = model.blocks[0][1].tiles  # type: ignore[index,union-attr]
        assert len(tiles) == 4
        actual = run(WIDE, Side(model), PLAN)
        assert 0 < device.attached_high_water_nbytes <= window_nbytes
    model = wide()
    limit_nbytes = 64 * 257 * 4
    plain = run(WIDE, Side(cut(model, limit_nbytes), is_plain=True), PLAN)
    assert_same_run(plain, actual)


def test_auto_tiles_no_layer_that_fits(swap_directory: Path) -> None:
    config = tiled_config(swap_directory, tile="auto", device_nbytes="4MiB", host_nbytes="8MiB")
    with offloaded(wide(), config, device=SimulatedDevice(5)) as model:
        assert type(model.blocks[0][1]) is nn.Linear  # type: ignore[index]


def test_auto_leaves_space_to_prefetch_the_next_tile(swap_directory: Path) -> None:
    """A window of half a layer: halves fit, but not two at a time; quarters do."""
    window_nbytes = 256 * 256 * 4 // 2 + (32 << 10)
    config = tiled_config(
        swap_directory, tile="auto", device_nbytes=window_nbytes, host_nbytes="8MiB"
    )
    with offloaded(wide(), config, device=SimulatedDevice(5)) as model:
        assert len(model.blocks[0][1].tiles) == 4  # type: ignore[index,union-attr]


def test_auto_on_the_cpu_trains_in_less_host_memory(swap_directory: Path) -> None:
    whole = smallest_host_nbytes(wide, tiled_config(swap_directory, tile=0))
    config = tiled_config(swap_directory, tile="auto", host_nbytes=whole // 2)
    with offloaded(wide(), config) as model:
        assert isinstance(model.blocks[0][1], TiledLinear)  # type: ignore[index]
        actual = run(WIDE, Side(model), PLAN)
    names = [name for name in actual.weights if name.startswith("blocks.0.1.tiles")]
    num_tiles = len(names) // 2
    rows = 256 // num_tiles
    plain = run(WIDE, Side(cut(wide(), rows * 257 * 4), is_plain=True), PLAN)
    assert_same_run(plain, actual)


# --- what cannot be cut -----------------------------------------------------------------------


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return F.linear(input, self.weight * 2, self.bias)


def _own_forward() -> nn.Module:
    return nn.Sequential(Scaled(256, 256))


def _parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(256, 256)))


def _also_elsewhere() -> nn.Module:
    model = nn.Sequential(nn.Linear(256, 256), nn.Bilinear(16, 16, 256))
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    model.own = model[0].weight
    return model


def _transposed() -> nn.Module:
    model = nn.Sequential(nn.Linear(256, 256))
    model[0].weight = nn.Parameter(torch.randn(256, 256).t())
    return model


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(256, 256))
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    return model


def _renormed() -> nn.Module:
    return nn.Sequential(nn.Embedding(256, 256, max_norm=1.0))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_own_forward, "a Scaled"),
        (_parametrized, "cannot be split"),
        (_also_elsewhere, "the own of a Sequential"),
        (_transposed, "are not contiguous"),
        (_hooked, "gradient hooks"),
        (_renormed, "max_norm"),
    ],
)
def test_a_layer_that_cannot_be_tiled_is_refused_with_the_reason(
    swap_directory: Path, build: Callable[[], nn.Module], reason: str
) -> None:
    config = tiled_config(swap_directory, tile="auto", device_nbytes="128KiB", host_nbytes="8MiB")
    model = build()
    before = dict(model.named_parameters())
    with pytest.raises(CapacityError, match=reason) as refused:
        infinity.offload(model, config, device=SimulatedDevice(1))
    assert refused.value.tier == "device" and "tiers.device.capacity" in str(refused.value)
    assert not list(swap_directory.glob("*"))
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


def test_without_tiles_a_layer_larger_than_the_window_is_refused(swap_directory: Path) -> None:
    config = tiled_config(swap_directory, tile=0, device_nbytes="128KiB", host_nbytes="8MiB")
    with pytest.raises(CapacityError, match="do not fit one device"):
        infinity.offload(wide(), config, device=SimulatedDevice(1))


def test_a_failed_offload_leaves_the_model_untiled(swap_directory: Path) -> None:
    model = decoder()
    types = {name: type(module) for name, module in model.named_modules()}
    before = dict(model.named_parameters())

    def fail(name: str) -> Tensor:
        if name.startswith("blocks.1"):
            raise OSError("gone")
        return torch.zeros_like(before[name])

    with pytest.raises(OSError, match="gone"):
        infinity.offload(model, tiled_config(swap_directory, host_nbytes="8MiB"), weights=fail)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert {name: type(module) for name, module in model.named_modules()} == types
    assert list(model.state_dict()) == list(decoder().state_dict())
    model.load_state_dict(decoder(1).state_dict())
    assert same_bits(model.head.weight, decoder(1).head.weight)  # type: ignore[arg-type,union-attr]


# --- names ------------------------------------------------------------------------------------


@pytest.fixture
def tiled(swap_directory: Path) -> Any:
    with offloaded(decoder(), tiled_config(swap_directory, host_nbytes="16MiB")) as model:
        yield model


def test_state_dict_has_the_model_s_own_names(tiled: nn.Module) -> None:
    plain = decoder().state_dict()
    assert list(tiled.state_dict()) == list(plain)
    assert not differences(plain, tiled.state_dict())
    kept = tiled.state_dict(keep_vars=True)
    assert kept["head.weight"].shape == (VOCAB, 128)
    tiled.load_state_dict(kept)
    assert not differences(plain, tiled.state_dict())
    other = decoder(1).state_dict()
    tiled.load_state_dict(other)
    assert not differences(other, tiled.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        tiled.load_state_dict({**other, "head.weight": torch.zeros(3, 128)})


def test_a_parameter_is_read_and_written_by_its_own_name(tiled: nn.Module) -> None:
    engine = infinity.engine_of(tiled)
    plain = decoder()
    name = "tokens.weight"
    assert same_bits(engine.read_parameter(name), plain.get_parameter(name).detach())
    assert engine.read_gradient(name) is None
    WHOLE.loss(tiled, batch(1)).backward()
    cut_plain = cut(decoder())
    WHOLE.loss(cut_plain, batch(1)).backward()
    gradient = engine.read_gradient(name)
    assert gradient is not None
    tiles = [tile.weight.grad for tile in cut_plain.tokens.tiles]  # type: ignore[union-attr]
    assert same_bits(gradient, torch.cat(tiles))
    with torch.no_grad():
        assert same_bits(tiled.head.weight.grad.clone(), gradient)  # type: ignore[union-attr]
    value = torch.randn(VOCAB, 128)
    engine.write_parameter(name, value)
    assert same_bits(engine.read_parameter(name, master=True), value)
    with pytest.raises(InfinityError, match="shape"):
        engine.write_parameter(name, value[1:])


def test_a_tiled_parameter_is_a_handle(tiled: nn.Module) -> None:
    weight = tiled.head.weight  # type: ignore[union-attr]
    assert weight.shape == (VOCAB, 128) and weight.dtype is torch.float32 and weight.requires_grad
    assert tiled.get_parameter("head.weight") is weight
    with torch.no_grad():
        assert same_bits(weight * 1, decoder().head.weight.detach())  # type: ignore[union-attr]
    # Used by hand it is put together, and its gradient goes to the tiles.
    F.linear(torch.ones(2, 128), weight).square().sum().backward()
    plain = decoder()
    F.linear(torch.ones(2, 128), plain.head.weight).square().sum().backward()  # type: ignore[union-attr,arg-type]
    gradient = infinity.engine_of(tiled).read_gradient("tokens.weight")
    assert gradient is not None
    assert not differences({"": plain.head.weight.grad}, {"": gradient})  # type: ignore[union-attr]
    assert not held_units(tiled)
    with torch.no_grad():
        for each in (weight, plain.head.weight):
            each.mul_(2)  # type: ignore[operator]
            each[-3:].fill_(3)  # type: ignore[index,operator]
            each.detach().t()[1].neg_()  # type: ignore[operator]
            each.grad.mul_(0.5)  # type: ignore[union-attr]
            each.grad[5].zero_()  # type: ignore[union-attr,index]
    assert same_bits(weight.detach(), plain.head.weight.detach())  # type: ignore[operator,union-attr]
    assert same_bits(weight.grad.clone(), plain.head.weight.grad)  # type: ignore[union-attr,arg-type]
    with infinity.gather(weight, modify=True), torch.no_grad():
        for tile in tiled.head.tiles:  # type: ignore[union-attr]
            tile.weight.fill_(0.5)
    assert bool((infinity.engine_of(tiled).read_parameter("tokens.weight") == 0.5).all())
    weight.requires_grad_(False)
    assert not any(tile.weight.requires_grad for tile in tiled.head.tiles)  # type: ignore[union-attr]


def test_optimizer_groups_accept_tiled_parameters(tiled: nn.Module) -> None:
    optimizer = infinity.AdamW([{"params": [tiled.head.weight]}], lr=0.1)  # type: ignore[union-attr]
    WHOLE.loss(tiled, batch(1)).backward()
    before = infinity.engine_of(tiled).read_parameter("tokens.weight")
    optimizer.step()
    after = infinity.engine_of(tiled).read_parameter("tokens.weight")
    assert bool((before != after).any(dim=1).all())
    names = {name for name, _ in named_parameters_of(tiled)}
    assert names == {name for name, _ in decoder().named_parameters()}


def test_export_and_import(tiled: nn.Module, tmp_path: Path) -> None:
    export_safetensors(tiled, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    saved = safetensors.torch.load_file(file)
    plain = dict(decoder().named_parameters())
    assert not differences({k: v.detach() for k, v in plain.items()}, saved)
    # And back: read by rows, never a whole table.
    source = weight_source(tmp_path / "out")
    most_rows = 0
    written: dict[str, Tensor] = {}

    def write(name: str, tensor: Tensor) -> None:
        nonlocal most_rows
        most_rows = max(most_rows, len(tensor)) if "tokens" in name else most_rows
        written[name] = tensor

    rows = {"tokens.weight": [("a.tokens", 0, 128), ("b.tokens", 128, 448)]}
    source.plan(decoder()).load(write, lambda name: rows.get(name, [(name, 0, 1)]))
    assert most_rows == 320
    assert same_bits(torch.cat([written["a.tokens"], written["b.tokens"]]), saved["tokens.weight"])
    config = tiled_config(tmp_path / "again", host_nbytes="16MiB")
    with infinity.init_empty_weights(config):
        model = decoder(1)
    with offloaded(model, config, weights=tmp_path / "out") as model:
        assert isinstance(model.head, TiledLinear)
        assert not differences(decoder().state_dict(), model.state_dict())


def test_built_on_meta_tiles_are_initialised(swap_directory: Path) -> None:
    config = tiled_config(swap_directory, host_nbytes="8MiB")
    with infinity.init_empty_weights(config):
        model = Wide(512)
    with offloaded(model, config, seed=3) as model:
        engine = infinity.engine_of(model)
        assert isinstance(model.blocks[0][1], TiledLinear)  # type: ignore[index]
        weight = engine.read_parameter("blocks.0.1.weight")
        assert weight.abs().max() <= 512**-0.5  # nn.Linear's rule, by inputs.
        assert weight.std() == pytest.approx((512 * 3) ** -0.5, rel=0.02)
        assert len(weight.unique(dim=0)) == 512


# --- with the rest of the engine --------------------------------------------------------------


def test_layer_major_accumulation_with_tiles_in_blocks(swap_directory: Path) -> None:
    """Without tied weights its sums are those of the plain loop, bit for bit, however many
    micro-batches wait for each other at tiles."""
    seeds = [1, 2, 3]
    plain = cut(wide(), 64 * 257 * 4)
    for seed in seeds:
        (WIDE.loss(plain, wide_batch(seed)) / 3).backward()
    for gradients, tile_micro_batches, device in (
        ("nvme", 4, SimulatedDevice(2)), ("host", 2, SimulatedDevice(3)), ("nvme", 1, None),
        ("nvme", 2, None), ("host", 3, None),
    ):  # fmt: skip
        config = tiled_config(
            swap_directory, tile=64 * 257 * 4, host_nbytes="8MiB",
            placement={"parameters": "nvme", "moments": "nvme", "gradients": gradients},
            schedule={"tile_micro_batches": tile_micro_batches},
        )  # fmt: skip
        with offloaded(wide(), config, device=device) as model:
            assert len(model.blocks[0][1].tiles) == 4  # type: ignore[index,union-attr]
            losses = infinity.forward_backward(
                model, lambda seed: WIDE.loss(model, wide_batch(seed)) / 3, seeds
            )
            assert len(losses) == 3
            assert not differences(Side(plain, is_plain=True).gradients(), Side(model).gradients())


@pytest.mark.parametrize(("tile", "tile_micro_batches"), [(0, 1), ("64KiB", 1), ("64KiB", 3)])
def test_a_layer_behind_a_block_needs_no_memory_beside_the_block(
    tile: Any, tile_micro_batches: int, swap_directory: Path
) -> None:
    """In the smallest window of the device, with a head as large as a block."""

    def build() -> nn.Module:
        model = wide()
        model.out = nn.Linear(256, 256)
        return model

    config = tiled_config(
        swap_directory,
        tile=tile,
        device_nbytes=1,
        schedule={"tile_micro_batches": tile_micro_batches},
    )
    with pytest.raises(CapacityError, match="one device") as refused:
        infinity.offload(build(), config, device=SimulatedDevice(1))
    config["tiers"]["device"]["capacity"] = refused.value.needed_nbytes
    device = SimulatedDevice(1)
    with offloaded(build(), config, device=device) as model:
        infinity.forward_backward(model, lambda seed: WIDE.loss(model, wide_batch(seed)), [1, 2, 3])
    assert 0 < device.attached_high_water_nbytes <= refused.value.needed_nbytes


class Counted(torch.autograd.Function):
    """Fails at one of its forwards and backwards, of all micro-batches and their repetitions."""

    left = iter(range(1 << 60))  # No number, which would be state that blocks share.

    @classmethod
    def count(cls, x: Tensor) -> Tensor:
        if next(cls.left, None) is None:
            raise RuntimeError("made to fail")
        return x.clone()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Counted.count(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return Counted.count(gradient)


class Entering(nn.Module):
    """Notes that a micro-batch has entered a block, as `Counting` that it is at its end."""

    # Of a library's class: numbers and lists would be state that blocks share.
    notes: SimpleQueue[int] = SimpleQueue()

    def forward(self, x: Tensor) -> Tensor:
        Entering.notes.put(1)
        return x

    @classmethod
    def most(cls) -> int:
        """How many micro-batches were inside blocks at once."""
        return max(accumulate(cls.notes.get_nowait() for _ in range(cls.notes.qsize())))


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        Entering.notes.put(-1)
        return Counted.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def test_micro_batches_that_wait_at_tiles(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than may be are inside a block, and each draws its own random numbers. Where one
    fails, those that wait at a tile end, also inside of a backward, and the next run has the
    gradients of one that never failed."""
    seeds = [1, 2, 3]

    def build() -> nn.Module:
        model = wide()
        for block in model.blocks:  # type: ignore[union-attr]
            block.insert(0, Entering()).insert(1, nn.Dropout(0.5))  # type: ignore[operator]
            block.append(Counting()).append(nn.Dropout(0.5))  # type: ignore[operator]
        return model

    def gradients(model: nn.Module) -> Any:
        torch.manual_seed(4)
        Entering.notes = SimpleQueue()
        infinity.forward_backward(model, lambda seed: WIDE.loss(model, wide_batch(seed)), seeds)
        return Side(model).gradients()

    config = tiled_config(
        swap_directory, tile=64 * 257 * 4, host_nbytes="4MiB", schedule={"tile_micro_batches": 1}
    )
    with offloaded(build(), config) as model:
        expected = gradients(model)
        assert Entering.most() == 1
    config["schedule"]["tile_micro_batches"] = 2
    with offloaded(build(), config) as model:
        assert not differences(expected, gradients(model))
        assert Entering.most() == 2
        for count in range(2 * 3 * len(seeds)):  # Blocks; forward, repeated, backward.
            model.zero_grad()
            monkeypatch.setattr(Counted, "left", iter(range(count)))
            with pytest.raises(RuntimeError, match="made to fail"):
                gradients(model)
            assert not held_units(model)
            assert not any("micro-batch" in each.name for each in threading.enumerate())
        model.zero_grad()
        monkeypatch.setattr(Counted, "left", iter(range(1 << 60)))
        assert not differences(expected, gradients(model))


def test_accumulating_a_tied_decoder(swap_directory: Path) -> None:
    plain = cut(decoder())
    for seed in (1, 2):
        (WHOLE.loss(plain, batch(seed)) / 2).backward()
    config = tiled_config(swap_directory, host_nbytes="16MiB")
    with offloaded(decoder(), config) as model:
        infinity.forward_backward(model, lambda seed: WHOLE.loss(model, batch(seed)) / 2, [1, 2])
        found = Side(model).gradients()
    for name, gradient in Side(plain, is_plain=True).gradients().items():
        assert gradient is not None
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_checkpointed_activations_and_bf16(swap_directory: Path) -> None:
    """Recomputed blocks fetch their tiles again; in bf16 tiles have masters of their own."""
    name = "llama"
    plain = ZOO[name]
    build = _llama
    entry = replace(plain, build=build)
    plan = Plan(steps=2, max_norm=1.0, checkpointing=True, generate=True)
    with offloaded(build(0), tiled_config(swap_directory, host_nbytes="16MiB")) as model:
        assert isinstance(model.model.embed_tokens, TiledEmbedding)  # type: ignore[union-attr]
        assert isinstance(model.lm_head, TiledLinear)
        actual = run(entry, Side(model), plan)
    assert_same_run(run(entry, Side(cut(build(0)), is_plain=True), plan), actual)
    config = tiled_config(swap_directory, host_nbytes="16MiB", compute="bfloat16", tile="64KiB")
    with offloaded(build(0), config) as model:
        optimizer = infinity.AdamW(model, lr=1e-2)
        losses = []
        for _ in range(4):
            loss = entry.loss(model, entry.batch(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        master = infinity.engine_of(model).read_parameter("lm_head.weight", master=True)
        weight = infinity.engine_of(model).read_parameter("lm_head.weight")
        assert same_bits(split(master)[0], weight)  # Ties are rounded up, not to even.


def _llama(seed: int) -> nn.Module:
    import transformers

    from .zoo import configuration

    options = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 320,
               "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(configuration("llama", **options)).train()


def test_adapters_over_a_tiled_base(swap_directory: Path) -> None:
    import peft

    def build(seed: int) -> nn.Module:
        options = peft.LoraConfig(
            r=4, target_modules=["lm_head", "up_proj"], init_lora_weights=False
        )
        torch.manual_seed(seed)
        return peft.get_peft_model(_llama(seed), options).train()

    entry = replace(ZOO["llama"], build=build)
    plan = Plan(steps=2, max_norm=1.0)
    with offloaded(build(0), tiled_config(swap_directory, host_nbytes="16MiB")) as model:
        base = model.base_model.model.lm_head.base_layer  # type: ignore[union-attr]
        assert isinstance(base, TiledLinear) and not base.weight.requires_grad
        actual = run(entry, Side(model), plan)
        adapter = peft.get_peft_model_state_dict(model)
        assert adapter and not any("tiles" in name for name in adapter)
    assert_same_run(run(entry, Side(cut(build(0)), is_plain=True), plan), actual)


def _step(model: nn.Module, optimizer: Any, seed: int) -> float:
    loss = WHOLE.loss(model, batch(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_checkpoint_of_other_tile_sizes_continues_exactly(
    swap_directory: Path, tmp_path: Path
) -> None:
    """Saved with tiles, on with none, with larger ones, and back, gradients included: the same state
    all the way, as the losses with the first tile size show to the last bit."""
    ways = [LIMIT_NBYTES, 0, 2 * LIMIT_NBYTES, LIMIT_NBYTES]
    expected: list[float] = []
    for number, tile in enumerate(ways):
        config = tiled_config(swap_directory, tile=tile, host_nbytes="16MiB")
        with offloaded(decoder(number), config) as model:
            optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=1.0)
            if number == 0:
                _step(model, optimizer, 1)
                WHOLE.loss(model, batch(7)).backward()
            else:
                load_checkpoint(tmp_path / f"run{number - 1}", model, optimizer)
            save_checkpoint(tmp_path / f"run{number}", model, optimizer)
            if number in (0, len(ways) - 1):
                found = [_step(model, optimizer, seed) for seed in (2, 3)]
                expected = expected or found
                assert found == expected


def test_moments_of_eight_bits_at_another_tile_size_are_refused(
    swap_directory: Path, tmp_path: Path
) -> None:
    """Their blocks need not end where a tile does: refused before anything is touched."""
    eight = {"precision": {"moments": "8bit"}, "host_nbytes": "16MiB"}
    with offloaded(decoder(), tiled_config(swap_directory, **eight)) as model:
        optimizer = infinity.AdamW(model, lr=1e-2)
        _step(model, optimizer, 1)
        save_checkpoint(tmp_path / "run", model, optimizer)
    with (
        offloaded(decoder(), tiled_config(swap_directory, tile=0, **eight)) as model,
        pytest.raises(ConfigError, match=r"schedule\.tile"),
    ):
        load_checkpoint(tmp_path / "run", model, infinity.AdamW(model, lr=1e-2))


# Weights used by hand, twice, sideways, in place, recomputed, adapted, of several dtypes, tied.
HABITS = [
    "llama-tied", "t5", "jamba", "deberta_v2", "perceiver", "dora", "lora-token-indices",
    "lora-tied-embedding", "UsedTwice", "ParentReads", "CalledSideways", "Recursive", "Frozen",
    "Conditional", "InPlace", "InnerGradient", "Checkpointed", "Attention", "MixedDtypes",
    "ReturnsParameter", "ZeroGradient",
]  # fmt: skip


@pytest.mark.parametrize("name", sampled(HABITS, HABITS[::2].__contains__))
def test_all_habits_of_models(
    name: str, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer that can be tiled is split into tiles of a few rows, far smaller than any user's.
    Sums are made in other orders, so loss and norm are close; a tiled parameter that is used by
    hand is gathered."""
    monkeypatch.setattr("infinity.modules.tiling.split.ROW_ALIGNMENT", 4)
    monkeypatch.setattr("infinity.engine.lay_out.fit", lambda tile, attempt, *rest: attempt(600))
    entry = ZOO[name]
    plan = Plan(steps=1, max_norm=1e9)
    plain = plain_run(entry, plan)
    with offloaded(entry.build(0), swap_config(swap_directory, host_nbytes="64MiB")) as model:
        assert any(isinstance(module, Tiled) for module in model.modules())
        record = run(entry, Side(model), plan)
        whole = set(dict(named_parameters_of(model)))
    assert whole == set(plain.weights)
    # In the dtypes that models choose: bf16 has 8 bits, and autograd rounds its sums to it.
    rtol = 1e-3 if name == "MixedDtypes" else 1e-5
    torch.testing.assert_close(record.losses, plain.losses, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(record.norms, plain.norms, rtol=10 * rtol, atol=1e-6)
