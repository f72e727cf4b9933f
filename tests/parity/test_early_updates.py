"""Updates in the backward: whatever the step decides, the bits are those of plain PyTorch.

The model is small, its state rests on NVMe or on the host, and a look at `early_updates_kept` and
`early_updates_undone` says which of the two ways was taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StorageError
from infinity.state.units import Chunk
from infinity.streaming.updates.early import EarlyUpdates
from infinity.streaming.updates.staging_ring import StagingRing
from infinity.streaming.updates.updater import Updater
from infinity.streaming.updates.worker import LooseWork
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.exhaustive import sampled

WIDTH, VOCABULARY, BLOCKS = 64, 50, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.skipped: set[int] = set()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for index, block in enumerate(self.blocks):
            x = x if index in self.skipped else block(x)
        return self.head(x)


class Tied(Model):
    """The head is the embedding: its gradients come at both ends of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Around(nn.Module):
    """Blocks in a module with a parameter of its own, which is in use before and after all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.out)


class Parent(Model):
    """The backward leaves the body's parameter last, and begins with it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(), nn.Identity()
        self.body = Around()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(ids))


def make(kind: type[Model] = Model) -> Model:
    torch.manual_seed(3)
    return kind()


def ids_of(number: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    ids = ids_of(number)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


Clip = Callable[[int], float | None]


class Run:
    """One side: the same loop over a plain and over an offloaded model."""

    def __init__(self, model: nn.Module, optimizer: Any, *, is_plain: bool) -> None:
        self.model, self.optimizer, self.is_plain = model, optimizer, is_plain

    def step(self, max_norm: float | None = None) -> None:
        if self.is_plain:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            self.optimizer.max_grad_norm = max_norm
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient(self, name: str) -> torch.Tensor:
        if self.is_plain:
            found = self.model.get_parameter(name).grad
        else:
            found = infinity.engine_of(self.model).read_gradient(name)
        assert found is not None
        return found.clone()

    def weight(self, name: str) -> torch.Tensor:
        if self.is_plain:
            return self.model.get_parameter(name).detach().clone()
        return infinity.engine_of(self.model).read_parameter(name)

    def values(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        return {name: self.weight(name) for name in names}


# By the name of a fixture: what rests on the host, and whether a device computes.
ON_HOST: dict[str, tuple[tuple[str, ...], bool]] = {
    "nothing": ((), False),
    "weights": (("parameters",), False),
    "moments beside a device": (("moments",), True),
    "all beside a device": (("parameters", "master", "moments"), True),
}
_on_host: list[str] = ["nothing"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test runs once without a device and once beside one; what rests on the host comes in
    turn. The first test, and `make exhaustive`, have all four."""
    marks = metafunc.definition.iter_markers("parametrize")
    if any(mark.args[0] == "on_host" for mark in marks):
        return
    at = [name for name in vars(metafunc.module) if name.startswith("test_")].index(
        metafunc.function.__name__
    )
    names = list(ON_HOST)
    kept = names if at == 0 else (names[at % 2], names[2 + at // 2 % 2])
    metafunc.parametrize("on_host", sampled(names, kept.__contains__), indirect=True)


@pytest.fixture(autouse=True)
def on_host(request: pytest.FixtureRequest) -> Iterator[str]:
    """What rests in host memory, of the tests of this file."""
    _on_host[:] = [request.param]
    yield request.param
    _on_host[:] = ["nothing"]


def options_of() -> dict[str, Any]:
    """The arguments of `infinity.offload` beside the configuration."""
    return {"device": SimulatedDevice()} if ON_HOST[_on_host[0]][1] else {}


def config_of(directory: Path, **changes: Any) -> dict[str, Any]:
    placement = dict.fromkeys(("parameters", "master", "moments"), "nvme")
    placement |= dict.fromkeys(ON_HOST[_on_host[0]][0], "host")
    config: dict[str, Any] = {
        "tiers": {
            "host": {"capacity": "16MiB", "huge_pages": False},
            "nvme": [{"path": str(directory)}],
        },
        "placement": placement | {"gradients": changes.pop("gradients", "host")},
        "schedule": {"updates": "both_passes", "update_chunk": "64KiB"},
    }
    for section, keys in changes.items():
        config[section] = config.get(section, {}) | keys
    return config


@contextmanager
def idle_drives() -> Iterator[None]:
    """Every transfer is over when an early update looks at it. Early updates never wait, so on a
    busy machine none may come about."""
    real = EarlyUpdates.advance

    def now(early: EarlyUpdates) -> None:
        real(early)
        while early.wake_worker is not None:  # What the worker may not get to before the step.
            early.end_work()
            turn = early.turn()
            if isinstance(turn, LooseWork):
                turn.run()
                turn.end()
            elif turn != ():
                break

    def under_way(early: EarlyUpdates) -> list[Any]:
        ring = early._ring
        slots = [*ring._slots, *(each.slot for each in ring._started.values() if each.slot)]
        transfers = [transfer for slot in slots for transfer in slot.transfers]
        transfers += [each.writing for each in early._weight_cache.weights if each.writing]
        return [transfer for transfer in transfers if not transfer.done()]

    def advance(early: EarlyUpdates) -> None:
        waited = under_way(early)
        for _ in range(12):
            for transfer in waited:
                with contextlib.suppress(StorageError):
                    transfer.wait()
            now(early)
            waited = under_way(early)
            if not waited:
                break

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyUpdates, "advance", advance)
        yield


@pytest.fixture(autouse=True)
def drives() -> Iterator[None]:
    with idle_drives():
        yield


Body = Callable[[Run], list[torch.Tensor]]


def plain_run(body: Body, kind: type[Model] = Model, lr: float = 1e-2) -> list[torch.Tensor]:
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    run = Run(model, optimizer, is_plain=True)
    return [*body(run), *run.values().values()]


def check(
    body: Body,
    directory: Path,
    *,
    kept: bool | None,
    undone: bool | None = None,
    kind: type[Model] = Model,
    **changes: Any,
) -> None:
    """Runs `body` on both sides. `kept` and `undone`: whether there must have been such updates;
    None: there may."""
    expected = plain_run(body, kind)
    model = infinity.offload(make(kind), config_of(directory, **changes), **options_of())
    optimizer = infinity.AdamW(model, lr=1e-2)
    run = Run(model, optimizer, is_plain=False)
    actual = [*body(run), *run.values().values()]
    counters = infinity.engine_of(model).counters.snapshot()
    infinity.close(model)
    for plain, ours in zip(expected, actual, strict=True):
        assert torch.equal(plain, ours)
    for wanted, name in ((kept, "early_updates_kept"), (undone, "early_updates_undone")):
        assert wanted is None or bool(counters.get(name)) is wanted, counters


def steps(run: Run, count: int, clip: Clip = lambda _: None, start: int = 0) -> list[torch.Tensor]:
    losses = []
    for number in range(start, start + count):
        loss = loss_of(run.model, number)
        loss.backward()
        losses.append(loss.detach().clone())
        run.step(clip(number))
    return losses


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("kind", [Model, Tied])
def test_updates_in_the_backward_have_the_bits_of_plain_pytorch(
    swap_directory: Path, gradients: str, kind: type[Model]
) -> None:
    check(
        lambda run: steps(run, 6), swap_directory,
        kept=True, undone=False, kind=kind, gradients=gradients,
    )  # fmt: skip


def test_a_norm_that_is_never_reached_keeps_every_early_update(swap_directory: Path) -> None:
    check(lambda run: steps(run, 6, lambda _: 1e6), swap_directory, kept=True, undone=False)


def test_clipping_every_step_leaves_updates_to_the_forward(swap_directory: Path) -> None:
    check(lambda run: steps(run, 6, lambda _: 1e-3), swap_directory, kept=False, undone=False)


def test_a_step_that_is_clipped_undoes_early_updates(swap_directory: Path) -> None:
    check(
        lambda run: steps(run, 9, lambda n: 1e-3 if n == 4 else 1e6), swap_directory,
        kept=True, undone=True,
    )  # fmt: skip


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_weights_that_are_written_among_early_updates_are_those_that_come_back(
    swap_directory: Path, gradients: str
) -> None:
    """Those of a module around the blocks: no write of them delays their use in the backward."""
    check(
        lambda run: steps(run, 10, lambda number: 1e-3 if number in (5, 8) else 1e6),
        swap_directory, kept=True, undone=True, kind=Parent, gradients=gradients,
    )  # fmt: skip


def test_another_learning_rate_at_the_step_undoes_early_updates(swap_directory: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        losses = []
        for number in range(5):
            loss = loss_of(run.model, number)
            loss.backward()
            losses.append(loss.detach().clone())
            run.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
            run.step()
        return losses

    check(body, swap_directory, kept=None, undone=True)


def test_a_schedule_that_steps_after_the_optimizer_is_expected(swap_directory: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.8)
        losses = []
        for number in range(5):
            losses += steps(run, 1, start=number)
            schedule.step()
        return losses

    check(body, swap_directory, kept=True, undone=False)


def test_gradients_of_several_backwards_are_complete_after_the_last(swap_directory: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        for step in range(5):
            for number in range(3):
                (loss_of(run.model, 3 * step + number) / 3).backward()
            run.step()
        return []

    check(body, swap_directory, kept=True, undone=False)


def test_one_more_backward_than_expected_undoes_early_updates(swap_directory: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        losses = steps(run, 3)
        loss_of(run.model, 7).backward()
        loss_of(run.model, 8).backward()
        run.step()
        return [*losses, *steps(run, 3, start=20)]

    check(body, swap_directory, kept=True, undone=True)


def test_who_looks_before_the_step_sees_the_old_weights(swap_directory: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        losses = steps(run, 3)
        loss_of(run.model, 7).backward()
        seen = [run.weight("blocks.3.up.weight"), run.gradient("blocks.3.up.weight")]
        with torch.no_grad():
            seen.append(loss_of(run.model, 9))
        run.step()
        return [*losses, *seen, *steps(run, 3, start=20)]

    check(body, swap_directory, kept=True, undone=True)


def test_a_gradient_that_is_changed_before_the_step_counts(swap_directory: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        losses = steps(run, 3)
        loss_of(run.model, 7).backward()
        with torch.no_grad():
            for parameter in run.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        run.step()
        return [*losses, *steps(run, 3, start=20)]

    check(body, swap_directory, kept=True, undone=True)


def test_a_step_that_is_left_out_undoes_early_updates(swap_directory: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        losses = steps(run, 3)
        loss_of(run.model, 7).backward()
        run.optimizer.zero_grad()
        return [*losses, *steps(run, 3, start=20)]

    check(body, swap_directory, kept=True, undone=True)


def layer_major_steps(
    run: Run, after_backward: Callable[[Run], None] = lambda run: None
) -> list[torch.Tensor]:
    """Five steps of two micro-batches, layer by layer on the offloaded side."""
    for step in range(5):
        numbers = [2 * step, 2 * step + 1]
        if run.is_plain:
            for number in numbers:
                (loss_of(run.model, number) / 2).backward()
        else:
            infinity.forward_backward(
                run.model, lambda number: loss_of(run.model, number) / 2, numbers
            )
        after_backward(run)
        run.step()
    return []


def test_layer_major_updates_in_its_backward(swap_directory: Path) -> None:
    check(layer_major_steps, swap_directory, kept=True, undone=False)


def test_the_state_of_the_optimizer_is_that_of_the_last_step(swap_directory: Path) -> None:
    def body(run: Run) -> list[torch.Tensor]:
        losses = steps(run, 3)
        loss_of(run.model, 7).backward()
        state = run.optimizer.state[run.model.get_parameter("blocks.3.up.weight")]
        seen = [state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
        run.step()
        return [*losses, *seen, *steps(run, 3, start=20)]

    check(body, swap_directory, kept=True, undone=True)


@pytest.mark.parametrize("verify", [True, False])
def test_a_checkpoint_between_backward_and_step_has_the_old_state(
    swap_directory: Path, tmp_path: Path, verify: bool
) -> None:
    directory = tmp_path / "checkpoints"
    config = config_of(swap_directory, io={"verify": verify}, checkpoint={"keep": 2})
    model = infinity.offload(make(), config, **options_of())
    optimizer = infinity.AdamW(model, lr=1e-2)
    run = Run(model, optimizer, is_plain=False)
    steps(run, 3)
    before = run.values()
    loss_of(model, 7).backward()
    infinity.checkpoint.save(directory, model, optimizer, step=3)
    optimizer.step()
    optimizer.zero_grad()
    steps(run, 2, start=20)
    infinity.checkpoint.load(directory, model, optimizer)
    for name, value in run.values().items():
        assert torch.equal(value, before[name])
    infinity.close(model)


def test_smallest_share_and_largest_share_have_the_same_bits(swap_directory: Path) -> None:
    def at(share: float) -> list[torch.Tensor]:
        model = infinity.offload(make(), config_of(swap_directory), **options_of())
        optimizer = infinity.AdamW(model, lr=1e-2)
        policy = infinity.engine_of(model).updater._early.policy
        run = Run(model, optimizer, is_plain=False)
        losses = []
        for number in range(5):
            policy.share = share
            losses += steps(run, 1, start=number)
        values = [*losses, *run.values().values()]
        infinity.close(model)
        return values

    expected = plain_run(lambda run: steps(run, 5))
    for share in (0.0, 0.3, 1.0):
        for plain, ours in zip(expected, at(share), strict=True):
            assert torch.equal(plain, ours)


@pytest.mark.parametrize("on_host", ["nothing"], indirect=True)
def test_state_of_units_that_the_backward_updates_is_read_in_the_forward(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drives have their part of the traffic in both passes, also of a unit's own update."""
    reads: list[str] = []
    read = StagingRing._start

    def note_read(ring: StagingRing, chunk: Chunk) -> Any:
        reads.append(chunk.unit.name)
        return read(ring, chunk)

    monkeypatch.setattr(StagingRing, "_start", note_read)

    def body(run: Run) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        seen: list[tuple[list[str], list[str]]] = []
        for number in range(6):
            if not run.is_plain:
                updater = infinity.engine_of(run.model).updater
                assert isinstance(updater, Updater) and updater._early is not None
                updater._early.policy.share = 1.0
            loss = loss_of(run.model, number)
            before = reads.copy()
            reads.clear()
            loss.backward()
            seen.append((before, reads.copy()))
            reads.clear()
            losses.append(loss.detach())
            run.step()
        if not run.is_plain:
            for before, during in seen[3:]:
                # No backward gets to the embedding: a forward updates it, and it is read later.
                assert len(set(before)) == BLOCKS + 1 and set(during) <= {"embedding"}
        return losses

    check(body, swap_directory, kept=True, undone=False)
