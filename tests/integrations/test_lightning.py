"""Lightning's loop, plain and offloaded: equal to the bit in fp32, with an end that ends well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import infinity
from tests.support.models import Mlp
from tests.support.offloading import small_tiers

lightning = pytest.importorskip("lightning", reason="pip install lightning")


class Task(lightning.LightningModule):
    """A model of ours, or of theirs, in Lightning's form."""

    def __init__(self, *, is_offloaded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model: nn.Module = Mlp(width=24)
        self.is_offloaded = is_offloaded
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.model(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("held_out", self.model(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        if self.is_offloaded:
            optimizer: Any = infinity.AdamW(self.model, lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def fit(task: Task, directory: Path, clip: float | None) -> float:
    """The last loss on what was held out."""
    rows = torch.randn(24, 24, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, gradient_clip_val=clip,
        accumulate_grad_batches=2, default_root_dir=directory, num_sanity_val_steps=0,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    trainer.fit(task, loader, loader)
    return float(trainer.callback_metrics["held_out"])


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.filterwarnings("ignore")
def test_fit_gives_the_same_run_and_ends_well(clip: float | None, tmp_path: Path) -> None:
    plain, mine = Task(is_offloaded=False), Task(is_offloaded=True)
    expected = fit(plain, tmp_path, clip)
    infinity.offload(mine.model, {"tiers": small_tiers(tmp_path / "swap", "8MiB")})
    with infinity.engine_of(mine.model) as engine:
        assert fit(mine, tmp_path, clip) == expected
        assert mine.losses == plain.losses
        for name, parameter in plain.model.named_parameters():
            assert torch.equal(engine.read_parameter(name), parameter), name
