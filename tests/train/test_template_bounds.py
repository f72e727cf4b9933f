"""Chat templates that take too much time or memory end with an error, not with the machine."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import ConfigError
from infinity.sizes import MIB
from infinity.tools.training import bounded_call
from infinity.tools.training.bounded_call import call_bounded
from tests.support.exhaustive import in_turn

from .record_jobs import rows_of, small_job, write

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = (
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}"
)
# Doubling takes processor time, too: the kernel clears each page. Either bound may come first.
EITHER = r"(256\.0 MiB of memory|1 s of processor time)"
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def talk(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(bounded_call, "MOST_CPU_S", 1.0)
    monkeypatch.setattr(bounded_call, "MOST_NBYTES", 256 * MIB)
    return small_job(tmp_path)


TOO_MUCH = {
    "loop": (LOOP, "more than 1 s of processor time"),
    "doubled": (DOUBLE, f"more than {EITHER}"),
    "repeated": ("{{ 'a' * 10 ** 12 }}", "more than 256.0 MiB of memory"),
    "centred": ("{{ 'a' | center(10 ** 12) }}", "more than 256.0 MiB of memory"),
    "power": ("{{ 9 ** (9 ** 9) }}", "more than 1 s of processor time"),
    "compiled": (
        "{% if false %}{{ 9 ** (9 ** 9) }}{% endif %}" + PLAIN, "more than 1 s of processor time",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("what", "kind"), in_turn(TOO_MUCH, ["conversations", "completions"]))
def test_a_template_that_takes_too_much_is_refused_within_seconds(
    tmp_path, table, what, kind
) -> None:
    """Also one whose constants are computed as it is compiled."""
    (template, said), record = TOO_MUCH[what], talk("a")
    if kind == "completions":
        record = {"prompt": record["messages"][:1], "completion": record["messages"][1:]}
    write(tmp_path / "data.jsonl", [record])
    began_s = time.process_time()
    with pytest.raises(ConfigError, match=f"the chat template takes {said}"):
        rows_of(table, template)
    assert time.process_time() - began_s < 30
    assert not (tmp_path / "swap").exists()


@pytest.mark.parametrize(("end", "said"), [(LOOP, "processor time"), (DOUBLE, EITHER)])
def test_a_record_that_a_template_cannot_end_is_named(tmp_path, table, end, said) -> None:
    template = PLAIN.replace(";", ";{% if m.content == 'bad' %}" + end + "{% endif %}")
    write(tmp_path / "data.jsonl", [talk("a"), talk("b"), talk("bad"), talk("c")])
    with pytest.raises(ConfigError, match=f"data.jsonl: record 3: the chat template .*{said}"):
        rows_of(table, template)


def test_a_template_that_calls_itself_is_refused_by_record(tmp_path, table) -> None:
    template = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    write(tmp_path / "data.jsonl", [talk("a")])
    with pytest.raises(ConfigError, match="record 1: the chat template refuses .*recursion"):
        rows_of(table, template)


def children() -> set[str]:
    """The processes that the threads of this one have begun."""
    files = Path("/proc/self/task").glob("*/children")
    return {number for file in files for number in file.read_text().split()}


def test_the_process_keeps_its_own_limits_and_children_end(tmp_path, table) -> None:
    limit, before = resource.getrlimit(resource.RLIMIT_AS), children()
    write(tmp_path / "data.jsonl", [talk("a")])
    with pytest.raises(ConfigError):
        rows_of(table, DOUBLE)
    assert rows_of(table, PLAIN)[0] == [("[user]a;[assistant]b;", "b;")]
    assert resource.getrlimit(resource.RLIMIT_AS) == limit
    assert children() <= before


def test_results_come_in_order_and_failures_name_their_value() -> None:
    def double(value: int, renew: Any) -> int:
        renew(0)
        if value == 3:
            raise ZeroDivisionError
        return 2 * value

    results = call_bounded(double, [1, 2, 3, 4], place_of=lambda value: f"value {value}")
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(ConfigError, match=r"value 3: the chat template fails: ZeroDivisionError"):
        next(results)
