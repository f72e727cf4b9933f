"""Calls between the layers of ARCHITECTURE.md go down: nothing below calls a layer above it back.

import-linter checks imports. Here a profile of one training step checks the calls, which could go
up by functions that a layer above has handed down.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import infinity
from tests.support.models import TinyDecoder

ROOT = Path(infinity.__file__).parent
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md"
# An early update takes the settings of the step that is expected from its parameters' optimizer.
HANDED_DOWN = {("modules", "optimizers")}


def rows() -> dict[str, int]:
    """The row of each folder in the table of layers."""
    table = re.findall(r"^\| (\d+) \| (.*?) \|", ARCHITECTURE.read_text(), re.MULTILINE)
    return {name: int(row) for row, names in table for name in re.findall(r"`(\w+)`", names)}


def folder_of(frame: FrameType | None) -> str | None:
    path = Path(frame.f_code.co_filename) if frame is not None else Path()
    return path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else None


def test_calls_of_a_training_step_go_down(tmp_path: Path) -> None:
    row_of, edges = rows(), set[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        caller, callee = folder_of(frame.f_back), folder_of(frame)
        if event == "call" and caller in row_of and callee in row_of:
            edges.add((str(caller), str(callee)))

    torch.manual_seed(0)
    model = TinyDecoder()
    tiers = {"host": {"capacity": "16MiB"}, "nvme": [{"path": str(tmp_path)}]}
    kinds = ("parameters", "master", "moments", "gradients")
    placement = {kind: ["nvme"] for kind in kinds}
    infinity.offload(model, {"tiers": tiers, "placement": placement})
    optimizer = infinity.AdamW(model, lr=1e-3)
    for seed in range(3):
        sys.setprofile(note)
        try:
            model(**model.inputs(seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    infinity.close(model)
    assert {("modules", "streaming"), ("streaming", "state"), ("state", "storage")} <= edges
    up = {(caller, callee) for caller, callee in edges if row_of[callee] > row_of[caller]}
    assert up <= HANDED_DOWN, f"these layers call layers above them: {up - HANDED_DOWN}"
