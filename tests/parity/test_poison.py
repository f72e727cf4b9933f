"""INFINITY_POISON: memory that a region has given up stays and reads as NaN."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from infinity.tiers.cuda import StreamMemoryRegion
from infinity.tiers.device import POISON_VARIABLE, ResizedRegion


class Stream:
    device = torch.device("cpu")


class Module:
    """The part of `torch.cuda` that a region calls."""

    def __init__(self) -> None:
        self.entered: list[Stream] = []

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        self.entered.append(stream)
        return nullcontext()


def region_of(kind: str) -> ResizedRegion:
    if kind == "plain":
        return ResizedRegion(64, torch.device("cpu"))
    return StreamMemoryRegion(Module(), Stream(), 64)


@pytest.mark.parametrize("kind", ["plain", "of a stream"])
def test_a_stale_view_reads_nan_while_the_memory_is_poisoned(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POISON_VARIABLE, "1")
    region = region_of(kind)
    stale = region.tensor(0, (16,), (1,), torch.float32)
    for value in (1.0, 2.0):
        region.take_memory()
        stale.fill_(value)
        assert stale.sum() == 16 * value
        region.drop_memory()
        assert not region.is_attached and stale.isnan().all()
        assert stale.view(torch.bfloat16).isnan().all()
    if isinstance(region, StreamMemoryRegion):
        assert len(region._module.entered) >= 4  # In the order of its stream.


@pytest.mark.parametrize("setting", [None, "", "0"])
def test_memory_goes_back_without_the_variable(
    setting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(POISON_VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(POISON_VARIABLE, setting)
    region = region_of("plain")
    region.take_memory()
    assert region.storage.nbytes() == 64
    region.drop_memory()
    assert region.storage.nbytes() == 0
