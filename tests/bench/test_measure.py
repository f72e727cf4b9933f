"""Contenders run in rounds, each round begun by the next; medians, paired ratios, CPU per GB,
verdicts, quantiles."""

from __future__ import annotations

import pytest

from infinity.tools.bench.measure import (
    GB,
    Comparison,
    Contender,
    Measurement,
    cpu_s_per_gb,
    paired_ratios,
    quantiles,
    run_rounds,
    summarize,
    verdict,
)


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


def samples(*gb_per_s: float) -> list[Measurement]:
    return [Measurement(GB, 1 / each) for each in gb_per_s]


def test_bandwidth_is_decimal() -> None:
    assert Measurement(3 * GB, 2.0).gb_per_s == pytest.approx(1.5)


def test_summary_has_median_and_spread() -> None:
    found = summarize([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)


def test_a_slow_spell_of_whole_rounds_cancels_in_paired_ratios() -> None:
    ours, theirs = samples(2.0, 1.0, 2.0, 1.0), samples(2.5, 1.25, 2.5, 1.25)
    found = paired_ratios(ours, theirs)
    assert found.low == pytest.approx(0.8) and found.high == pytest.approx(0.8)


def test_ratios_need_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratios(samples(1.0, 1.0), samples(1.0))


def test_cpu_is_summed_before_it_is_divided() -> None:
    """fio counts whole milliseconds: most rounds may say 0."""
    found = [Measurement(GB, 1.0, cpu_s) for cpu_s in (0.0, 0.0, 0.003)]
    assert cpu_s_per_gb(found) == pytest.approx(0.001)


def test_cpu_is_unknown_when_one_sample_does_not_know() -> None:
    assert cpu_s_per_gb([Measurement(GB, 1.0, 0.5), Measurement(GB, 1.0)]) is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((True, True), True),
        ((True, False), False),
        ((None, False), False),
        ((True, None), None),
        ((None, None), None),
    ],
)
def test_one_wrong_comparison_is_wrong(
    flags: tuple[bool | None, ...], expected: bool | None
) -> None:
    assert verdict([Measurement(GB, 1.0, ok=flag) for flag in flags]) is expected


def test_quantiles_are_values_that_occurred() -> None:
    found = quantiles([4.0, 1.0, 3.0, 2.0, 5.0], [0.0, 0.5, 1.0])
    assert found == {0.0: 1.0, 0.5: 3.0, 1.0: 5.0}
