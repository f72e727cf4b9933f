"""State that the modules of a model change, in micro-batches that pass a block together.

A block's forward runs twice, and micro-batches take turns. Gradients, buffers, attributes and
generators are those of `for batch in micro_batches: loss_of(batch).backward()`, or the model is
refused before the step.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.errors import UnsupportedError
from infinity.modules.accumulate.proof import Proof, checksums
from tests.support.bits import differences
from tests.support.offloading import offloaded, swap_config

from .harness import Side

WIDTH = 8


class Block(nn.Module):
    """A linear layer and something that is more than a function of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.change(self.linear(x)))

    def change(self, y: Tensor) -> Tensor:
        return y


class BatchNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def change(self, y: Tensor) -> Tensor:
        found: Tensor = self.norm(y)
        return found


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(self.linear)


class OldSpectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(self.linear)


class Average(Block):
    """Reads the average of what came before; `how` it is written."""

    how = "in place"
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def change(self, y: Tensor) -> Tensor:
        found = y - self.average
        new = 0.9 * self.average + 0.1 * y.detach().mean(0)
        if self.how == "in place":
            self.average.copy_(new)
        elif self.how == "data":
            self.average.data.copy_(new)
        else:
            self.average = new
        return found


class AverageOfData(Average):
    how = "data"


class AverageReplaced(Average):
    how = "replaced"


class Counts(Block):
    """An attribute, a list and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.table = 0, [1.0], {"scale": 1.0}

    def change(self, y: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(len(self.seen)))
        self.table["scale"] *= 1.5
        return y * (self.calls + sum(self.seen) + self.table["scale"])


class Noise(Block):
    """Generators of its own: of torch, Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(3)
        self.python, self.old = random.Random(4), numpy.random.RandomState(6)
        self.new = numpy.random.default_rng(5)

    def change(self, y: Tensor) -> Tensor:
        drawn = torch.rand(WIDTH, generator=self.torch_generator)
        return y * drawn * (self.python.random() + self.new.random() + self.old.rand())


class Meter:
    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {"norm": []}
        self.load = torch.zeros(WIDTH)


class Objects(Block):
    """State in an object, in nested containers, in plain tensors, in a buffer that is registered
    late, and past `__setattr__`."""

    late: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.calls = Meter(), 0

    def change(self, y: Tensor) -> Tensor:
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(WIDTH))
        self.meter.seen["norm"].append(float(y.detach().norm()))
        found = y * sum(self.meter.seen["norm"]) - self.late - self.meter.load
        self.late.add_(y.detach().mean(0))
        self.meter.load += y.detach().mean(0)
        self.__dict__["calls"] += 1
        return found * self.calls


KINDS = [
    Block, BatchNorm, Spectral, OldSpectral, Average, AverageOfData, AverageReplaced, Counts, Noise,
    Objects,
]  # fmt: skip


class Model(nn.Module):
    def __init__(self, kind: type[Block], stem: nn.Module | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if stem is None else stem
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


Loss = Callable[[nn.Module, Tensor], Tensor]


def square(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean() / 3
    return found


def batches(step: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(6, WIDTH, generator=generator) for _ in range(count)]


def state_of(model: nn.Module) -> list[Any]:
    """Buffers, and what blocks count."""
    buffers = [(name, buffer.clone().tolist()) for name, buffer in model.named_buffers()]
    others = [
        (block.calls, list(block.seen), dict(block.table))
        for block in model.modules()
        if isinstance(block, Counts)
    ]
    drawn = [
        (block.torch_generator.get_state().tolist(), block.python.getstate(), block.new.random())
        for block in model.modules()
        if isinstance(block, Noise)
    ]
    kept = [
        (block.calls, block.meter.seen, block.meter.load.tolist())
        for block in model.modules()
        if isinstance(block, Objects)
    ]
    return [*buffers, *others, *drawn, *kept]


def check(
    make: Callable[[], nn.Module], swap: Path, loss_of: Loss = square, steps: int = 2
) -> None:
    """Losses, gradients and state after each of some steps without updates."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    with offloaded(make(), swap_config(swap)) as mine:
        for step in range(steps):
            losses = []
            for batch in batches(step):
                loss = loss_of(plain, batch)
                loss.backward()
                losses.append(loss.detach())
            found = infinity.forward_backward(mine, lambda x: loss_of(mine, x), batches(step))
            assert all(map(torch.equal, losses, found))
            assert not differences(Side(plain, is_plain=True).gradients(), Side(mine).gradients())
            assert state_of(plain) == state_of(mine)
            plain.zero_grad()
            mine.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_block_changes_ends_as_in_plain_accumulation(
    kind: type[Block], swap_directory: Path
) -> None:
    check(lambda: Model(kind), swap_directory)


def test_statistics_outside_of_blocks_are_those_of_the_plain_order(swap_directory: Path) -> None:
    def make() -> nn.Module:
        stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        return Model(BatchNorm, stem)

    check(make, swap_directory)


class DrawsOutside(Block):
    """Draws from the generators of the process."""

    def change(self, y: Tensor) -> Tensor:
        return y * random.random() * float(numpy.random.rand()) * torch.rand(())


def test_a_repeated_forward_draws_the_numbers_of_the_first(swap_directory: Path) -> None:
    """Of Python and NumPy as of torch. One micro-batch draws what a plain backward does."""
    torch.manual_seed(0)
    plain = Model(DrawsOutside)
    torch.manual_seed(0)
    seeds: list[Any] = []
    with offloaded(Model(DrawsOutside), swap_config(swap_directory)) as mine:
        for run in (0, 1):
            torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
            if run == 0:
                square(plain, batches(0)[0]).backward()
            else:
                infinity.forward_backward(mine, lambda x: square(mine, x), batches(0, 1))
            seeds.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
        assert seeds[0] == seeds[1]
        assert not differences(Side(plain, is_plain=True).gradients(), Side(mine).gradients())
        losses = infinity.forward_backward(mine, lambda x: square(mine, x), batches(0))
        assert len({loss.item() for loss in losses}) == 3


# -- Attributes that a loss sets -------------------------------------------------------------------


class Scaled(Block):
    scale = 1.0

    def change(self, y: Tensor) -> Tensor:
        return y * self.scale


@contextmanager
def rescaled(model: nn.Module, factor: float) -> Any:
    """As PEFT's `rescale_adapter_scale`."""
    layers = [module for module in model.modules() if isinstance(module, Scaled)]
    before = [layer.scale for layer in layers]
    for layer in layers:
        layer.scale = layer.scale * factor
    try:
        yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
            layer.scale = scale


class Keeps(Block):
    """Leaves a detached tensor behind, which the loss reads."""

    last: Tensor | None = None

    def change(self, y: Tensor) -> Tensor:
        self.last = y.detach() * 2
        return y


def with_an_attribute(model: nn.Module, x: Tensor) -> Tensor:
    with rescaled(model, 1.0 + float(x[0, 0].abs())):
        return square(model, x)


def with_another_forward(model: nn.Module, x: Tensor) -> Tensor:
    original, factor = model.forward, 1.0 + float(x[0, 0].abs())
    try:
        model.forward = lambda x: original(x) * factor  # type: ignore[method-assign]
        return square(model, x)
    finally:
        model.forward = original  # type: ignore[method-assign]


def of_what_blocks_kept(model: nn.Module, x: Tensor) -> Tensor:
    found = square(model, x)
    kept = [block.last for block in model.modules() if isinstance(block, Keeps)]
    assert all(last is not None for last in kept)
    return found * sum(last.mean() for last in kept if last is not None)


def with_other_parts_trained(model: nn.Module, x: Tensor) -> Tensor:
    for name in ("head", "blocks.1"):
        model.get_submodule(name).requires_grad_(bool(x[0, 0] > 0))
    return square(model, x)


def with_another_module(model: nn.Module, x: Tensor) -> Tensor:
    stem = model.stem
    if x[0, 0] > 0:
        model.stem = nn.Identity()
    try:
        return square(model, x)
    finally:
        model.stem = stem


def with_other_parameters(model: nn.Module, x: Tensor) -> Tensor:
    others = {"head.bias": x.mean().reshape(1), "blocks.1.linear.bias": x.mean(0)}
    found: Tensor = torch.func.functional_call(model, others, (x,)).square().mean()
    return found


class Halves(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func in (torch.tanh, torch.Tensor.mean) else found


def in_a_mode(model: nn.Module, x: Tensor) -> Tensor:
    with Halves():
        return square(model, x)


class MakesTensors(Block):
    def change(self, y: Tensor) -> Tensor:
        return (y * torch.tensor([1 / 3])).float()


def in_another_dtype(model: nn.Module, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return square(model, x) * torch.tensor([1 / 7]).sum()
    finally:
        torch.set_default_dtype(torch.float32)


def with_other_kernels(model: nn.Module, x: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return square(model, x) * (1 + torch.backends.cuda.flash_sdp_enabled())


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Scaled, with_an_attribute), (Block, with_another_forward), (Keeps, of_what_blocks_kept),
        (Block, with_other_parts_trained), (Block, with_another_module),
        (Block, with_other_parameters), (Block, in_a_mode), (MakesTensors, in_another_dtype),
        (Block, with_other_kernels),
    ],
)  # fmt: skip
def test_what_a_loss_sets_or_reads_is_that_of_its_micro_batch(
    kind: type[Block], loss: Loss, swap_directory: Path
) -> None:
    check(lambda: Model(kind), swap_directory, loss)
    assert torch.get_default_dtype() == torch.float32 and torch.backends.cuda.flash_sdp_enabled()


def test_a_mode_around_the_window_reaches_its_micro_batches(swap_directory: Path) -> None:
    with Halves():
        check(lambda: Model(Block), swap_directory)


class Masked(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.inference_mode():
            mask = x.mean(-1, keepdim=True) > 0
        for block in self.blocks:
            x = block(x, mask)
        found: Tensor = self.head(x)
        return found


class TakesAMask(Block):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.SystemRandom()  # It has no state, and nothing draws from it.

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * torch.where(mask, 1.0, 0.5))


def test_blocks_may_have_what_keeps_no_state(swap_directory: Path) -> None:
    """Inference tensors, which count no versions, and the generator of the operating system."""
    check(lambda: Masked(TakesAMask), swap_directory)


class Mixes(Model):
    """Compiled: a block, its module, the loss, and a residual between blocks, which meets others."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.blocks[0].compile(backend="aot_eager")
        self.blocks[1] = torch.compile(self.blocks[1], backend="aot_eager")
        self.mix = torch.compile(lambda a, b: a * b.sigmoid() + torch.tanh(a), backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        x = residual = self.stem(x)
        for block in self.blocks:
            x = self.mix(block(x), x)
            residual = self.mix(residual, x)
        found: Tensor = self.mix(self.head(residual), x[:, :1])
        return found


def test_compiled_code_runs_in_parts(swap_directory: Path) -> None:
    batch = batches(0)
    torch.manual_seed(0)
    plain = Mixes()
    sum(square(plain, x) for x in batch).backward()  # type: ignore[union-attr]
    torch.manual_seed(0)
    with offloaded(Mixes(), swap_config(swap_directory)) as mine:
        infinity.forward_backward(mine, lambda x: square(mine, x), batch)
        found = Side(mine).gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


class Program:
    """A loop as a class, whose loss counts, keeps values for its end, and logs."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count, self.scale, self.seen = model, 0, torch.ones(()), list[float]()

    def loss(self, x: Tensor) -> Tensor:
        self.count += len(x)
        self.scale = x.mean()
        loss = square(self.model, x) * self.scale * self.count
        self.seen.append(loss.item())
        return loss


def test_what_a_loss_keeps_in_an_object_is_that_of_its_micro_batch(swap_directory: Path) -> None:
    torch.manual_seed(0)
    plain = Program(Model(Block))
    for x in batches(0):
        plain.loss(x).backward()
    torch.manual_seed(0)
    with offloaded(Model(Block), swap_config(swap_directory)) as model:
        mine = Program(model)
        infinity.forward_backward(model, lambda x: mine.loss(x), batches(0))
        found = Side(model).gradients()
    assert mine.count == plain.count and mine.seen == plain.seen
    assert torch.equal(mine.scale, plain.scale)
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


# -- What is refused -------------------------------------------------------------------------------


def refused(model: nn.Module, swap: Path, words: str, loss_of: Loss = square) -> None:
    with offloaded(model, swap_config(swap)), pytest.raises(UnsupportedError, match=words):
        infinity.forward_backward(model, lambda x: loss_of(model, x), batches(0))


def test_a_count_that_a_loss_changes_before_and_behind_its_blocks_is_refused(
    swap_directory: Path,
) -> None:
    table = SimpleNamespace(count=0)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        table.count += 1
        y = square(model, x)
        table.count += 1
        return y

    refused(Model(Block), swap_directory, "count changes in the course", loss)


OUTSIDE = itertools.count(1)  # Nobody sees that it changes.


class ReadsOutside(Block):
    def change(self, y: Tensor) -> Tensor:
        return y * next(OUTSIDE)


class ReadsLate(Block):
    """Differs in a single element of the repeated forward, in one micro-batch."""

    calls = itertools.count(1)

    def change(self, y: Tensor) -> Tensor:
        if next(type(self).calls) == 3 * 3 + 5:
            y = y + torch.eye(len(y), y.shape[1])[0] * 1e-6 * torch.arange(len(y))[:, None].eq(1)
        return y


def test_one_element_of_one_micro_batch_is_found(swap_directory: Path) -> None:
    ReadsLate.calls = itertools.count(1)
    refused(Model(ReadsLate), swap_directory, r"blocks\.1 gave another tensor")


def test_one_micro_batch_is_compared_in_later_windows() -> None:
    proof = Proof()
    seen = []
    for _ in range(14):
        proof.begin(3)
        seen.append([number for number in range(3) if proof.is_compared(number)])
        proof.end()
    assert seen[:8] == [[0, 1, 2]] * 8
    assert [row[0] for row in seen[8:]] == [2, 0, 1, 2, 0, 1] and all(map(len, seen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("width", [5, 7, 1024, 8193])
def test_a_checksum_sees_elements_that_are_exchanged(dtype: torch.dtype, width: int) -> None:
    values = torch.randn(6, width).mul(9).to(dtype)
    values[0, :3] = values[1, :3] = torch.tensor([1, 0, 1])
    values[:, -1], values[1, 0] = values[:, 0], 0
    (first,) = checksums([values])
    others = [
        values.roll(1, 1),
        values.roll(1, 0),
        values[:, torch.randperm(width)],
        values[[1, 0, *range(2, 6)]],
    ]
    assert first is not None and all(first != found for found in checksums(others))
    assert checksums([values.t().contiguous().t(), None]) == [first, None]
    shifted = torch.cat([values.new_ones(1), values.flatten()])[1:].view_as(values)
    assert checksums([shifted]) == [first]


class Hooked(Model):
    """Scales a gradient between blocks; `has_residual`: the gradient comes in parts."""

    has_residual = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x.register_hook(lambda gradient: gradient * 3)
            x = block(x) + (x if self.has_residual else 0)
        found: Tensor = self.head(x)
        return found


class HookedResidual(Hooked):
    has_residual = True


def test_a_hook_of_a_tensor_between_blocks_is_called_once_or_refused(swap_directory: Path) -> None:
    check(lambda: Hooked(Block), swap_directory)
    refused(HookedResidual(Block), swap_directory, "has a hook or keeps its gradient")


class Twice(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).expand(-1, WIDTH))


class Steps(Model):
    step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return super().forward(x) * self.step


def hooked_by_a_program() -> nn.Module:
    model = Model(Block)
    model.blocks[1].register_forward_hook(lambda *_: None)
    return model


def with_a_hook_for_one_call(model: nn.Module, x: Tensor) -> Tensor:
    """As PEFT does for aLoRA, Poly and X-LoRA."""
    handle = model.get_submodule("blocks.0").register_forward_pre_hook(lambda *_: None)
    try:
        return square(model, x)
    finally:
        handle.remove()


def called_in_a_backward(model: nn.Module, x: Tensor) -> Tensor:
    """As cached losses of sentence-transformers do."""
    loss = square(model, x).detach().requires_grad_()
    loss.register_hook(lambda gradient: square(model, x).backward())
    return loss * 1


class HooksItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


class KeepsAGradient(Block):
    def change(self, y: Tensor) -> Tensor:
        y.retain_grad()
        return y


def of_two_calls(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(-x)
    found: Tensor = (model(x) - target).square().mean()
    return found


def with_a_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True, allow_unused=True)
    found: Tensor = y.square().mean() + (0 if gradient is None else gradient.square().mean())
    return found


def with_two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    y.abs().mean().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return y.square().mean()


COUNT = ContextVar("count", default=1)


def of_a_context_variable(model: nn.Module, x: Tensor) -> Tensor:
    COUNT.set(COUNT.get() + 1)
    return square(model, x) * COUNT.get()


class Shares(Block):
    """Has something in common with other blocks, or with the program."""

    norm = nn.BatchNorm1d(WIDTH, affine=False)
    total = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "norm":
            self.norm = type(self).norm
        self.generator, self.table = GENERATOR, TABLE
        self.frozen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def change(self, y: Tensor) -> Tensor:
        if self.what == "norm":
            found: Tensor = self.norm(y)
            return found
        if self.what == "generator":
            return y * torch.rand(WIDTH, generator=self.generator)
        if self.what == "table":
            self.table["calls"] += 1
        elif self.what == "flag":  # As it was after an even number of calls.
            FLAG.data.neg_()
            return y * FLAG
        elif self.what == "class":
            type(self).total += 1
        elif self.what == "global":
            return y[:, torch.randperm(WIDTH, generator=PERMUTES)]
        elif self.what == "parameter":
            with torch.no_grad():
                self.frozen.add_(y.mean(0))
        return y


class _ById(dict[str, float]):
    def __eq__(self, other: object) -> bool:
        return self is other


GENERATOR, PERMUTES, FLAG = torch.Generator(), torch.Generator(), torch.ones(1)
TABLE, LOCAL = _ById(calls=0, weight=1.0), threading.local()


class Stacks(Model):
    """Keeps a skip for the time of a call."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.skips: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.skips.append(x.detach())
        return super().forward(x) + self.skips.pop().mean()


class Averages(Model):
    average: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean()
        return y - self.average


class Weighs(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE["weight"]


class WeighsItself(Block):
    def change(self, y: Tensor) -> Tensor:
        return y * TABLE["weight"]


def with_a_global(model: nn.Module, x: Tensor) -> Tensor:
    TABLE["weight"] = float(x[0, 0])
    return square(model, x)


def test_a_global_that_no_block_reads_is_that_of_its_micro_batch(swap_directory: Path) -> None:
    check(lambda: Weighs(Block), swap_directory, with_a_global)


def with_a_thread(model: nn.Module, x: Tensor) -> Tensor:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
    return square(model, x) * LOCAL.calls


def counted_by_a_hook() -> nn.Module:
    model, calls = Model(Block), []

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        calls.append(1)

    for block in model.blocks:
        block.register_full_backward_hook(hook)
    return model


class Checkpointed(BatchNorm):
    def change(self, y: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().change, y, use_reentrant=False)
        return found


# What makes the model, its loss, and the words of the refusal.
REFUSED: dict[str, tuple[Callable[[], nn.Module], Loss, str]] = {
    "another output": (
        lambda: Model(ReadsOutside), square, r"blocks\.2 gave another tensor as its output 0",
    ),
    "a hook of the program": (
        hooked_by_a_program, square,
        r"blocks\.1 has the forward hook .*test_repeated_state.*lambda",
    ),
    "a hook for one call": (
        lambda: Model(Block), with_a_hook_for_one_call, "has the forward hook",
    ),
    "a call in a backward": (lambda: Model(Block), called_in_a_backward, "called in a backward"),
    "statistics of two calls": (lambda: Twice(BatchNorm), square, "calls it more than once"),
    "counts of two calls": (lambda: Twice(Counts), square, "calls it more than once"),
    "numbers of two calls": (lambda: Twice(Noise), square, "calls it more than once"),
    "a hook of its own input": (
        lambda: Model(HooksItsInput), square, r"blocks\.0 calls register_hook of its own input",
    ),
    "a gradient kept inside": (
        lambda: Model(KeepsAGradient), square, r"blocks\.0 calls retain_grad of a tensor inside it",
    ),
    "statistics of a call without gradients": (
        lambda: Model(BatchNorm), of_two_calls, "calls it more than once",
    ),
    "a gradient inside a loss": (lambda: Model(Block), with_a_penalty, "a backward of its own"),
    "a backward inside a loss": (lambda: Model(Block), with_two_backwards, "a backward of its own"),
    "a context variable": (
        lambda: Model(Block), of_a_context_variable, "in the context variable 'count'",
    ),
    **{
        f"a shared {what}": (lambda what=what: Model(partial(Shares, what)), square, words)
        for what, words in (
            ("norm", r"blocks\.0\.norm.running_mean changes in a block"),
            ("generator", r"blocks\.0\.generator changes in a block"),
            ("table", r"blocks\.0\.table\.calls changes in a block"),
            ("flag", "FLAG changes in a block"),
            ("class", r"Shares\.total changes in a block"),
            ("global", "PERMUTES changes in a block"),
            ("parameter", r"blocks\.0 changes blocks\.0\.frozen, and its forward runs twice"),
        )
    },
    "a stack of the model": (Stacks, square, "skips changes in a micro-batch"),
    "an average outside of blocks": (lambda: Averages(Block), square, "average is read"),
    "a global of the loss": (lambda: Model(WeighsItself), with_a_global, r"TABLE\.weight changes in"),
    "a thread of the loss": (lambda: Model(Block), with_a_thread, r"LOCAL\.calls changes in the thre"),
    "a count of a backward": (counted_by_a_hook, square, "calls changes in a backward"),
    "statistics of a checkpoint": (
        lambda: Model(Checkpointed), square, "running_mean in its backward",
    ),
    "a count outside of blocks": (
        lambda: Steps(Block), square, "step is read in a micro-batch, and an earlier one has left",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_repeated_is_refused_before_the_step(
    what: str, swap_directory: Path
) -> None:
    make, loss, words = REFUSED[what]
    refused(make(), swap_directory, words, loss)
