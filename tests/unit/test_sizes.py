"""Sizes: text to bytes and back, and alignment arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config.schema.train import Diffusion
from infinity.sizes import (
    GIB,
    KIB,
    MIB,
    align_down,
    align_up,
    counted,
    format_nbytes,
    parse_nbytes,
    write_size,
)

SIZES = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0B", 0),
        ("512MiB", 512 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        (" 8 GB ", 8 * 10**9),
        ("64kB", 64_000),
        ("64KB", 64_000),
        ("2TB", 2 * 10**12),
        ("1TiB", 1 << 40),
        (4096, 4096),
        (0, 0),
    ],
)
def test_parse_reads_binary_and_decimal_units(text: str | int, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["8G", "8g", "512M", "1T", "4k"])
def test_parse_refuses_a_bare_letter_and_names_both_readings(text: str) -> None:
    unit = text[-1].upper()
    with pytest.raises(ValueError, match=f"{unit}iB.*{unit}B"):
        parse_nbytes(text)


@pytest.mark.parametrize(
    "value", ["", "GiB", "8", "-1GiB", "1e9", "8GiB!", "8 GiBs", -1, True, 1.5, None, [8]]
)
def test_parse_refuses_what_is_not_a_size(value: object) -> None:
    with pytest.raises(ValueError):
        parse_nbytes(value)  # type: ignore[arg-type]


@given(SIZES)
def test_written_size_reads_back_exactly(nbytes: int) -> None:
    """`write_size` is exact, whatever unit it picks."""
    assert parse_nbytes(write_size(nbytes)) == nbytes


@given(st.integers(1, 2**20), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB"]))
def test_written_size_is_no_longer_than_the_text_it_came_from(number: int, unit: str) -> None:
    """A size given in a round unit is written in a unit, never as a long count of bytes."""
    written = write_size(parse_nbytes(f"{number}{unit}"))
    assert not written.rstrip("B").isdigit()


@given(SIZES)
def test_formatted_size_is_right_to_its_last_digit(nbytes: int) -> None:
    """The human form keeps one decimal, so it is off by at most half a tenth of its unit."""
    read = parse_nbytes(format_nbytes(nbytes))
    unit_nbytes = parse_nbytes("1" + format_nbytes(nbytes).split()[1])
    assert abs(read - nbytes) <= unit_nbytes * 0.0501 + 1


@given(st.integers(0, 2**62), st.integers(1, 2**21))
def test_alignment_brackets_the_value_within_one_step(value: int, alignment: int) -> None:
    low, high = align_down(value, alignment), align_up(value, alignment)
    assert low <= value <= high
    assert low % alignment == high % alignment == 0
    assert value - low < alignment and high - value < alignment


def test_alignment_examples() -> None:
    assert (align_up(5, 4), align_down(5, 4), align_up(8, 4), align_down(8, 4)) == (8, 4, 8, 8)
    assert align_up(1, 4 * KIB) == 4096


def test_one_thing_is_in_the_singular() -> None:
    assert counted(1, "images with captions") == "1 image with captions"
    assert Diffusion(resolution=32).described(1) == "1 image of 32 x 32 pixels"
    assert (counted(1, "steps"), counted(2_000, "steps")) == ("1 step", "2,000 steps")
