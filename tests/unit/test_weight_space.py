"""Eviction of weights of similar sizes: one block, chosen by its next use alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.streaming.weights import space
from infinity.streaming.weights.moves import WeightMoves
from tests.support.models import TinyDecoder


def test_eviction_without_stored_weights_lists_no_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges in memory matter where blocks of very different sizes lie beside each other."""
    evicted: list[int] = []
    evict = WeightMoves.evict

    def count(moves: WeightMoves, weights: Any) -> None:
        evicted.append(weights.unit.index)
        evict(moves, weights)

    def refuse(*values: object, **named: object) -> None:
        raise AssertionError("a range was listed")

    monkeypatch.setattr(WeightMoves, "evict", count)
    monkeypatch.setattr(space, "Evictable", refuse)
    torch.manual_seed(0)
    model = TinyDecoder()
    tiers = {"host": {"capacity": "640KiB"}, "nvme": [{"path": str(tmp_path)}]}
    kinds = ("parameters", "master", "moments", "gradients")
    placement = {kind: ["nvme"] for kind in kinds}
    schedule = {"updates": "deferred"}
    infinity.offload(model, {"tiers": tiers, "placement": placement, "schedule": schedule})
    optimizer = infinity.AdamW(model, lr=1e-3)
    for seed in range(2):
        model(**model.inputs(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    infinity.close(model)
    assert evicted
