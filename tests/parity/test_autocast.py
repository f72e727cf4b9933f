"""Copies of weights that autocast keeps: as long as gradients depend on them, and no longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.offloading import offloaded, swap_config

LAYERS, WIDTH = 4, 16


class Casts(TorchDispatchMode):
    """Counts casts of weights to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and kwargs["dtype"] is torch.bfloat16
        self.count += is_cast and args[0].shape == (WIDTH, WIDTH)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_gradients", [False, True], ids=["without", "with"])
def test_a_second_forward_casts_again_if_and_only_if_there_are_no_gradients(
    swap_directory: Path, has_gradients: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x = torch.randn(3, WIDTH)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    with offloaded(model, swap_config(swap_directory)) as model:
        with torch.set_grad_enabled(has_gradients), torch.autocast("cpu", torch.bfloat16):
            first = model(x)
            with Casts() as casts:
                second = model(x)
        assert casts.count == (0 if has_gradients else LAYERS)
        assert torch.equal(first, expected) and torch.equal(second, expected)
