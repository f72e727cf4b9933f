"""The environment of a run, from files that the test writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from infinity.storage.arena import Arena
from infinity.tools.bench import report


def test_drive_of_a_partition_is_its_parent(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    disk = tmp_path / "sys/devices/nvme0n1"
    (disk / "queue").mkdir(parents=True)
    (disk / "nvme0n1p1").mkdir()
    (disk / "queue/scheduler").write_text("[none] mq-deadline\n")
    (disk / "device").mkdir()
    (disk / "device/model").write_text("FAST 9000\n")
    link = tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(disk / "nvme0n1p1")
    (disk / "nvme0n1p1/partition").write_text("1\n")
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.parent.mkdir(parents=True)
    mounts.write_text(
        f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / {tmp_path} rw,noatime - xfs /dev/b rw,noquota\n"
    )
    found = report.drive(tmp_path, tmp_path)
    assert (found["drive"], found["model"]) == ("nvme0n1", "FAST 9000")
    assert found["scheduler"] == "[none] mq-deadline"
    assert (found["file_system"], found["options"]) == ("xfs", "rw,noatime,noquota")


def test_a_fact_that_the_system_lacks_is_none(tmp_path: Path) -> None:
    found = report.drive(tmp_path, tmp_path)
    assert found["drive"] is None and found["file_system"] is None
    assert found["free_nbytes"] > 0


def test_description_of_this_machine_is_json(arena: Arena, tmp_path: Path) -> None:
    found = json.loads(json.dumps(report.environment_of([tmp_path], arena)))
    assert found["kernel"] == os.uname().release
    assert found["arena_nbytes"] == arena.capacity_nbytes
    assert found["paths"][0]["path"] == str(tmp_path)
    assert found["packages"]["torch"]
