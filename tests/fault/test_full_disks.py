"""A full or failing disk while a run writes its adapter, its export and its metrics."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import infinity
from infinity.checkpoint import export_safetensors
from infinity.config import SwapConfig
from infinity.errors import StorageError
from infinity.tools.training import program
from infinity.tools.training.adapter import save_adapter
from infinity.tools.training.report import Reporter
from infinity.tools.training.tokenizers import ByteTokenizer
from tests.support.bits import assert_same
from tests.support.file_systems import failing, fill, small_tmpfs
from tests.train.jobs import job_table

SHAPE: dict[str, Any] = {
    "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 256,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MOST_RUNGS = 60


def content_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.fixture
def adapted() -> Iterator[Any]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE))
    model = peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules=["c_attn"]))
    infinity.offload(model, {"tiers": {"host": {"capacity": "8MiB", "huge_pages": False}}})
    yield model
    infinity.engine_of(model).close()


def save_small(directory: Path, tokenizer: Any) -> None:
    """An earlier adapter of another rank."""
    model = peft.get_peft_model(
        GPT2LMHeadModel(GPT2Config(**SHAPE)), peft.LoraConfig(r=2, target_modules=["c_attn"])
    )
    infinity.offload(model, {"tiers": {"host": {"capacity": "8MiB", "huge_pages": False}}})
    with infinity.engine_of(model):
        save_adapter(model, directory, tokenizer=tokenizer)


def test_an_adapter_is_saved_whole_or_the_earlier_one_stays(tmp_path: Path, adapted: Any) -> None:
    """On a disk that has one page more at each rung: every file is the first that does not fit."""
    tokenizer = ByteTokenizer().for_records()
    with small_tmpfs(tmp_path / "disk", 1 << 20) as disk:
        save_small(disk / "out", tokenizer)
        before = content_of(disk / "out")
        for rung in range(MOST_RUNGS):
            filling = fill(disk, but_nbytes=rung * 4096)
            try:
                save_adapter(adapted, disk / "out", tokenizer=tokenizer)
            except StorageError as error:
                assert error.errno == errno.ENOSPC
                assert str(disk / "out") in str(error) and "free some space" in str(error)
                assert content_of(disk / "out") == before
            else:
                break
            finally:
                filling.unlink()
        assert rung > 10
        saved = load_file(disk / "out" / "adapter_model.safetensors")
        assert {tuple(value.shape) for value in saved.values()} == {(32, 32), (96, 32)}
        assert json.loads((disk / "out" / "adapter_config.json").read_text())["r"] == 32
        assert not [path for path in (disk / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("has_links", [True, False])
def test_an_adapter_of_another_rank_is_not_mixed_with_the_earlier_one(
    tmp_path: Path, adapted: Any, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Each sync and each change of a name fails in turn."""
    save_small(tmp_path / "out", None)
    before = content_of(tmp_path / "out")
    if not has_links:
        failing(monkeypatch, ("link",), 1, errno.EPERM)
    for rung in range(1, MOST_RUNGS):
        with monkeypatch.context() as patch:
            has_failed = failing(patch, ("fsync", "replace"), rung, errno.EIO)
            try:
                save_adapter(adapted, tmp_path / "out")
            except StorageError as error:
                assert error.errno == errno.EIO and "dmesg" in str(error)
            else:
                assert not has_failed()
                break
        assert content_of(tmp_path / "out") == before
    assert rung > 6
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert described["r"] == 32 and any(value.shape == (32, 32) for value in saved.values())


def test_an_export_that_does_not_fit_leaves_the_earlier_one(tmp_path: Path) -> None:
    tokenizer, kept = ByteTokenizer().for_records(), 0
    with small_tmpfs(tmp_path / "disk", 2 << 20) as disk:
        torch.manual_seed(1)
        export_safetensors(GPT2LMHeadModel(GPT2Config(**SHAPE)), disk / "out", tokenizer=tokenizer)
        before = content_of(disk / "out")
        model = GPT2LMHeadModel(GPT2Config(**SHAPE | {"activation_function": "relu"}))
        for rung in range(0, 4 * MOST_RUNGS, 2):
            filling = fill(disk, but_nbytes=rung * 4096)
            try:
                export_safetensors(model, disk / "out", tokenizer=tokenizer, max_shard_nbytes=40000)
            except StorageError as error:
                assert error.errno == errno.ENOSPC and str(disk / "out") in str(error)
                assert content_of(disk / "out") == before
                kept += 1
            else:
                break
            finally:
                filling.unlink()
        assert kept > 10
        loaded = AutoModelForCausalLM.from_pretrained(disk / "out")
        assert_same(loaded.state_dict(), model.state_dict())
        assert loaded.config.activation_function == "relu"


# -- A run -----------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """A job whose output is on a small file system, and everything else elsewhere."""
    GPT2LMHeadModel(GPT2Config(**SHAPE)).save_pretrained(tmp_path / "base")
    return job_table(
        tmp_path,
        model={"path": str(tmp_path / "base")},
        adapter={"rank": 4},
        train={"steps": 16, "batch_size": 2},
        output={"directory": str(tmp_path / "disk" / "out")},
        checkpoint={"directory": str(tmp_path / "checkpoints"), "every": 2},
    )


def run(table: dict[str, Any], **options: Any) -> str:
    """Returns what was printed, whether the run ends well or not."""
    file = io.StringIO()
    try:
        program.train(SwapConfig.load(table), console=Console(file=file, width=500), **options)
    except StorageError as error:
        return f"{file.getvalue()}\n{type(error).__name__}: {error}"
    return file.getvalue()


def at_steps(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], object]]) -> None:
    """Calls the action of a step before its line is written."""
    step = Reporter.step

    def acting(reporter: Reporter, line: dict[str, Any], *times: Any) -> None:
        actions.get(line["step"], lambda: None)()
        step(reporter, line, *times)

    monkeypatch.setattr(Reporter, "step", acting)


def steps_in(path: Path) -> list[int]:
    assert path.read_bytes().endswith(b"\n")
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_whose_output_is_full_trains_on_says_so_and_goes_on_from_its_checkpoint(
    tmp_path: Path, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = table | {"output": {"directory": str(tmp_path / "whole")}}
    run(whole | {"checkpoint": {"directory": str(tmp_path / "other"), "every": 2}})
    with small_tmpfs(tmp_path / "disk", 1 << 20) as disk:
        with monkeypatch.context() as patch:
            at_steps(patch, {3: lambda: fill(disk)})
            printed = run(table)
        metrics = disk / "out" / "metrics.jsonl"
        written = steps_in(metrics)
        assert written == list(range(1, 1 + len(written))) and 3 <= len(written) < 12
        assert printed.count("metrics.jsonl cannot be written: No space left") == 1
        lost = f"{16 - len(written)} lines of {metrics}, from step {len(written) + 1} on"
        assert printed.count(f"lost: {lost}") == 1
        assert f"StorageError: [Errno 28] save the adapter of '{disk}/out" in printed
        assert "free some space there" in printed
        (disk / ".filling").unlink()
        run(table, resume=True)
        name = "adapter_model.safetensors"
        resumed, expected = (load_file(path / name) for path in (disk / "out", tmp_path / "whole"))
        assert_same(resumed, expected, is_ordered=False)
