"""Reads of headers and of a run's own files that fail or end early, one after the other."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from infinity.checkpoint import weight_source
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader
from infinity.config import SwapConfig
from infinity.errors import CorruptionError, InfinityError, StorageError
from infinity.tools.training import program
from infinity.tools.training.job_data import tokenize
from infinity.tools.training.tokenizers import ByteTokenizer
from tests.train.jobs import job_table

PLAIN = os.pread
SHAPE = {
    "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": 256,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MOST_RUNGS = 200


def spoil(monkeypatch: pytest.MonkeyPatch, directory: Path, rung: int, mode: str) -> list[str]:
    """Makes the `rung`-th pread of a file below `directory` fail, or return half. Returns the names
    of the files that are read, up to that one."""
    names: list[str] = []

    def read(fd: int, nbytes: int, offset: int) -> bytes:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if len(names) < rung and path.startswith(str(directory)):
            names.append(Path(path).name)
            if len(names) == rung:
                if mode == "EIO":
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return PLAIN(fd, nbytes, offset)[: nbytes // 2]
        return PLAIN(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", read)
    return names


@pytest.mark.parametrize("mode", ["EIO", "short"])
def test_a_header_that_cannot_be_read_is_an_error_with_its_file(tmp_path, monkeypatch, mode):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8)}, file)
    for rung in (1, 2):
        with monkeypatch.context() as patch:
            spoil(patch, tmp_path, rung, mode)
            expected = StorageError if mode == "EIO" else CorruptionError
            with pytest.raises(expected, match=r"model\.safetensors") as caught:
                SafetensorsReader(file)
            assert caught.value.errno == (errno.EIO if mode == "EIO" else errno.EILSEQ)


def test_a_file_whose_header_grew_beyond_all_bounds_is_not_the_known_one(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8)}, file)
    with SafetensorsReader(file) as reader:
        known = reader.header()
    content = file.read_bytes()
    for length in (2**40, 2**63 - 1, 2**64 - 1):
        file.write_bytes(struct.pack("<Q", length) + content[8:])
        with pytest.raises(CorruptionError, match=r"model\.safetensors.*header should have"):
            SafetensorsReader(file, known=known)


@pytest.mark.parametrize("when", ["closed", "open", "meanwhile"])
def test_a_file_that_is_written_between_two_reads_is_refused(tmp_path, monkeypatch, when):
    """Its header is as it was. Another working directory is no other file."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8)}, file)
    monkeypatch.chdir(tmp_path)
    source = weight_source("model.safetensors")
    monkeypatch.chdir("/")
    assert torch.equal(source.read("a"), torch.ones(8))
    if when == "closed":
        source.close()

    def write(*read, plain=os.preadv):
        save_file({"a": torch.zeros(8)}, file)
        os.utime(file, ns=(1, 1))
        return plain(*read) if read else 0

    if when == "meanwhile":
        monkeypatch.setattr(os, "preadv", write)
    else:
        write()
    with pytest.raises(CorruptionError, match="was modified since the checkpoint was opened"):
        source.read("a")
    source.close()


@pytest.mark.parametrize("mode", ["EIO", "short"])
def test_tokens_that_cannot_be_read_back_are_an_error(tmp_path, monkeypatch, mode):
    (tmp_path / "text.txt").write_text("abcdefgh")
    tokens = tokenize([tmp_path / "text.txt"], ByteTokenizer(), vocab_size=256, directory=tmp_path)
    spoil(monkeypatch, tmp_path, 1, mode)
    with pytest.raises(StorageError, match=f"read tokens of '{tmp_path}'"):
        tokens.read(0, 8)


def test_a_resumed_run_names_the_file_of_each_read_that_fails(tmp_path, monkeypatch):
    """No error is one of another library, and the checkpoint is read whole afterwards."""
    GPT2LMHeadModel(GPT2Config(**SHAPE)).save_pretrained(tmp_path / "base")
    table = job_table(
        tmp_path,
        tiers={"host": {"capacity": "24MiB", "huge_pages": False}},
        model={"path": str(tmp_path / "base")},
        train={"steps": 1, "batch_size": 2},
        output={"directory": str(tmp_path / "output"), "export": False},
        checkpoint={"every": 1},
    )

    def run(**options: Any) -> None:
        program.train(SwapConfig.load(table), console=Console(file=io.StringIO()), **options)

    run()
    table["train"]["steps"] = 2
    failures = 0
    for rung in (*range(1, 9), *range(9, MOST_RUNGS, 7)):
        with monkeypatch.context() as patch:
            names = spoil(patch, tmp_path, rung, "EIO")
            try:
                run(resume=True)
            except InfinityError as error:
                failures += 1
                is_unnamed = names[-1].startswith("#")  # The file of tokens has no name.
                assert is_unnamed or names[-1] in str(error), (names[-1], str(error))
            else:
                break
    assert failures > 5
    lines = (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
