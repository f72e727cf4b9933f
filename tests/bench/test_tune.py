"""Scores, survivors and the choice are pure; the search runs on a small drive."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from dataclasses import replace

import pytest

from infinity.config import SwapConfig
from infinity.sizes import MIB
from infinity.tools.bench import tune
from infinity.tools.bench.measure import IoSettings, Lab, SampleSummary
from infinity.tools.bench.nvme import KINDS
from infinity.tools.bench.tune import PathBandwidth, TunedSetting

SMALL, MIDDLE, LARGE = (IoSettings(4 * MIB, depth) for depth in (2, 4, 8))


def rates(by_candidate: dict[IoSettings, list[float]]) -> tune.Rates:
    return dict.fromkeys(KINDS, by_candidate)


def test_the_best_in_everything_scores_one() -> None:
    found = tune.scores(rates({SMALL: [1.0, 1.0], LARGE: [2.0, 2.0]}))
    assert found == {SMALL: pytest.approx(0.5), LARGE: pytest.approx(1.0)}


def test_a_slow_round_does_not_change_the_ranking() -> None:
    # The third round fell into a slow spell for all; MIDDLE is best in every round.
    found = tune.scores(rates({SMALL: [2.0, 2.0, 1.0], MIDDLE: [2.2, 2.2, 1.1]}))
    assert found[SMALL] == pytest.approx(1 / 1.1)


def test_candidates_that_left_are_not_scored_again() -> None:
    found = tune.scores(rates({SMALL: [1.0], MIDDLE: [2.0, 2.0], LARGE: [2.0, 2.0]}))
    assert set(found) == {MIDDLE, LARGE}


def test_the_fewest_bytes_in_flight_within_the_tolerance_win() -> None:
    assert tune.choose({SMALL: 0.96, MIDDLE: 0.98, LARGE: 1.0}) == SMALL
    assert tune.choose({SMALL: 0.94, MIDDLE: 0.98, LARGE: 1.0}) == MIDDLE


def test_the_larger_block_wins_at_equal_bytes_in_flight() -> None:
    two, four = IoSettings(2 * MIB, 4), IoSettings(4 * MIB, 2)
    assert tune.choose({two: 1.0, four: 0.97}) == four


def test_the_margin_narrows_with_the_rounds_and_spares_who_may_be_chosen() -> None:
    found = {SMALL: 0.88, MIDDLE: 0.96, LARGE: 1.0}
    assert SMALL in tune.survivors(found, 2)
    assert tune.survivors(found, 12) == [MIDDLE, LARGE]


def test_two_searches_of_one_noisy_drive_agree() -> None:
    """8 MiB in flight saturate; 5 % noise on every figure, and half the rounds at 60 %."""

    def search(seed: int) -> IoSettings:
        chance = random.Random(seed)
        found: dict[IoSettings, list[float]] = {who: [] for who in tune.CANDIDATES}
        for _ in range(9):
            spell = chance.choice((1.0, 0.6))
            for who, values in found.items():
                true_gb_per_s = 3.0 * min(1.0, who.in_flight_nbytes / (8 * MIB))
                values.append(true_gb_per_s * spell * chance.gauss(1.0, 0.02))
        return tune.choose(tune.scores(rates(found)))

    assert {search(seed) for seed in range(20)} == {IoSettings(4 * MIB, 2)}


def choice(*gb_per_s: float) -> TunedSetting:
    paths = tuple(
        PathBandwidth(f"/mnt/{index}", *[SampleSummary(each, each / 2, each * 2, 5)] * 3)
        for index, each in enumerate(gb_per_s)
    )
    return TunedSetting(MIDDLE, {MIDDLE: 1.0}, 3, 0.005, paths)


def test_fragment_is_a_configuration() -> None:
    text = tune.to_toml(choice(2.5), ["/mnt/0"], "remark")
    config = SwapConfig.load(tomllib.loads(text))
    assert (config.io.block_size, config.io.queue_depth) == (4 * MIB, 4)
    (tier,) = config.tiers.nvme
    assert (tier.read_gb_per_s, tier.write_gb_per_s, tier.mixed_gb_per_s) == (2.5, 2.5, 2.5)
    assert text.startswith("# remark\n")


def test_fragment_of_unequal_drives_has_weights_and_whole_stripes() -> None:
    text = tune.to_toml(choice(2.0, 5.0), ["/mnt/0", '/mnt/"1"'], "remark")
    config = SwapConfig.load(tomllib.loads(text))
    assert [tier.weight for tier in config.tiers.nvme] == [1.0, 2.5]
    assert str(config.tiers.nvme[1].path) == '/mnt/"1"'
    assert config.io.stripe == config.io.block_size


def test_search_on_a_real_directory(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(2)
    lab = replace(lab, effort=replace(lab.effort, nbytes=16 * MIB))
    found = tune.search(lab, limit_s=0.0)
    assert found.best in tune.CANDIDATES and found.rounds == 3
    assert found.best in found.scores and 0 < found.scores[found.best] <= 1
    assert [path.path for path in found.paths] == [str(each) for each in lab.directories]
    assert all(path.read.count == 5 and path.read.low > 0 for path in found.paths)
    assert all(list(directory.iterdir()) == [] for directory in lab.directories)
