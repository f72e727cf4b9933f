"""From a process group of torch.distributed to connections between its ranks."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from infinity.distributed.addresses import (
    LOOPBACK,
    Machine,
    choose_address,
    refusal,
    this_machine,
)
from infinity.distributed.connecting import allow_sockets
from infinity.distributed.messages import Purpose
from infinity.distributed.node_memory import NodeMemory, OwnMemory, map_memory
from infinity.distributed.peer import Peer
from infinity.distributed.transport import PeerTransport
from infinity.errors import CapacityError, ConfigError
from infinity.observe import Counters
from infinity.storage.arena import Arena

_log = logging.getLogger("infinity")
_STRANGERS = 128


@dataclass(frozen=True, slots=True)
class RankTopology:
    """The data-parallel ranks of this job, as far as the engine needs to know them."""

    process_group: Any
    rank: int
    count: int
    job_rank: int  # Among all ranks of the job, of which this group may be a part.
    job_count: int
    node_rank: int  # Among the ranks of this node.
    node_count: int  # Ranks of this node, those of other groups included where torchrun says so.
    machines: tuple[Machine, ...]  # By rank of the group.

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the group on each node, nodes in the order of their first rank."""
        found: list[list[int]] = []
        for rank, machine in enumerate(self.machines):
            for node in found:
                if machine.is_node_of(self.machines[node[0]]):
                    node.append(rank)
                    break
            else:
                found.append([rank])
        return tuple(map(tuple, found))

    @property
    def has_neighbours(self) -> bool:
        """Whether another rank of the group runs on this boot of this machine."""
        boot = self.machines[self.rank].boot
        return bool(boot) and sum(machine.boot == boot for machine in self.machines) > 1


def path_of_rank(path: Path, rank: int) -> Path:
    """A rank's own directory in a configured swap directory."""
    return path / f"rank-{rank}"


def path_of_job(path_of_rank: Path) -> Path:
    """The configured swap directory around a rank's own."""
    return path_of_rank.parent


def find_group(group: Any = None) -> RankTopology | None:
    """Returns the ranks that state is sharded over, or None for a single one.

    `group` is a process group, a 1-D `DeviceMesh`, or None for all ranks of torch.distributed. A
    collective call over the group: it learns which ranks share a node.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ConfigError("a group was given, but torch.distributed is not initialized")
        _warn_of_processes_that_have_not_joined()
        return None
    group = process_group(group)
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    if count == 1:
        return None
    machines: list[Any] = [None] * count
    dist.all_gather_object(machines, this_machine(), group=group)
    here = [other for other in range(count) if machines[rank].is_node_of(machines[other])]
    node_count = max(len(here), int(os.environ.get("LOCAL_WORLD_SIZE", 0)))
    return RankTopology(
        process_group=group,
        rank=rank,
        count=count,
        job_rank=dist.get_rank(),
        job_count=dist.get_world_size(),
        node_rank=here.index(rank),
        node_count=node_count,
        machines=tuple(machines),
    )


def _warn_of_processes_that_have_not_joined() -> None:
    """Without a process group, every process of torchrun offloads a whole model by itself."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _log.warning(
            "this is one of %s processes that have not joined, so it offloads the whole model by "
            "itself; to divide the model, call infinity.offload after TrainingArguments, "
            "Accelerator() or torch.distributed.init_process_group",
            os.environ["WORLD_SIZE"],
        )


def process_group(group: Any) -> Any:
    """Returns the process group behind a 1-D `DeviceMesh`, or the group itself.

    Raises ConfigError if this process is not in it.
    """
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ConfigError(
                f"expected a mesh of one dimension, got {group.ndim}; give one slice of it, such "
                'as mesh["dp"]'
            )
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ConfigError("this process is not a member of the group that was given")
    return group


def connect(group: RankTopology, counters: Counters, arena: Arena) -> PeerTransport:
    """Returns the transport between the ranks, not open yet. A collective call.

    The other ranks of this machine read `arena` where it is a file in memory. Raises ConfigError,
    on all ranks, if a rank cannot be reached from another machine, or has too few descriptors.
    """
    few = ""
    try:
        allow_sockets(group.count)
    except ConfigError as error:
        few = f"on rank {group.rank}: {error}"
    address = choose_address(group.rank, group.machines)
    # Strangers may connect before any rank is admitted.
    backlog = len(Purpose) * group.count + _STRANGERS
    listener = socket.create_server((address or LOOPBACK, 0), backlog=backlog)
    me = Peer(
        group.rank,
        group.machines[group.rank].host,
        os.getpid(),
        address,
        listener.getsockname()[1],
        secrets.token_bytes(32),
    )
    peers, refusals = zip(*_of_all(group, (me, few)), strict=True)
    if any(refusals):
        listener.close()
        raise ConfigError(few or next(filter(None, refusals)))
    unreachable = {peer.rank: group.machines[peer.rank] for peer in peers if not peer.address}
    if unreachable:
        listener.close()
        raise ConfigError(refusal(unreachable))
    transport = PeerTransport(group.rank, peers, listener, counters, _share_memory(group, arena))
    _tell_of_uncaught_exceptions(transport)
    return transport


def _share_memory(group: RankTopology, arena: Arena) -> NodeMemory:
    """Maps the memory of the other ranks of this machine, and learns which of them map this rank's.
    A collective call."""
    boot, own = group.machines[group.rank].boot, None
    if group.has_neighbours:
        try:
            own = OwnMemory(group.count, boot, arena)
        except (OSError, CapacityError) as error:
            _log.info("rank %d shares no memory: %s", group.rank, error)
    offers = _of_all(group, own and own.offer)
    mapped = {}
    for rank, offer in enumerate(offers):
        found = map_memory(offer, boot) if offer is not None and rank != group.rank else None
        if found is not None:
            mapped[rank] = found
    readers = [
        rank for rank, known in enumerate(_of_all(group, set(mapped))) if group.rank in known
    ]
    arena.close_file()
    if own is not None:
        own.close_files()
    memory = NodeMemory(own, mapped, readers)
    _log.info("rank %d: %s", group.rank, memory.routes(group.count - 1))
    return memory


def _of_all(group: RankTopology, local: Any) -> list[Any]:
    """Returns every rank's object, by rank. A collective call."""
    gathered: list[Any] = [None] * group.count
    dist.all_gather_object(gathered, local, group=group.process_group)
    return gathered


def _tell_of_uncaught_exceptions(transport: PeerTransport) -> None:
    """Sends an uncaught exception to the other ranks, which then name the cause."""
    before, known = sys.excepthook, weakref.ref(transport)

    def tell(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        living = known()
        if living is not None:
            living.abort(f"{kind.__name__}: {error}")
        before(kind, error, traceback)

    sys.excepthook = tell
