"""Of an embedding's gradient that rests on a device, the rows that a batch has looked up leave it
to be measured, and the norm has the bits of all rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.state.units import TensorFacts, TensorSpec, Unit, layout_unit
from infinity.streaming.gradients import resting_norms
from infinity.streaming.gradients.resting_norms import (
    COUNT_NBYTES,
    RowSearch,
    may_have_rows_of_zeros,
)
from infinity.streaming.gradients.store import GradientStore
from infinity.streaming.gradients.tensors import norm_of
from infinity.tiers.device import FINISHED, Copy
from tests.support.two_sides import VOCABULARY, WIDTH, Side, compare, ids_of, plain_run, same_bits

from .test_norm_tasks import steps
from .test_resting_norms import (
    CHANGES,
    STATE,
    check_norm,
    lent_to_norms,
    resting,
    resting_of,
    store_of,
)

ROW_NBYTES = 4 * WIDTH


@pytest.fixture
def is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix of the model is searched, which has few rows."""
    monkeypatch.setattr(resting_norms, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(resting_norms, "_LEAST_RATIO", 2)


def spec_of(*shape: int, stride: tuple[int, ...] | None = None) -> TensorSpec:
    stride = stride or ((shape[1], 1) if len(shape) == 2 else (1,))
    facts = TensorFacts("table", shape, stride, torch.float32, True)
    [spec] = layout_unit(0, "unit", [facts]).tensors
    return spec


class CopiesAtOnce:
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        target.copy_(source)
        return FINISHED


class LateCopy(Copy):
    """Over when it is waited for."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._copy.wait()


@given(
    st.integers(1, 300),
    st.integers(1, 5),
    st.floats(0, 1),
    st.integers(-45, 38),
    st.sampled_from([None, float("inf"), float("nan"), -0.0]),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=200)
def test_the_norm_of_the_rows_is_that_of_all(
    num_rows: int, width: int, share: float, exponent: int, special: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spec = spec_of(num_rows, 64 * width)
    table = torch.randn(spec.facts.shape, generator=generator) * 10.0**exponent
    table[torch.rand(num_rows, generator=generator) >= share] = 0
    if special is not None:
        table[seed % num_rows, seed % (64 * width)] = special
    on_host = torch.empty(COUNT_NBYTES, dtype=torch.uint8)
    search = RowSearch(CopiesAtOnce(), table.flatten(), spec, on_host)  # type: ignore[arg-type]
    rows = search.pick()
    is_other = (table != 0).any(dim=1)
    if rows is None:
        assert resting_norms._LEAST_RATIO * max(int(is_other.sum()), 1) > num_rows
    else:
        assert torch.equal(rows[: is_other.sum()].isnan(), table[is_other].isnan())
        picked, expected = norm_of(rows.flatten(), spec), norm_of(table.flatten(), spec)
        assert torch.equal(picked.view(torch.int32), expected.view(torch.int32))


def test_what_is_searched() -> None:
    assert may_have_rows_of_zeros(spec_of(1 << 18, 64))
    assert not may_have_rows_of_zeros(spec_of((1 << 18) - 1, 64))  # Too small.
    assert not may_have_rows_of_zeros(spec_of(1 << 20, 96))  # Rows change the lanes of others.
    assert not may_have_rows_of_zeros(spec_of(1 << 24))
    assert not may_have_rows_of_zeros(spec_of(1 << 12, 1 << 12, stride=(1, 1 << 12)))


@pytest.mark.parametrize("others", [{}, STATE], ids=["gradients-alone", "all-state"])
def test_only_the_rows_that_were_looked_up_leave_the_device(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, str]
) -> None:
    def nbytes_out(searched: str) -> list[int]:
        monkeypatch.setattr(resting_norms, "_LEAST_RATIO", 2)
        monkeypatch.setattr(resting_norms, "may_have_rows_of_zeros", lambda s: s.name == searched)
        run = resting(swap_directory, placement=others)
        counters, totals, seen = infinity.engine_of(run.model).counters, [0], []
        for number in range(4):
            seen += steps(run, 1, start=number)
            totals.append(int(counters.snapshot()["device_out_nbytes"]))
        seen += run.values().values()
        assert same_bits(plain_run(lambda run: steps(run, 4)), seen)
        infinity.close(run.model)
        return [after - before for before, after in pairwise(totals)]

    whole, searched = nbytes_out("none"), nbytes_out("embedding.weight")
    for number in range(4):
        num_rows = len(ids_of(number).unique())
        assert 0 < num_rows < VOCABULARY // 2
        left_nbytes = (VOCABULARY - num_rows) * ROW_NBYTES
        assert whole[number] - searched[number] == left_nbytes - COUNT_NBYTES


def test_a_gradient_without_rows_of_zeros_is_copied_whole(
    swap_directory: Path, is_searched: None
) -> None:
    def body(run: Side) -> list[torch.Tensor]:
        for number in range(3):
            every = torch.arange(VOCABULARY).view(2, -1)
            out = run.model(every).flatten(0, 1)
            nn.functional.cross_entropy(out, (every.flatten() + number) % VOCABULARY).backward()
            run.step(1e-3)
        return []

    compare(body, resting(swap_directory))


def behind_a_backward(directory: Path, *, delay_s: float) -> Side:
    """A run whose third step has yet to be made, with memory to measure all sums at once."""
    run = resting(directory, delay_s=delay_s)
    steps(run, 2)
    resting_of(run)._most_nbytes = 1 << 30
    run.backward(2)
    return run


def end_step(run: Side) -> None:
    """Makes the step, which leaves no memory to the norms."""
    run.step(1e-3)
    assert not lent_to_norms(run) and not resting_of(run)._nbytes
    infinity.close(run.model)


@pytest.mark.parametrize("delay_s", [0.0, 0.01], ids=["searched", "on-the-way"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_norm_is_that_of_the_content_when_the_step_asks(
    swap_directory: Path, is_searched: None, name: str, delay_s: float
) -> None:
    run = behind_a_backward(swap_directory, delay_s=delay_s)
    engine, store = infinity.engine_of(run.model), store_of(run)
    [(unit, spec)] = table_of(store)
    with engine._lock:
        if delay_s:
            assert spec in resting_of(run)._searched
        CHANGES[name](store, unit, spec)
        resting_of(run).advance()
        check_norm(store, unit, spec, name)
    infinity.close(run.model)


def test_a_sum_that_is_searched_is_not_searched_again(
    swap_directory: Path, is_searched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Search(RowSearch):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.count = LateCopy(self.count)

    monkeypatch.setattr(resting_norms, "RowSearch", Search)
    run = behind_a_backward(swap_directory, delay_s=0)
    engine, store, norms = infinity.engine_of(run.model), store_of(run), resting_of(run)
    [(unit, spec)] = table_of(store)
    with engine._lock:
        searched = norms._searched[spec]
        store.expect_norms([(unit, spec)])  # As the step does.
        assert norms._searched[spec] is searched
        CHANGES["put"](store, unit, spec)
        store.expect_norms([(unit, spec)])  # Another content waits for the end of the search.
        assert norms._searched[spec] is searched
        check_norm(store, unit, spec, "put")
    end_step(run)


@pytest.mark.parametrize("name", ["__init__", "pick"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_search_that_fails_keeps_no_memory_and_one_without_memory_is_left_out(
    swap_directory: Path,
    is_searched: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: type[Exception],
) -> None:
    real, failures = getattr(RowSearch, name), [error("simulated")]

    def fail_once(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments)

    run = resting(swap_directory)
    monkeypatch.setattr(RowSearch, name, fail_once)
    if error is RuntimeError:
        with pytest.raises(RuntimeError, match="simulated"):
            steps(run, 3)
        while resting_of(run).reclaim():
            pass
    else:
        seen = [*steps(run, 3), *run.values().values()]
        assert same_bits(plain_run(lambda run: steps(run, 3)), seen)
    assert not failures and not lent_to_norms(run) and not resting_of(run)._nbytes
    infinity.close(run.model)


def test_a_search_of_another_content_picks_no_rows(
    swap_directory: Path, is_searched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = behind_a_backward(swap_directory, delay_s=0.01)
    engine, store, norms = infinity.engine_of(run.model), store_of(run), resting_of(run)
    [(unit, spec)] = table_of(store)
    with engine._lock:
        searched = norms._searched[spec].search
        monkeypatch.setattr(searched, "pick", lambda: pytest.fail("rows were picked"))
        CHANGES["put"](store, unit, spec)
        check_norm(store, unit, spec, "put")
    end_step(run)


def test_memory_of_a_search_is_given_to_who_needs_it(
    swap_directory: Path, is_searched: None
) -> None:
    run = resting(swap_directory, delay_s=0.01)
    steps(run, 2)
    run.backward(2)
    engine, store, norms = infinity.engine_of(run.model), store_of(run), resting_of(run)
    with engine._lock:
        assert norms._searched and lent_to_norms(run)
        while store.reclaim():
            pass
        assert not norms._searched and not lent_to_norms(run) and not norms._nbytes
        for unit, spec in table_of(store):
            expected = torch.linalg.vector_norm(store.read(unit, spec))
            assert torch.equal(store.norm(unit, spec), expected)
    end_step(run)


def test_closing_within_a_search_leaves_nothing(swap_directory: Path, is_searched: None) -> None:
    run = resting(swap_directory, delay_s=0.01)
    steps(run, 2)
    run.backward(2)
    assert resting_of(run)._searched
    infinity.close(run.model)


def table_of(store: GradientStore) -> list[tuple[Unit, TensorSpec]]:
    return [
        (unit, spec)
        for unit in store._store.units
        for spec in unit.trainable()
        if spec.name == "embedding.weight"
    ]
