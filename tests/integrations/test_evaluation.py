"""Evaluations of a Trainer in sweeps: the numbers of a plain Trainer, and one read of the base."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

import infinity
from infinity.integrations.hf import prepare_trainer

from .test_hf import Tokens
from .test_windows import (
    Norms,
    OwnLoss,
    Plain,
    gpt2,
    gpt2_lora,
    gpt2_without_dropout,
    hooked,
    linear,
    llama,
    make_trainer,
    mixtral_lora,
    prefix,
    said_by_us,
    swap,
    tied,
)


class DrawingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 0.1 * torch.rand(())


class Draws(Plain):
    """Draws in evaluation, too."""

    def block(self) -> nn.Module:
        return DrawingBlock()


class CountingBlock(DrawingBlock):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) + self.count


class Counts(Plain):
    """A block knows how often it was called."""

    def block(self) -> nn.Module:
        return linear(CountingBlock())


class OwnPrediction(Trainer):
    def prediction_step(self, *args: Any, **options: Any) -> Any:
        loss, logits, labels = super().prediction_step(*args, **options)
        return loss + self.state.global_step, logits, labels


def an_evaluation(trainer: Any) -> list[Any]:
    """Losses and metrics, logged and returned; the numbers that are drawn behind it."""
    torch.manual_seed(5)
    found = [trainer.evaluate() for _ in range(2)]
    return [[v for k, v in row.items() if "_loss" in k] for row in found] + [torch.rand(()).item()]


@pytest.mark.parametrize("order", [None, False])
@pytest.mark.parametrize(
    ("cls", "make", "said"),
    [
        (Trainer, gpt2, None),
        (Trainer, gpt2_lora, None),
        (Trainer, mixtral_lora, None),
        (Trainer, tied, None),
        (Trainer, Norms, None),
        (Trainer, Counts, None),
        (OwnLoss, gpt2_without_dropout, None),
        (Trainer, Draws, "draws random numbers"),
        (Trainer, hooked, "transformer.h.1 has the forward hook"),
        (Trainer, prefix, "PREFIX_TUNING gives a cache"),
        (OwnPrediction, gpt2, "prediction_step of OwnPrediction"),
    ],
)
def test_an_evaluation_is_that_of_a_plain_trainer(
    cls: Any, make: Any, said: str | None, order: bool | None, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, trusted_tests: None,
) -> None:  # fmt: skip
    """What keeps batches from passing the blocks together is named once."""
    options = {"per_device_eval_batch_size": 2}
    plain = make_trainer(cls, make(), tmp_path / "plain", **options)
    plain.eval_dataset = Tokens(9, 2)  # The last batch is short.
    expected = an_evaluation(plain)
    with infinity.engine_of(infinity.offload(make(), swap(tmp_path))) as engine:
        mine = make_trainer(cls, engine.model, tmp_path / "mine", **options)
        mine.eval_dataset = Tokens(9, 2)
        prepare_trainer(mine, layer_major=order)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="infinity"):
            assert an_evaluation(mine) == expected
    messages = said_by_us(caplog)
    assert [bool(said and re.search(said, message)) for message in messages] == [True] * bool(said)


def top(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(-1)


@pytest.mark.parametrize("is_reduced", [False, True])
def test_predictions_and_metrics_are_those_of_a_plain_trainer(
    is_reduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the logits of a few batches only are kept."""
    nbytes = 3 * 2 * 12 * 50 * 4 + 4096
    monkeypatch.setattr("infinity.integrations.evaluation._MOST_RESULTS_NBYTES", nbytes)

    def metrics(prediction: Any) -> dict[str, float]:
        return {"sum": float(abs(prediction.predictions).sum()), "most": prediction.label_ids.max()}

    def run(model: Any, name: str, is_prepared: bool) -> tuple[Any, ...]:
        trainer = make_trainer(Trainer, model, tmp_path / name, per_device_eval_batch_size=2)
        trainer.compute_metrics = metrics
        trainer.preprocess_logits_for_metrics = top if is_reduced else None
        if is_prepared:
            prepare_trainer(trainer)
        found = trainer.evaluate(Tokens(13, 2))
        predicted = trainer.predict(Tokens(7, 3))
        return [found[f"eval_{name}"] for name in ("loss", "sum", "most")], predicted

    expected = run(gpt2(), "plain", False)
    with infinity.engine_of(infinity.offload(gpt2(), swap(tmp_path))) as engine:
        found = run(engine.model, "mine", True)
    assert found[0] == expected[0]
    assert (found[1].predictions == expected[1].predictions).all()
    assert (found[1].label_ids == expected[1].label_ids).all()


class Reads(TrainerCallback):
    """The bytes read up to each evaluation's start, and to its end."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def nbytes(self) -> float:
        found: float = self.engine.counters.snapshot().get("nvme_read_nbytes", 0)
        return found


def test_an_evaluation_reads_the_base_once_for_all_batches(
    tmp_path: Path, trusted_tests: None
) -> None:
    """As counted by the engine; a plain one reads it for each batch."""
    base = sum(p.numel() * 4 for n, p in llama().named_parameters() if "layers" in n)
    config = swap(tmp_path, capacity="2800KiB") | {"schedule": {"prefetch": False}}
    config["placement"] = {"parameters": ["nvme"]}
    read = {}
    with infinity.engine_of(infinity.offload(llama(), config)) as engine:
        counts = Reads(engine)
        trainer = make_trainer(
            Trainer, engine.model, tmp_path / "out", per_device_eval_batch_size=2
        )
        prepare_trainer(trainer)
        for how in ("swept", "plain"):
            if how == "plain":
                trainer._why_unswept = "a test"
            for _ in range(2):
                before = counts.nbytes()
                trainer.evaluate(Tokens(16, 2))
                read[how] = counts.nbytes() - before
    assert 0.7 * base <= read["swept"] <= 1.05 * base, (read, base)
    assert read["plain"] >= 7 * read["swept"], (read, base)
