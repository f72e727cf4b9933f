"""Sums of squares: the bits of the tree, on any number of threads, for any values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import _core  # noqa: TID251 (its own checks are what is tested)
from infinity.ops import norms as squares
from infinity.ops.norms import SQUARES_NUMEL, sum_squares

SPECIAL = [0.0, -0.0, math.inf, math.nan, 1e-45, -1e-40, 3.4e38, 1.0, -1.0]


def torch_sums(values: torch.Tensor) -> torch.Tensor:
    """The same trees, by operations of torch."""
    count = math.ceil(values.numel() / SQUARES_NUMEL)
    squares = torch.zeros(count * SQUARES_NUMEL, dtype=torch.float64)
    squares[: values.numel()] = values
    level = squares.square_().view(count, SQUARES_NUMEL)
    while level.shape[1] > 1:
        half = level.shape[1] // 2
        level = level[:, :half] + level[:, half:]
    return level[:, 0]


@given(
    numel=st.one_of(st.integers(0, 3 * SQUARES_NUMEL), st.integers(0, 700 * SQUARES_NUMEL)),
    offset=st.integers(0, 17),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
    special=st.lists(st.sampled_from(SPECIAL), max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_native_sums_have_the_bits_of_torch_operations(
    numel: int, offset: int, num_threads: int, seed: int, special: list[float]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(offset + numel, generator=generator)[offset:]
    values *= 10.0 ** (seed % 60 - 40)
    for number, value in enumerate(special if numel else []):
        values[(seed + 1009 * number) % numel] = value
    sums = torch.full((math.ceil(numel / SQUARES_NUMEL) + 1,), -1.0, dtype=torch.float64)
    _core.update.sum_squares(values.data_ptr(), numel, sums.data_ptr(), num_threads=num_threads)
    assert sums[-1] == -1.0, "nothing is written behind the sums"
    torch.testing.assert_close(sums[:-1], torch_sums(values), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("numel", [0, 1, SQUARES_NUMEL, 4 * SQUARES_NUMEL, 9 * SQUARES_NUMEL + 5])
def test_operations_of_a_device_have_the_bits_of_the_host(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(squares, "_PIECE_NUMEL", 4 * SQUARES_NUMEL)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-20
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)[:numel]
    found = squares.sum_squares_by_torch(values)
    torch.testing.assert_close(found, sum_squares(values), rtol=0, atol=0, equal_nan=True)


def test_a_flag_of_this_thread_does_not_change_the_sums() -> None:
    values = torch.full((SQUARES_NUMEL,), 1e-40)
    wanted = sum_squares(values)
    assert wanted > 0
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(sum_squares(values), wanted)
    finally:
        torch.set_flush_denormal(False)


def test_addresses_that_cannot_be_are_refused() -> None:
    sums = torch.zeros(1, dtype=torch.float64)
    for values, numel, place, num_threads in [
        (0, 1, sums.data_ptr(), 1),
        (sums.data_ptr() + 1, 1, sums.data_ptr(), 1),
        (sums.data_ptr(), 1 << 62, sums.data_ptr(), 1),
        (sums.data_ptr(), 2, 0, 1),
        (sums.data_ptr(), 2, sums.data_ptr() + 4, 1),
        (sums.data_ptr(), 2, sums.data_ptr(), 0),
    ]:
        with pytest.raises(ValueError, match=r"address|num_threads"):
            _core.update.sum_squares(values, numel, place, num_threads=num_threads)
