"""Faults of the files that frozen weights rest in: named, harmless to the model and to the files."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import SwapConfig
from infinity.engine.build import build
from infinity.errors import CorruptionError, StorageError
from tests.support.forked import Script, wait_until
from tests.support.quantized import tiny_causal_lm, write_quantized

from .harness import Trap

TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "base"
    write_quantized(tiny_causal_lm("deepseek-v3"), path, "int4")
    return path


def digests(base: Path) -> dict[str, str]:
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in base.iterdir()}


def empty_model(base: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with infinity.init_empty_weights():
        config = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("norm.weight"))
    return model


@contextmanager
def over(base: Path, swap: Path) -> Iterator[tuple[Any, Trap]]:
    from infinity.checkpoint import weight_source

    traps: list[Trap] = []

    def trapped(engine: Any) -> Trap:
        traps.append(Trap(engine))
        return traps[0]

    model = empty_model(base)
    config = SwapConfig.load({
        "tiers": {"host": {"capacity": "2MiB"}, "nvme": [{"path": str(swap)}]},
        "placement": {"parameters": "nvme", "master": "host", "moments": "host"},
    })  # fmt: skip
    plan = weight_source(base).plan(model)
    build(model, config, weights=plan, seed=0, units="auto", device=None, wrap_storage=trapped)
    try:
        yield model, traps[0]
    finally:
        infinity.close(model)


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()  # type: ignore[no-any-return]


def test_each_read_of_a_shard_that_fails_is_named_and_the_step_can_be_made_again(
    base: Path, tmp_path: Path
) -> None:
    """The first, the second ... read of a step fails, until none does."""
    before = digests(base)
    with over(base, tmp_path / "plain") as (model, _):
        expected = [step(model, infinity.AdamW(model, lr=1e-3)) for _ in range(1)]
    rung, found = 0, 0
    while True:
        rung += 1
        with over(base, tmp_path / "swap") as (model, trap):
            optimizer = infinity.AdamW(model, lr=1e-3)
            trap.set("read", rung, errno.EIO)
            try:
                loss = step(model, optimizer)
            except StorageError as error:
                assert trap.error is not None
                if error.path.endswith(".safetensors"):
                    found += 1
                    assert str(base) in str(error) and "Frozen weights rest in this file" in str(
                        error
                    )
                    assert error.errno == errno.EIO
                optimizer.zero_grad()
                loss = step(model, optimizer)
            assert torch.equal(loss, expected[0])
            if trap.error is None:
                break
    assert found >= 5
    assert digests(base) == before


def test_a_shard_that_changed_between_opening_and_training_is_refused(
    base: Path, tmp_path: Path
) -> None:
    from infinity.checkpoint import weight_source

    copy = tmp_path / "base"
    copy.mkdir()
    for each in base.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    model = empty_model(copy)
    plan = weight_source(copy).plan(model)
    shard = sorted(copy.glob("*.safetensors"))[1]
    os.utime(shard, ns=(1, 1))
    with pytest.raises(CorruptionError, match="was modified since the checkpoint was opened"):
        build(
            model, SwapConfig.load({"tiers": {"host": {"capacity": "8MiB"}}}), weights=plan,
            seed=0, units="auto", device=None,
        )  # fmt: skip
    assert all(not hasattr(each, "owner") for each in model.parameters()), "the model is as it was"


@pytest.mark.parametrize("change", ["shorter", "gone", "other", "unread"])
def test_a_shard_that_changes_while_it_is_trained_on_is_named(
    base: Path, tmp_path: Path, change: str
) -> None:
    copy = tmp_path / "base"
    copy.mkdir()
    for each in base.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    shard = sorted(copy.glob("*.safetensors"))[1]
    with over(copy, tmp_path / "swap") as (model, _):
        optimizer = infinity.AdamW(model, lr=1e-3)
        first = None if change == "unread" else step(model, optimizer)
        if change == "gone":
            shard.unlink()  # The open file stays readable.
            assert step(model, optimizer) < first + 1
            return
        if change == "shorter":
            os.truncate(shard, 100)
        else:
            content = bytearray(shard.read_bytes())
            middle = len(content) // 2
            content[middle : middle + 4096] = bytes(4096)
            with shard.open("r+b") as file:
                file.write(content)
        with pytest.raises(StorageError) as caught:
            for _ in range(3):
                step(model, optimizer)
        assert caught.value.path == str(shard)


def test_a_byte_that_changed_between_stop_and_resume_is_named_before_it_is_used(
    base: Path, tmp_path: Path
) -> None:
    """Length, time and header are as they were. With the old byte the run goes on."""
    copy = tmp_path / "base"
    copy.mkdir()
    for each in base.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    shard = sorted(copy.glob("*.safetensors"))[1]
    with over(copy, tmp_path / "swap") as (model, _):
        optimizer = infinity.AdamW(model, lr=1e-3)
        step(model, optimizer)
        saved = infinity.checkpoint.save(tmp_path / "runs", model, optimizer)
        expected = step(model, optimizer)

    def flip() -> None:
        times = os.stat(shard)
        with shard.open("r+b") as file:
            file.seek(times.st_size // 2)
            byte = file.read(1)[0]
            file.seek(times.st_size // 2)
            file.write(bytes([byte ^ 1]))
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))

    flip()
    with over(copy, tmp_path / "swap") as (model, _):
        optimizer = infinity.AdamW(model, lr=1e-3)
        infinity.checkpoint.load(saved, model, optimizer)
        trained = [one for one in model.parameters() if one.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        with pytest.raises(CorruptionError, match=r"or the one that it continues") as caught:
            step(model, optimizer)
        assert caught.value.path == str(shard)
        optimizer.zero_grad()
        flip()
        assert all(map(torch.equal, before, trained))
        assert torch.equal(step(model, optimizer), expected)


TRAINING = """
import sys
from pathlib import Path
import infinity
from tests.fault.test_shards import over, step

with over(Path(sys.argv[1]), Path(sys.argv[2])) as (model, _):
    optimizer = infinity.AdamW(model, lr=1e-3)
    while True:
        step(model, optimizer)
        print("step", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
def test_a_killed_run_leaves_every_shard_as_it_was(
    base: Path, tmp_path: Path, delay_s: float
) -> None:
    before = digests(base)
    run = Script(TRAINING, base, tmp_path / "swap")
    wait_until(lambda: "step\n" in run.stdout.read_text(), run)
    with suppress(subprocess.TimeoutExpired):
        run.wait(delay_s)
    run.kill()
    assert run.wait() == -signal.SIGKILL
    assert digests(base) == before
