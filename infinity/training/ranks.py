"""The rank of this process in a job of torchrun; rank 0 prints and exports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from infinity.config import SwapConfig
from infinity.distributed.group import find_group

# Of a wait in a barrier, such as that for the rank that tokenises the data: hours. NCCL's own 10
# minutes would end the other ranks. The engine finds out much sooner which rank is gone.
_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class JobRank:
    """This process among those of the job. Rank 0 prints, evaluates and exports."""

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints for all."""
        return self.rank == 0


@contextmanager
def job_rank(config: SwapConfig) -> Iterator[JobRank]:
    """Joins the process group of the job, an existing one or that of torchrun, for a `with` block.

    After an exception the group of torchrun stays, and ends with the process.
    """
    is_joined = dist.is_initialized()
    if not is_joined and int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield JobRank()
        return
    if is_joined:
        rank = JobRank(dist.get_rank(), dist.get_world_size())
        with _torchrun_variables(rank):
            yield rank
        return
    is_cuda = config.tiers.device.kind != "cpu" and torch.cuda.is_available()
    if is_cuda:
        # A process may see its own device alone: SLURM's --gpus-per-task.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    # Objects travel between hosts. A barrier of TRL or accelerate is NCCL's.
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, timeout=_TIMEOUT)
    yield JobRank(dist.get_rank(), dist.get_world_size())
    # Not after an exception: it waits for aborts that wait for a rank that is gone.
    dist.destroy_process_group()


@contextmanager
def _torchrun_variables(rank: JobRank) -> Iterator[None]:
    """Sets the variables of torchrun that are missing: accelerate reads ranks from them, not from
    the process group. A collective call."""
    topology = find_group()
    local_rank = topology.node_rank if topology is not None else 0
    wanted = {"RANK": rank.rank, "WORLD_SIZE": rank.count, "LOCAL_RANK": local_rank}
    missing = {name: str(value) for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
