"""What each kind of value accepts, refuses and writes back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import Capacity, SwapConfig
from infinity.config.values import (
    Flag,
    Loading,
    ValueType,
    auto_or,
    budget,
    file_name,
    integer,
    location,
    number,
    or_off,
    size,
)
from infinity.errors import ConfigError
from infinity.sizes import GIB, KIB, MIB

HERE = Loading(Path("/base"))
FLAG: ValueType = get_args(Flag)[1]


def refused(kind: ValueType, value: Any) -> str:
    with pytest.raises(ValueError) as caught:
        kind.read(value, HERE)
    return str(caught.value)


@given(st.integers(1, 2**63 - 1))
def test_size_reads_back_what_it_wrote(nbytes: int) -> None:
    assert size().read(size().write(nbytes), HERE) == nbytes


@given(
    st.one_of(
        st.just(Capacity()),
        st.builds(Capacity, nbytes=st.integers(1, 2**63 - 1)),
        st.builds(Capacity, percent=st.floats(0, 100, exclude_min=True)),
    )
)
def test_capacity_reads_back_what_it_wrote(capacity: Capacity) -> None:
    """Whatever was asked for: "auto", a size, or any share a float can say."""
    assert budget().read(budget().write(capacity), HERE) == capacity


def test_size_takes_whole_numbers_as_bytes() -> None:
    assert size().read(4096, HERE) == 4096
    assert size().read(1e9, HERE) == 10**9  # TOML and YAML 1.2 read 1e9 as a float.


def test_size_beyond_all_floats_is_refused_as_any_other() -> None:
    with pytest.raises(ConfigError, match=r"tiers\.host\.capacity"):
        SwapConfig.load({"tiers": {"host": {"capacity": "9" * 400 + ".5GiB"}}})


def test_size_names_its_limits() -> None:
    kind = size(minimum=64 * KIB, maximum=GIB, multiple=4 * KIB)
    assert kind.read("64KiB", HERE) == 64 * KIB
    assert "at least 64KiB" in refused(kind, "4KiB")
    assert "at most 1GiB" in refused(kind, "2GiB")
    assert "multiple of 4KiB" in refused(kind, 65 * KIB + 1)
    assert all(word in kind.expected for word in ("4KiB", "64KiB", "1GiB"))


def test_capacity_stays_symbolic_until_the_total_is_known() -> None:
    share = budget().read("80%", HERE)
    assert (share.percent, share.nbytes, share.is_auto) == (80.0, None, False)
    assert share.resolve(10 * GIB) == 8 * GIB
    assert Capacity(percent=100.0).resolve(2**62 + 1) == 2**62 + 1
    assert Capacity(percent=33.3).resolve(1000) == 333


def test_auto_capacity_takes_the_share_its_tier_gives_it() -> None:
    assert Capacity().is_auto
    assert Capacity().resolve(10 * GIB, auto_percent=50) == 5 * GIB
    assert SwapConfig().tiers.host.budget_nbytes(10 * GIB) == 5 * GIB


def test_capacity_in_bytes_does_not_depend_on_the_total() -> None:
    assert Capacity(nbytes=8 * GIB).resolve(GIB) == 8 * GIB


def test_integer_takes_a_float_that_is_one() -> None:
    read = integer().read(1e3, HERE)
    assert read == 1000 and isinstance(read, int)


@pytest.mark.parametrize("value", [True, "1e-5", None, math.inf, math.nan, 10**400, 0, 1])
def test_number_refuses_what_is_not_one_in_its_range(value: Any) -> None:
    with pytest.raises((ValueError, OverflowError)):
        number(above=0, below=1).read(value, HERE)


def test_number_in_quotes_is_told_to_lose_them() -> None:
    assert "remove the quotes" in refused(number(), "1e-5")


@pytest.mark.parametrize(
    ("word", "flag"), [("on", True), ("Yes", True), ("true", True), ("off", False), ("NO", False)]
)
def test_flag_understands_the_words_of_yaml(word: str, flag: bool) -> None:
    assert FLAG.read(word, HERE) is flag


@pytest.mark.parametrize("value", [0, 0.0, None, "none", "null", "off"])
def test_limit_that_is_off_reads_as_none_and_is_written_zero(value: Any) -> None:
    kind = or_off(number(above=0))
    assert kind.read(value, HERE) is None
    assert kind.write(None) == 0


def test_limit_that_is_on_is_read_by_its_own_kind() -> None:
    assert or_off(number(above=0)).read(0.5, HERE) == 0.5


def test_auto_or_a_size() -> None:
    assert auto_or(size()).read("auto", HERE) == "auto"
    assert auto_or(size()).read("2MiB", HERE) == 2 * MIB


def test_relative_path_starts_at_the_directory_of_the_file() -> None:
    assert location().read("a/b", HERE) == Path("/base/a/b")
    assert location().read("/a/b", HERE) == Path("/a/b")
    assert location().read(Path("a"), HERE) == Path("/base/a")


def test_path_expands_home_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    assert location().read("~/a", HERE) == Path("/home/me/a")
    assert location().read("$SCRATCH/a", HERE) == Path("/scratch/a")
    assert location().read("${SCRATCH}2/a", HERE) == Path("/scratch2/a")


def test_path_with_an_unset_variable_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    assert "NOT_SET is not set" in refused(location(), "$NOT_SET/a")
    assert "${}" in refused(location(), "${}/a")


def test_path_to_the_parent_follows_transport_as_the_kernel_does(tmp_path: Path) -> None:
    """link/.. is the parent of what the link points to."""
    (tmp_path / "far" / "target").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "target")
    read = location().read("link/../swap", Loading(tmp_path))
    assert read == (tmp_path / "far" / "swap").resolve()


def test_null_path_is_told_about_the_bare_tilde_of_yaml() -> None:
    assert "bare ~ is null in YAML" in refused(location(), None)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (size(), [True, 0, -1, 1.5, math.inf, math.nan, None, "1e9", [1], 2**63]),
        (budget(), ["0%", "101%", "-5%", "%", "80 percent"]),
        (integer(0, 4), [True, 1.5, "3", None, -1, 5, math.nan]),
        (FLAG, [0, 1, None, "maybe", "", []]),
        (or_off(number(above=0)), [-0.5, False]),
        (auto_or(size()), ["automatic"]),
        (location(), ["", "  ", None, True, 3, b"/a", "a\0b", "~no-such-user-here/a", ["/a"]]),
        (file_name(), ["/abs.jsonl", "../up.jsonl", "a/../../b", ".", "", None]),
    ],
)
def test_a_kind_refuses_what_is_not_of_it(kind: ValueType, values: list[Any]) -> None:
    for value in values:
        refused(kind, value)
