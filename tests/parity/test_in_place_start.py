"""The start over a base of very many tensors: headers are read, and the work per tensor is constant."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

from tests.support.quantized import CONFIG_NAME, INDEX_NAME, tiny_causal_lm, write_quantized

from .in_place import Base, config_of, over
from .test_in_place_bytes import adapted

EXPERTS = 512  # Of three matrices each, of three tensors each.
LAYERS = 4


def write_again(source: Path, target: Path, num_layers: int) -> int:
    """Writes headers in which the last layer of a one-shard INT4 base stands so many times, over a
    file without blocks. Returns the number of tensors."""
    target.mkdir()
    (file,) = source.glob("*.safetensors")
    with file.open("rb") as opened:
        (nbytes,) = struct.unpack("<Q", opened.read(8))
        entries = json.loads(opened.read(nbytes))
    made: dict[str, Any] = {"__metadata__": entries.pop("__metadata__")}
    end = 0
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        for layer in range(1, num_layers + 1) if ".layers.1." in name else [0]:
            again = re.sub(r"\.layers\.1\.", f".layers.{layer}.", name)
            made[again] = {**entry, "data_offsets": [end, end + last - first]}
            end += last - first
    header = json.dumps(made).encode()
    with (target / file.name).open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + end)
    places = dict.fromkeys(list(made)[1:], file.name)
    (target / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((source / CONFIG_NAME).read_text())
    (target / CONFIG_NAME).write_text(json.dumps({**config, "num_hidden_layers": num_layers + 1}))
    return len(places)


class Counted:
    """Calls of functions, of Python and of C, and the bytes that system calls read, in a block."""

    num_calls = 0

    def __enter__(self) -> Counted:
        self._before = self._read_nbytes()
        sys.setprofile(self._count)
        return self

    def _count(self, _frame: Any, event: str, _argument: Any) -> None:
        self.num_calls += event in ("call", "c_call")

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.read_nbytes = self._read_nbytes() - self._before

    @staticmethod
    def _read_nbytes() -> int:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["rchar"])


def test_the_start_reads_headers_only_and_its_work_grows_with_their_number(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "n_routed_experts": EXPERTS, "n_group": 1}
    plain = tiny_causal_lm("kimi-k2", hidden_size=64, moe_intermediate_size=64, **sizes)
    write_quantized(plain, tmp_path / "one", "int4", num_shards=1)
    del plain
    found = []
    for num_layers in (1, LAYERS):
        directory = tmp_path / f"{num_layers} layers"
        num_tensors = write_again(tmp_path / "one", directory, num_layers)
        with Counted() as counted, over(Base.at(directory), config_of(tmp_path), adapted) as opened:
            sys.setprofile(None)
            _, engine = opened
            stored = [unit for unit in engine.store.units if unit.stored is not None]
            assert len(stored) >= num_layers
            assert engine.counters.snapshot().get("shard_read_nbytes", 0) == 0
        found.append((num_tensors, counted.num_calls))
    # The first run has also read what it imported.
    (shard,) = directory.glob("*.safetensors")
    with shard.open("rb") as file:
        (header_nbytes,) = struct.unpack("<Q", file.read(8))
    texts_nbytes = sum(each.stat().st_size for each in directory.glob("*.json"))
    # Some of it twice: for the places of the tensors, and for the identity of the files.
    assert counted.read_nbytes <= 3 * (header_nbytes + texts_nbytes) < 0.75 * shard.stat().st_size
    (few, calls_of_few), (many, calls_of_many) = found
    assert few > 4000 and many > 3.9 * few
    assert calls_of_many <= 1.1 * LAYERS * calls_of_few
