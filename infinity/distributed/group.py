"""From a process group of torch.distributed to connections between its ranks."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from infinity.distributed.wire.addresses import UNIX, Machine, choose_address, refusal, this_machine
from infinity.distributed.wire.connecting import Meeting, allow_sockets, listen
from infinity.distributed.wire.failures import tell_of_uncaught_exceptions
from infinity.distributed.wire.node_memory import NodeMemory, OwnMemory, map_memory
from infinity.distributed.wire.protocol import Peer, Purpose
from infinity.distributed.wire.transport import SILENCE_S, TIMEOUT_S, PeerTransport
from infinity.errors import CapacityError, ConfigError
from infinity.observe import Counters
from infinity.private.torch import world
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
    # The connections, which the engine takes. A plan has none.
    links: PeerTransport = None  # type: ignore[assignment]

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


def find_group(group: Any = None, *, timeout_s: float = TIMEOUT_S) -> RankTopology | None:
    """Returns the ranks that state is sharded over, connected, or None for a single one.

    `group` is a process group, a 1-D `DeviceMesh`, None for all ranks of torch.distributed, or what
    this function has returned. A collective call over the group. The caller closes the links.
    Raises RankError for a rank that does not come within `timeout_s`, ConfigError as `join`.
    """
    if isinstance(group, RankTopology):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ConfigError("a group was given, but torch.distributed is not initialized")
        _warn_of_processes_that_have_not_joined()
        return None
    group = process_group(group)
    if dist.get_world_size(group) == 1:
        return None
    found = join(
        store_of(group), dist.get_rank(group), dist.get_process_group_ranks(group), timeout_s
    )
    return replace(
        found, process_group=group, job_rank=dist.get_rank(), job_count=dist.get_world_size()
    )


def join(store: Any, rank: int, of_job: Sequence[int], timeout_s: float) -> RankTopology:
    """Connects the ranks of a group, which find each other in `store`; there may be no process
    group yet. `of_job`: the number of each among all ranks of the job.

    A collective call. Raises RankError for a rank that does not come within `timeout_s` or is gone,
    and ConfigError, on all ranks, if a rank cannot be reached from another machine or has too few
    descriptors.
    """
    meeting, is_over = Meeting(store, rank, of_job), False
    try:
        # A rank that comes late finds word of a failure in the store before this listener ends.
        with ExitStack() as failed, meeting.ending_together():
            remedy = "; distributed.timeout_s waits longer"
            machines = meeting.all_gather("machines", this_machine(), timeout_s, remedy)
            links = _connect(meeting, rank, machines, of_job, timeout_s, failed)
            is_over = True
            failed.pop_all()
    finally:
        meeting.end(is_over=is_over)
    here = [other for other in range(len(of_job)) if machines[rank].is_node_of(machines[other])]
    return RankTopology(
        process_group=None,
        rank=rank,
        count=len(of_job),
        job_rank=of_job[rank],
        job_count=len(of_job),
        node_rank=here.index(rank),
        node_count=max(len(here), int(os.environ.get("LOCAL_WORLD_SIZE", 0))),
        machines=tuple(machines),
        links=links,
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


def store_of(group: Any) -> Any:
    """Returns the key-value store in which the ranks of a process group have found each other.

    Raises ConfigError for a backend that has none.
    """
    known: Any = world.pg_map
    store = known[group or dist.group.WORLD][1]
    if store is None:
        raise ConfigError(
            f"the process group of backend {dist.get_backend(group)} has no store; expected one of "
            "torch.distributed's own backends, gloo or nccl"
        )
    return store


def _connect(
    meeting: Meeting,
    rank: int,
    machines: Sequence[Machine],
    of_job: Sequence[int],
    timeout_s: float,
    failed: ExitStack,
) -> PeerTransport:
    """Returns open links between the ranks. `failed` ends the listener if they are not."""
    few = ""
    try:
        allow_sockets(len(machines))
    except ConfigError as error:
        few = f"on rank {rank}: {error}"
    address = choose_address(rank, machines)
    # Strangers may connect before any rank is admitted.
    backlog = len(Purpose) * len(machines) + _STRANGERS
    listener, place = listen(address or UNIX, backlog)
    failed.callback(listener.close)
    secret, host = secrets.token_bytes(32), machines[rank].host
    me = Peer(rank, host, os.getpid(), place if address else None, secret, of_job[rank])
    # All ranks are here: only one that is stuck or gone since then does not come.
    of_all = meeting.all_gather("peers", (me, few), SILENCE_S)
    peers, refusals = zip(*of_all, strict=True)
    if any(refusals):
        raise ConfigError(few or next(filter(None, refusals)))
    unreachable = {peer.rank: machines[peer.rank] for peer in peers if not peer.address}
    if unreachable:
        raise ConfigError(refusal(unreachable))
    links = PeerTransport(rank, peers, listener, timeout_s)
    links.open()
    tell_of_uncaught_exceptions(links.failures)
    return links


def share_memory(group: RankTopology, counters: Counters, arena: Arena) -> None:
    """Maps the memory of the other ranks of this machine, and learns which of them map this rank's.
    A collective call. They read `arena` where it is a file in memory."""
    boot, own, links = group.machines[group.rank].boot, None, group.links
    if group.has_neighbours:
        try:
            own = OwnMemory(group.count, boot, arena)
        except (OSError, CapacityError) as error:
            _log.info("rank %d shares no memory: %s", group.rank, error)
    offers = links.all_gather_objects("offers of memory", own and own.offer)
    mapped = {}
    for rank, offer in enumerate(offers):
        found = map_memory(offer, boot) if offer is not None and rank != group.rank else None
        if found is not None:
            mapped[rank] = found
    links.share(counters, NodeMemory(own, mapped, ()))  # Before another rank lends its memory.
    known = links.all_gather_objects("memory is mapped", set(mapped))
    arena.close_file()
    if own is not None:
        own.close_files()
    readers = [rank for rank, mapped_there in enumerate(known) if group.rank in mapped_there]
    links.share(counters, NodeMemory(own, mapped, readers))
    _log.info("rank %d: %s", group.rank, links.memory.routes(group.count - 1))
