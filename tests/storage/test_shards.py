"""Files of a frozen base: which directory a read came from, in the words of a trace."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader
from infinity.sizes import PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.storage.protocol import Priority
from infinity.storage.shards import ShardFiles, ShardRun

from .conftest import OpenEngine


def test_a_read_names_the_directory_of_its_drive_also_after_close(
    tmp_path: Path, arena: Arena, open_any: OpenEngine
) -> None:
    """A trace is written when a run has ended. `infinity spread` leaves links to other drives."""
    (tmp_path / "drive").mkdir()
    (tmp_path / "base").mkdir()
    shard, link = tmp_path / "drive/a.safetensors", tmp_path / "base/a.safetensors"
    save_file({"w": torch.arange(PAGE_NBYTES, dtype=torch.int32)}, shard)
    link.symlink_to(shard)
    with SafetensorsReader(link) as reader:
        identity = reader.identity()
    files = ShardFiles(open_any("threads"), [identity], verify=True)
    run = ShardRun(str(link), 0, PAGE_NBYTES, 0)
    read = files.read([run], address=arena.address, priority=Priority.FORWARD, label="w")
    read.wait()
    files.close()
    ((file, *_),) = read.passages()
    assert files.path_of(file) == str(tmp_path / "drive")
