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
    with pytest.raises((ValueError, OverflowError)) as caught:
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
    assert Capacity(nbytes=8 * GIB).resolve(GIB) == 8 * GIB
    assert Capacity().is_auto and Capacity().resolve(10 * GIB, auto_percent=50) == 5 * GIB
    assert SwapConfig().tiers.host.budget_nbytes(10 * GIB) == 5 * GIB


def test_number_in_quotes_is_told_to_lose_them() -> None:
    assert "remove the quotes" in refused(number(), "1e-5")


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
        (size(), {4096: 4096, 1e9: 10**9}),  # TOML and YAML 1.2 read 1e9 as a float.
        (integer(), {1e3: 1000}),
        (FLAG, {"on": True, "Yes": True, "true": True, "off": False, "NO": False}),
        (or_off(number(above=0)), {0: None, None: None, "none": None, "off": None, 0.5: 0.5}),
        (auto_or(size()), {"auto": "auto", "2MiB": 2 * MIB}),
        (location(), {"a/b": Path("/base/a/b"), "/a/b": Path("/a/b"), Path("a"): Path("/base/a")}),
    ],
)
def test_a_kind_reads_what_is_of_it(kind: ValueType, values: dict[Any, Any]) -> None:
    for value, wanted in values.items():
        read = kind.read(value, HERE)
        assert read == wanted and type(read) is type(wanted)
        assert kind.read(kind.write(read), HERE) == read


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (size(), [True, 0, -1, 1.5, math.inf, math.nan, None, "1e9", [1], 2**63]),
        (budget(), ["0%", "101%", "-5%", "%", "80 percent"]),
        (integer(0, 4), [True, 1.5, "3", None, -1, 5, math.nan]),
        (number(above=0, below=1), [True, "1e-5", None, math.inf, math.nan, 10**400, 0, 1]),
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
