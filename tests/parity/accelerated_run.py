"""Trains on the device of tests/support/accelerator.cpp, plain and offloaded, and compares bits.

Then twice with a mutation of the engine's stream code, which must change them.

`python -m tests.parity.accelerated_run LIBRARY DIRECTORY`, in a process of its own.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import infinity
from infinity.tiers.streams import StreamCopy
from tests.support.accelerator import Accelerator, register
from tests.support.offloading import offloaded, swap_config

WIDTH = 32
Record = list[tuple[str, Tensor]]


class Block(nn.Module):
    """A block whose backward runs in the thread that autograd has for the device."""

    threads: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.threads.add(threading.get_ident()))
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batches(device: torch.device) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=source).to(device) for _ in range(2)]


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def plain(device: torch.device) -> Record:
    """Forward and backward on the device, the update on a twin on the host, as the engine's."""
    model, twin, found = make().to(device), make(), []
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for batch in batches(device):
        loss = model(batch)
        loss.backward()
        found.append(("loss", loss.detach().cpu()))
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.grad = ours.grad.cpu()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                ours.copy_(theirs)
                ours.grad = None
    return found + [(name, weight.detach()) for name, weight in twin.named_parameters()]


def with_offload(
    device: torch.device, config: dict[str, Any], *, is_layer_major: bool = False
) -> Record:
    found: Record = []
    with offloaded(make(), config, device=Accelerator(device)) as model:
        optimizer = infinity.AdamW(model, lr=1e-2)
        for batch in batches(device):
            if is_layer_major:
                (loss,) = infinity.forward_backward(model, model, [batch])
            else:
                loss = model(batch)
                loss.backward()
            found.append(("loss", loss.detach().cpu()))
            optimizer.step()
            optimizer.zero_grad()
        for name, handle in list(model.named_parameters()):
            with infinity.gather([handle]):
                found.append((name, model.get_parameter(name).detach().cpu()))
    return found


def differing(left: Record, right: Record) -> list[str]:
    assert [name for name, _ in left] == [name for name, _ in right]
    return [
        name for (name, mine), (_, other) in zip(left, right, strict=True)
        if not torch.equal(mine, other)
    ]  # fmt: skip


def order_without_wait(copy: StreamCopy) -> None:
    copy._keep = None


_init = StreamCopy.__init__


def keep_nothing(copy: StreamCopy, *args: Any, **kwargs: Any) -> None:
    _init(copy, *args, **kwargs | {"keep": None})


def main(library: str, directory: str) -> None:
    device = register(Path(library))
    wanted = plain(device)
    assert Block.threads and threading.get_ident() not in Block.threads
    window = 3 * 4 * sum(p.numel() for p in Block().parameters())
    window_of = {"host": window, "nvme": window, "device": "4MiB"}
    configs = {
        place: swap_config(Path(directory) / place, placement=place, device_nbytes=nbytes)
        for place, nbytes in window_of.items()
    }
    for place, config in configs.items():
        found = differing(with_offload(device, config, is_layer_major=place == "nvme"), wanted)
        assert not found, f"{place}: {found} differ from plain PyTorch on the device"
        print(place, "is equal")
    configs["device"]["schedule"]["update_on"] = "device"
    found = differing(with_offload(device, configs["device"]), wanted)
    assert not found, f"{found} differ where state on the device is updated there"
    print("an update there is equal")
    mutations = {"order": order_without_wait, "__init__": keep_nothing}
    for name, instead in mutations.items():
        before = getattr(StreamCopy, name)
        setattr(StreamCopy, name, instead)
        found = differing(with_offload(device, configs["host"]), wanted)
        assert found, f"{name}: not needed on this device"
        print(instead.__name__, "is seen")
        setattr(StreamCopy, name, before)


if __name__ == "__main__":
    main(*sys.argv[1:])
