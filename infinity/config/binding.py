"""Binds the threads of a rank to NUMA nodes, so that its memory lies beside the cores that use it.

Ranks that share a machine otherwise run on all of its cores, and their pages lie where the thread
that touches them first happens to run: half of all copies and updates then cross to another node.
`torchrun --numa-binding=node` does the same; what it leaves to do here is nothing.

Sources: sched_setaffinity(2), which is of one thread; set_mempolicy(2): a page lies on the node of
the thread that touches it first; the kernel's Documentation/ABI/stable/sysfs-devices-node.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Set
from pathlib import Path

from infinity.config.cores import read_ranges, threads_here
from infinity.errors import ConfigError

BINDING_VARIABLE = "INFINITY_NUMA_BINDING"
_CHOICES = ("node", "none")


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether ranks are bound, as INFINITY_NUMA_BINDING says: "node" (default) or "none". Raises
    ConfigError."""
    word = environment.get(BINDING_VARIABLE, "") or "node"
    if word not in _CHOICES:
        raise ConfigError(
            f'{BINDING_VARIABLE}: expected "node" or "none", got {word!r}; "none" leaves the '
            "threads of a rank where they are"
        )
    return word == "node"


def cores_by_node(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """Returns the cores of each NUMA node of the machine."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            text = (folder / "cpulist").read_text()
            found[int(folder.name.removeprefix("node"))] = read_ranges(text)
    return found


def nodes_of_rank(
    nodes: Mapping[int, Set[int]],
    allowed: Set[int],
    *,
    rank: int,
    num_ranks: int,
    device_node: int | None,
) -> tuple[int, ...]:
    """Returns the NUMA nodes that one of the `num_ranks` of a machine is bound to; empty if it
    stays as it is. Pure.

    nodes: the cores of each node
    allowed: the cores of the rank's affinity, which it never leaves
    device_node: the node of the rank's device; None if the device is the host, or sysfs does not
        say. Ranks then take the nodes in turn, so that all cores are used.
    """
    here = sorted(node for node, cores in nodes.items() if cores & allowed)
    if num_ranks < 2 or len(here) < 2:
        return ()
    if device_node is not None:
        return (device_node,) if device_node in here else ()
    return tuple(here[rank % len(here) :: num_ranks])


def bind_rank(
    *,
    rank: int,
    num_ranks: int,
    device_node: int | None,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> tuple[int, ...]:
    """Binds all threads of this process to NUMA nodes, and returns these; empty if nothing changes.

    Called before host memory is touched. Threads that are bound more narrowly stay so. `rank` is
    that among the `num_ranks` of the machine. Raises ConfigError as `is_wanted`.
    """
    if not is_wanted(os.environ if environment is None else environment):
        return ()
    nodes = cores_by_node(root)
    allowed = os.sched_getaffinity(0)
    chosen = nodes_of_rank(nodes, allowed, rank=rank, num_ranks=num_ranks, device_node=device_node)
    cores = {core for node in chosen for core in nodes[node]} & allowed
    if not chosen or cores == allowed:
        return ()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # A thread may have ended.
            own = os.sched_getaffinity(int(task)) & cores
            if own:
                os.sched_setaffinity(int(task), own)
    threads_here.cache_clear()
    return chosen
