"""Tiles of shapes: how rows are split, the same units as the engine makes, and ZeRO-Infinity's
table."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.config import SwapConfig
from infinity.errors import CapacityError
from infinity.modules.tiling.split import Tiling
from infinity.plan import Batch, forecast, load_hardware
from infinity.plan.layout import PlannedModel
from infinity.plan.model import model_of_module, model_of_shape
from infinity.plan.shapes import gpt_shape
from infinity.sizes import GIB
from infinity.state.tiles import ROW_ALIGNMENT, cut_rows, fit, limits
from infinity.tools.plan import advice

KINDS = ("parameters", "master", "moments", "gradients")


@given(
    num_rows=st.integers(1, 10**6), row_nbytes=st.integers(1, 10**6), limit=st.integers(1, 10**12)
)
def test_rows_are_split_evenly_below_the_limit(num_rows: int, row_nbytes: int, limit: int) -> None:
    starts = cut_rows(num_rows, row_nbytes, limit)
    sizes = [stop - start for start, stop in pairwise(starts)]
    assert starts[0] == 0 and starts[-1] == num_rows and all(size > 0 for size in sizes)
    assert all(start % ROW_ALIGNMENT == 0 for start in starts[:-1])
    assert len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
    assert max(sizes) * row_nbytes <= limit or max(sizes) <= ROW_ALIGNMENT
    if len(sizes) > 1:  # One tile less would be too large.
        assert num_rows > (len(sizes) - 1) * (limit // row_nbytes // ROW_ALIGNMENT * ROW_ALIGNMENT)


def test_the_search_stops_at_the_first_limit_with_space_to_prefetch() -> None:
    tried: list[int | None] = []

    def attempt(limit_nbytes: int | None) -> int | None:
        tried.append(limit_nbytes)
        if limit_nbytes is None or limit_nbytes > 300 << 10:
            raise CapacityError("device", needed_nbytes=2, available_nbytes=1, key="k", detail="d")
        return limit_nbytes

    assert fit("auto", attempt, lambda limit, _: limit == 128 << 10, 1 << 20) == 128 << 10
    assert tried == [None, 512 << 10, 256 << 10, 128 << 10]
    assert fit("auto", attempt, lambda *_: False, 1 << 20) == 256 << 10
    assert list(limits(1 << 20))[-1] == 64 << 10
    for tile in (None, 512 << 10):
        with pytest.raises(CapacityError):
            fit(tile, attempt, lambda *_: True, 1 << 20)


def test_weights_that_are_decoded_are_tiled_where_two_have_no_space() -> None:
    """Where no tile makes space the search takes none."""
    for largest, tile in ((1 << 20, 1 << 20), (256 << 10, 256 << 10), (1 << 10, None)):

        def has_space(limit_nbytes: int | None, is_untiled: bool, largest: int = largest) -> bool:
            return not is_untiled and limit_nbytes is not None and limit_nbytes <= largest

        assert fit("auto", lambda limit: limit, has_space, 2 << 20) == tile
        assert fit("auto", lambda limit: limit, lambda _, is_untiled: is_untiled, 2 << 20) is None


def test_the_search_refuses_with_the_least_that_any_division_needs() -> None:
    """The number that it names is accepted, and less is refused."""
    needs = {None: 900, 512 << 10: 700, 256 << 10: 500, 128 << 10: 600, 64 << 10: 800}

    def attempt(limit_nbytes: int | None) -> int | None:
        needed = needs[limit_nbytes]
        if needed > available:
            raise CapacityError(
                "host", needed_nbytes=needed, available_nbytes=available, key="k", detail="d"
            )
        return limit_nbytes

    available = 499
    with pytest.raises(CapacityError) as refused:
        fit("auto", attempt, lambda *_: True, 1 << 20)
    assert refused.value.needed_nbytes == 500
    available = 500
    assert fit("auto", attempt, lambda *_: True, 1 << 20) == 256 << 10


def test_a_division_that_fits_the_host_is_refused_for_the_device() -> None:
    def attempt(limit_nbytes: int | None) -> None:
        tier = "device" if limit_nbytes == 128 << 10 else "host"
        raise CapacityError(tier, needed_nbytes=9, available_nbytes=1, key="k", detail="d")

    with pytest.raises(CapacityError) as refused:
        fit("auto", attempt, lambda *_: True, 1 << 20)
    assert refused.value.tier == "device"


class Experts(nn.Module):
    """Two packed parameters, with a row per expert, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self._is_expert_parallel = 6, False
        self.gate_up_proj = nn.Parameter(torch.zeros(6, 128, 64))
        self.down_proj = nn.Parameter(torch.zeros(6, 64, 64))

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> None:
        raise AssertionError("only cut, never run")


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 6, bias=False)
        self.experts = Experts()


def test_the_same_units_as_the_engine_makes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 64)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 640, bias=False), nn.Linear(640, 64, bias=False), Moe())
                for _ in range(2)
            )
            self.head = nn.Linear(64, 1000, bias=False)
            self.head.weight = self.embedding.weight

    config = SwapConfig.load({})
    text = SimpleNamespace(hidden_size=64)
    hf_config = SimpleNamespace(model_type="two", get_text_config=lambda: text)

    def units_of(module: nn.Module) -> PlannedModel:
        return model_of_module(module, config, hf_config)

    whole = units_of(Two())
    for limit_nbytes in (300 << 10, 100 << 10, 64 << 10):
        cut = Two()
        Tiling(cut, lambda parameter: 4).cut(limit_nbytes)
        engine, planned = units_of(cut), whole.with_tiles(limit_nbytes)
        assert sorted(u.weight_nbytes for u in engine.units) == sorted(
            u.weight_nbytes for u in planned.units
        )
        assert engine.held_nbytes == planned.held_nbytes
        assert len(planned.units) > len(whole.units) or limit_nbytes > whole.largest_nbytes
        assert planned.active_params == engine.active_params == whole.active_params


@pytest.mark.parametrize(
    ("hidden", "num_tiles", "fits"),
    [
        # ZeRO-Infinity, section 8.5, memory in pieces of 2 GB: 8K whole, 64K with 16 tiles. The
        # layer of 64K, cut into 16, has 2 GiB to the byte, and the biases are there too.
        (8 << 10, 1, True), (16 << 10, 1, False), (65408, 16, True), (80 << 10, 16, False),
    ],
)  # fmt: skip
def test_the_widest_block_of_a_window(hidden: int, num_tiles: int, fits: bool) -> None:
    shape = gpt_shape("one block", 1, hidden, vocab=1)
    tile = 0 if num_tiles == 1 else 8 * hidden**2 // num_tiles
    table = {
        "tiers": {
            "device": {"capacity": f"{2 * GIB}B"},
            "host": {"capacity": "85%"},
            "nvme": [{"path": "/mnt/nvme"}],
        },
        "placement": {kind: ["host", "nvme"] for kind in KINDS},
        "precision": {"compute": "bfloat16"},
        "schedule": {"tile": tile},
    }
    model = model_of_shape(shape, torch.bfloat16)
    hardware, batch = load_hardware("dgx-2"), Batch(2048, 2048)
    if not fits:
        with pytest.raises(CapacityError) as refused:
            forecast(SwapConfig.load(table), model, hardware, batch)
        assert refused.value.tier == "device"
        table["schedule"] = {"tile": "auto"}
    found = forecast(SwapConfig.load(table), model, hardware, batch)
    assert found.model.held_nbytes <= 2 * GIB
    said = " ".join(found.warnings)
    assert ("tiles" in said) == (num_tiles > 1 or not fits)
    # Whatever the cut, the arithmetic is the same, and so are the bytes of the drives and tiers.
    assert found.model.active_params == model.active_params


def test_tiles_are_not_advised_once_the_largest_unit_does_not_shrink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each limit has twice the units of the one before it."""
    tried: list[int] = []

    def with_tiles(limit_nbytes: int) -> SimpleNamespace:
        return SimpleNamespace(units=[SimpleNamespace(weight_nbytes=max(limit_nbytes, 2 * GIB))])

    def is_tight_again(base: Any, config: SwapConfig, model: Any) -> bool:
        tried.append(config.schedule.tile)  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(advice, "is_tight_again", is_tight_again)
    model: Any = SimpleNamespace(largest_nbytes=16 * GIB, with_tiles=with_tiles)
    base: Any = SimpleNamespace(is_tight=True, hardware=None, batch=None)
    config = SwapConfig.load({})
    assert list(advice._tiles(config, model, base)) == []
    assert tried == [8 * GIB, 4 * GIB, 2 * GIB]
