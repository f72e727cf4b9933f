"""The rank of this process in a job of torchrun; rank 0 prints and exports."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity.config import JobConfig
from infinity.distributed.collective.process_groups import GroupSockets
from infinity.distributed.group import RankTopology, find_group, join
from infinity.distributed.wire.failures import waiting_beside
from infinity.errors import ConfigError, RankError
from infinity.tools.training.process import Interrupt

# Of a wait in a barrier, such as that for the rank that tokenises the data: hours. NCCL's own 10
# minutes would end the other ranks. The links find out much sooner which rank is gone.
_TIMEOUT = timedelta(days=1)
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class JobRank:
    """This process among those of the job. Rank 0 prints, evaluates and exports."""

    rank: int = 0
    count: int = 1
    topology: RankTopology | None = field(default=None, compare=False)  # None for a single rank.
    interrupt: Interrupt = field(default_factory=Interrupt, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints for all."""
        return self.rank == 0

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Runs a `with` block on rank 0, then on the first rank of each other node, then on all
        others. So a later rank finds what an earlier one has written."""
        topology, turn = self.topology, 0 if self.is_first else 2
        if topology is not None and turn and topology.node_rank == 0:
            turn = 1
        for part in range(3):
            if part == turn:
                yield
            if topology is not None and part < 2:
                dist.barrier(topology.process_group)


@contextmanager
def job_rank(config: JobConfig) -> Iterator[JobRank]:
    """Joins the process group of the job, an existing one or that of torchrun, for a `with` block.

    The links between the ranks open before anything else. From then on every wait for another rank
    ends in a RankError soon after that rank is gone, a wait of a trainer's own, too. After an
    exception the group of torchrun stays, and ends with the process.
    """
    is_joined = dist.is_initialized()
    if not is_joined and int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield JobRank()
        return
    timeout_s, sockets = config.distributed.timeout_s, GroupSockets()
    store: Any = None
    if is_joined:
        topology = find_group(timeout_s=timeout_s)
    else:
        store = _store_of_launcher(timeout_s)
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        topology = join(store, rank, range(count), timeout_s)
    if topology is None:
        yield JobRank()
        return
    with _ending_in_rank_errors(topology, sockets):
        if not is_joined:
            topology = _init_process_group(config, topology, store, sockets)
        with _torchrun_variables(topology):
            yield JobRank(topology.rank, topology.count, topology)
    if not is_joined:
        # Not after an exception: it waits for aborts that wait for a rank that is gone.
        dist.destroy_process_group()


@contextmanager
def _ending_in_rank_errors(topology: RankTopology, sockets: GroupSockets) -> Iterator[None]:
    """Closes the links, which an engine has closed unless it was not made. An error in the block is
    that of the links if another rank is gone."""
    links = topology.links
    links.failures.on_failure = sockets.shut_down
    try:
        yield
    except BaseException as error:
        cause = links.failures.cause_of(error)
        if cause is error:
            raise
        raise cause from error
    finally:
        links.close()


def _store_of_launcher(timeout_s: float) -> Any:
    """Returns the store of torchrun, or that of rank 0 for another launcher, and does not wait for
    other ranks in it. Raises RankError, ConfigError."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} processes need the variables of torchrun; "
            f"{', '.join(missing)} is missing. Start them by torchrun, or set WORLD_SIZE=1"
        )
    address, port, rank, count = (os.environ[name] for name in _VARIABLES)
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            int(port),
            int(count),
            is_master=rank == "0" and not is_torchruns,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise RankError(
            0,
            f"rank 0, or the launcher, has not opened the store of torch.distributed at "
            f"{address}:{port} within {timeout_s} s; distributed.timeout_s waits longer",
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"infinity/attempt-{attempt}", store)


def _init_process_group(
    config: JobConfig, topology: RankTopology, store: Any, sockets: GroupSockets
) -> RankTopology:
    """Makes the process group of the job. Raises RankError if a rank is gone meanwhile."""
    is_cuda = config.tiers.device.kind != "cpu" and torch.cuda.is_available()
    if is_cuda:
        # A process may see its own device alone: SLURM's --gpus-per-task.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    # Objects travel between hosts. A barrier of TRL or accelerate is NCCL's.
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"

    def init() -> None:
        with sockets.noted():
            dist.init_process_group(
                backend, store=store, rank=topology.rank, world_size=topology.count,
                timeout=_TIMEOUT,
            )  # fmt: skip

    waiting_beside(topology.links.failures, init)
    return replace(topology, process_group=dist.group.WORLD)


@contextmanager
def _torchrun_variables(topology: RankTopology) -> Iterator[None]:
    """Sets the variables of torchrun that are missing: accelerate reads ranks from them, not from
    the process group."""
    wanted = {"RANK": topology.rank, "WORLD_SIZE": topology.count, "LOCAL_RANK": topology.node_rank}
    missing = {name: str(value) for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            with contextlib.suppress(KeyError):
                del os.environ[name]
