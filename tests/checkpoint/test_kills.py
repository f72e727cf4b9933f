"""kill -9 at any moment of training, of a commit and of a checkpoint: the run goes on from the last
committed step, and ends with the bits it would have ended with.

The long form, INFINITY_KILLS=200, kills that often.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.forked import TIME_LIMIT_S, run_script

from .harness import is_intact

LINKED_KILLS = int(os.environ.get("INFINITY_KILLS", "6"))
LIVES = """
import json, sys
from pathlib import Path
from tests.checkpoint import kill_loop
print(json.dumps(kill_loop.main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))))
"""


def lives(
    directory: Path, kills: int, seed: int = 0, *, mode: str = "copied", steps: int
) -> dict[str, int]:
    directory.mkdir()
    done = run_script(LIVES, directory, mode, steps, kills, seed, timeout=TIME_LIMIT_S + 30 * kills)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def outcomes(directory: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm of every step; a step that was taken again must have had the same."""
    found: dict[int, tuple[float, float]] = {}
    for line in (directory / "outcomes").read_text().splitlines():
        step, loss, norm = json.loads(line)
        assert found.setdefault(step, (loss, norm)) == (loss, norm), step
    return found


def check_the_same_end(directory: Path) -> None:
    """Every step and the last state of the killed run are those of the whole one."""
    assert outcomes(directory / "killed") == outcomes(directory / "whole")
    final = [(directory / name / "final").read_text() for name in ("killed", "whole")]
    assert final[0] == final[1]
    left = directory / "killed" / "checkpoints"
    assert len(list(left.iterdir())) == 2 and is_intact(left)


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    """Six kills, half of them at a random effect on files, against a run without any."""
    assert lives(tmp_path / "whole", 0, steps=36) == {
        "killed": 0, "in_checkpoint": 0, "lives": 1, "adopted": 0,
    }  # fmt: skip
    report = lives(tmp_path / "killed", 6, steps=36)

    assert report["killed"] == 6
    assert report["in_checkpoint"] >= 2, "kills that hit a checkpoint in the making"
    check_the_same_end(tmp_path)


@pytest.mark.timeout(900 + 30 * LINKED_KILLS)
def test_a_run_whose_every_step_is_committed_loses_none(tmp_path):
    """Links, commits and checkpoints in turn; a life never begins before the last commit."""
    steps = max(24, 3 * LINKED_KILLS)
    lives(tmp_path / "whole", 0, mode="linked", steps=steps)
    report = lives(tmp_path / "killed", LINKED_KILLS, mode="linked", steps=steps)

    assert report["killed"] == LINKED_KILLS
    assert report["adopted"] >= 1, "lives that went on in the swap files of the one before"
    check_the_same_end(tmp_path)
    assert list((tmp_path / "killed" / "swap").iterdir()) == []
    print(json.dumps(report))


@pytest.mark.timeout(900 + 30 * LINKED_KILLS)
def test_a_run_that_is_killed_among_updates_in_the_backward_loses_no_commit(tmp_path):
    """Every second life ends between two chunks that a backward updates. The run without kills has no
    such updates."""
    steps = 6 * (LINKED_KILLS + 1)
    lives(tmp_path / "whole", 0, mode="early", steps=steps)
    report = lives(tmp_path / "killed", LINKED_KILLS, mode="early", steps=steps)

    assert report["killed"] == LINKED_KILLS
    assert report["adopted"] >= 1, "lives that went on in the swap files of the one before"
    assert not (tmp_path / "whole" / "in_early_updates").exists()
    nums_kept = list(map(int, (tmp_path / "killed" / "in_early_updates").read_text().split()))
    assert len(nums_kept) >= max(1, LINKED_KILLS // 4), "lives that ended in an early update"
    assert any(nums_kept), "lives that had kept and committed early updates before"
    check_the_same_end(tmp_path)
    assert list((tmp_path / "killed" / "swap").iterdir()) == []
