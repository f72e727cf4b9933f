"""One loop, run by a plain model and by an offloaded one: all that the loop sees has the same bits.

A *body* trains through a `Side` and returns what it saw. `compare` runs it on both sides, and compares
the weights after it, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StorageError
from infinity.streaming.updates.turns import UpdateTurns
from infinity.streaming.updates.worker import LooseWork
from tests.support.offloading import small_tiers, units_in_use

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
Named = dict[str, torch.Tensor | None]


class Side:
    """One side of a comparison: a plain model, or an offloaded one that is used as its users do."""

    def __init__(self, model: nn.Module, optimizer: Any = None, *, is_plain: bool = False) -> None:
        self.model, self.optimizer, self.is_plain = model, optimizer, is_plain

    def adamw(self, groups: Any = None, *, lr: float = 1e-2, weight_decay: float = 0.1) -> Any:
        """Makes the side's optimizer: infinity's AdamW, or torch's fused one."""
        groups = self.model.parameters() if groups is None else groups
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        if self.is_plain:
            self.optimizer = torch.optim.AdamW(groups, fused=True, **options)
        else:
            self.optimizer = infinity.AdamW(groups, **options)
        return self.optimizer

    def backward(self, *numbers: int) -> None:
        """The backwards of these batches, one after the other."""
        for number in numbers:
            loss_of(self.model, number).backward()

    def update(self, max_norm: float | None = None) -> torch.Tensor | None:
        """A clipped step that forgets no gradient. Returns the norm, None without clipping."""
        norm = None
        if not self.is_plain:
            self.optimizer.max_grad_norm = max_norm
        elif max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return norm if self.is_plain or max_norm is None else self.optimizer.grad_norm

    def step(self, max_norm: float | None = None) -> None:
        self.update(max_norm)
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
        """The weights, each read by itself."""
        return {name: self.weight(name) for name, _ in self.model.named_parameters()}

    def gradients(self) -> Named:
        return self._shown(lambda parameter: parameter.grad)

    def weights(self) -> dict[str, torch.Tensor]:
        found = self._shown(lambda parameter: parameter)
        return {name: value for name, value in found.items() if value is not None}

    def _shown(self, shown: Callable[[torch.Tensor], torch.Tensor | None]) -> Named:
        """Copies on the host of what is shown of every parameter, in the model's order; of one unit
        at a time, since the budgets of tests do not hold the whole model."""
        parts = dict(self.model.named_parameters())
        together: dict[Any, list[str]] = {(): list(parts)}
        if not self.is_plain:
            together.clear()
            engine = infinity.engine_of(self.model)
            for name, handle in parts.items():
                units = tuple(param.unit.index for param in engine.params_of([handle]))
                together.setdefault(units, []).append(name)
        found: Named = dict.fromkeys(parts)
        for names in together.values():
            unit = [parts[name] for name in names]
            with contextlib.nullcontext() if self.is_plain else infinity.gather(unit):
                for name in names:
                    value = shown(self.model.get_parameter(name))
                    found[name] = None if value is None else value.detach().clone().cpu()
        return found

    def settled(self) -> None:
        """Fails if some forward or backward has not given a unit back."""
        assert self.is_plain or not held_units(self.model), f"held: {held_units(self.model)}"


def held_units(model: nn.Module) -> list[str]:
    """Units that some forward or backward has not given back."""
    return units_in_use(infinity.engine_of(model))


@contextmanager
def idle_drives() -> Iterator[None]:
    """Every transfer is over when an early update looks at it. Early updates never wait, so on a
    busy machine none may come about."""
    real = UpdateTurns.advance

    def now(early: UpdateTurns) -> None:
        real(early)
        while early.has_worker:  # What the worker may not get to before the step.
            early._gradients.end_readers()
            turn = early.turn()
            if isinstance(turn, LooseWork):
                turn.run()
                turn.end()
            elif turn != ():
                break

    def under_way(early: UpdateTurns) -> list[Any]:
        ring = early._ring
        slots = [*ring._slots, *(each.slot for each in ring._started.values() if each.slot)]
        transfers = [transfer for slot in slots for transfer in slot.transfers]
        transfers += [each.writing for each in early._weight_cache.weights if each.writing]
        return [transfer for transfer in transfers if not transfer.done()]

    def advance(early: UpdateTurns) -> None:
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
        patch.setattr(UpdateTurns, "advance", advance)
        yield


Body = Callable[[Side], list[torch.Tensor]]


def config_of(directory: Path, **changes: Any) -> dict[str, Any]:
    """All state on NVMe but gradients, unless `gradients` says so; updates in both passes."""
    placement = dict.fromkeys(("parameters", "master", "moments"), "nvme")
    config: dict[str, Any] = {
        "tiers": small_tiers(directory),
        "placement": placement | {"gradients": changes.pop("gradients", "host")},
        "schedule": {"updates": "both_passes", "update_chunk": "64KiB"},
    }
    for section, keys in changes.items():
        config[section] = config.get(section, {}) | keys
    return config


def offloaded(
    directory: Path, *, device: Any = None, model: nn.Module | None = None, **changes: Any
) -> Side:
    model = infinity.offload(model or make(), config_of(directory, **changes), device=device)
    return Side(model, infinity.AdamW(model, lr=1e-2))


def plain_run(body: Body, kind: type[Model] = Model, lr: float = 1e-2) -> list[torch.Tensor]:
    run = Side(make(kind), is_plain=True)
    run.adamw(lr=lr, weight_decay=1e-2)
    return [*body(run), *run.values().values()]


def same_bits(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> bool:
    return len(expected) == len(actual) and all(map(torch.equal, expected, actual))


def compare(body: Body, run: Side, kind: type[Model] = Model) -> dict[str, float]:
    """Runs `body` with plain PyTorch and with `run`, which ends. Returns its counters."""
    expected = plain_run(body, kind)
    actual = [*body(run), *run.values().values()]
    counters = infinity.engine_of(run.model).counters.snapshot()
    infinity.close(run.model)
    assert same_bits(expected, actual)
    return counters


def steps(run: Side, count: int, clip: Clip = lambda _: None, start: int = 0) -> list[torch.Tensor]:
    """So many steps of a batch each. Returns their losses."""
    losses = []
    for number in range(start, start + count):
        loss = loss_of(run.model, number)
        loss.backward()
        losses.append(loss.detach().clone())
        run.step(clip(number))
    return losses


def layer_major_steps(run: Side) -> list[torch.Tensor]:
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
        run.step()
    return []
