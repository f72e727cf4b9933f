"""Bits that flip on the drives during a run: found, named, and never trained on or saved."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch

import infinity
from infinity.engine.engine import Engine
from infinity.errors import CorruptionError, InfinityError
from infinity.sizes import PAGE_NBYTES
from infinity.state.store import NvmeLocation
from infinity.storage.protocol import FileRange
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import assert_same
from tests.support.models import Mlp

from .harness import (
    WIDTH,
    loss_of,
    mlp,
    offload,
    offloaded_step,
    optimizer_of,
    plain_steps,
    swap_config,
    weights_of,
)

STEPS = 3
KINDS = ["parameters", "master", "exp_avg", "exp_avg_sq", "gradients"]


def flip(path: str, offset_nbytes: int, random_bits: random.Random) -> None:
    """One low bit of the page at an offset."""
    at = offset_nbytes + random_bits.randrange(PAGE_NBYTES)
    with open(path, "r+b") as raw:
        (byte,) = os.pread(raw.fileno(), 1, at)
        os.pwrite(raw.fileno(), bytes([byte ^ 1]), at)
        os.fsync(raw.fileno())


def places(engine: Engine, kind: str) -> list[tuple[str, FileRange]]:
    """Every unit that has this kind on NVMe, and where its bytes are now."""
    store = engine.store
    assert store.volume is not None
    return [
        (store.units[index].name, each)
        for (index, name), location in store.placed().items()
        if name.value == kind and isinstance(location, NvmeLocation)
        for each in store.volume.locate(location.extents)
    ]


def backward(model: torch.nn.Module, step: int) -> None:
    loss_of(model, step).backward()


class Narrow(Mlp):
    """Takes what the others take, and computes in bfloat16: it has masters."""

    def inputs(self, seed: int) -> dict[str, torch.Tensor]:
        return {name: value.bfloat16() for name, value in super().inputs(seed).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_of_every_kind_of_state_end_in_an_error_that_names_it(
    tmp_path: Path, kind: str
) -> None:
    """With the default `io.verify`."""
    prng = random.Random(kind)
    updates = prng.choice(["deferred", "at_step"])
    compute = "bfloat16" if kind == "master" else "float32"
    config = swap_config(tmp_path / "swap", updates=updates, compute=compute)
    torch.manual_seed(0)
    model = (Narrow if kind == "master" else Mlp)(width=WIDTH, layers=6).train()
    engine = offload(model, config)
    try:
        optimizer = optimizer_of(model)
        offloaded_step(model, optimizer, 0)
        offloaded_step(model, optimizer, 1)
        engine.flush()
        backward(model, 2)
        where = places(engine, kind)
        assert where, f"no {kind} rests on NVMe"
        chosen = {}
        for name, each in prng.sample(where, len(where) // 2):
            page = each.offset_nbytes + prng.randrange(each.nbytes // PAGE_NBYTES) * PAGE_NBYTES
            flip(each.path, page, prng)
            chosen[each.path, page] = name
        with pytest.raises(CorruptionError) as caught:
            optimizer.step()
            optimizer.zero_grad()
            backward(model, 3)
            weights_of(model)
        error = caught.value
        assert error.errno == errno.EBADMSG
        assert f"{kind} of {chosen[error.path, error.offset_nbytes]}" in str(error)
        for part in (error.path, str(error.offset_nbytes), "checkpoint"):
            assert part in str(error)
    finally:
        engine.close()


def test_bits_flipped_all_over_the_swap_file_never_change_a_weight_in_silence(
    tmp_path: Path,
) -> None:
    """At any moment of a step: an error, or the bits of a run without a flip."""
    expected = plain_steps(mlp(), STEPS)
    num_found = 0
    for seed in range(6):
        prng = random.Random(seed)
        model = mlp()
        engine = offload(model, swap_config(tmp_path / f"swap-{seed}"))
        try:
            optimizer = optimizer_of(model)
            offloaded_step(model, optimizer, 0)
            moment = prng.randrange(3)
            _ = engine.flush() if moment == 0 else backward(model, 1)
            pages = [
                (each.path, each.offset_nbytes + at)
                for kind in KINDS
                for _, each in places(engine, kind)
                for at in range(0, each.nbytes, PAGE_NBYTES)
            ]
            for path, page in prng.sample(pages, 8):
                flip(path, page, prng)
            try:
                if moment == 0:
                    backward(model, 1)
                optimizer.step()
                optimizer.zero_grad()
                offloaded_step(model, optimizer, 2)
                assert_same(expected, weights_of(model))
            except InfinityError as error:
                assert isinstance(error, CorruptionError)
                num_found += 1
        finally:
            engine.close()
    assert num_found >= 4


def test_flipped_bits_of_saved_activations_raise_an_error(tmp_path: Path) -> None:
    """State on the host, inputs on NVMe: every page of the swap file is one of inputs."""
    config = swap_config(tmp_path / "swap", placement="host", host_nbytes="32MiB")
    config["placement"]["activations"] = "nvme"
    model = mlp()
    engine = offload(model, config, device=SimulatedDevice())
    volume = engine.store.volume
    assert volume is not None
    (path,) = volume.file_paths

    losses = []

    def loss(batch: torch.Tensor) -> torch.Tensor:
        losses.append(model(batch).square().mean())
        volume.engine.drain()
        for page in range(0, os.path.getsize(path), PAGE_NBYTES):
            if len(losses) == 2:  # All inputs are suspended, and no backward has begun.
                flip(path, page, random.Random(page))
        return losses[-1]

    try:
        with pytest.raises(CorruptionError, match="activations: the page is not what was written"):
            infinity.forward_backward(
                model, loss, [torch.full((2, 96), 0.1), torch.full((2, 96), 0.2)]
            )
    finally:
        engine.close()


def test_offload_warns_that_reads_are_not_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = swap_config(tmp_path / "swap")
    config["io"]["verify"] = False
    offload(mlp(), config).close()
    assert "io.verify = false" in caplog.text and "trained on" in caplog.text
