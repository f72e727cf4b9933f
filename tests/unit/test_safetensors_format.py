"""The safetensors file by hand, compared with the library."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsReader,
    SafetensorsWriter,
    TensorInfo,
)
from infinity.errors import CorruptionError, StorageError, UnsupportedError

TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "index": torch.arange(5),
}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    infos = [
        TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    writer = SafetensorsWriter(path, infos, metadata={"format": "pt"})
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    writer.finish()
    writer.commit()
    writer.close()


def rewrite_header(path: Path, change) -> None:
    """Applies `change` to the header's entries and keeps the data as it is."""
    content = path.read_bytes()
    (header_nbytes,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + header_nbytes])
    change(entries)
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + header_nbytes :])


def test_library_loads_what_is_written_in_any_order(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, TENSORS)

    loaded = safetensors.torch.load_file(path)

    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def test_reader_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(TENSORS, path, metadata={"format": "pt"})

    with SafetensorsReader(path) as reader:
        assert reader.metadata == {"format": "pt"}
        assert reader.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            read = reader.read(name)
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


def test_every_tensor_starts_at_a_multiple_of_its_item_size(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, TENSORS)

    with SafetensorsReader(path) as reader:
        for info in reader.tensors.values():
            assert info.offset_nbytes % info.dtype.itemsize == 0, info


@pytest.mark.parametrize("kept_nbytes", [0, 5, 8, 100, -1])
def test_truncated_file_is_refused_on_opening(tmp_path, kept_nbytes):
    """A file cut in its length, its header or its last tensor is known by its size alone."""
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:kept_nbytes])

    with pytest.raises(CorruptionError, match=r"a\.safetensors"):
        SafetensorsReader(path)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    path.write_bytes(path.read_bytes() + b"x")

    with pytest.raises(CorruptionError, match="header accounts for"):
        SafetensorsReader(path)


def test_header_that_is_not_json_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 16) + b"version https://")

    with pytest.raises(CorruptionError, match="not valid JSON"):
        SafetensorsReader(path)


def shift(entries, nbytes):
    for name, entry in entries.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + nbytes for offset in entry["data_offsets"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e["weight"].update(shape=[3, 5]), "'weight'.*needs 60 bytes.*gives it 48"),
        (lambda e: e["weight"].update(shape=[3, -4]), "'weight' is malformed.*is -4"),
        (lambda e: e["weight"].pop("dtype"), "entry of tensor 'weight' is malformed"),
        (lambda e: e.pop("weight"), "overlap or leave a hole|accounts for"),
        (lambda e: shift(e, 1), "expected 0: tensors overlap or leave a hole"),
    ],
)
def test_header_that_contradicts_itself_is_refused(tmp_path, change, message):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    rewrite_header(path, change)

    with pytest.raises(CorruptionError, match=message):
        SafetensorsReader(path)


def test_a_dtype_that_torch_lacks_stops_only_its_own_tensor(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    rewrite_header(path, lambda entries: entries["weight"].update(dtype="F4"))

    with SafetensorsReader(path) as reader:
        assert torch.equal(reader.read("half"), TENSORS["half"])
        with pytest.raises(UnsupportedError, match="'weight' has dtype F4"):
            reader.read("weight")


def test_scales_of_eight_bit_exponents_are_read(tmp_path):
    scales = {"scale": torch.tensor([1.0, 2.0, 0.5]).to(torch.float8_e8m0fnu)}
    safetensors.torch.save_file(scales, tmp_path / "a.safetensors")
    with SafetensorsReader(tmp_path / "a.safetensors") as reader:
        assert reader.read("scale").float().tolist() == [1.0, 2.0, 0.5]


def test_missing_file_is_a_storage_error_with_its_path(tmp_path):
    with pytest.raises(StorageError, match="nowhere") as caught:
        SafetensorsReader(tmp_path / "nowhere.safetensors")
    assert caught.value.operation == "open"


def test_file_that_is_not_committed_leaves_the_old_one_alone(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"weight": torch.zeros(4)})

    writer = SafetensorsWriter(
        path, [TensorInfo(name="weight", dtype=torch.float32, shape=(4,))], metadata={}
    )
    writer.write("weight", torch.ones(4))
    writer.close()

    assert torch.equal(safetensors.torch.load_file(path)["weight"], torch.zeros(4))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
