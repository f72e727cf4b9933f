"""Accumulation windows of transformers.Trainer, layer-major: the bits of a plain Trainer.

The plain Trainer draws the random numbers of each micro-batch from the state that
`infinity.forward_backward` gives to that micro-batch; everything else is its own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AdaptionPromptConfig, LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
)

import infinity
from infinity.errors import ConfigError, UnsupportedError
from infinity.integrations.hf import prepare_trainer
from tests.support.offloading import small_tiers

from .test_hf import Tokens, arguments, make_lora, make_model


class Seeded(Trainer):
    """A plain Trainer whose micro-batches draw from states of their own."""

    window: int | None = None  # The first one of a window goes on with the present state.

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        self.place = 0
        return super().get_batch_samples(*args, **options)

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        place = self.place % self.window if self.window else self.place
        self.place += 1
        if not place:
            first = torch.get_rng_state()
            self.seeds = [int(torch.randint(2**62, ())) for _ in range(8)]
            torch.set_rng_state(first)
            return super().training_step(*args, **options)
        kept = torch.get_rng_state()
        torch.manual_seed(self.seeds[place - 1])
        loss = super().training_step(*args, **options)
        torch.set_rng_state(kept)
        return loss


class Journal(TrainerCallback):
    """Every event of a run, with what a callback can see of it."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **more: Any) -> None:
            logs = {k: v for k, v in (more.get("logs") or {}).items() if not _is_timed(k)}
            self.events.append((name, state.global_step, state.epoch, logs, control.should_log))

        return note


def _is_timed(key: str) -> bool:
    return any(word in key for word in ("time", "runtime", "per_second", "flos"))


def gpt2(**options: Any) -> GPT2LMHeadModel:
    return make_model(tie_word_embeddings=False, **options)  # Dropout is on.


def gpt2_without_dropout() -> Any:
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def gpt2_lora() -> Any:
    return make_lora(tie_word_embeddings=False)


def mixtral_lora() -> Any:
    torch.manual_seed(3)
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50, num_local_experts=4, output_router_logits=True,
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(MixtralForCausalLM(config), lora)


def make_trainer(cls: Any, model: Any, directory: Path, **options: Any) -> Any:
    """Of ten micro-batches per epoch: the last window of an epoch has one."""
    more = {k: options.pop(k) for k in ("compute_loss_func",) if k in options}
    of_a_run = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "eval_steps": 2,
        "per_device_eval_batch_size": 2,
    }
    return cls(
        model=model, args=arguments(directory, **(of_a_run | options)), train_dataset=Tokens(20, 1),
        eval_dataset=Tokens(5, 2), callbacks=[Journal()], **more,
    )  # fmt: skip


def swap(directory: Path, **host: Any) -> dict[str, Any]:
    return {"tiers": small_tiers(directory / "swap", **host)}


def events(trainer: Any) -> list[Any]:
    (journal,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, Journal)]
    found: list[Any] = journal.events
    return found


def a_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


RUNS: list[tuple[Callable[[], Any], dict[str, Any]]] = [
    (gpt2, {}),
    (gpt2_lora, {"gradient_accumulation_steps": 5, "window": 2}),
    (gpt2, {"label_smoothing_factor": 0.1, "average_tokens_across_devices": False}),
    (gpt2, {"compute_loss_func": a_loss, "max_grad_norm": 0.0}),
    (gpt2_lora, {"gradient_checkpointing": True, "gradient_accumulation_steps": 4}),
    (gpt2_lora, {"gradient_accumulation_steps": 1, "gradient_checkpointing": True}),
    (gpt2_lora, {"neftune_noise_alpha": 5.0, "torch_empty_cache_steps": 1}),
    (mixtral_lora, {}),
]


@pytest.mark.parametrize(("make", "options"), [(make, dict(run)) for make, run in RUNS])
def test_a_layer_major_run_is_that_of_a_plain_trainer(
    make: Callable[[], Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, norms and evaluations; the order of callbacks and what they see; the weights."""
    window = options.pop("window", None)
    plain = make_trainer(Seeded, make(), tmp_path / "plain", **options)
    plain.window = window
    plain.train()
    model = infinity.offload(make(), swap(tmp_path))
    mine = make_trainer(Trainer, model, tmp_path / "mine", **options)
    prepare_trainer(mine, layer_major=True, window=window).train()
    assert events(mine) == events(plain)
    names = [event[0] for event in events(mine)]
    steps = {1: 20, 3: 8, 4: 6, 5: 4}[mine.args.gradient_accumulation_steps]
    assert names.count("on_step_end") == steps and names.count("on_evaluate") == steps // 2
    assert names.count("on_substep_end") == 20 - steps
    assert mine.state.log_history[-1]["train_loss"] == plain.state.log_history[-1]["train_loss"]
    with infinity.engine_of(model) as engine:
        for name, parameter in plain.model.named_parameters():
            assert torch.equal(engine.read_parameter(name), parameter), name


def test_layer_inputs_of_a_window_rest_on_the_tier_that_is_configured(tmp_path: Path) -> None:
    """And that changes no bit."""
    seen = []
    for tier in ("host", "nvme"):
        config = swap(tmp_path) | {"placement": {"activations": tier}}
        model = infinity.offload(gpt2(), config)
        trainer = make_trainer(Trainer, model, tmp_path / "out", max_steps=2, eval_strategy="no")
        with infinity.engine_of(model) as engine:
            prepare_trainer(trainer, layer_major=True).train()
            assert (engine.counters.snapshot().get("activation_out_nbytes", 0) > 0) == (
                tier == "nvme"
            )
        seen.append(events(trainer))
    assert seen[0] == seen[1]


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}

    def run(name: str, resume: bool | str = False, **more: Any) -> Any:
        model = infinity.offload(gpt2_lora(), swap(tmp_path / name))
        trainer = make_trainer(Trainer, model, tmp_path / name / "out", **options, **more)
        prepare_trainer(trainer, layer_major=True).train(resume_from_checkpoint=resume)
        with infinity.engine_of(model) as engine:
            weights = {n: engine.read_parameter(n) for n in engine.parameter_names()}
        return trainer.state.log_history[:-1], weights

    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
    whole = run("whole")
    again = run("again", str(tmp_path / "whole" / "out" / "checkpoint-3"))
    keys = ("step", "loss", "grad_norm", "learning_rate")
    rows = [[{k: row.get(k) for k in keys} for row in each[0]] for each in (whole, again)]
    assert rows[0] == rows[1] and len(rows[0]) == 8
    assert all(torch.equal(whole[1][name], again[1][name]) for name in whole[1])


# -- What it is for --------------------------------------------------------------------------------


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=10, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50, tie_word_embeddings=False,
    )  # fmt: skip
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(config), lora)


def test_bytes_of_a_step_do_not_grow_with_the_window(tmp_path: Path, trusted_tests: None) -> None:
    """As counted by the engine: a step reads the base twice for 1, 2 and 4 micro-batches; the plain
    loop reads it twice for each."""
    base = sum(p.numel() * 4 for n, p in llama().named_parameters() if "layers" in n)
    read: dict[Any, float] = {}
    runs: list[tuple[int, dict[str, Any]]] = [
        (1, {}), (2, {}), (4, {}), (4, {"window": 2}), (2, {"layer_major": False}),
    ]  # fmt: skip
    for count, how in runs:
        config = swap(tmp_path, capacity="2800KiB") | {"schedule": {"prefetch": False}}
        config["placement"] = {"parameters": ["nvme"]}
        model = infinity.offload(llama(), config)
        trainer = make_trainer(
            Trainer, model, tmp_path / "out", gradient_accumulation_steps=count, max_steps=2,
            per_device_train_batch_size=1,
            eval_strategy="no",
        )  # fmt: skip
        counts: list[float] = []
        with infinity.engine_of(model) as engine:

            class Counts(TrainerCallback):
                def on_step_end(self, *args: Any, engine: Any = engine, **more: Any) -> None:
                    counts.append(engine.counters.snapshot()["nvme_read_nbytes"])  # noqa: B023

            trainer.add_callback(Counts())
            prepare_trainer(trainer, **how).train()
        read[count, *how] = counts[-1] - counts[-2]
    for count in (2, 4):
        assert abs(read[count,] / read[1,] - 1) <= 0.02, read
    assert 1.9 * base <= read[1,] <= 2.05 * base, (read, base)
    assert abs(read[4, "window"] / read[1,] / 2 - 1) <= 0.02, read
    assert read[2, "layer_major"] >= 1.9 * read[1,], read


# -- What goes back to the plain loop --------------------------------------------------------------


def said_by_us(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "infinity"]


class OwnStep(Trainer):
    def training_step(self, *args: Any, **options: Any) -> Tensor:
        loss = super().training_step(*args, **options)
        assert any(p.grad is not None for p in self.model.parameters())
        return loss


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


def prefix() -> Any:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return get_peft_model(gpt2(), config)


class WithReference(Trainer):
    """As those of DPO and KTO, whose loss disables adapters."""

    ref_model = None


def adaption_prompt() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50,
    )  # fmt: skip
    adapter = AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapter)


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(50, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.embed(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize(
    ("cls", "make", "said"),
    [
        (OwnStep, gpt2, "training_step of OwnStep may need gradients"),
        (Trainer, prefix, "PREFIX_TUNING gives a cache"),
        (WithReference, adaption_prompt, "ADAPTION_PROMPT is disabled by other modules"),
        (Trainer, NoBlocks, "no list of blocks"),
    ],
)
def test_what_cannot_run_layer_major_runs_plain_with_a_reason(
    cls: Any, make: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_steps": 2, "eval_strategy": "no"}
    plain = make_trainer(cls, make(), tmp_path / "plain", **options)
    plain.train()
    model = infinity.offload(make(), swap(tmp_path))
    trainer = make_trainer(cls, model, tmp_path / "out", **options)
    with infinity.engine_of(model), caplog.at_level(logging.WARNING, logger="infinity"):
        with pytest.raises(UnsupportedError, match=said):
            prepare_trainer(trainer, layer_major=True)
        assert not said_by_us(caplog)
        prepare_trainer(trainer).train()
        assert [said in message for message in said_by_us(caplog)] == [True]
        assert events(trainer) == events(plain)


def linear(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), activation)


class Plain(nn.Module):
    """An embedding and blocks in a row: nothing speaks against layer-major order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def block(self) -> nn.Module:
        return linear(nn.Tanh())

    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.run(self.embed(input_ids)).square().mean()}


class InPlace(Plain):
    def block(self) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))


class StepTwice(Trainer):
    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(*args, **options)
        self.accelerator.backward(loss)
        return loss


@pytest.mark.parametrize(
    ("cls", "make", "said"),
    [
        (Trainer, InPlace, r"changes an argument in place.*layer_major=False"),
        (StepTwice, gpt2_without_dropout, r"backward once, got 2 calls.*layer_major=False"),
    ],
)
def test_what_shows_in_the_first_window_names_the_way_back(
    cls: Any, make: Any, said: str, tmp_path: Path
) -> None:
    model = infinity.offload(make(), swap(tmp_path))
    with infinity.engine_of(model):
        trainer = make_trainer(cls, model, tmp_path / "out", max_steps=1, eval_strategy="no")
        with pytest.raises(UnsupportedError, match=said):
            prepare_trainer(trainer, layer_major=True).train()


# -- What a default changes ------------------------------------------------------------------------


class Norms(Plain):
    """Blocks with running statistics."""

    def block(self) -> nn.Module:
        return linear(nn.BatchNorm1d(12))


class Residuals(Plain):
    """A residual and a skip between blocks."""

    def run(self, hidden: Tensor) -> Tensor:
        first = hidden
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden * first


class Shared(Plain):
    def run(self, hidden: Tensor) -> Tensor:
        return super().run(super().run(hidden))


class AsideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        object.__setattr__(self, "aside", y.square().mean())
        return y.tanh()


class Aside(Plain):
    """A block leaves a tensor on itself, which the loss reads."""

    block = AsideBlock

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        return {"loss": found["loss"] + sum(block.aside for block in self.blocks)}


class BoxedBlock(AsideBlock):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(y=super().forward(x))


class Boxed(Plain):
    """A block returns an object with a tensor."""

    block = BoxedBlock

    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden).y
        return hidden


def hooked() -> Any:
    model = gpt2_without_dropout()
    model.transformer.h[1].register_forward_hook(lambda *_: None)
    return model


def tied() -> Any:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class DropsOut(TrainerCallback):
    """Turns dropout on when two steps have run in the order that was found at the first one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 2:
            for module in more["model"].modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.2


class LaterDropout(Trainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.add_callback(DropsOut())


class Features(Trainer):
    """Adds what a hook of one call has stored to the loss."""

    def compute_loss(self, model: Any, *args: Any, **options: Any) -> Any:
        stored: list[Tensor] = []
        block = model.transformer.h[0]
        handle = block.register_forward_hook(lambda _, __, out: stored.append(out))
        try:
            loss = super().compute_loss(model, *args, **options)
        finally:
            handle.remove()
        return loss + stored[-1].pow(2).mean()


class Cached(Trainer):
    """Calls the model again in its backward, as cached losses of sentence-transformers do."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            loss = super().compute_loss(model, inputs, *args, **options)
        loss = loss.detach().requires_grad_()

        def again(gradient: Tensor) -> None:
            with torch.enable_grad():
                (model(**inputs).loss * gradient).backward()

        loss.register_hook(again)
        return loss * 1


@pytest.mark.parametrize(
    ("cls", "make", "said"),
    [
        (Trainer, gpt2, "draws random numbers"),
        (Trainer, gpt2_lora, "draws random numbers"),
        (Trainer, Norms, "blocks.0.1.running_mean changes"),
        (Trainer, Residuals, "lead to each other"),
        (Trainer, Shared, "used in several places"),
        (Trainer, tied, "are one weight"),
        (Trainer, Aside, "by another way than its outputs"),
        (Trainer, Boxed, "inside an object"),
        (Trainer, InPlace, "changes an argument in place"),
        (Trainer, hooked, "transformer.h.1 has the forward hook"),
        (Features, gpt2_without_dropout, "registers the forward hook"),
        (Cached, gpt2_without_dropout, "is called in a backward"),
        (LaterDropout, gpt2_without_dropout, "draws random numbers"),
        (Trainer, Plain, None),
        (OwnLoss, gpt2_without_dropout, None),
        (Trainer, mixtral_lora, None),
    ],
)
def test_a_default_never_changes_a_result(
    cls: Any, make: Any, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    trusted_tests: None,
) -> None:  # fmt: skip
    """Losses, norms and weights are those of the plain Trainer. What speaks against layer-major
    order is named once; where nothing does, the windows behind the first run so."""
    assert_default_is_plain(cls, make, said, tmp_path, caplog)


class Now(Trainer):
    """The loss reads what the trainer knows of its micro-batch."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self.now = inputs["labels"].float().mean()
        return super().compute_loss(model, inputs, *args, **options) * (1 + self.now / 50)


class HalvingBlock(AsideBlock):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 2)
        return torch.tanh(self.linear(x))


class Halving(Plain):
    """Each block halves the gradient of its input by a hook."""

    block = HalvingBlock


def with_backward_hook() -> Any:
    model = gpt2_without_dropout()
    model.transformer.h[0].register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("cls", "make", "said"),
    [
        (OwnLoss, gpt2_without_dropout, "OwnLoss.compute_loss"),
        (Now, gpt2_without_dropout, "Now.compute_loss"),
        (Trainer, Halving, "the model is of the class .*Halving"),
        (Trainer, with_backward_hook, "transformer.h.0 has the backward hook"),
        (LaterDropout, gpt2_without_dropout, "DropsOut.on_step_end"),
    ],
)
def test_a_default_leaves_the_order_of_code_that_it_does_not_know(
    cls: Any, make: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Journal, "__module__", "transformers.journal")
    assert_default_is_plain(cls, make, said, tmp_path, caplog)


def assert_default_is_plain(
    cls: Any, make: Any, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_steps": 4, "eval_strategy": "no"}
    plain = make_trainer(cls, make(), tmp_path / "plain", **options)
    plain.train()
    model = infinity.offload(make(), swap(tmp_path))
    trainer = make_trainer(cls, model, tmp_path / "out", **options)
    with infinity.engine_of(model) as engine, caplog.at_level(logging.WARNING, logger="infinity"):
        prepare_trainer(trainer).train()
        assert trainer.is_layer_major == (said is None)
        assert events(trainer) == events(plain)
        for name, parameter in plain.model.named_parameters():
            assert torch.equal(engine.read_parameter(name), parameter), name
    messages = said_by_us(caplog)
    assert [bool(said and re.search(said, message)) for message in messages] == [True] * bool(said)


def test_a_window_of_no_micro_batches_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(Trainer, gpt2(), tmp_path / "out")
    with pytest.raises(ConfigError, match="number of micro-batches"):
        prepare_trainer(trainer, swap(tmp_path), window=0)
    assert not (tmp_path / "swap").exists()


def test_a_trainer_with_a_loss_of_its_own_runs_layer_major(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = infinity.offload(gpt2(), swap(tmp_path))
    with infinity.engine_of(model), caplog.at_level(logging.WARNING, logger="infinity"):
        trainer = make_trainer(OwnLoss, model, tmp_path / "out", max_steps=1, eval_strategy="no")
        assert prepare_trainer(trainer, layer_major=True).is_layer_major and not said_by_us(caplog)
        assert not prepare_trainer(trainer, layer_major=False).is_layer_major
        trainer.train()
