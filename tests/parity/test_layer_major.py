"""`infinity.forward_backward`: the gradients of plain accumulation, in whatever order blocks are run.

The reference is `for batch in micro_batches: loss_of(batch).backward()` over the plain model. Where
every parameter and every tensor between blocks has one use, sums are made in the same order and all
bits are equal. Elsewhere (tied weights, shared blocks, inputs that several blocks read) some sums
are made in another order: each such sum of n terms is off by at most (n - 1) * 2**-24 relative to
the sum of magnitudes, which a relative 2e-5 of the norm of all gradients leaves wide room for.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import InfinityError, UnsupportedError
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences
from tests.support.exhaustive import sampled
from tests.support.models import DecoderBlock, TinyDecoder
from tests.support.offloading import offloaded, swap_config

from .harness import Named, Side, held_units, seed_everything, smallest_host_nbytes, to_device
from .test_zoo import FailAt
from .zoo import ZOO, Entry

EXACT = [
    "llama", "mistral", "qwen3", "gptj", "phi3", "gpt_neox", "mixtral", "qwen3_moe", "deepseek_v3",
    "rwkv", "vit", "swin", "convnext", "resnet", "clip", "llava", "qwen2_vl", "wav2vec2", "encodec",
    "lora",
    "lora-experts", "Mlp", "ParentReads", "CalledSideways", "Frozen", "NestedLists", "InPlace",
    "KeywordTensors", "PassesThrough", "CustomFunction", "Attention", "Parametrized", "UsedTwice",
]  # fmt: skip
ROUNDED = [
    "gpt2", "t5", "bart", "albert", "zamba2", "longt5", "funnel", "deberta_v2", "detr", "mllama",
    "whisper", "hrm_text", "TinyDecoder", "TiedAcross", "Conditional",
]  # fmt: skip
RANDOM = ["gpt2-dropout", "bert-dropout", "lora-all-linear-dropout", "Dropout", "Checkpointed"]

SEEDS = (1, 2, 3)


def build(entry: Entry) -> nn.Module:
    """In training no cache is kept; with one some models mask attention by other kernels."""
    model = entry.build(0).train()
    for module in model.modules():
        if isinstance(getattr(getattr(module, "config", None), "use_cache", None), bool):
            module.config.use_cache = False
    return model


def plain(entry: Entry, seeds: tuple[int, ...]) -> tuple[list[Tensor], Named]:
    model = build(entry)
    losses = []
    seed_everything(5)
    for seed in seeds:
        loss = entry.loss(model, entry.batch(seed)) / len(seeds)
        loss.backward()
        losses.append(loss.detach())
    return losses, Side(model, is_plain=True).gradients()


def accumulated(
    entry: Entry, seeds: tuple[int, ...], config: dict[str, Any], device: Any = None
) -> tuple[list[Tensor], Named]:
    with offloaded(build(entry), config, device=device) as model:
        place = "cpu" if device is None else device.torch_device

        def loss_of(seed: int) -> Tensor:
            return entry.loss(model, to_device(entry.batch(seed), place)) / len(seeds)

        seed_everything(5)
        losses = infinity.forward_backward(model, loss_of, seeds)
        assert not held_units(model)
        return [loss.cpu() for loss in losses], Side(model).gradients()


def check(name: str, seeds: tuple[int, ...], directory: Path, *, is_exact: bool) -> None:
    entry = ZOO[name]
    expected_losses, expected = plain(entry, seeds)
    losses, gradients = accumulated(entry, seeds, swap_config(directory))
    assert all(map(torch.equal, expected_losses, losses))
    found = differences(expected, gradients)
    if is_exact:
        assert not found
        return
    total = torch.stack([g.double().norm() for g in expected.values() if g is not None]).norm()
    for key, gradient in expected.items():
        other = gradients[key]
        assert (gradient is None) == (other is None), key
        if gradient is not None and other is not None:
            assert (gradient.double() - other.double()).norm() <= 2e-5 * total, key


OF_THE_ZOO = [name for name in EXACT if name in ZOO]


@pytest.mark.parametrize("name", sampled(OF_THE_ZOO, OF_THE_ZOO[::2].__contains__))
def test_gradients_are_those_of_plain_accumulation(name: str, swap_directory: Path) -> None:
    check(name, SEEDS, swap_directory, is_exact=True)


@pytest.mark.parametrize("name", sampled(ROUNDED, ROUNDED[::2].__contains__))
def test_sums_of_several_uses_differ_by_their_order_alone(name: str, swap_directory: Path) -> None:
    check(name, SEEDS, swap_directory, is_exact=False)


@pytest.mark.parametrize("name", RANDOM)
def test_one_micro_batch_draws_the_numbers_of_a_plain_backward(
    name: str, swap_directory: Path
) -> None:
    """Also in the repeated forward of a block."""
    check(name, (1,), swap_directory, is_exact=name != "gpt2-dropout" and name != "bert-dropout")


class _Paths(nn.Module):
    """What a diffusion model has between its blocks: a condition that blocks and the head read,
    skips to later blocks, a stem that the head reads, and losses on the way. `has_residuals`: tensors
    between blocks lead to each other."""

    def __init__(self, has_residuals: bool) -> None:
        super().__init__()
        self.has_residuals = has_residuals
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.stem, self.late, self.head = (nn.Linear(16, 16) for _ in range(3))
        self.blocks = nn.ModuleList(_Conditioned(16) for _ in range(3))
        self.up = nn.ModuleList(_Conditioned(32) for _ in range(3))
        self.join = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.time(x[:, :8])
        x = self.stem(x)
        late = self.late(x)  # Made first and read last.
        skips, heads = [], []
        for block in self.blocks:
            x = block(x, condition) + (x if self.has_residuals else 0)
            skips.append(x)
        for block, join in zip(self.up, self.join, strict=True):
            x = join(block(torch.cat([x, skips.pop()], -1), condition.repeat(1, 2)))
            heads.append((x * 1.5).sigmoid().mean())
        return (self.head(x) + condition).square().mean() + sum(heads) + late.tanh().mean()


class _Conditioned(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        hidden = self.norm(x) * (1 + condition) + condition
        return x * 0.5 + self.mlp(hidden).relu() + x.sigmoid()


@pytest.mark.parametrize("has_residuals", [False, True])
def test_paths_between_blocks_have_the_sums_of_autograd(
    has_residuals: bool, swap_directory: Path
) -> None:
    """Three terms meet in one tensor, so their order shows in the bits. A hook of a parameter that
    the head reads is called once for each micro-batch."""
    batches = [torch.randn(4, 16, generator=torch.Generator().manual_seed(s)) for s in SEEDS]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return _Paths(has_residuals)

    model = make()
    for batch in batches:
        model(batch).backward()
    expected = Side(model, is_plain=True).gradients()
    calls: list[Tensor] = []
    with offloaded(make(), swap_config(swap_directory)) as mine:
        mine.head.bias.register_hook(calls.append)
        infinity.forward_backward(mine, mine, batches)
        found = Side(mine).gradients()
    assert len(calls) == len(batches)
    if not has_residuals:
        assert not differences(expected, found)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=2e-5, atol=1e-7)


# -- Where things rest -----------------------------------------------------------------------------

PLACES = [
    ("device", "host", "io_uring", True),
    ("host", "host", "threads", True),
    ("nvme", "nvme", "threads", True),
    (["host", "nvme"], "nvme", "threads", False),
]


def train(config: dict[str, Any], device: Any = None) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of three micro-batches with dropout, clipping and weight decay."""
    entry = ZOO["gpt2-dropout"]
    torch.manual_seed(0)
    with offloaded(build(entry), config, device=device) as model:
        place = "cpu" if device is None else device.torch_device
        optimizer = infinity.AdamW(model, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
        losses = []
        seed_everything(9)
        for step in range(3):
            seeds = range(3 * step, 3 * step + 3)
            found = infinity.forward_backward(
                model, lambda s: entry.loss(model, to_device(entry.batch(s), place)) / 3, seeds
            )
            losses += [loss.item() for loss in found]
            optimizer.step()
            optimizer.zero_grad()
        return losses, Side(model).weights()


@pytest.fixture(scope="module")
def trained_on_host() -> tuple[list[float], dict[str, Tensor]]:
    return train(swap_config(None, placement="host"))


@pytest.mark.parametrize("is_simulated", [False, True], ids=["cpu", "simulated"])
@pytest.mark.parametrize(("activations", "state", "engine", "prefetch"), PLACES)
def test_where_state_and_activations_rest_changes_no_bit(
    trained_on_host: Any,
    swap_directory: Path,
    io_engines: frozenset[str],
    activations: Any,
    state: str,
    engine: str,
    prefetch: bool,
    is_simulated: bool,
) -> None:
    config = swap_config(
        swap_directory, placement=state, prefetch=prefetch,
        engine=engine if engine in io_engines else "threads",
    )  # fmt: skip
    config["placement"]["activations"] = activations
    device = SimulatedDevice(seed=4, delay_s=2e-4) if is_simulated else None
    losses, weights = train(config, device)
    assert losses == trained_on_host[0]
    assert not differences(trained_on_host[1], weights)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_in_the_smallest_budget_inputs_go_and_return(tier: str, swap_directory: Path) -> None:
    """On a device with its own memory, and with no space to prefetch."""
    entry = ZOO["llama"]
    config = swap_config(swap_directory)
    config["placement"]["activations"] = tier
    least = smallest_host_nbytes(lambda: build(entry), config, SimulatedDevice())
    room_nbytes = 0 if tier == "nvme" else 1 << 18
    config["tiers"]["host"]["capacity"] = least + room_nbytes
    expected_losses, expected = plain(entry, SEEDS)
    losses, gradients = accumulated(entry, SEEDS, config, SimulatedDevice(seed=1, delay_s=2e-4))
    assert losses == expected_losses
    assert not differences(expected, gradients)


# -- What it is for --------------------------------------------------------------------------------


class _Stack(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _square_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


@pytest.mark.parametrize(
    ("moments", "tile", "read", "written"),
    sampled(
        [("float32", 0, 14.3, 12.2), ("8bit", 0, 8.3, 6.2), ("float32", "128KiB", 21.3, 17.2)],
        lambda case: case[1] == 0,
    ),
)
def test_bytes_of_a_step_are_the_same_for_any_number_of_micro_batches(
    moments: str, tile: Any, read: float, written: float, swap_directory: Path
) -> None:
    """Everything on NVMe but gradients, bf16, and nothing kept in memory. Per parameter the update
    reads 2 + 2 (weight and residual) and the moments, 8 or 2 (1 + 4/256), the backward 2; all but
    the backward's are written. Padding and pages of scales are all that may come on top, and only
    the block at either turn stays. As counted by the kernel, where it counts at all. With tiles
    gradients are there, too (4 of each), biases have pages of their own, and the repeated forward
    reads 2, as often as a group of micro-batches goes through a block, not once for each of them."""
    width, layers = 512, 3 if tile else 8
    moved = []
    for count, tile_micro_batches in [(1, 4), (4, 4), (4, 1)] if tile else [(1, 4), (4, 4), (8, 4)]:
        torch.manual_seed(0)
        model = _Stack(width, layers)
        numel = sum(parameter.numel() for parameter in model.parameters())
        kinds = ["parameters", "master", "moments"] + ["gradients"] * bool(tile)
        config = swap_config(
            swap_directory / str(count), placement={kind: ["nvme"] for kind in kinds},
            prefetch=False, precision={"compute": "bfloat16", "moments": moments},
            schedule={"tile": tile, "tile_micro_batches": tile_micro_batches},
        )  # fmt: skip
        config["tiers"]["host"]["capacity"] = smallest_host_nbytes(
            lambda: _Stack(width, layers), config
        )
        (swap_directory / str(count)).parent.mkdir(exist_ok=True)
        with offloaded(model, config):
            engine = infinity.engine_of(model)
            optimizer = infinity.AdamW(model, lr=1e-3)
            batches = [torch.randn(1, width).bfloat16() for _ in range(count)]
            for _ in range(3):  # The second reads moments that were never written: holes.
                before = _moved(engine)
                infinity.forward_backward(model, _square_loss(model), batches)
                optimizer.step()
                optimizer.zero_grad()
            moved.append([a - b for a, b in zip(_moved(engine), before, strict=True)])
    counted, by_kernel = [each[:2] for each in moved], [each[2:] for each in moved]
    if tile:  # Three more groups: tiles twice in the backward and once in the forward, gradients.
        (group_read, group_written), _ = counted.pop(), by_kernel.pop()
        per_group = [
            (group_read - counted[0][0]) / numel / 3, (group_written - counted[0][1]) / numel / 3
        ]  # fmt: skip
        assert 5.5 + 4 <= per_group[0] <= 6 + 4.3 and 4 <= per_group[1] <= 4.3, per_group
    assert all(each == counted[0] for each in counted[1:])
    is_on_a_drive = os.major(os.stat(swap_directory).st_dev) != 0
    for nbytes in counted + (by_kernel if is_on_a_drive else []):
        per_parameter = [each / numel for each in nbytes]
        assert 0.92 * (read - 0.3) <= per_parameter[0] <= read, per_parameter
        assert 0.98 * (written - 0.2) <= per_parameter[1] <= written, per_parameter


def _moved(engine: Any) -> list[int]:
    """Bytes read and written, by the engine's counters and by the kernel's (proc(5))."""
    counters = engine.counters.snapshot()
    kernel = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [
        int(counters.get("nvme_read_nbytes", 0)), int(counters.get("nvme_write_nbytes", 0)),
        int(kernel["read_bytes"]), int(kernel["write_bytes"]),
    ]  # fmt: skip


def test_no_two_micro_batches_have_logits_at_once(swap_directory: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            alive.append(weakref.ref(logits))
            counts.append(sum(each() is not None for each in alive))
            return logits

    class Model(_Stack):
        def __init__(self) -> None:
            super().__init__(32, 3)
            self.head = Head(32, 512)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x)).logsumexp(-1).mean()

    with offloaded(Model(), swap_config(swap_directory)) as model:
        gc.disable()
        try:
            infinity.forward_backward(model, model, [torch.randn(2, 32) for _ in range(5)])
        finally:
            gc.enable()
    assert counts == [1] * 5


class _Skips(nn.Module):
    """Which blocks run depends on the input, and so does how often."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x.square().sum()


def test_each_micro_batch_takes_its_own_way_through_the_blocks(swap_directory: Path) -> None:
    torch.manual_seed(0)
    reference, model = _Skips(), _Skips()
    model.load_state_dict(reference.state_dict())
    ways = [(0, 1, 2, 3), (0, 3), (1,), (3, 1, 0), (2, 2, 1), ()]
    batches = [(torch.randn(3, 16, requires_grad=True), way) for way in ways]
    for x, way in batches:
        reference(x, way).backward()
    inputs = [x.grad for x, _ in batches]
    for x, _ in batches:
        x.grad = None
    with offloaded(model, swap_config(swap_directory)):
        infinity.forward_backward(model, lambda batch: model(*batch), batches)
        found = Side(model).gradients()
    for (name, parameter), (x, _), expected in itertools.zip_longest(
        reference.named_parameters(), batches, inputs, fillvalue=(None, None)
    ):
        if name is not None:
            torch.testing.assert_close(found[name], parameter.grad)
        if x is not None:
            assert torch.equal(x.grad, expected)


# -- What it refuses, and what goes wrong ----------------------------------------------------------


@contextmanager
def decoder(swap_directory: Path, make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    with offloaded(make(), swap_config(swap_directory)) as model:
        yield model


def ids(seed: int) -> Tensor:
    return torch.randint(4, 96, (2, 8), generator=torch.Generator().manual_seed(seed))


class _Wrong(nn.Module):
    def __init__(self, block: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_WrongBlock(block), _WrongBlock(block)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum() + sum(block.aside.sum() for block in self.blocks if block.aside is not None)


class _WrongBlock(nn.Module):
    aside: Tensor | None = None

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _puts_aside(block: _WrongBlock, x: Tensor) -> Tensor:
    y = block.linear(x)
    block.aside = y.square()
    return torch.tanh(y)


def _changes_argument(block: _WrongBlock, x: Tensor) -> Tensor:
    return block.linear(x.add_(1))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_puts_aside, "inside blocks.1 reaches the loss by another way"),
        (_changes_argument, "blocks.0 changes an argument in place"),
    ],
)
def test_blocks_that_cannot_be_repeated_are_refused(
    function: Any, says: str, swap_directory: Path
) -> None:
    with offloaded(_Wrong(function), swap_config(swap_directory)) as model:
        with pytest.raises(UnsupportedError, match=says):
            infinity.forward_backward(model, model, [torch.randn(2, 8) for _ in range(2)])
        assert not held_units(model)
        model(torch.randn(2, 8)).backward()  # The plain way still works.


def test_wrong_moments_are_refused(swap_directory: Path) -> None:
    with offloaded(_Stack(16, 2), swap_config(swap_directory)) as model:
        batch = torch.randn(2, 16)
        with torch.no_grad(), pytest.raises(InfinityError, match="no_grad"):
            infinity.forward_backward(model, lambda x: model(x).sum(), [batch])
        with pytest.raises(InfinityError, match="inside another"):
            infinity.forward_backward(
                model, lambda x: infinity.forward_backward(model, model, [x]), [batch]
            )
        assert infinity.forward_backward(model, model, []) == []
        infinity.forward_backward(model, lambda x: model(x).sum(), [batch])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception(error: Any, swap_directory: Path) -> None:
    """At operations through the whole run; then the gradients are those of a run that never
    failed."""
    make = lambda: TinyDecoder(width=16, layers=3, heads=2, vocab=96)  # noqa: E731
    with decoder(swap_directory, make) as model:

        def run() -> Named:
            infinity.forward_backward(model, lambda s: model(ids(s), labels=ids(s)), SEEDS)
            return Side(model).gradients()

        expected = run()
        model.zero_grad()
        counter = _FailIn(1 << 60, error)
        with counter:
            run()
        total = (1 << 60) - counter.left
        for count in range(0, total, max(1, total // 12)):
            model.zero_grad()
            with pytest.raises(error), _FailIn(count, error):
                run()
            assert not held_units(model)
            assert not any("micro-batch" in t.name for t in _threads())
        model.zero_grad()
        assert not differences(expected, run())


def _threads() -> list[Any]:
    import threading

    return threading.enumerate()


class _FailIn(FailAt):
    """FailAt reaches the thread it was entered in; here also the linear layers of others."""

    def __enter__(self) -> Any:
        self._linear = torch.nn.functional.linear

        def linear(*args: Any, **kwargs: Any) -> Tensor:
            self.left -= 1
            if self.left < 0:
                raise self.error("made to fail")
            return self._linear(*args, **kwargs)

        torch.nn.functional.linear = linear  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *args: Any) -> Any:
        torch.nn.functional.linear = self._linear
        return super().__exit__(*args)


def test_decoder_blocks_are_blocks() -> None:
    """The tests above would be empty otherwise."""
    model = TinyDecoder(width=16, layers=3, heads=2, vocab=96)
    assert sum(isinstance(module, DecoderBlock) for module in model.modules()) == 3


def test_shapes_that_change_reserve_no_more_than_the_largest(swap_directory: Path) -> None:
    """A dozen steps of other sizes after one of the largest: files, device and what is lent between
    steps do not grow, and no space of any size leaks in between."""
    config = swap_config(swap_directory, update_chunk="16KiB")
    config["placement"]["activations"] = ["host", "nvme"]
    least = smallest_host_nbytes(lambda: _Stack(128, 4), config, SimulatedDevice())
    config["tiers"]["host"]["capacity"] = least + (256 << 10)
    device = SimulatedDevice(seed=2, delay_s=0.0)
    torch.manual_seed(0)
    with offloaded(_Stack(128, 4), config, device=device) as model:
        engine = infinity.engine_of(model)
        optimizer = infinity.AdamW(model, lr=1e-3)
        host = engine.pool

        def reserved(sizes: list[int]) -> tuple[Any, ...]:
            batches = [torch.randn(rows, 128) for rows in sizes]
            infinity.forward_backward(model, _square_loss(model), batches)
            if len(sizes) % 2:
                _square_loss(model)(batches[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
            while engine.pool._reclaim(0):
                pass
            files = [path.stat().st_size for path in swap_directory.rglob("*") if path.is_file()]
            return sum(files), device.attached_high_water_nbytes, host.lent(), host.free_nbytes

        first = reserved([600] * 5)
        source = torch.Generator().manual_seed(0)
        for step in range(12):
            count = int(torch.randint(1, 6, (), generator=source))
            sizes = torch.randint(1, 601, (count,), generator=source).tolist()
            assert reserved(sizes) == first, f"step {step} of sizes {sizes}"
        assert engine.counters.snapshot()["activation_out_nbytes"] > 0
