"""Saving and loading need no more memory than a chunk beside the host budget."""

from __future__ import annotations

import json

from tests.support.forked import run_script

_MIB = 1 << 20

_CHILD = """
import json, sys
from pathlib import Path
import torch
import infinity
from tests.support.memory import growth_nbytes

directory = Path(sys.argv[1])
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 2048, bias=False) for _ in range(8)))
infinity.offload(model, {
    "tiers": {"device": {"kind": "cpu"}, "host": {"capacity": "48MiB", "huge_pages": False},
              "nvme": [{"path": str(directory / "swap")}]},
    "schedule": {"update_chunk": "2MiB"},
    "placement": {"gradients": "nvme"},
}, weights=lambda name: torch.full((2048, 1024), 1.0))
optimizer = infinity.AdamW(model)
number = iter(range(9))

def save():
    infinity.checkpoint.save(directory / "checkpoints", model, optimizer, step=next(number))

growth = {
    "save": growth_nbytes(save),
    "load": growth_nbytes(
        lambda: infinity.checkpoint.load(directory / "checkpoints", model, optimizer)
    ),
}
infinity.engine_of(model).close()
print(json.dumps(growth))
"""


def test_a_checkpoint_is_never_in_memory(tmp_path):
    """192 MiB of state through a 48 MiB arena: resident memory grows by the arena's untouched
    pages at most, and 16 MiB for Python's and the allocator's own."""
    done = run_script(_CHILD, tmp_path)
    assert done.returncode == 0, done.stderr
    growth = json.loads(done.stdout)
    saved = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*"))
    assert saved > 2 * 192 * _MIB
    assert growth["save"] < 64 * _MIB, growth
    assert growth["load"] < 64 * _MIB, growth
