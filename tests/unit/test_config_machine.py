"""The memory a run may take: what the kernel has, or less inside a memory cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.config.machine import host_memory
from infinity.errors import CapacityError
from infinity.sizes import GIB, KIB, MIB
from infinity.storage import arena


def machine(root: Path, files: dict[str, str]) -> Path:
    """A file system root that holds `files` and 16 GiB of available memory."""
    meminfo = f"MemTotal: {32 * GIB // KIB} kB\nMemAvailable:   {16 * GIB // KIB} kB\n"
    for name, text in ({"proc/meminfo": meminfo} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_outside_cgroups_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path, {})).nbytes == 16 * GIB


def test_cgroup_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert host_memory(machine(tmp_path, files)).nbytes == 16 * GIB


def test_cgroup_v2_leaves_its_limit_less_use_without_droppable_cache(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/jobs/one\n",
        "sys/fs/cgroup/jobs/one/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/jobs/one/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/jobs/one/memory.stat": (f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n"),
    }
    assert host_memory(machine(tmp_path, files)).nbytes == 3 * GIB


def test_cgroup_above_limits_too(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/jobs/one\n"}
    for group, limit in (("jobs/one", 8 * GIB), ("jobs", 2 * GIB)):
        files[f"sys/fs/cgroup/{group}/memory.max"] = str(limit)
        files[f"sys/fs/cgroup/{group}/memory.current"] = str(512 * MIB)
        files[f"sys/fs/cgroup/{group}/memory.stat"] = ""
    assert host_memory(machine(tmp_path, files)).nbytes == 1536 * MIB


def test_cgroup_v1_is_read_where_there_is_no_v2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(256 * MIB),
        "sys/fs/cgroup/memory/box/memory.stat": "total_inactive_file 0\n",
    }
    assert host_memory(machine(tmp_path, files)).nbytes == 768 * MIB


def test_cgroup_v1_limits_beside_a_v2_hierarchy_without_memory(tmp_path: Path) -> None:
    """As systemd's hybrid mode has it; inside a container the own group is the root of the
    mount."""
    files = {
        "proc/self/cgroup": "9:memory:/docker/abc\n0::/docker/abc\n",
        "sys/fs/cgroup/unified/cgroup.procs": "1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.stat": (
            f"total_inactive_file {256 * MIB}\ntotal_active_file {256 * MIB}\n"
        ),
    }
    assert host_memory(machine(tmp_path, files)).nbytes == 1536 * MIB


def test_a_limit_without_statistics_still_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/jobs\n",
        "sys/fs/cgroup/jobs/memory.max": str(GIB),
        "sys/fs/cgroup/jobs/memory.current": str(256 * MIB),
    }
    assert host_memory(machine(tmp_path, files)).nbytes == 768 * MIB


def test_a_budget_beyond_a_cgroup_limit_is_refused_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "proc/self/cgroup": "0::/jobs/one\n",
        "sys/fs/cgroup/jobs/memory.max": str(40 * MIB),
        "sys/fs/cgroup/jobs/memory.current": str(30 * MIB),
        "sys/fs/cgroup/jobs/memory.stat": "",
    }
    root = machine(tmp_path, files)
    monkeypatch.setattr(arena, "host_memory", lambda: host_memory(root))
    with pytest.raises(CapacityError, match=r"40.0 MiB in .*/jobs/memory.max") as caught:
        arena.Arena(12 * MIB)
    assert caught.value.available_nbytes == int(0.95 * 10 * MIB)
    arena.Arena(9 * MIB).close()


def test_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(GIB),
        "sys/fs/cgroup/memory.current": str(2 * GIB),
        "sys/fs/cgroup/memory.stat": "",
    }
    assert host_memory(machine(tmp_path, files)).nbytes == 0


def test_this_machine_has_memory() -> None:
    assert host_memory().nbytes > 0
