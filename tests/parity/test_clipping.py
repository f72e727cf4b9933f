"""Clipping is an operation on gradients: they read clipped, are changed afterwards, are clipped in
parts, and only where the program says so. Bits are those of `torch.nn.utils` and `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import CapacityError, NonFiniteError
from infinity.optimizers.clipping import clip_grad_norm_
from infinity.streaming.updates.updater import Updater
from infinity.testing.simulated_device import SimulatedDevice
from tests.support import two_sides
from tests.support.exhaustive import sampled
from tests.support.two_sides import Model, Side, idle_drives, loss_of, make, plain_run

SMALL, LARGE = 1e-3, 1e6
CLIPPED = (SMALL, 0.5, LARGE)

Clip = Callable[..., torch.Tensor]
Program = Callable[[Side, Clip], list[torch.Tensor]]


def parameters(run: Side, *names: str) -> list[Any]:
    modules = [run.model.get_submodule(name) for name in names] or [run.model]
    return [parameter for module in modules for parameter in module.parameters()]


def backward(run: Side, number: int) -> torch.Tensor:
    loss = loss_of(run.model, number)
    loss.backward()
    return loss.detach().clone()


def end(run: Side) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()


def read(run: Side) -> list[torch.Tensor]:
    return [p.grad.clone() for p in parameters(run) if p.grad is not None]


def noise(p: Any) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 1e-3


# -- What happens between the backward and the step ------------------------------------------------


def all_of_it(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip(parameters(run), SMALL)]


def in_another_order(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip(reversed(parameters(run)), SMALL)]


def a_generator(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip((p for p in parameters(run)), SMALL)]


def one_parameter(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip(parameters(run)[3], SMALL)]


def a_part(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip(parameters(run, "blocks.1", "head"), SMALL), *read(run)]


def parts_by_their_own_norms(run: Side, clip: Clip) -> list[torch.Tensor]:
    parts = ("blocks.0", SMALL), ("blocks.1.up", 0.01), ("blocks.2", LARGE), ("head", 0.1)
    return [clip(parameters(run, name), max_norm) for name, max_norm in parts]


def parts_of_one_unit(run: Side, clip: Clip) -> list[torch.Tensor]:
    weight, *others = parameters(run, "blocks.2")
    return [clip([weight], SMALL), clip(others, 0.01)]


def one_part_twice(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip(parameters(run, "blocks.1"), m) for m in (0.05, SMALL)] + [
        clip(parameters(run), 0.01)
    ]


def a_parameter_named_twice(run: Side, clip: Clip) -> list[torch.Tensor]:
    first, second, *_ = parameters(run)
    return [clip([first, second, first], SMALL), *read(run)]


def nothing_that_has_a_gradient(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip([], SMALL)]


def other_norms(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [
        clip(parameters(run), 0.1, norm_type=float("inf")),
        clip(parameters(run, "blocks.0"), SMALL, norm_type=1),
    ]


def to_zero(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip(parameters(run, "head"), 0.0), *read(run)]


def to_infinity(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip(parameters(run), float("inf")), *read(run)]


def then_read(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [clip(parameters(run), SMALL), *read(run), *read(run)]


def then_noise(run: Side, clip: Clip) -> list[torch.Tensor]:
    norm = clip(parameters(run), SMALL)
    with torch.no_grad():
        for p in parameters(run):
            p.grad.add_(noise(p))
    return [norm]


def then_other_gradients(run: Side, clip: Clip) -> list[torch.Tensor]:
    norm = clip(parameters(run), SMALL)
    for p in parameters(run, "blocks.0", "blocks.3.down"):
        p.grad = p.grad + noise(p)
    return [norm, *read(run)]


def then_a_mask(run: Side, clip: Clip) -> list[torch.Tensor]:
    norm = clip(parameters(run), SMALL)
    with torch.no_grad():
        for p in parameters(run):
            if p.dim() == 2:
                p.grad[:2] = 0
    return [norm]


def then_some_dropped(run: Side, clip: Clip) -> list[torch.Tensor]:
    norm = clip(parameters(run), SMALL)
    parameters(run, "blocks.4")[0].grad = None
    parameters(run, "blocks.4")[1].grad.zero_()
    return [norm]


def then_another_backward(run: Side, clip: Clip) -> list[torch.Tensor]:
    norm = clip(parameters(run), SMALL)
    return [norm, backward(run, 77)]


def between_backwards_and_again(run: Side, clip: Clip) -> list[torch.Tensor]:
    norm = clip(parameters(run, "blocks.0", "head"), SMALL)
    return [norm, backward(run, 78), clip(parameters(run), 0.01)]


def by_value(run: Side, clip: Clip) -> list[torch.Tensor]:
    nn.utils.clip_grad_value_(parameters(run), 1e-4)
    return read(run)


def by_value_after_the_norm(run: Side, clip: Clip) -> list[torch.Tensor]:
    norm = clip(parameters(run), 0.1)
    nn.utils.clip_grad_value_(parameters(run, "blocks.1"), 1e-4)
    return [norm]


def with_torchs_function(run: Side, clip: Clip) -> list[torch.Tensor]:
    return [nn.utils.clip_grad_norm_(parameters(run), SMALL), *read(run)]


def with_both_functions(run: Side, clip: Clip) -> list[torch.Tensor]:
    norm = clip(parameters(run), 0.01)
    return [norm, nn.utils.clip_grad_norm_(parameters(run, "blocks.2"), SMALL)]


def nothing(run: Side, clip: Clip) -> list[torch.Tensor]:
    return []


OPERATIONS: list[Program] = [
    all_of_it, in_another_order, a_generator, one_parameter, a_part, parts_by_their_own_norms,
    parts_of_one_unit, one_part_twice, a_parameter_named_twice, nothing_that_has_a_gradient,
    other_norms, to_zero, to_infinity, then_read, then_noise, then_other_gradients, then_a_mask,
    then_some_dropped, then_another_backward, between_backwards_and_again, by_value,
    by_value_after_the_norm, with_torchs_function, with_both_functions, nothing,
]  # fmt: skip


def steps_with(run: Side, clip: Clip, operations: Iterable[Program]) -> list[torch.Tensor]:
    """Two steps as they come, one with each operation, and the same gradients once more after some."""
    found = [backward(run, 0)]
    end(run)
    found.append(backward(run, 1))
    end(run)
    for number, operation in enumerate(operations, start=2):
        found += [backward(run, number), *operation(run, clip)]
        run.optimizer.step()
        if number % 3 == 0:
            run.optimizer.step()  # Of the same gradients, which are clipped already.
        if number % 4 == 0:
            found += read(run)
        if number % 5:
            run.optimizer.zero_grad()
    return found


def plain(program: Program) -> list[torch.Tensor]:
    return plain_run(lambda run: program(run, nn.utils.clip_grad_norm_))


# By the name of a placement: (tier of state, tier of gradients, whether a device computes).
PLACES = {
    "on drives": ("nvme", "nvme", False),
    "gradients on the host": ("nvme", "host", False),
    "on the host beside a device": ("host", "host", True),
    "gradients on a device": ("host", "device", True),
    "on drives beside a device": ("nvme", "nvme", True),
}


def offloaded(
    directory: Path, place: str = "on drives", updates: str = "both_passes", **options: Any
) -> Side:
    state, gradients, is_beside = PLACES[place]
    run = two_sides.offloaded(
        directory, device=SimulatedDevice() if is_beside else None, gradients=gradients,
        placement=dict.fromkeys(("parameters", "master", "moments"), state),
        schedule={"updates": updates},
    )  # fmt: skip
    run.optimizer = infinity.AdamW(run.model, lr=1e-2, **options)
    return run


def ours(program: Program, run: Side, clip: Clip = clip_grad_norm_) -> list[torch.Tensor]:
    found = [*program(run, clip), *run.values().values()]
    infinity.close(run.model)
    return found


def assert_same(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    assert len(expected) == len(actual)
    differing = [i for i, pair in enumerate(zip(expected, actual, strict=True)) if not same(*pair)]
    assert not differing, differing


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


KEPT = ("on drives", "on the host beside a device")  # In turn.


@pytest.mark.parametrize(
    ("place", "operation"),
    sampled(
        product(PLACES, OPERATIONS),
        lambda case: case[0] == KEPT[OPERATIONS.index(case[1]) % len(KEPT)],
    ),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_whatever_is_clipped_and_done_afterwards_has_the_bits_of_torch(
    swap_directory: Path, place: str, operation: Program
) -> None:
    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        return steps_with(run, clip, [operation, nothing, operation, nothing])

    with idle_drives():
        assert_same(plain(program), ours(program, offloaded(swap_directory, place)))


UPDATES = ["both_passes", "deferred", "at_step"]
# Updates in both passes in each place; the others in one.
SEEDS = {(place, "both_passes"): seed for seed, place in enumerate(PLACES)} | {
    (place, updates): seed
    for seed, (place, updates) in enumerate(zip(KEPT, UPDATES[1:], strict=True))
}


@pytest.mark.parametrize(
    ("place", "updates", "seed"),
    sampled(
        product(PLACES, UPDATES, range(6)), lambda case: SEEDS.get((case[0], case[1])) == case[2]
    ),
)
def test_any_order_of_operations_has_the_bits_of_torch(
    swap_directory: Path, place: str, updates: str, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    chosen = [OPERATIONS[i] for i in torch.randperm(len(OPERATIONS), generator=draw)[:9].tolist()]

    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        return steps_with(run, clip, chosen)

    assert_same(plain(program), ours(program, offloaded(swap_directory, place, updates)))


# -- Early updates -----------------------------------------------------------------------------------


def test_a_part_that_is_clipped_leaves_the_early_updates_of_the_others(
    swap_directory: Path,
) -> None:
    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        found = []
        for number in range(6):
            found.append(backward(run, number))
            if number == 5:
                found.append(clip(parameters(run, "blocks.4"), SMALL))
            end(run)
        return found

    run = offloaded(swap_directory, "on the host beside a device")
    before: dict[str, float] = {}

    def watched(run: Side, clip: Clip) -> list[torch.Tensor]:
        def clip_and_note(given: Any, max_norm: float) -> torch.Tensor:
            before.update(infinity.engine_of(run.model).counters.snapshot())
            return clip(given, max_norm)

        found = program(run, clip_and_note)
        after = infinity.engine_of(run.model).counters.snapshot()
        for name in ("early_updates_kept", "early_updates_undone"):
            before[name] = after.get(name, 0) - before.get(name, 0)
        return found

    with idle_drives():
        assert_same(plain(program), ours(watched, run))
    assert before["early_updates_undone"] == 1 and before["early_updates_kept"] > 1, before


def test_a_norm_that_clips_nothing_keeps_all_early_updates(swap_directory: Path) -> None:
    run = offloaded(swap_directory)
    with idle_drives():
        for number in range(6):
            backward(run, number)
            run.optimizer.clip_grad_norm_(LARGE)
            end(run)
    counters = infinity.engine_of(run.model).counters.snapshot()
    infinity.close(run.model)
    assert counters["early_updates_kept"] and not counters.get("early_updates_undone"), counters


def test_clipping_reads_and_writes_no_gradient(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factor waits for the update, which multiplies as it reads."""
    from infinity.streaming.gradients.tensors import TensorGradient

    run = offloaded(swap_directory)
    monkeypatch.setattr(TensorGradient, "apply_scale", lambda *_: pytest.fail("is written"))
    for number in range(4):
        backward(run, number)
        run.optimizer.clip_grad_norm_(SMALL)
        end(run)
    infinity.close(run.model)


# -- The optimizer's own setting ---------------------------------------------------------------------


def test_a_step_without_a_call_does_not_clip(swap_directory: Path) -> None:
    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        found = []
        for number in range(5):
            found.append(backward(run, number))
            if number in (0, 3):
                found.append(
                    clip(parameters(run), SMALL)
                    if run.is_plain
                    else run.optimizer.clip_grad_norm_(SMALL)
                )
            end(run)
        return found

    assert_same(plain(program), ours(program, offloaded(swap_directory)))


def with_setting(run: Side, clip: Clip) -> list[torch.Tensor]:
    """Steps of an optimizer with max_grad_norm=0.01, some of which a call clips instead."""
    found = []
    for number in range(6):
        found.append(backward(run, number))
        if number == 1:
            found.append(clip(parameters(run), SMALL))
        elif number == 3:
            found.append(clip(parameters(run, "head"), SMALL))
        elif run.is_plain:
            clip(parameters(run), 0.01)
        run.optimizer.step()
        if number != 1:
            # Each of several ways to drop gradients.
            [run.optimizer, run.model][number % 2].zero_grad()
        else:
            for p in parameters(run):
                p.grad = None
    return found


@pytest.mark.parametrize("place", sampled(PLACES, KEPT.__contains__))
def test_a_call_clips_in_the_place_of_the_setting_for_one_step(
    swap_directory: Path, place: str
) -> None:
    run = offloaded(swap_directory, place, max_grad_norm=0.01)
    assert_same(plain(with_setting), ours(with_setting, run))


@pytest.mark.parametrize("is_dropped", [True, False], ids=["dropped", "zeros"])
def test_the_setting_clips_a_step_whose_clipped_gradients_are_gone(
    is_dropped: bool, swap_directory: Path
) -> None:
    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        backward(run, 0)
        clip(parameters(run), SMALL)
        run.model.zero_grad(set_to_none=is_dropped)
        loss = backward(run, 1)
        if run.is_plain:
            clip(parameters(run), 0.01)
        run.optimizer.step()
        return [loss, *read(run)]

    run = offloaded(swap_directory, max_grad_norm=0.01)
    assert_same(plain(program), ours(program, run))


@pytest.mark.parametrize("updates", ["at_step", "both_passes"])
def test_a_step_that_was_refused_and_is_made_again_clips_once(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, updates: str
) -> None:
    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        losses = []
        for number in range(3):
            losses.append(backward(run, number))
            if run.is_plain:
                clip(parameters(run), 0.01)
            elif number == 1:
                with monkeypatch.context() as patch:
                    error = CapacityError(
                        "host", needed_nbytes=1, available_nbytes=0, key="tiers.host.capacity",
                        detail="none",
                    )  # fmt: skip
                    for name in ("apply", "defer"):
                        patch.setattr(Updater, name, lambda *_, error=error: _raise(error))
                    with pytest.raises(CapacityError):
                        run.optimizer.step()
            end(run)
        return losses

    run = offloaded(swap_directory, updates=updates, max_grad_norm=0.01)
    assert_same(plain(program), ours(program, run))


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("in_call", [True, False])
def test_a_norm_that_is_not_finite_raises_before_a_gradient_is_clipped(
    swap_directory: Path, in_call: bool
) -> None:
    run = offloaded(swap_directory, max_grad_norm=0.01, error_if_nonfinite=not in_call)
    backward(run, 0)
    p = parameters(run, "blocks.1")[0]
    p.grad = torch.full_like(p.grad, float("inf"))
    before = read(run)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"blocks\.1"):
            if in_call:
                run.optimizer.clip_grad_norm_(SMALL, error_if_nonfinite=True)
            else:
                run.optimizer.step()
    assert_same(before, read(run))
    p.grad = torch.ones(p.shape)
    end(run)
    assert run.optimizer.grad_norm.isfinite()
    infinity.close(run.model)


def test_a_norm_that_is_not_finite_makes_gradients_what_torch_makes_them(
    swap_directory: Path,
) -> None:
    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        backward(run, 0)
        p = parameters(run, "blocks.1")[0]
        p.grad = torch.full_like(p.grad, float("inf"))
        q = parameters(run, "blocks.2")[0]
        q.grad = torch.full_like(q.grad, float("nan"))
        found = [clip(parameters(run, "blocks.1"), 1.0), clip(parameters(run), 1.0), *read(run)]
        end(run)
        return found

    assert_same(plain(program), ours(program, offloaded(swap_directory)))


def test_a_step_is_skipped_for_the_norm_that_a_call_has_measured(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = offloaded(swap_directory, skip_if_nonfinite=True)
    before = list(run.values().values())
    backward(run, 0)
    p = parameters(run, "blocks.1")[0]
    p.grad = torch.full_like(p.grad, float("inf"))
    assert run.optimizer.clip_grad_norm_(1.0).isinf()
    end(run)
    assert run.optimizer.step_was_skipped and run.optimizer.grad_norm.isinf()
    assert_same(before, list(run.values().values()))
    backward(run, 1)
    norm = run.optimizer.clip_grad_norm_(SMALL)
    engine = type(infinity.engine_of(run.model))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "gradient_norms", lambda *_: pytest.fail("are measured again"))
        end(run)
    assert not run.optimizer.step_was_skipped and torch.equal(run.optimizer.grad_norm, norm)
    infinity.close(run.model)


def test_a_measured_norm_clips_nothing_and_leaves_the_setting(swap_directory: Path) -> None:
    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        loss = backward(run, 0)
        if run.is_plain:
            norm = nn.utils.get_total_norm([p.grad for p in parameters(run)], 1)
            clip(parameters(run), 0.01)
        else:
            norm = run.optimizer.clip_grad_norm_(None, norm_type=1)
        end(run)
        return [loss, norm]

    run = offloaded(swap_directory, max_grad_norm=0.01)
    assert_same(plain(program), ours(program, run))


def test_a_checkpoint_between_clipping_and_the_step_has_the_clipped_gradients(
    tmp_path: Path,
) -> None:
    def program(run: Side, clip: Clip) -> list[torch.Tensor]:
        losses = [backward(run, 0)]
        end(run)
        losses += [backward(run, 1), clip(parameters(run, "blocks.1"), SMALL)]
        if not run.is_plain:
            infinity.checkpoint.save(tmp_path / "saved", run.model, run.optimizer, step=1)
        end(run)
        return losses

    (tmp_path / "one").mkdir()
    expected = plain(program)
    assert_same(expected, ours(program, offloaded(tmp_path / "one")))
    (tmp_path / "two").mkdir()
    resumed = offloaded(tmp_path / "two")
    infinity.checkpoint.load(tmp_path / "saved", resumed.model, resumed.optimizer)
    end(resumed)
    assert_same(expected[3:], list(resumed.values().values()))
    infinity.close(resumed.model)


# -- Several models ----------------------------------------------------------------------------------


def test_parameters_of_two_offloaded_models_and_a_plain_one_are_clipped_together(
    tmp_path: Path,
) -> None:
    found = []
    for is_plain in (True, False):
        models: list[nn.Module] = [make(), make(), make(Model)]
        optimizers: list[Any] = []
        for index, model in enumerate(models):
            if is_plain or index == 1:
                made = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            else:
                directory = tmp_path / str(index)
                config = {
                    "tiers": {
                        "host": {"capacity": "16MiB", "huge_pages": False},
                        "nvme": [{"path": str(directory)}],
                    }
                }
                infinity.offload(model, config)
                made = infinity.AdamW(model, lr=1e-2)
            optimizers.append(made)
        clip: Clip = nn.utils.clip_grad_norm_ if is_plain else clip_grad_norm_
        values = []
        for number in range(3):
            for index, model in enumerate(models):
                loss_of(model, 10 * number + index).backward()
            every = [p for model in models for p in model.parameters()]
            values.append(clip(every, 0.1))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        values += [loss_of(model, 99).detach() for model in models]
        for index in (0, 2) if not is_plain else ():
            infinity.close(models[index])
        found.append(values)
    assert_same(*found)
