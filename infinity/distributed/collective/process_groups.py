"""The process groups of the ranks' devices, of one name on every rank, and their operations."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity.distributed.group import RankTopology
from infinity.distributed.wire import transport
from infinity.distributed.wire.failures import naming_lost_ranks
from infinity.errors import ConfigError, InfinityError
from infinity.private.torch import use_torchcomms_enabled, world

# Of an operation that every rank has begun. A device may be far behind its host; the links find out
# much sooner who is gone.
TIMEOUT_S = 600.0
_ABORT_S = 60.0  # An abort may wait for an operation of the program's own that lost a rank.
_MOST_CTAS = 16  # Of a kernel. Gathers, sums and 32 of the program's own fit 64 multiprocessors.
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_WAITS = "makes each operation between devices wait on the host, expected one that is only issued"
_BLOCKING = {
    "TORCH_NCCL_BLOCKING_WAIT": _WAITS,
    "NCCL_BLOCKING_WAIT": _WAITS,  # Its name before PyTorch 2.2, which PyTorch still reads.
    "CUDA_LAUNCH_BLOCKING": _WAITS,
    "NCCL_LAUNCH_ORDER_IMPLICIT": (
        "makes NCCL take the operations of two groups on one device for an error"
    ),
}


class DeviceGroups:
    """Process groups: operations of one group do not wait for those of another. `gathers` and
    `sums` have all ranks, `node_gathers` those of this node, where they gather by themselves. Any
    thread."""

    def __init__(self, gathers: Any, sums: Any, node_gathers: Any = None) -> None:
        self.gathers = gathers
        self.sums = sums
        self.node_gathers = node_gathers
        self._lock = threading.Lock()
        self.is_aborted = False  # An operation may wait for ever then.
        self._ending: list[threading.Thread] = []
        self._end_s = 0.0

    def leave(self) -> None:
        """Shuts the groups down, which frees the memory of their communicators, after all ranks
        have made their last operation. Does nothing for a group that the backend or the program has
        shut down, and after an abort: a shutdown of NCCL waits for one, without a limit.

        A group of gloo is left as it is: it holds no device memory, and its shutdown would wait for
        a rank that is stuck in an operation. The group stays registered: `destroy_process_group`
        would free its name, and the next group of these ranks would meet under the same keys of the
        store, where the addresses of this one are.
        """
        for group in () if self.is_aborted else self._all:
            with contextlib.suppress(Exception):
                if dist.get_backend(group) != "gloo":
                    group.shutdown()

    def abort(self) -> None:
        """Ends every wait of this rank in an operation of the groups. Waits until the aborts are
        over, at most until a minute after the first call. A later call also ends operations that
        the first one has not reached: those of a communicator that NCCL was still making.

        All at once, each in a thread of its own: an abort of NCCL waits for what is on the device,
        and may wait there for an operation of another group, which only that group's abort ends.
        `ncclGroupStart` in this thread would not join them: PyTorch calls NCCL in further threads.
        """
        with self._lock:
            if not self.is_aborted:
                self.is_aborted, self._end_s = True, time.monotonic() + _ABORT_S
            if not any(thread.is_alive() for thread in self._ending):
                self._ending = []
                for group in self._all:
                    thread = threading.Thread(
                        target=_abort, args=(group,), name="infinity-abort", daemon=True
                    )
                    thread.start()
                    self._ending.append(thread)
        for thread in self._ending:
            thread.join(max(0.0, self._end_s - time.monotonic()))

    @property
    def _all(self) -> list[Any]:
        groups = (self.gathers, self.sums, self.node_gathers)
        return [group for group in groups if group is not None]


def _abort(group: Any) -> None:
    with contextlib.suppress(Exception):
        group.abort()


def device_groups(
    group: RankTopology, device: torch.device, *, over_nodes: bool = False
) -> DeviceGroups:
    """Returns process groups of their own for the ranks' devices; `leave` ends them.

    `over_nodes`: the ranks of each node have a group, too. Operations of other groups are issued in
    another order. A collective call. Raises ConfigError.
    """
    backend = dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(backend):
        raise ConfigError(
            f'distributed.exchange: "collective" between {device.type} devices needs the backend '
            f"{backend!r} of torch.distributed, which this build of PyTorch lacks; "
            'set it to "one_sided"'
        )
    if backend == "nccl":
        _refuse_split(group)
    ranks = [range(group.count)]
    return DeviceGroups(
        _device_group(group, backend, ranks),
        _device_group(group, backend, ranks),
        _device_group(group, backend, group.nodes) if over_nodes else None,
    )


def refuse_blocking_calls() -> None:
    """Raises ConfigError where PyTorch would not issue the operations of the devices' groups at
    once, or could not make these groups. Where an operation waits on the host for all ranks, the
    thread that issues it does not play the log that another rank waits for."""
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes each operation between devices wait on the host "
            "for all ranks, expected one that is only issued; set it to INFO, or set "
            'distributed.exchange to "one_sided"'
        )
    for name, what in _BLOCKING.items():
        if _is_on(os.environ.get(name, "")):
            raise ConfigError(
                f"{name}={os.environ[name]} {what}; unset it, or set distributed.exchange to "
                '"one_sided"'
            )
    if use_torchcomms_enabled is not None and use_torchcomms_enabled():  # And it is installed.
        raise ConfigError(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 sorts the ranks of a new group, expected the order "
            'of the engine; set it to 0, or set distributed.exchange to "one_sided"'
        )


def _is_on(value: str) -> bool:
    """Whether PyTorch and NCCL read the value of an environment variable as true."""
    return value.lower() not in ("", "0", "n", "no", "off", "f", "false")


def _device_group(group: RankTopology, backend: str, divided: Sequence[Sequence[int]]) -> Any:
    # An abort ends what NCCL waits for; gloo goes on to its timeout. Ranks enter operations
    # within PATIENCE_S of each other, so one that lasts longer has lost a rank.
    timeout = timedelta(seconds=TIMEOUT_S if backend == "nccl" else transport.SILENCE_S)
    options = _nccl_options(timeout) if backend == "nccl" else None
    with _watchdog_that_ends_no_process():
        return new_group(
            group.process_group, divided, backend=backend, timeout=timeout, options=options
        )


def _nccl_options(timeout: timedelta) -> Any:
    """Returns the options of a group whose kernels fit on a device beside those of others.

    Kernels of two communicators that wait for other ranks must be on the device at once, or each
    may wait for what the other one keeps off it. NCCL takes up to 32 CTAs for each, about one for a
    multiprocessor, which the device may not have for gathers, sums and the program's own. Source:
    NCCL's user guide, "Using multiple NCCL communicators concurrently".
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MOST_CTAS
    options._timeout = timeout  # noqa: SLF001  PyTorch warns where it is not the group's.
    return options


def _refuse_split(group: RankTopology) -> None:
    """Raises ConfigError where making a group would wait for ranks that do not offload.

    With `init_process_group(device_id=...)` NCCL makes further groups by ncclCommSplit, in which
    all ranks of the job take part.
    """
    world = dist.group.WORLD
    if getattr(world, "bound_device_id", None) is not None and group.count < group.job_count:
        raise ConfigError(
            f"init_process_group(device_id=...) makes all {group.job_count} ranks take part in "
            f"each new group, and {group.count} of them offload this model; leave device_id out, "
            'or set distributed.exchange to "one_sided"'
        )


@contextlib.contextmanager
def _watchdog_that_ends_no_process() -> Iterator[None]:
    """Makes groups whose watchdog ends no process, in the block.

    The watchdog of NCCL would end the process when another rank is gone, before the transport has
    named that rank. 2: it aborts the communicators of the group only. A value that is there is no
    choice of the user for these groups: torchrun sets 1 in every process. Source: PyTorch's
    documentation of ProcessGroupNCCL's environment variables.
    """
    before = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "2"
    try:
        yield
    finally:
        del os.environ[_WATCHDOG]
        if before is not None:
            os.environ[_WATCHDOG] = before


class GroupOperations:
    """The operations of one process group: as `DeviceExchange` needs them. Made by `Collectives`.

    `count` is the number of its ranks; `told` surrounds each operation.
    """

    def __init__(
        self, group: Any, count: int, told: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._group = group
        self.count = count
        self._told = told

    def all_gather(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Every rank's `source`, uint8 (n,), into `target`, uint8 (count * n,), in rank order. On
        the devices, in the stream that is current."""
        with self._told():
            _all_gather(target, source, group=self._group)

    def all_to_all(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Row r of `source` to row `rank` of rank r's `target`: both (count, n), of one dtype."""
        with self._told():
            dist.all_to_all_single(
                target.view(torch.uint8), source.view(torch.uint8), group=self._group
            )


@contextlib.contextmanager
def operating(groups: DeviceGroups, links: transport.PeerTransport) -> Iterator[None]:
    """Surrounds an operation of the groups. Raises as `naming_lost_ranks`."""
    if groups.is_aborted:  # An operation on an aborted group may wait for ever.
        links.check()
        raise InfinityError("between devices of ranks: the operations were ended")
    with naming_lost_ranks(links.failures):
        yield


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
