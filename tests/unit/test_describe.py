"""`infinity.describe`: bytes by kind and tier, what is in memory, and nothing moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError


def offloaded(directory: Path, **placement: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model[0].requires_grad_(False)
    nvme = [{"path": str(directory / "swap")}]
    tiers = {"host": {"capacity": "8MiB", "huge_pages": False}, "nvme": nvme}
    infinity.offload(model, {"tiers": tiers, "placement": placement})
    return model


def test_every_byte_of_state_is_on_its_tier(tmp_path: Path) -> None:
    model = offloaded(tmp_path, moments=["host"], gradients=["nvme"])
    found = infinity.describe(model)
    layer = 64 * 64 * 4
    assert (found.num_params, found.num_trainable, found.num_units) == (4 * 4096, 3 * 4096, 4)
    assert found.resting == {
        "parameters": {"nvme": 4 * layer},
        "moments": {"host": 2 * 3 * layer},
        "gradients": {"nvme": 3 * layer},
    }
    assert found.host_capacity_nbytes == 8 << 20
    assert 2 * 3 * layer <= found.host_in_use_nbytes <= 8 << 20
    assert found.places["nvme"].endswith("swap")
    infinity.close(model)


def test_describing_moves_nothing_and_counts_what_moved(tmp_path: Path) -> None:
    model = offloaded(tmp_path)
    before = infinity.engine_of(model).counters.snapshot()
    first = infinity.describe(model)
    assert infinity.engine_of(model).counters.snapshot() == before
    optimizer = infinity.AdamW(model, lr=1e-2)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    second = infinity.describe(model)
    assert second.written_nbytes >= first.written_nbytes and second.resting == first.resting
    assert second.weights_in_memory == (4, 4 * 64 * 64 * 4)
    infinity.close(model)
    with pytest.raises(InfinityError, match="not offloaded"):
        infinity.describe(model)


def test_the_table_names_every_tier_that_holds_something(tmp_path: Path) -> None:
    model = offloaded(tmp_path)
    text, page = str(infinity.describe(model)), infinity.describe(model)._repr_html_()
    assert text.splitlines()[0] == "Sequential: 16,384 parameters, 12,288 trained, 4 units"
    for word in ("parameters", "moments", "nvme", "host budget of 8.0 MiB", str(tmp_path)):
        assert word in text and word in page
    infinity.close(model)
