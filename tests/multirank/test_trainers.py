"""transformers.Trainer, TRL's SFTTrainer and loops with accelerate in two processes, beside a plain
one that accumulates what both of them see: the same sums in the same order, and halving is exact."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

import infinity
from infinity.distributed.group import find_group
from infinity.errors import ConfigError
from infinity.integrations import deepspeed
from infinity.integrations.hf import prepare_accelerator, prepare_trainer
from tests.integrations import test_hf as hf
from tests.support.bits import assert_same

from .processes import run_ranks

COUNT = 2
STEPS = 4


def model_without_dropout() -> Any:
    """Ranks draw the numbers of dropout alike, and one process draws them one after the other."""
    model = hf.make_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@contextmanager
def torchrun(rank: int) -> Iterator[None]:
    """Sets the variables of torchrun."""
    wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": COUNT, "LOCAL_WORLD_SIZE": COUNT}
    os.environ |= {name: str(value) for name, value in wanted.items()}
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]


def swap(directory: Path) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    config = hf.swap(directory)
    config["tiers"]["host"]["capacity"] = "64MiB"
    return config


def close(model: Any) -> dict[str, Tensor]:
    engine = infinity.engine_of(model)
    found = {name: engine.read_parameter(name) for name in engine.parameter_names()}
    engine.close()
    return found


def plain_weights(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# -- transformers.Trainer ------------------------------------------------------------------------


def _options(**more: Any) -> dict[str, Any]:
    return {"max_steps": STEPS, "eval_steps": 2, "max_grad_norm": 0.0, "warmup_steps": 1} | more


def _without_norms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "grad_norm"} for row in rows]


def _norms(rows: list[dict[str, Any]]) -> list[float]:
    return [row["grad_norm"] for row in rows if "grad_norm" in row]


class _StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def _train(
    rank: int,
    directory: str,
    options: dict[str, Any],
    resume: str | None = None,
    stop_after: int | None = None,
) -> Any:
    with torchrun(rank):
        args = hf.arguments(Path(directory), **options)  # Joins the processes.
        model = infinity.offload(model_without_dropout(), swap(Path(directory)))
        trainer = hf.Trainer(
            model=model, args=args, train_dataset=hf.Tokens(40, 1), eval_dataset=hf.Tokens(8, 2)
        )
        prepare_trainer(trainer, layer_major=None if options["max_grad_norm"] else False)
        if stop_after is not None:
            trainer.add_callback(_StopAfter(stop_after))
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        evaluation = trainer.evaluate()["eval_loss"]
        return hf.history(trainer), evaluation, close(model)


def _plain(directory: Path, options: dict[str, Any]) -> Any:
    args = hf.arguments(directory, **options)
    trainer = hf.Trainer(
        model=model_without_dropout(), args=args, train_dataset=hf.Tokens(40, 1),
        eval_dataset=hf.Tokens(8, 2),
    )  # fmt: skip
    trainer.train()
    evaluation = trainer.evaluate()["eval_loss"]
    return hf.history(trainer), evaluation, plain_weights(trainer.model)


def _evaluate(rank: int, directory: str) -> Any:
    more = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}
    with torchrun(rank):
        args = hf.arguments(Path(directory), **_options(**more))
        with infinity.engine_of(
            infinity.offload(model_without_dropout(), swap(Path(directory)))
        ) as engine:
            trainer = hf.Trainer(
                model=engine.model, args=args, train_dataset=hf.Tokens(40, 1),
                eval_dataset=hf.Tokens(11, 2),
            )  # fmt: skip
            prepare_trainer(trainer, layer_major=True).train()
            sweep, counts = trainer._sweep_calls, []
            trainer._sweep_calls = lambda calls: (counts.append(len(calls)), sweep(calls))[1]
            losses = []
            for trainer._why_unswept in (None, "a test"):
                losses.append(trainer.evaluate()["eval_loss"])
            return losses, counts


def test_evaluations_of_two_processes_are_those_of_batches_one_by_one(tmp_path: Path) -> None:
    """11 records are three batches of two on each process: one of them is added, and left out."""
    for (loss, expected), counts in run_ranks(COUNT, _evaluate, str(tmp_path)):
        assert loss == expected and counts == [3]


def test_trainer_of_two_processes_is_one_that_sees_both_batches(tmp_path: Path) -> None:
    """Losses, learning rates, evaluations and weights to the bit; norms to their rounding."""
    plain = _plain(tmp_path / "plain", _options(gradient_accumulation_steps=2))
    both = run_ranks(COUNT, _train, str(tmp_path / "both"), _options(gradient_accumulation_steps=1))
    for history, evaluation, weights in both:
        assert_same(plain[2], weights)
        assert evaluation == plain[1]
        assert _without_norms(history) == _without_norms(plain[0])
        assert _norms(history) == pytest.approx(_norms(plain[0]), rel=1e-6)
        assert len(_norms(history)) == STEPS
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    saved = plain_weights(again)
    assert all(torch.equal(saved[name], weight) for name, weight in both[0][2].items())


def test_windows_and_clipping_over_processes_are_as_of_one(tmp_path: Path) -> None:
    """Sums of four micro-batches have another order: to rounding."""
    plain = _plain(tmp_path / "plain", _options(gradient_accumulation_steps=4, max_grad_norm=0.5))
    options = _options(gradient_accumulation_steps=2, max_grad_norm=0.5)
    first, second = run_ranks(COUNT, _train, str(tmp_path / "both"), options)
    assert_same(first[2], second[2])
    assert first[0] == second[0]
    assert _norms(first[0]) == pytest.approx(_norms(plain[0]), rel=1e-4)
    for one, other in zip(_without_norms(first[0]), _without_norms(plain[0]), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for name, weight in plain[2].items():
        assert torch.allclose(first[2][name], weight, atol=1e-4), name


def test_a_run_of_two_processes_is_resumed_by_two_and_by_one(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    options = _options(gradient_accumulation_steps=1, eval_strategy="no", **saving)
    whole = run_ranks(COUNT, _train, str(tmp_path / "run"), options)
    cut = run_ranks(COUNT, _train, str(tmp_path / "cut"), options, None, 2)
    assert cut[0][2].keys() == whole[0][2].keys()
    checkpoint = tmp_path / "cut" / "checkpoint-2"
    assert sorted(path.name for path in checkpoint.glob("rng_state*")) == [
        "rng_state_0.pth",
        "rng_state_1.pth",
    ]
    for found, wanted in zip(
        run_ranks(COUNT, _train, str(tmp_path / "two"), options, str(checkpoint)),
        whole,
        strict=True,
    ):
        assert_same(wanted[2], found[2])
        assert found[0] == wanted[0]
    alone = options | {"gradient_accumulation_steps": 2}
    args = hf.arguments(tmp_path / "one", **alone)
    model = infinity.offload(model_without_dropout(), swap(tmp_path))
    trainer = hf.Trainer(model=model, args=args, train_dataset=hf.Tokens(40, 1))
    prepare_trainer(trainer, layer_major=False).train(resume_from_checkpoint=str(checkpoint))
    assert_same(whole[0][2], close(model))


# -- TRL -----------------------------------------------------------------------------------------


def _sft(directory: Path, accumulation: int) -> Any:
    from tests.integrations import test_trl

    data = test_trl.datasets.Dataset.from_dict({"text": test_trl.texts(24, 0)})
    options = test_trl.common(
        directory, gradient_accumulation_steps=accumulation, max_grad_norm=0.0
    )
    return test_trl.trl.SFTTrainer(
        model=test_trl.make_model(lora=False, dropout=0.0),
        args=test_trl.trl.SFTConfig(max_length=16, **options),
        train_dataset=data, processing_class=test_trl.tokenizer(),
    )  # fmt: skip


def _train_sft(rank: int, directory: str) -> Any:
    with torchrun(rank):
        trainer = prepare_trainer(_sft(Path(directory), 1), swap(Path(directory)))
        trainer.train()
        return _without_norms(hf.history(trainer)), close(trainer.model)


def test_sft_of_two_processes_is_one_that_sees_both_batches(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install trl")
    plain = _sft(tmp_path / "plain", 2)
    plain.train()
    for history, weights in run_ranks(COUNT, _train_sft, str(tmp_path / "both")):
        assert_same(plain_weights(plain.model), weights)
        assert history == _without_norms(hf.history(plain))


def _average_each_batch(model: Any) -> None:
    """Averages the gradient of every micro-batch over the processes, as the engine does.

    DistributedDataParallel averages the sum of a window instead, whose bits differ from three
    addends on. Accelerate leaves the model as it is.
    """
    model._is_accelerate_prepared = True

    def average(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        torch.distributed.all_reduce(total)
        return total / COUNT

    for parameter in model.parameters():
        parameter.register_hook(average)


def _train_grpo_window(rank: int, directory: str) -> Any:
    """Returns history and weights of GRPO with two micro-batches: plain TRL, then offloaded, whose
    micro-batches come one after the other; and again, whose micro-batches pass blocks together."""
    from tests.integrations import test_trl

    results = []
    with torchrun(rank), pytest.MonkeyPatch.context() as patch:
        options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
        patch.setattr(test_trl, "common", partial(test_trl.common, **options))
        for is_plain, together in itertools.product((True, False), (False, True)):
            path = Path(directory) / f"{is_plain}-{together}"
            model = test_trl.make_model(lora=False, dropout=0.0)
            trainer = test_trl.grpo(model, path, None)
            if not is_plain:
                prepare_trainer(trainer, swap(path), layer_major=together)
            elif not together:
                _average_each_batch(model)
            trainer.train()
            weights = plain_weights(model) if is_plain else close(trainer.model)
            results.append((_without_norms(test_trl.history(trainer)), weights))
    return results


def _train_trl(rank: int, directory: str) -> Any:
    """GRPO and a reward model with an adapter: first plain TRL, then offloaded, in one process."""
    from tests.integrations import test_trl

    results = []
    with torchrun(rank), pytest.MonkeyPatch.context() as patch:
        plain_options = partial(test_trl.common, gradient_accumulation_steps=1, max_grad_norm=0.0)
        patch.setattr(test_trl, "common", plain_options)
        for make_trainer in (test_trl.grpo, test_trl.reward):
            is_grpo = make_trainer is test_trl.grpo
            for is_plain in (True, False):
                model = test_trl.make_model(lora=False) if is_grpo else test_trl.make_scorer()
                path = Path(directory) / f"{make_trainer.__name__}-{is_plain}"
                trainer = make_trainer(model, path, None)
                if not is_plain:
                    prepare_trainer(trainer, swap(path))
                trainer.train()
                weights = plain_weights(model) if is_plain else close(trainer.model)
                results.append((_without_norms(test_trl.history(trainer)), weights))
    return results


def test_grpo_and_reward_of_two_processes_are_those_of_plain_trl(tmp_path: Path) -> None:
    """Generated lengths, rewards, losses and weights to the bit, with seeds as TRL sets them."""
    pytest.importorskip("trl", reason="pip install trl")
    for grpo, my_grpo, reward, my_reward in run_ranks(COUNT, _train_trl, str(tmp_path)):
        for plain, mine in ((grpo, my_grpo), (reward, my_reward)):
            assert mine[0] == plain[0]
            assert len(mine[0]) == (4 if mine is my_grpo else 6)  # With two evaluations.
            assert_same(plain[1], mine[1])


def test_grpo_windows_of_two_processes_are_those_of_plain_trl_in_either_order_of_sums(
    tmp_path: Path,
) -> None:
    """The order of the sums is all that differs from plain TRL: with it, weights are equal to the
    bit. Windows that pass blocks together have the order of plain TRL."""
    pytest.importorskip("trl", reason="pip install trl")
    for plain, window, mine, my_window in run_ranks(COUNT, _train_grpo_window, str(tmp_path)):
        for expected, found in ((plain, mine), (window, my_window)):
            assert found[0] == expected[0]
            assert_same(expected[1], found[1])


def _train_served(rank: int, directory: str, url: str) -> Any:
    from tests.integrations import test_rollouts

    with torchrun(rank):
        model = test_rollouts.make_model(lora=True, dropout=0.0)
        trainer = test_rollouts.make_trainer(model, Path(directory), max_steps=2, learning_rate=0.1)
        prepare_trainer(trainer, swap(Path(directory)), sampler=url)
        trainer.train()
        infinity.engine_of(model).close()
        return test_rollouts.history(trainer)


def test_a_server_gets_the_adapter_of_all_processes_once(tmp_path: Path) -> None:
    """And samples from it for each of them, as their log-probabilities show."""
    pytest.importorskip("trl", reason="pip install trl")
    from tests.integrations import test_rollouts

    served = test_rollouts.server()
    with served.running() as url:
        rows = run_ranks(COUNT, _train_served, str(tmp_path), url)
    assert len(served.loaded) == 2
    for row in [row for found in rows for row in found if "loss" in row]:
        assert 0 < row[f"{test_rollouts.DIFFERENCE}max"] < 1e-5


# -- accelerate ----------------------------------------------------------------------------------


def _loop(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, norms: list[float]
) -> list[float]:
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), torch.inf)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    return losses


def _accelerate(rank: int, directory: str) -> Any:
    with torchrun(rank):
        accelerator = hf.Accelerator(cpu=True)
        model = infinity.offload(model_without_dropout(), swap(Path(directory)))
        model, optimizer = prepare_accelerator(accelerator, model, infinity.AdamW(model, lr=1e-2))
        loader = accelerator.prepare(hf.DataLoader(hf.Tokens(16, 1), batch_size=2))
        norms: list[float] = []
        losses = _loop(accelerator, model, optimizer, loader, norms)
        accelerator.save_state(f"{directory}/saved")
        weights = {name: weight.clone() for name, weight in _read(model).items()}
        losses += _loop(accelerator, model, optimizer, loader, norms)
        accelerator.load_state(f"{directory}/saved")
        assert_same(weights, _read(model))
        more = _loop(accelerator, model, optimizer, loader, [])
        assert more == losses[-len(more) :]
        return losses, norms, close(model)


def _read(model: Any) -> dict[str, Tensor]:
    engine = infinity.engine_of(model)
    return {name: engine.read_parameter(name) for name in engine.parameter_names()}


def test_an_accelerate_loop_over_processes_is_one_that_sees_both_batches(tmp_path: Path) -> None:
    accelerator = hf.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = model_without_dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(hf.DataLoader(hf.Tokens(16, 1), batch_size=2))
    norms: list[float] = []
    losses = _loop(accelerator, model, optimizer, loader, norms)
    losses += _loop(accelerator, model, optimizer, loader, norms)
    means = [(one + other) / 2 for one, other in zip(losses[::2], losses[1::2], strict=True)]
    for found, found_norms, weights in run_ranks(COUNT, _accelerate, str(tmp_path)):
        assert found == pytest.approx(means, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-6)
        assert_same(plain_weights(model), weights)


# -- DeepSpeed ------------------------------------------------------------------------------------


def _deepspeed(rank: int, directory: str) -> Any:
    """A loop with accumulation, which stops and goes on; then that of plain PyTorch, in which all
    processes add their gradients of each micro-batch."""
    config: dict[str, Any] = {
        "train_batch_size": 8, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }  # fmt: skip
    rows = torch.randn(2 * STEPS, COUNT, 2, 8, generator=torch.Generator().manual_seed(3))[:, rank]

    def make() -> Any:
        torch.manual_seed(7)
        return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))

    losses, plain_losses = [], []
    with torchrun(rank):
        engine, *_ = deepspeed.initialize(model=make(), config=config)
        for index, row in enumerate(rows):
            if index == STEPS:
                engine.save_checkpoint(directory, client_state={"index": index})
                infinity.close(engine.module)
                engine, *_ = deepspeed.initialize(model=make(), config=config)
                assert engine.load_checkpoint(directory)[1] == {"index": index}
            loss = engine(row).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        sizes = engine.train_micro_batch_size_per_gpu(), engine.global_steps, engine.global_samples
        weights = close(engine.module)
    plain = make()
    parameters = list(plain.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)
    for index, row in enumerate(rows):
        loss = plain(row).square().mean()
        plain_losses.append(loss.item())
        for parameter, mine in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            dist.all_reduce(mine)
            mine /= 2 * COUNT
            parameter.grad = mine if parameter.grad is None else parameter.grad + mine
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return sizes, (losses, plain_losses), (weights, plain_weights(plain))


def test_a_loop_of_deepspeed_over_processes_has_the_bits_of_plain_pytorch(tmp_path: Path) -> None:
    for sizes, losses, weights in run_ranks(COUNT, _deepspeed, str(tmp_path)):
        assert sizes == (2, STEPS, 8 * STEPS)
        assert losses[0] == losses[1]
        assert_same(*weights)


# -- What is refused -----------------------------------------------------------------------------


def test_a_model_that_was_offloaded_before_the_processes_joined_is_refused(tmp_path: Path) -> None:
    model = infinity.offload(model_without_dropout(), hf.swap(tmp_path))
    trainer = hf.make_trainer(model, tmp_path / "out")
    trainer.args.__class__ = type(
        "TwoProcesses", (type(trainer.args),), {"world_size": property(lambda _: COUNT)}
    )
    with pytest.raises(ConfigError, match="after the processes have joined"):
        prepare_trainer(trainer)
    infinity.engine_of(model).close()


def test_a_process_that_has_not_joined_the_others_is_warned_before_it_takes_the_directory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_group() is None and not caplog.records
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_group() is None
    assert "one of 2 processes that have not joined" in caplog.text
    assert "call infinity.offload after TrainingArguments" in caplog.text
