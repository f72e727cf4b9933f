"""Sums, products and copies in host memory: the bits of torch's operations on any number of threads,
and the threads that updates have."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import _core  # noqa: TID251 (its own checks are what is tested)
from infinity.ops import host_sums

ITEM_NUMEL = 1 << 18  # What a thread takes at a time.
NUMEL = host_sums.LEAST_NBYTES // 4  # The least that native kernels get.
SPECIAL = [0.0, -0.0, float("inf"), 1e-45, -1e-40, 3.4e38]


def numbers(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of all magnitudes, which begin with special ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values *= 10.0 ** torch.randint(-44, 30, (numel,), generator=generator)
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)[:numel]
    return values.to(dtype)


@given(
    numel=st.one_of(st.integers(0, 1000), st.integers(0, 3 * ITEM_NUMEL)),
    offset=st.integers(0, 17),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
    is_bf16=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_native_sums_products_and_copies_have_the_bits_of_torch(
    numel: int, offset: int, num_threads: int, seed: int, is_bf16: bool
) -> None:
    dtype, size = torch.bfloat16 if is_bf16 else torch.float32, offset + numel
    term, total = numbers(size, seed, dtype), numbers(size + 1, seed + 1)
    target, factor = total.clone(), 1.0 / (1 + seed % 7)
    product, copy = torch.full((size + 1,), -1.0), torch.full((size + 1,), -1.0, dtype=dtype)
    at = [tensor[offset:].data_ptr() for tensor in (target, product, copy)]
    source = term[offset:].data_ptr()
    _core.update.add(at[0], source, numel, is_bf16=is_bf16, num_threads=num_threads)
    _core.update.multiply(at[1], source, factor, numel, is_bf16=is_bf16, num_threads=num_threads)
    _core.update.copy(at[2], source, numel * term.itemsize, num_threads=num_threads)
    total[offset:size].add_(term[offset:])
    assert torch.equal(target.view(torch.int32), total.view(torch.int32)), "nothing else is changed"
    wanted = term.float() * factor
    assert torch.equal(product[offset:size].view(torch.int32), wanted[offset:].view(torch.int32))
    assert torch.equal(copy[offset:size], term[offset:])
    assert product[size] == copy[size] == -1.0, "nothing is written behind the end"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of each call of a native kernel, where the rule gives three."""
    used: list[int] = []

    def noting(kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, num_threads: int, **options: Any) -> None:
            used.append(num_threads)
            kernel(*arguments, num_threads=num_threads, **options)

        return call

    kernels = {name: noting(getattr(_core.update, name)) for name in ("add", "multiply", "copy")}
    monkeypatch.setattr(host_sums, "_core", SimpleNamespace(update=SimpleNamespace(**kernels)))
    monkeypatch.setattr(host_sums, "threads_here", lambda _: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_arrays_take_the_threads_of_updates(dtype: torch.dtype, threads: list[int]) -> None:
    term, total = numbers(NUMEL, 1, dtype), numbers(NUMEL, 2)
    wanted = total + term
    host_sums.add_(total, term)
    assert torch.equal(total, wanted)
    target = torch.empty(NUMEL)
    host_sums.copy_(target, term)
    assert torch.equal(target, term.float())
    wanted = term.float() * (1 / 3)
    assert torch.equal(host_sums.multiplied_(term.clone(), 1 / 3), wanted)
    target = torch.empty(2 * NUMEL, dtype=dtype)
    host_sums.copy_(target, torch.cat([term, term]))
    assert torch.equal(target, torch.cat([term, term]))
    assert threads == [3] * 4


@pytest.mark.parametrize(
    ("total", "term"),
    [
        (torch.zeros(NUMEL - 1), numbers(NUMEL - 1, 1)),
        (torch.zeros(NUMEL), numbers(NUMEL, 1, torch.float16)),
        (torch.zeros(NUMEL), numbers(NUMEL, 1).double()),
        (torch.zeros(NUMEL, dtype=torch.bfloat16), numbers(NUMEL, 1)),
        (torch.zeros(64, NUMEL // 64).T, numbers(NUMEL, 1).view(-1, 64)),
        (torch.zeros(64, NUMEL // 64), numbers(NUMEL, 1).view(-1, 64).T),
    ],
    ids=["small", "fp16", "fp64", "narrowed", "strides of the sum", "strides of the term"],
)
def test_other_arrays_are_left_to_torch(
    total: torch.Tensor, term: torch.Tensor, threads: list[int]
) -> None:
    wanted = total.clone().copy_(term)
    host_sums.copy_(total, term)
    assert torch.equal(total, wanted)
    wanted = total + term.to(total.dtype) if total.dtype is not torch.float32 else total + term
    host_sums.add_(total, term)
    assert torch.equal(total, wanted.to(total.dtype))
    assert not threads


def test_torch_sums_where_it_has_the_threads_of_updates(
    threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    total = torch.zeros(NUMEL)
    host_sums.add_(total, torch.ones(NUMEL))
    assert total.sum() == NUMEL and not threads


def test_terms_in_bf16_are_added_by_the_kernel_whatever_threads_torch_has(
    threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    total, term = numbers(NUMEL, 1), numbers(NUMEL, 2, torch.bfloat16)
    wanted = total + term
    assert torch.equal(host_sums.add_(total, term), wanted)
    assert threads == [3]


def test_a_product_of_fp32_numbers_is_in_their_own_memory() -> None:
    values = torch.ones(8)
    assert host_sums.multiplied_(values, 0.5) is not None
    assert torch.equal(values, torch.full((8,), 0.5))


def test_addresses_that_cannot_be_are_refused() -> None:
    place = torch.zeros(4).data_ptr()
    calls: list[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = [
        (_core.update.add, (0, place, 1), {"is_bf16": False}),
        (_core.update.add, (place, place + 2, 1), {"is_bf16": False}),
        (_core.update.multiply, (place + 1, place, 1.0, 1), {"is_bf16": True}),
        (_core.update.multiply, (place, 0, 1.0, 1), {"is_bf16": True}),
        (_core.update.copy, (place, place, (1 << 64) - 1), {}),
        (_core.update.copy, (0, place, 1), {}),
    ]
    for kernel, arguments, options in calls:
        with pytest.raises(ValueError, match="address"):
            kernel(*arguments, num_threads=1, **options)
    with pytest.raises(ValueError, match="num_threads"):
        _core.update.add(place, place, 1, is_bf16=False, num_threads=0)
    with pytest.raises(ValueError, match="num_threads"):
        _core.update.multiply(place, place, 1.0, 1, is_bf16=False, num_threads=0)
    with pytest.raises(ValueError, match="num_threads"):
        _core.update.copy(place, place + 4, 4, num_threads=0)
