"""Scripts that end without `close`: exit handlers do what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.exhaustive import sampled
from tests.support.forked import EXIT, Script

# Rank 1 ends behind a step whose updates wait, in lockstep. Rank 0 makes one more backward, for
# which rank 1 gives its shards, and reads weights that rest there.
SCRIPT = """
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import infinity
from infinity.testing import SimulatedDevice
from tests.multirank.models import DeepBlocks, batch, loss_of
from tests.multirank.work import read_weights

rank, directory, tier, exchange = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
store = dist.FileStore(str(directory / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = DeepBlocks()
config = {
    "distributed": {"exchange": exchange},
    "tiers": {
        "host": {"capacity": "64MiB", "huge_pages": False},
        "nvme": [{"path": str(directory / "swap"), "capacity": "64MiB"}],
        "device": {"kind": "cpu"},
    },
    "io": {"verify": False},
    "placement": dict.fromkeys(("parameters", "master", "moments", "gradients"), tier),
}
infinity.offload(model, config, device=SimulatedDevice(7))
engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=1e-2)
for step in range(5):
    if rank == 1 and step == 4:  # It proposes nothing ahead: stand-ins give its shards.
        engine.weight_cache.prefetch_anew = lambda: None
    loss_of(model, batch(10 * step + rank, model.width)).backward()
    optimizer.step()
    optimizer.zero_grad()
assert exchange == "one_sided" or engine.ranks._collectives.is_in_lockstep
if rank == 0:
    time.sleep(1.0)  # The other one is in its exit handlers by now.
    loss_of(model, batch(7, model.width)).backward()
    assert all(torch.isfinite(tensor).all() for tensor in read_weights(model).values())
print("over", flush=True)
"""


@pytest.mark.parametrize(
    ("tier", "exchange"),
    sampled(
        [("host", "collective"), ("nvme", "collective"), ("nvme", "one_sided")],
        lambda case: case != ("host", "collective"),
    ),
)
def test_a_script_that_ends_without_close_serves_the_ranks_that_still_work(
    tmp_path: Path, tier: str, exchange: str
) -> None:
    processes = [Script(SCRIPT + EXIT, rank, tmp_path, tier, exchange) for rank in range(2)]
    try:
        for process in processes:
            said, errors = process.communicate(timeout=120)
            assert process.returncode == 0 and said == "over\n", errors
            assert "after shutdown" not in errors and "failed:" not in errors, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
