"""Evaluations of a Trainer in sweeps: the numbers of a plain Trainer, and one read of the base."""

from __future__ import annotations

import logging
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

import infinity
from infinity.integrations.hf import prepare_trainer
from tests.support.exhaustive import sampled

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


def read_nbytes(engine: Any) -> float:
    found: float = engine.counters.snapshot().get("nvme_read_nbytes", 0)
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
        trainer = make_trainer(
            Trainer, engine.model, tmp_path / "out", per_device_eval_batch_size=2
        )
        prepare_trainer(trainer)
        for how in ("swept", "plain"):
            if how == "plain":
                trainer._why_unswept = "a test"
            for _ in range(2):
                before = read_nbytes(engine)
                trainer.evaluate(Tokens(16, 2))
                read[how] = read_nbytes(engine) - before
    assert 0.7 * base <= read["swept"] <= 1.05 * base, (read, base)
    assert read["plain"] >= 7 * read["swept"], (read, base)


def windows_of(trainer: Any) -> list[tuple[int, int]]:
    """Prepares a trainer. Returns (micro-batches, evaluated batches) of each sweep to come."""
    found: list[tuple[int, int]] = []
    prepare_trainer(trainer)
    engine = infinity.engine_of(trainer.model)
    sweep = engine.sweep

    def counting(losses: Any, calls: Any = ()) -> Any:
        found.append((len(losses), len(calls)))
        return sweep(losses, calls)

    engine.sweep = counting  # type: ignore[method-assign]
    return found


def rows(trainer: Any) -> list[dict[str, Any]]:
    timed = ("time", "runtime", "per_second", "flos")
    return [
        {k: v for k, v in row.items() if not any(word in k for word in timed)}
        for row in trainer.state.log_history
    ]


def quiet(cls: Any, model: Any, directory: Path, **options: Any) -> Any:
    """Without the journal, which sees in which order events come."""
    trainer = make_trainer(cls, model, directory, **options)
    trainer.callback_handler.callbacks = [
        callback
        for callback in trainer.callback_handler.callbacks
        if type(callback).__module__.startswith("transformers")
    ]
    return trainer


@pytest.mark.parametrize(
    ("make", "options"),
    sampled(
        product(
            [gpt2_without_dropout, mixtral_lora],
            [{}, {"eval_strategy": "epoch"}, {"save_strategy": "steps"}],
        ),
        lambda case: (case[0] is mixtral_lora) == ("eval_strategy" not in case[1]),
    ),
)
def test_an_evaluation_that_passes_with_the_next_step_is_that_of_a_plain_trainer(
    make: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """Logs, of the step that it follows and in their order, and weights. What a save needs comes
    before it; the last window of an epoch has one micro-batch."""
    options = {"save_steps": 4, "eval_steps": 1, "num_train_epochs": 3} | options
    plain = quiet(Trainer, make(), tmp_path / "plain", **options)
    plain.train()
    with infinity.engine_of(infinity.offload(make(), swap(tmp_path))) as engine:
        mine = quiet(Trainer, engine.model, tmp_path / "mine", **options)
        counts = windows_of(mine)
        mine.train()
        assert rows(mine) == rows(plain)
        for name, parameter in plain.model.named_parameters():
            assert torch.equal(engine.read_parameter(name), parameter), name
    assert sum("eval_loss" in row for row in rows(mine)) == (
        3 if "eval_strategy" in options else 12
    )
    assert (3, 3) in counts and (0, 3) in counts, counts


def test_an_evaluation_with_the_next_step_reads_no_byte(tmp_path: Path) -> None:
    """As counted by the engine. Of five evaluations, the first and the last one read the base."""
    base = sum(p.numel() * 4 for n, p in llama().named_parameters() if "layers" in n)
    read = {}
    for strategy in ("no", "steps"):
        config = swap(tmp_path, capacity="2800KiB") | {"schedule": {"prefetch": False}}
        config["placement"] = {"parameters": ["nvme"]}
        with infinity.engine_of(infinity.offload(llama(), config)) as engine:
            trainer = quiet(
                Trainer, engine.model, tmp_path / "out", eval_strategy=strategy, eval_steps=1,
                gradient_accumulation_steps=2, num_train_epochs=1,
            )  # fmt: skip
            counts = windows_of(trainer)
            trainer.train()
            assert counts.count((2, 3)) == (0 if strategy == "no" else 3), counts
            read[strategy] = read_nbytes(engine)
    assert 1.5 * base <= read["steps"] - read["no"] <= 2.2 * base, (read, base)
