"""How wide may a layer be, against the number of tiles it runs as, in a window that stays the same?

    python bench/tiling.py --path /mnt/nvme0 --save bench/results/tiling.json --plot tiling.png

Twice the same question. *Predicted*: a block of a GPT-like model in 16 bits (attention, and two
layers of hidden x 4 hidden) in a device window of 2 GiB, asked of what `infinity plan` uses; beside
it ZeRO-Infinity's two published points, found with memory fragmented into pieces of 2 GB: 8K
without tiles and 64K with 16 (Rajbhandari et al., SC21, section 8.5). *Run*: one layer of hidden x
4 hidden in fp32, state on NVMe, trained for two steps on the simulated device, whose attached bytes
are counted; the largest that trains is looked for, and the next size must be refused.

Sizes, no times: nothing here depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import arguments, print_table, save
from torch import nn

import infinity
from infinity.config import SwapConfig
from infinity.errors import CapacityError
from infinity.plan import Batch, forecast, load_hardware
from infinity.plan.model import model_of_shape
from infinity.plan.shapes import gpt_shape
from infinity.sizes import GIB, MIB, format_nbytes
from infinity.state.tiles import SMALLEST_TILE_NBYTES
from infinity.testing.simulated_device import SimulatedDevice

KINDS = ("parameters", "master", "moments", "gradients")
PUBLISHED = {1: 8 << 10, 16: 64 << 10}


def main() -> None:
    parser = arguments(__doc__, plot=True)
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--run-factors", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--window", type=int, default=2 * GIB, help="bytes, of the prediction")
    parser.add_argument("--run-window", type=int, default=MIB, help="bytes, of the run")
    words = parser.parse_args()
    predicted = [predict(factor, words.window) for factor in words.factors]
    with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-tiling-") as scratch:
        found = [run(factor, words.run_window, Path(scratch)) for factor in words.run_factors]
    report(predicted, found, words)


def largest(fits: Callable[[int], bool], step: int) -> int:
    """The largest multiple of `step` that fits; 0 when none does. What fits, fits when smaller."""
    low, high = 0, 1
    while fits(high * step):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def tile_nbytes(layer_nbytes: int, factor: int) -> int:
    """`schedule.tile` that cuts a layer into so many; 0 leaves it whole."""
    return 0 if factor == 1 else max(layer_nbytes // factor, SMALLEST_TILE_NBYTES)


# -- Predicted -------------------------------------------------------------------------------------


def predict(factor: int, window_nbytes: int) -> dict[str, Any]:
    """For tiles of the `factor`-th part of the widest layer."""
    hardware = load_hardware("dgx-2")

    def fits(hidden: int) -> bool:
        shape = gpt_shape("one block", 1, hidden, vocab=1)
        widest_nbytes = 4 * hidden * hidden * 2
        try:
            forecast(
                SwapConfig.load(
                    {
                        "tiers": {
                            "device": {"capacity": f"{window_nbytes}B"},
                            "host": {"capacity": "85%"},
                            "nvme": [{"path": "/mnt/nvme"}],
                        },
                        "placement": {kind: ["host", "nvme"] for kind in KINDS},
                        "precision": {"compute": "bfloat16"},
                        "schedule": {"tile": tile_nbytes(widest_nbytes, factor)},
                    }
                ),
                model_of_shape(shape, torch.bfloat16),
                hardware,
                Batch(2048, 2048),
            )
        except CapacityError as error:
            assert error.tier == "device", error
            return False
        return True

    return {"factor": factor, "hidden": largest(fits, 128)}


# -- Run -------------------------------------------------------------------------------------------


def run(factor: int, window_nbytes: int, scratch: Path) -> dict[str, Any]:
    """The widest layer that trains, the bytes attached at most, and the next wider one refused."""
    peaks: dict[int, int] = {}

    def fits(hidden: int) -> bool:
        try:
            peaks[hidden] = train(hidden, factor, window_nbytes, scratch)
        except CapacityError as error:
            assert error.tier == "device", error
            return False
        return True

    hidden = largest(fits, 64)
    layer_nbytes = 4 * hidden * hidden * 4
    assert peaks[hidden] <= window_nbytes, "the window was exceeded"
    return {
        "factor": factor, "hidden": hidden, "layer_nbytes": layer_nbytes,
        "window_nbytes": window_nbytes, "peak_nbytes": peaks[hidden],
    }  # fmt: skip


def train(hidden: int, factor: int, window_nbytes: int, scratch: Path) -> int:
    """Two steps; the bytes of weights that were on the device at once, at most."""
    layer_nbytes = 4 * hidden * hidden * 4
    config = {
        "tiers": {
            "device": {"kind": "cpu", "capacity": f"{window_nbytes}B"},
            "host": {"capacity": "256MiB"},
            "nvme": [{"path": str(scratch / "swap")}],
        },
        "placement": dict.fromkeys(KINDS, "nvme"),
        "schedule": {"tile": tile_nbytes(layer_nbytes, factor)},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(hidden, 4 * hidden, bias=False))
    device = SimulatedDevice(0, delay_s=0.0)
    infinity.offload(model, config, device=device)
    with infinity.engine_of(model):
        optimizer = infinity.AdamW(model, lr=0.01 / hidden)
        losses = []
        for _ in range(2):
            loss = model(torch.ones(4, hidden)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[1] < losses[0], losses
        return device.attached_high_water_nbytes


# -- Report ----------------------------------------------------------------------------------------


def report(
    predicted: list[dict[str, Any]], found: list[dict[str, Any]], words: argparse.Namespace
) -> None:
    def published(row: dict[str, Any]) -> str:
        return f"{PUBLISHED[row['factor']]:,}" if row["factor"] in PUBLISHED else ""

    print_table(
        f"widest GPT-like block in a window of {format_nbytes(words.window)}, 16 bits",
        {"tiles": "{factor}", "predicted hidden size": "{hidden:,}", "ZeRO-Infinity": published},
        predicted,
    )
    if found:
        columns = {
            "tiles": "{factor}", "hidden size that trains": "{hidden:,}",
            "layer": lambda row: format_nbytes(row["layer_nbytes"]),
            "layer / window": lambda row: f"{row['layer_nbytes'] / row['window_nbytes']:.2f}",
            "peak in window": lambda row: f"{row['peak_nbytes'] / row['window_nbytes']:.0%}",
        }  # fmt: skip
        title = f"one layer of h x 4h, fp32, window {format_nbytes(words.run_window)}"
        print_table(title, columns, found)
    save(words.save, words, predicted=predicted, published=PUBLISHED, run=found)
    if words.plot is not None:
        draw(predicted, found, words.plot)


def draw(predicted: list[dict[str, Any]], found: list[dict[str, Any]], path: Path) -> None:
    """Hidden size over tiles, both axes by powers of two."""
    from infinity.tools.pictures.timeline import find_pyplot

    pyplot = find_pyplot()
    figure, axis = pyplot.subplots(figsize=(5.5, 4))
    for rows, label, marker in (
        (predicted, "predicted, 2 GiB", "o"), (found, "run, simulated device", "s"),
    ):  # fmt: skip
        if rows:
            axis.plot(
                [row["factor"] for row in rows], [row["hidden"] for row in rows],
                marker=marker, label=label,
            )  # fmt: skip
    axis.plot(list(PUBLISHED), list(PUBLISHED.values()), "k^--", label="ZeRO-Infinity, 2 GB pieces")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    least, most = predicted[0], predicted[-1]
    axis.set_title(
        f"{most['factor']} tiles: a layer {most['hidden'] / least['hidden']:.0f} times as wide in "
        "the same window",
        fontsize="medium",
    )
    axis.set_xlabel("tiles of the widest layer")
    axis.set_ylabel("largest hidden size")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
