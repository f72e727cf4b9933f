"""The CPU: cores this process may use, instruction sets, NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from infinity.config.cores import cpu_quota, read_ranges
from infinity.tools.doctor.files import read_field, read_text
from infinity.tools.doctor.finding import Finding, degraded, ok

# Instruction sets that speed up arithmetic over flat buffers, by the kernel's names.
_X86 = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16")
_ARM = ("asimd", "fphp", "bf16", "sve", "sve2")


def examine(root: Path) -> Iterator[Finding]:
    """Yields the findings on cores, instruction sets and NUMA nodes."""
    yield check_cores(len(os.sched_getaffinity(0)), cpu_quota(root))
    yield check_instructions(os.uname().machine, *describe_cpu(root))
    nodes = read_ranges(read_text(root / "sys/devices/system/node/online"))
    status = root / "proc/self/status"
    yield check_numa(
        nodes,
        memory_nodes=read_ranges(read_field(status, "Mems_allowed_list")),
        cpu_nodes=cpu_nodes(root, nodes, read_ranges(read_field(status, "Cpus_allowed_list"))),
    )


def check_cores(num_cores: int, quota: float | None) -> Finding:
    """`num_cores` by affinity, `quota` in cores."""
    if quota is not None and quota < num_cores:
        return degraded(
            "cores",
            f"{num_cores}, but time for {quota:g} only (cgroup limit)",
            cost="threads beyond the limit stop one another for tens of milliseconds",
            remedy=f"Raise the container's limit, or set OMP_NUM_THREADS={max(1, int(quota))}.",
        )
    return ok("cores", str(num_cores))


def describe_cpu(root: Path) -> tuple[str, frozenset[str]]:
    """Returns the model and instruction sets of the first core. Arm has "Features" and no model."""
    cpuinfo = root / "proc/cpuinfo"
    model = read_field(cpuinfo, "model name") or "model not said"
    flags = read_field(cpuinfo, "flags") or read_field(cpuinfo, "Features") or ""
    return model, frozenset(flags.split())


def check_instructions(machine: str, model: str, flags: frozenset[str]) -> Finding:
    """`machine` is that of uname(2)."""
    subject = "instruction sets"
    known = _X86 if machine == "x86_64" else _ARM
    has = [name for name in known if name in flags]
    found = f"{model}: {', '.join(has) or 'none that matter here'}"
    if machine == "x86_64" and not {"avx2", "fma"} <= flags:
        return degraded(
            subject,
            found,
            cost="the optimizer's update on the host runs several times slower without AVX2",
            remedy="In a virtual machine: let it see the host's CPU (-cpu host).",
        )
    return ok(subject, found)


def cpu_nodes(root: Path, nodes: frozenset[int], cpus: frozenset[int]) -> frozenset[int]:
    """Returns the NUMA nodes of these cores."""
    folder = root / "sys/devices/system/node"
    return frozenset(
        node for node in nodes if cpus & read_ranges(read_text(folder / f"node{node}/cpulist"))
    )


def check_numa(
    nodes: frozenset[int], *, memory_nodes: frozenset[int], cpu_nodes: frozenset[int]
) -> Finding:
    """Judges the `nodes` of the machine, those of the allowed memory, and those of the allowed
    cores."""
    if len(nodes) <= 1:
        return ok("NUMA", "one node")
    allowed = memory_nodes & nodes or nodes
    if len(allowed) == 1 and cpu_nodes <= allowed:
        return ok("NUMA", f"bound to node {min(allowed)} of {len(nodes)}")
    return degraded(
        "NUMA",
        f"{len(nodes)} nodes, this process may use {len(allowed)} of them for memory and "
        f"{len(cpu_nodes) or len(nodes)} to run",
        cost="pages of the arena may lie far from the drive, the device or the core that uses them",
        remedy="numactl --cpunodebind=N --membind=N infinity train ..., with the node N that the "
        "drive and the device hang on, when one node's memory suffices.",
    )
