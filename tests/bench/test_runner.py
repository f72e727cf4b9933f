"""Contenders run in rounds, each round begun by the next."""

from __future__ import annotations

import pytest

from infinity.tools.bench.measure import ContenderGroup, Measurement, run_group


class Logged:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def run(self) -> Measurement:
        self._log.append(self.name)
        return Measurement(len(self._log), 1.0)


def test_rounds_are_interleaved_and_the_first_contender_changes() -> None:
    log: list[str] = []
    a, b, c = (Logged(name, log) for name in "ABC")
    rounds: list[int] = []
    result = run_group(ContenderGroup("t", "c", [a], [b, c]), rounds=3, on_round=rounds.append)
    assert "".join(log[3:]) == "ABCBCACAB"
    assert rounds == [-1, 0, 1, 2]
    # Warm-ups are thrown away; the i-th samples are of one round.
    assert [sample.nbytes for sample in result.samples["A"]] == [4, 9, 11]
    assert [sample.nbytes for sample in result.samples["C"]] == [6, 8, 10]


def test_without_warm_up_the_first_round_counts() -> None:
    log: list[str] = []
    result = run_group(ContenderGroup("t", "c", [Logged("A", log)]), rounds=1, warm_ups=0)
    assert [sample.nbytes for sample in result.samples["A"]] == [1]


def test_two_contenders_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="one name"):
        run_group(ContenderGroup("t", "c", [Logged("A", []), Logged("A", [])]), rounds=1)
