"""A notebook in a real kernel: what a cell shows, a cell that runs again, an interrupt."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")

IMPORTS = """
import itertools
import torch
from torch import nn
import infinity
from infinity.observe.loss_curve import LossCurve
config = {"tiers": {"host": {"capacity": "16MiB", "huge_pages": False}, "nvme": [{"path": "swap"}]}}
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
def train(model, optimizer):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""
OFFLOAD = """
model = infinity.offload(build(), config)
optimizer = infinity.AdamW(model, lr=1e-2)
infinity.describe(model)
"""
TRAIN = """
curve = LossCurve(8)
for _ in range(8):
    curve.add(train(model, optimizer))
"""
ENDLESS = """
for step in itertools.count():
    train(model, optimizer)
    if step == 2:
        print("begun")
"""
# As many steps in memory as were made: the interrupted cell's, whichever they were, and one more.
COMPARE = """
optimizer.zero_grad()
train(model, optimizer)
steps = int(optimizer.state[next(model.parameters())]["step"])
plain = build()
reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
for _ in range(steps):
    train(plain, reference)
with infinity.gather(model):
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters())]
print(steps, all(same))
"""


class Kernel:
    """Runs cells one after the other, as a user does."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._client.nb.cells.clear()
        self._client.on_cell_executed = self._keep_reply
        self._reply: dict[str, Any] = {}

    @property
    def error(self) -> str | None:
        """The name of the error that ended the last cell, as the kernel replied it.

        A second interrupt while IPython draws the traceback of the first leaves the cell without
        an output for the error. The reply has its name all the same.
        """
        return self._reply.get("ename")

    def _keep_reply(self, execute_reply: dict[str, Any], **_: Any) -> None:
        self._reply = execute_reply["content"]

    def run(self, source: str, *, may_fail: bool = False) -> Any:
        cell = nbformat.v4.new_code_cell(source)
        if may_fail:
            cell.metadata["tags"] = ["raises-exception"]
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return cell

    def run_interrupted(self, source: str) -> Any:
        """Runs a cell that does not end, and interrupts it once it has printed something."""
        is_over = threading.Event()
        index = len(self._client.nb.cells)
        interrupter = threading.Thread(target=self._interrupt, args=(index, is_over))
        interrupter.start()
        try:
            return self.run(source, may_fail=True)
        finally:
            is_over.set()
            interrupter.join()

    def _interrupt(self, index: int, is_over: threading.Event) -> None:
        cells = self._client.nb.cells
        while len(cells) <= index or not cells[index].outputs:
            if is_over.wait(0.1):
                return
        # Again until the cell ends: Python drops an interrupt that comes in a finalizer.
        while not is_over.is_set():
            # The manager is asynchronous: what this call gives does nothing until it is awaited.
            asyncio.run(self._client.km.interrupt_kernel())
            is_over.wait(5)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    directory: Path = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(), timeout=240, resources={"metadata": {"path": str(directory)}}
    )
    with client.setup_kernel():
        running = Kernel(client)
        running.run(IMPORTS)
        yield running


def html_of(cell: Any) -> list[str]:
    return [
        output["data"]["text/html"]
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]


def text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_a_model_shows_where_it_rests_also_when_its_cell_runs_again(kernel: Kernel) -> None:
    (first,) = html_of(kernel.run(OFFLOAD))
    for words in ("2,128 parameters", "<th>nvme</th>", "host budget of 16.0 MiB"):
        assert words in first
    again = kernel.run(OFFLOAD)
    (second,) = html_of(again)
    assert "is replaced" in text_of(again)
    assert second.split("in memory")[0] == first.split("in memory")[0]


def test_losses_are_one_curve_that_is_drawn_in_its_place(kernel: Kernel) -> None:
    kernel.run(OFFLOAD)
    cell = kernel.run(TRAIN)
    (picture,) = html_of(cell)
    assert "step 8 of 8, loss " in picture and "value='100.0'" in picture
    (line,) = re.findall(r"polyline points='([^']*)'", picture)
    assert len(line.split()) == 8


def test_an_interrupted_cell_leaves_the_model_as_its_steps_made_it(kernel: Kernel) -> None:
    kernel.run(OFFLOAD)
    kernel.run("train(model, optimizer)")
    kernel.run_interrupted(ENDLESS)
    assert kernel.error == "KeyboardInterrupt"
    steps, is_same = text_of(kernel.run(COMPARE)).split()
    assert int(steps) >= 4 and is_same == "True"
    kernel.run("infinity.close(model)")
