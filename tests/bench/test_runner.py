"""Contenders run in rounds, each round begun by the next."""

from __future__ import annotations

import pytest

from infinity.tools.bench.measure import Comparison, Contender, Measurement, run_rounds


def logged(name: str, log: list[str]) -> Contender:
    def run() -> Measurement:
        log.append(name)
        return Measurement(len(log), 1.0)

    return Contender(name, run)


def test_rounds_are_interleaved_and_the_first_contender_changes() -> None:
    log: list[str] = []
    a, b, c = (logged(name, log) for name in "ABC")
    rounds: list[int] = []
    result = run_rounds(Comparison("t", "c", [a], [b, c]), rounds=3, on_round=rounds.append)
    assert "".join(log[3:]) == "ABCBCACAB"
    assert rounds == [-1, 0, 1, 2]
    # Warm-ups are thrown away; the i-th samples are of one round.
    assert [sample.nbytes for sample in result.samples["A"]] == [4, 9, 11]
    assert [sample.nbytes for sample in result.samples["C"]] == [6, 8, 10]


def test_without_warm_up_the_first_round_counts() -> None:
    log: list[str] = []
    result = run_rounds(Comparison("t", "c", [logged("A", log)]), rounds=1, warm_ups=0)
    assert [sample.nbytes for sample in result.samples["A"]] == [1]


def test_two_contenders_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="one name"):
        run_rounds(Comparison("t", "c", [logged("A", []), logged("A", [])]), rounds=1)
