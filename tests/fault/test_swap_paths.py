"""Swap directories on real file systems that are full, and of other users."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import infinity
from infinity.errors import CapacityError, StorageError
from infinity.tools.training.adapter import save_adapter
from tests.support.file_systems import fill, small_tmpfs
from tests.support.quantized import tiny_causal_lm, write_quantized

NOBODY = 65534


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])


def config_of(swap: Path) -> dict[str, Any]:
    tiers = {"host": {"capacity": "16MiB", "huge_pages": False}, "nvme": [{"path": str(swap)}]}
    return {"tiers": tiers, "placement": {"gradients": ["nvme"]}}


def refusal_of(model: nn.Module, swap: Path) -> BaseException:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises((CapacityError, StorageError)) as refused:
        infinity.offload(model, config_of(swap))
    assert all(map(torch.equal, before, model.parameters()))
    return refused.value


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 256)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:swap path")
def test_a_drive_that_is_too_small_or_full_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "mounted", 2 << 20) as point:
        refused = refusal_of(build(), point)
        assert isinstance(refused, CapacityError) and refused.tier == "nvme"
        assert refused.available_nbytes < 2 << 20 and not list(point.iterdir())
        filling = fill(point)
        assert "free some space" in str(refusal_of(build(), point / "swap"))
        assert list(point.iterdir()) == [filling]


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "mounted", 4 << 20) as point:
        yield point


@pytest.mark.filterwarnings("ignore:swap path")
def test_a_checkpoint_that_a_full_drive_refuses_loses_no_state(
    small_drive: Path, tmp_path: Path
) -> None:
    plain = build()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    model = build()
    model = infinity.offload(model, config_of(tmp_path / "swap"))
    fill(small_drive, but_nbytes=1 << 20)
    with infinity.engine_of(model) as engine:
        optimizer = infinity.AdamW(model, lr=1e-3)
        for _ in range(2):
            step(model, optimizer)
            step(plain, reference)
            with pytest.raises(StorageError) as refused:
                infinity.checkpoint.save(small_drive, model, optimizer)
            assert refused.value.errno == errno.ENOSPC
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, engine.read_parameter(name)), name


def adapted(base: Path) -> Any:
    with infinity.init_empty_weights():
        config = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj"]))


def train_adapter(model: Any, optimizer: Any) -> list[torch.Tensor]:
    ids = torch.arange(12).view(1, 12)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [one.detach().clone() for one in model.parameters() if one.requires_grad]


@pytest.mark.filterwarnings("ignore:swap path")
def test_a_full_drive_beside_a_frozen_base_is_named_and_loses_nothing(
    small_drive: Path, tmp_path: Path
) -> None:
    """The copy of a base that is decoded into the swap tier, checkpoints, and the saved adapter."""
    point, base = small_drive, small_drive / "base"
    write_quantized(tiny_causal_lm("llama"), base, "nf4")
    before = {each.name: each.read_bytes() for each in base.iterdir()}
    filling = fill(point, but_nbytes=64 << 10)

    def config(swap: Path, frozen: str) -> dict[str, Any]:
        return config_of(swap) | {"placement": {"parameters": "nvme", "frozen": frozen}}

    with pytest.raises(CapacityError, match=r"tiers\.nvme") as refused:
        infinity.offload(adapted(base), config(point / "swap", "copy"), weights=base)
    assert str(point) in str(refused.value) and not list((point / "swap").iterdir())

    table = config(tmp_path / "swap", "checkpoint")
    torch.manual_seed(0)
    with infinity.engine_of(infinity.offload(adapted(base), table, weights=base)) as engine:
        model = engine.model
        optimizer = infinity.AdamW(model, lr=1e-2)
        first = train_adapter(model, optimizer)
        with (point / "rest").open("wb") as rest, pytest.raises(OSError):
            while True:
                os.write(rest.fileno(), bytes(4096))
        with pytest.raises(StorageError) as full:
            infinity.checkpoint.save(point / "runs", model, optimizer)
        assert full.value.errno == errno.ENOSPC and str(point) in str(full.value)
        (point / "saved").mkdir()
        with pytest.raises(StorageError) as full:
            save_adapter(model, point / "saved")
        assert full.value.errno == errno.ENOSPC and not list((point / "saved").iterdir())
        filling.unlink()
        saved = infinity.checkpoint.save(point / "runs", model, optimizer)
        second = train_adapter(model, optimizer)
    assert {each.name: each.read_bytes() for each in base.iterdir()} == before
    with infinity.engine_of(infinity.offload(adapted(base), table, weights=base)) as engine:
        optimizer = infinity.AdamW(engine.model, lr=1e-2)
        infinity.checkpoint.load(saved, engine.model, optimizer)
        loaded = [one.detach() for one in engine.model.parameters() if one.requires_grad]
        assert all(map(torch.equal, loaded, first))
        assert all(map(torch.equal, train_adapter(engine.model, optimizer), second))


def open_to_all(directory: Path) -> None:
    """Lets another user look into the test's directory: pytest makes its own for one user."""
    for parent in [directory, *directory.parents]:
        if not parent.name.startswith(("test_", "popen-", "pytest-")):
            return
        parent.chmod(0o755)


def as_nobody(check: Callable[[], None]) -> None:
    """Runs `check` in a child process that belongs to another user."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
@pytest.mark.parametrize(
    ("owner", "mode", "below", "words"),
    [
        (NOBODY, 0o000, False, "not writable: check its mode"),
        (NOBODY, 0o000, True, "Permission denied"),
        (NOBODY, 0o500, False, "not writable"),
        (NOBODY, 0o300, False, "check the owner and the mode"),
        (0, 0o755, False, "not writable"),
        (0, 0o755, True, "choose a writable parent"),
    ],
)
def test_a_directory_of_another_user_or_mode_is_refused(
    owner: int, mode: int, below: bool, words: str, tmp_path: Path
) -> None:
    open_to_all(tmp_path)
    swap = tmp_path / "swap"
    swap.mkdir()
    os.chown(swap, owner, owner)
    swap.chmod(mode)

    def check() -> None:
        refused = refusal_of(build(), swap / "below" if below else swap)
        assert isinstance(refused, StorageError) and words in str(refused), refused

    as_nobody(check)
    swap.chmod(0o700)
    assert not list(swap.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become another user")
def test_the_lock_of_another_user_is_refused_and_unchanged(tmp_path: Path) -> None:
    open_to_all(tmp_path)
    tmp_path.chmod(0o777)
    lock = tmp_path / "infinity.lock"
    lock.write_text('{"schema": 1}')
    lock.chmod(0o600)
    as_nobody(lambda: _check_lock(tmp_path))
    assert lock.read_text() == '{"schema": 1}' and list(tmp_path.iterdir()) == [lock]


def _check_lock(swap: Path) -> None:
    refused = refusal_of(build(), swap)
    assert "check the owner and the mode" in str(refused), refused
