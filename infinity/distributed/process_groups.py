"""New process groups of torch.distributed, which every rank finds under one name."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from infinity.errors import ConfigError
from infinity.private.torch import world


def new_group(
    group: Any,
    divided: Sequence[Sequence[int]],
    *,
    backend: str,
    timeout: timedelta,
    options: Any = None,
) -> Any:
    """Returns the new process group that this rank is in. Its ranks keep the order of `divided`.

    A collective call of all ranks of `group`. `divided`: the ranks of each new group, by their
    number in `group`; every rank is in one of them. `options`: of the backend.

    PyTorch finds the members of a group under its name. If `group` has all ranks of the job, each
    of them makes all of the groups, and their names are numbers that all ranks count alike. Else
    only members make a group, and its name is of them and `number_of_groups`: see
    `refuse_unequal_names`.
    """
    of_job, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    is_all_of_job = _has_all_of_job(group)
    found = None
    for ranks in divided:
        if not is_all_of_job and rank not in ranks:
            continue
        made = dist.new_group(
            [of_job[rank] for rank in ranks],
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=not is_all_of_job,
            sort_ranks=False,  # Rows of a gather are parts in the order of the caller's group.
        )
        if rank in ranks:
            # INV-19: row r of an operation is the part of rank r.
            assert dist.get_rank(made) == ranks.index(rank), "ranks of the group were sorted"
            found = made
    return found


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


def number_of_groups() -> int:
    """Returns the number of process groups that this rank is in."""
    return len(world.pg_names)


def refuse_unequal_names(group: Any, numbers: Sequence[int]) -> None:
    """Raises ConfigError if the ranks of `group` would wait for each other under other names.

    numbers: `number_of_groups` of each rank, by rank of `group`
    """
    other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    if other is not None and not _has_all_of_job(group):
        raise ConfigError(
            f"rank 0 is in {numbers[0]} process groups and rank {other} in {numbers[other]}: "
            "expected equally many, because PyTorch names a new group of some ranks of the job by "
            "that number. Put the ranks that offload this model into equally many groups, or "
            'offload it on all ranks of the job, or set distributed.exchange to "one_sided"'
        )


def _has_all_of_job(group: Any) -> bool:
    return dist.get_world_size(group) == dist.get_world_size()


class GroupSockets:
    """The sockets of a process group of gloo, which has no abort: where they end, every operation
    that waits for another rank fails. A wait of gloo is otherwise as long as the timeout of the
    group, if the other rank lives and is stuck."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}  # Number of the inode by descriptor.

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the sockets that the process opens in the block."""
        before = _sockets()
        yield
        self._found = dict(_sockets().items() - before.items())

    def shut_down(self) -> None:
        """Ends the connections that were noted and are still the same."""
        there = _sockets()
        for descriptor, inode in self._found.items():
            if there.get(descriptor) != inode:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
                # Gloo ends the process where a listener fails.
                if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    own.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """Returns the number of the inode of every open socket, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
