"""`infinity.forward`: calls without gradients that pass the blocks together, alone or in training.

The reference is `with torch.no_grad(): [call(batch) for batch in batches]` over the plain model.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import InfinityError, UnsupportedError
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences
from tests.support.exhaustive import in_turn
from tests.support.models import TinyDecoder
from tests.support.offloading import offloaded, swap_config

from .harness import Side, held_units, seed_everything, to_device
from .zoo import ZOO, Entry

SEEDS = (1, 2, 3)
NAMES = [
    "llama", "gpt2", "mistral", "qwen3", "gptj", "phi3", "gpt_neox", "t5", "bert-dropout", "rwkv",
    "mixtral", "qwen3_moe", "deepseek_v3", "lora-experts", "TinyDecoder", "Conditional",
]  # fmt: skip


def plain(entry: Entry) -> list[Tensor]:
    model = entry.build(0).eval()
    with torch.no_grad():
        return [entry.loss(model, entry.batch(seed)) for seed in SEEDS]


@pytest.mark.parametrize(("name", "has_device"), in_turn(NAMES, [False, True]))
def test_results_have_the_bits_of_a_loop(name: str, has_device: bool, swap_directory: Path) -> None:
    entry, device = ZOO[name], SimulatedDevice() if has_device else None
    model, config = entry.build(0).eval(), swap_config(swap_directory)
    with offloaded(model, config, device=device):
        place = "cpu" if device is None else device.torch_device

        def call(seed: int) -> Tensor:
            assert not torch.is_grad_enabled()
            return entry.loss(model, to_device(entry.batch(seed), place)).cpu()

        found = infinity.forward(model, call, SEEDS)
        assert not held_units(model)
        assert all(map(torch.equal, plain(entry), found))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return ZOO["TinyDecoder"].loss(model, ZOO["TinyDecoder"].batch(seed))


def losses_of(model: nn.Module) -> Any:
    return partial(loss_of, model)


def test_each_weight_is_read_once_for_all_batches(swap_directory: Path) -> None:
    read = []
    with offloaded(decoder().eval(), tight_config(swap_directory)) as model:
        counters = infinity.engine_of(model).counters
        for seeds in (SEEDS[:1], SEEDS):
            for _ in range(3):  # Up to the third, memory has what others left there.
                before = counters.snapshot().get("nvme_read_nbytes", 0)
                infinity.forward(model, lambda seed: loss_of(model, seed), seeds)
            read.append(counters.snapshot()["nvme_read_nbytes"] - before)
    assert read[0] == read[1] > 0


def decoder() -> nn.Module:
    """Its blocks draw numbers in training."""
    torch.manual_seed(0)
    model = TinyDecoder(layers=16)
    model.blocks = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.1)) for block in model.blocks)
    return model


def tight_config(directory: Path) -> dict[str, Any]:
    return swap_config(directory, host_nbytes="640KiB", update_chunk="16KiB")


def test_an_evaluation_in_the_window_of_a_step_changes_no_bit_of_it(swap_directory: Path) -> None:
    """Nor does it read more, nor draw a number that the step draws."""
    found = {}

    def evaluate(model: nn.Module, seed: int) -> Tensor:
        model.eval()
        try:
            return loss_of(model, seed)
        finally:
            model.train()

    with offloaded(decoder().eval(), tight_config(swap_directory)) as model:
        expected = infinity.forward(model, lambda seed: loss_of(model, seed), (7, 8))
    for is_evaluated in (False, True):
        with offloaded(decoder().train(), tight_config(swap_directory)) as model:
            engine, calls = infinity.engine_of(model), []
            if is_evaluated:
                calls = [lambda s=seed: evaluate(model, s) for seed in (7, 8)]
            for _ in range(2):
                model.zero_grad()
                seed_everything(3)
                before = engine.counters.snapshot().get("nvme_read_nbytes", 0)
                losses, results = engine.sweep(
                    [lambda s=seed: loss_of(model, s) for seed in SEEDS], calls
                )
                nbytes = engine.counters.snapshot()["nvme_read_nbytes"] - before
            drawn = torch.rand(())
            found[is_evaluated] = losses, Side(model).gradients(), nbytes, drawn
            assert all(map(torch.equal, expected, results)) or not is_evaluated
            assert all(module.training for module in model.modules())
    (losses, gradients, nbytes, drawn), (others, more, as_many, same) = found.values()
    assert all(map(torch.equal, losses, others)) and not differences(gradients, more)
    assert 0 < as_many <= 1.02 * nbytes and drawn == same


def test_gradients_that_wait_for_a_step_stay(swap_directory: Path) -> None:
    with offloaded(ZOO["TinyDecoder"].build(0), swap_config(swap_directory)) as model:
        infinity.forward_backward(model, losses_of(model), SEEDS)
        before = Side(model).gradients()
        infinity.forward(model, losses_of(model), (4, 5))
        assert not differences(before, Side(model).gradients())


def test_calls_that_draw_go_on_from_sweep_to_sweep(swap_directory: Path) -> None:
    with offloaded(TinyDecoder(), swap_config(swap_directory)) as model:
        seed_everything(1)
        first, second = (infinity.forward(model, lambda _: torch.rand(()), SEEDS) for _ in "ab")
    assert len({float(number) for number in [*first, *second]}) == 2 * len(SEEDS)


def test_a_failed_call_leaves_nothing_in_use(swap_directory: Path) -> None:
    def call(seed: int) -> Tensor:
        loss = losses_of(model)(seed)
        if seed == 2:
            raise ValueError("a bad batch")
        return loss

    with offloaded(ZOO["TinyDecoder"].build(0).eval(), swap_config(swap_directory)) as model:
        with pytest.raises(ValueError, match="a bad batch"):
            infinity.forward(model, call, SEEDS)
        assert not held_units(model)
        found = infinity.forward(model, losses_of(model), SEEDS)
        assert all(map(torch.equal, plain(ZOO["TinyDecoder"]), found))


def test_what_cannot_pass_together_is_refused(swap_directory: Path) -> None:
    with offloaded(ZOO["TinyDecoder"].build(0).eval(), swap_config(swap_directory)) as model:
        with pytest.raises(InfinityError, match=r"infinity\.forward inside another one"):
            infinity.forward(model, lambda s: infinity.forward(model, losses_of(model), [s]), SEEDS)
        seen: list[Any] = []
        block = next(m for m in model.modules() if type(m).__name__ == "DecoderBlock")
        handle = block.register_forward_hook(lambda *found: seen.append(found[-1]))
        with pytest.raises(UnsupportedError, match="hook"):
            infinity.forward(model, losses_of(model), SEEDS)
        handle.remove()
