"""kill -9 of a Trainer at any effect of a checkpoint: the half-written one is never resumed from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.forked import TIME_LIMIT_S, run_script

EVERY = 1 if os.environ.get("INFINITY_KILLS") else 16
SCRIPT = """
import json, sys
from pathlib import Path
from tests.integrations import trainer_kills
print(json.dumps(trainer_kills.main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
"""


@pytest.mark.timeout(3 * TIME_LIMIT_S)
def test_a_trainer_that_is_killed_at_any_effect_of_a_checkpoint_goes_on_from_a_whole_one(
    tmp_path: Path,
) -> None:
    """And ends with the losses and the best checkpoint of the run that was not killed."""
    done = run_script(SCRIPT, tmp_path, 1, EVERY, timeout=2 * TIME_LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["kills"] >= 5, report
    newest = report["newest"]
    assert newest == sorted(newest) and set(newest) == {"checkpoint-2", "checkpoint-3"}
    assert report["leftovers"] >= 2, "kills in the making of a checkpoint, or in a removal"
