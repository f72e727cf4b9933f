"""TRL's SFTTrainer and DPOTrainer for `infinity train`: their arguments and their calls of the run.

The loop, its batches, losses, epochs, learning rates, evaluations and trackers are transformers'
and TRL's. `RunTrainer` answers what differs for a run: the model is on meta until it is offloaded,
the optimizer is that of `[optimizer]`, a step that is not finite is refused or skipped, and the run
is told of every step, after which it may save. Written against transformers 5.23
and TRL 1.16.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from infinity.bounded import MalformedError, field, integer, table_of
from infinity.checkpoint.run.load import check_kinds, random_state, restore_random_state
from infinity.config import JobConfig, Optimizer
from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, NonFiniteError, refusing
from infinity.integrations.hf import OffloadedTrainer
from infinity.integrations.rollouts import generates
from infinity.modules.reading.adapters import adapter_of, names_of_adapters
from infinity.modules.tiling.split import named_parameters_of
from infinity.optimizers.algorithms import OPTIMIZERS
from infinity.optimizers.offloaded import OffloadedOptimizer
from infinity.private.torch import tree_leaves
from infinity.tools.training.denoising import Denoising
from infinity.tools.training.embedding import loss_of, wrapped
from infinity.tools.training.job_data import JobData, check_amount
from infinity.tools.training.latents import cache_of, collate
from infinity.tools.training.methods import (
    classes_of,
    give_reference,
    measuring,
    rewards_of,
    telling_rewards,
    trainer_arguments,
)
from infinity.tools.training.metrics import digest, digest_of_random, digests_of_rows
from infinity.tools.training.ranks import JobRank
from infinity.tools.training.report import Step
from infinity.tools.training.teacher import Teacher, give_head, taught
from infinity.tools.training.tokenizers import Tokenizer

MOST_SKIPPED = 16  # Steps in a row; more are no coincidence.
_STATE_NAME = "trainer_state.json"


def parameter_groups(
    model: torch.nn.Module, optimizer: Optimizer, adapter: str = "default"
) -> list[dict[str, Any]]:
    """Returns groups of the trainable parameters, each once, without those of other adapters: those
    with weight decay, and the others."""
    others = set(names_of_adapters(model)) - {adapter}
    decayed: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in named_parameters_of(model):
        if parameter.requires_grad and not adapter_of(name, others):
            (decayed if optimizer.has_decay(name) else rest).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": optimizer.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: torch.nn.Module, options: Optimizer, adapter: str = "default"
) -> OffloadedOptimizer:
    """Returns the optimizer of `[optimizer]` over the trainable parameters of one adapter, or of a
    model without one."""
    own = set(options.keys) & {"betas", "eps", "momentum", "dampening", "nesterov"}
    make: Callable[..., OffloadedOptimizer] = OPTIMIZERS[options.name]
    return make(
        parameter_groups(model, options, adapter),
        lr=options.lr,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        always_norm=True,
        error_if_nonfinite=True,
        **{key: getattr(options, key) for key in own},
    )


def require_trackers(names: tuple[str, ...]) -> None:
    """Raises ConfigError, which names the package, for a tracker that is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"train.report_to: {', '.join(missing)} is not installed; expected the package of each "
            f"tracker: pip install {' '.join(missing)}"
        )


def make_trainer(
    config: JobConfig, model: Any, data: JobData, tokenizer: Tokenizer | None, rank: JobRank, *,
    reference: Any = None,
) -> Any:  # fmt: skip
    """Returns TRL's trainer over a model on meta, with the data prepared. It trains when the model
    is offloaded and `prepare_trainer` has taken it. `reference` is that of `build_reference`.

    Raises ConfigError for data that TRL refuses, and for too little of it.
    """
    import trl
    from transformers import EarlyStoppingCallback, PrinterCallback

    grpo = config.train.grpo
    base, _ = classes_of(config.train)
    kind = type(base.__name__, (RunTrainer, base), {"__module__": base.__module__})
    processing: Any = data.processor or (tokenizer and tokenizer.for_records())
    if config.train.facts.purpose == "scores sequences":  # Whose end is found by this token.
        processing.pad_token = processing.pad_token or processing.eos_token
        model.config.get_text_config().pad_token_id = processing.pad_token_id
    own: dict[str, Any] = {}
    if grpo is not None:
        own["reward_funcs"] = rewards_of(config, model, tokenizer)
    trained = model
    if config.train.embed is not None and tokenizer is not None:
        trained, processing = wrapped(model, config, tokenizer), None
        own["loss"] = loss_of(config.train.embed, trained)
    if tokenizer is None:
        own["data_collator"] = partial(collate, cache_of(config))
    if reference is not None and config.train.method == "dpo":
        own["ref_model"] = reference
    if data.is_ready:
        pad_id = processing.pad_token_id
        collator = trl.trainer.sft_trainer.DataCollatorForLanguageModeling
        own["data_collator"] = collator(pad_token_id=0 if pad_id is None else pad_id)
    # TRL and the template raise these for records that they cannot write, and for settings.
    kinds = (ValueError, TypeError, KeyError, RuntimeError, IndexError)
    with refusing("TRL refuses the run", *kinds, remedy=_lack_of_end(processing, data)):
        trainer = kind(
            model=trained,
            args=trainer_arguments(config, data),
            train_dataset=data.train,
            eval_dataset=data.held_out if config.train.eval_every else None,
            processing_class=processing,
            **own,
        )
    if grpo is not None and reference is not None:
        give_reference(trainer, reference, grpo.beta)
    if config.train.embed is not None:
        trainer.data_collator.max_length = config.data.sequence_length
    if config.train.method == "distill":
        give_head(model if config.adapter is None else model.get_base_model())
    if config.train.method == "classify":  # A head's loss is a mean whatever it is told, and
        trainer.model_accepts_loss_kwargs = False  # Trainer would add up those of a step.
    trainer.remove_callback(PrinterCallback)
    if data.is_ready:  # Text has no special tokens that the model's would be aligned with.
        trainer.processing_class = None
    if config.train.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(config.train.early_stopping_patience))
    trainer.begin_run(config, rank)
    return trainer


def _lack_of_end(processing: Any, data: JobData) -> str:
    """Returns what to say of a tokenizer of records without an end-of-text token, "" for another.
    Raises ConfigError for one that also has no token to fill batches with."""
    words = processing if data.processor is None else processing.tokenizer
    if words is None or data.is_ready or words.eos_token is not None:
        return ""
    if words.pad_token is None:
        raise ConfigError(
            f"data.tokenizer: {words.name_or_path} has neither eos_token nor pad_token, with which "
            "batches of records are filled; name one in its tokenizer_config.json"
        )
    return "; perhaps because the tokenizer has no eos_token (tokenizer_config.json)"


def with_patience(state: dict[str, Any], patience: int) -> tuple[dict[str, Any], bool]:
    """Returns a saved state of the loop with the run's own patience, which may have changed since
    (0 is none), and whether that patience ends the run before a step. It may be less than the one
    that the run had, which then had not stopped."""
    name = "EarlyStoppingCallback"
    callbacks = dict(state["stateful_callbacks"])
    saved = callbacks.pop(name, None)
    if saved is None or not patience:
        return state | {"stateful_callbacks": callbacks}, False
    callbacks[name] = saved | {"args": saved["args"] | {"early_stopping_patience": patience}}
    num_misses = saved["attributes"]["early_stopping_patience_counter"]
    return state | {"stateful_callbacks": callbacks}, num_misses >= patience


def state_of(state: Any) -> dict[str, Any]:
    """Returns the part of a TrainerState that a continuation needs, the same on every rank."""
    kept = ("global_step", "epoch", "best_metric", "best_global_step", "stateful_callbacks")
    table = dataclasses.asdict(state)
    return {key: table[key] for key in kept}


def check_state(state: Any, step: int) -> None:
    """Raises MalformedError unless `state` is of the kind that `state_of` returns after `step`."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

    own = state_of(TrainerState(global_step=step))
    if not isinstance(state, dict) or state.keys() != own.keys():
        raise MalformedError(f"the trainer's state is no table of {', '.join(own)}")
    integer(state["global_step"], "global_step", least=step, most=step)
    for key in ("epoch", "best_metric", "best_global_step"):
        check_kinds(state[key], None if state[key] is None else 0.0, key)
    callbacks = table_of(state["stateful_callbacks"], "stateful_callbacks")
    for known in (TrainerControl(), EarlyStoppingCallback()):
        name, expected = type(known).__name__, known.state()
        for part, values in expected.items() if name in callbacks else ():
            saved = table_of(field(table_of(callbacks[name], name), part), f"{part} of {name}")
            if not saved.keys() <= values.keys():
                raise MalformedError(f"{part} of {name} has {sorted(saved.keys() - values.keys())}")
            check_kinds(saved, values, f"{part} of {name}")


def _leave_out(*_: Any, **__: Any) -> Any:
    """A method of a trainer that does nothing in a run."""


class RunTrainer(OffloadedTrainer):
    """The methods in which TRL's trainers differ for a run. `make_trainer` mixes them in."""

    eval_dataset: Any  # The rows of an evaluation.
    held_out: Any  # All that could be evaluated.
    optimizer: Any
    state: Any
    job_run: Any  # The `Run` of `program.py`.
    teacher: Teacher | None = None  # Of "distill".
    denoising: Denoising | None = None  # Of "diffusion".
    offloaded_optimizer: OffloadedOptimizer

    def _calculate_rewards(self, inputs: Any, prompts: Any, *rest: Any) -> Any:
        """Overrides TRL's."""
        with telling_rewards(self, prompts):
            return super()._calculate_rewards(inputs, prompts, *rest)

    def begin_run(self, config: JobConfig, rank: JobRank) -> None:
        """Takes what the methods need; checks the amount of data."""
        name = "default" if config.adapter is None else config.adapter.peft_name
        self._make_optimizer = partial(make_optimizer, self.model, config.optimizer, name)
        self._rank = rank
        # The trainers of a process share it, and those of several adapters take turns.
        self._gradient_state = copy.deepcopy(vars(self.accelerator.gradient_state))
        self._take_gradient_state(self.accelerator)
        self._options = config.train
        self._num_skipped = 0  # In a row.
        self._ended_step = 0
        self._now = Step()
        if config.train.grpo is None:
            check_amount(
                len(self.train_dataset),
                config.train.batch_size,
                f"records packed and cut to data.sequence_length={config.data.sequence_length}",
                "; or raise data.sequence_length: a record whose answer begins behind it is left "
                "out",
                num_ranks=rank.count if self.args.dataloader_drop_last else 1,
            )
        self.held_out = self.eval_dataset
        if self.eval_dataset is not None:
            most = config.train.eval_batches * config.train.batch_size
            rows = min(len(self.eval_dataset), most)
            self.eval_dataset = self.eval_dataset.select(range(rows))

    def _take_gradient_state(self, owner: Any) -> Any:
        """Gives an accelerator, or a dataloader of its, the state of this trainer alone."""
        if hasattr(owner, "gradient_state"):
            owner.gradient_state = type(self.accelerator.gradient_state)()
            vars(owner)["gradient_state"].__dict__ = self._gradient_state
        return owner

    def get_train_dataloader(self) -> Any:
        """Returns TRL's."""
        return self._take_gradient_state(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **options: Any) -> Any:
        """Returns TRL's, with a last batch that is not full."""
        with patch.object(self.args, "dataloader_drop_last", False):
            loader = super().get_eval_dataloader(*args, **options)
        return self._take_gradient_state(loader)

    def count_steps(self) -> int:
        """Returns the number of steps of the whole run."""
        loader = self.get_train_dataloader()
        steps = self.set_initial_training_values(self.args, loader)[-1]
        return int(steps)

    def run(
        self,
        job_run: Any,
        *,
        state: dict[str, Any] | None = None,
        restore: Callable[[], None] | None = None,
    ) -> None:
        """Makes the steps, or those that are left after `state`, which `position` returned.
        `restore` loads all other state once the optimizer and the schedule exist."""
        self.job_run, self._restore = job_run, restore
        if state is None:
            self.train()
            return
        from transformers import TrainerState

        self._ended_step = int(state["global_step"])
        state, is_over = with_patience(state, self._options.early_stopping_patience)
        found, steps = TrainerState(**state), self.count_steps()
        found.compute_steps(self.args, steps)
        found.train_batch_size = self.args.train_batch_size
        if is_over or self._ended_step >= steps:  # Trainer would make more.
            self.create_optimizer_and_scheduler(steps)
            self._load_optimizer_and_scheduler(None)
            self.state = found
            self._load_callback_state()
            return
        with tempfile.TemporaryDirectory(prefix="infinity-state-") as directory:
            found.save_to_json(str(Path(directory) / _STATE_NAME))
            self.train(resume_from_checkpoint=directory)

    def position(self) -> dict[str, Any]:
        """Returns the state of the loop for a checkpoint, the same on every rank."""
        from transformers import EarlyStoppingCallback

        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()
        best_step = self.job_run.summary.best_step  # Of weights that are written.
        return state_of(self.state) | {"best_global_step": best_step}

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, *others: Any, **options: Any
    ) -> Any:
        """Leaves preferences as they are whose messages were written as tokens, but for prompts
        that leave no token of an answer."""
        if "prompt_ids" not in dataset.column_names:
            prepare = super()._prepare_dataset
            return prepare(dataset, processing_class, args, *others, **options)
        most = args.max_length
        return dataset.filter(lambda record: len(record["prompt_ids"]) < most)

    # The model is on meta when the trainer is made, and placed when it trains; the run loads a
    # checkpoint and writes a card of its own; the optimizer's step computes the norm.
    _move_model_to_device = _load_from_checkpoint = _leave_out
    add_model_card_callback = _get_grad_norm = _leave_out

    def prepare_loss(self, loss: Any, model: Any) -> Any:
        """Moves the model of a loss of sentence-transformers nowhere."""
        return loss

    # The optimizer, and steps that are not finite.

    def create_optimizer(self, model: Any = None) -> Any:
        """Makes the optimizer of `[optimizer]` once, and returns it."""
        if self.optimizer is None:
            self.offloaded_optimizer = made = self._make_optimizer()
            self._update = made.step
            step = MethodType(lambda *_: self._step_or_skip(), made)
            made.step = step  # type: ignore[method-assign]
            self.optimizer = made
        return self.optimizer

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0: Trainer would visit every parameter for each micro-batch."""
        return 0

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """Begins a step, and makes its batches, of which a teacher says what it knows."""
        self._now.before = None
        self._now = Step(before=self._now, measured=measuring(self))
        self.job_run.begin_step()
        found = super().get_batch_samples(*args, **options)
        if self.teacher is not None:
            self.teacher.listen(found[0])
        return found

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Returns the loss of TRL; with a teacher, its divergence for the log-probabilities; of
        images that of their velocities."""
        if self.denoising is not None:
            loss = self.denoising.loss(model, inputs, self.state.global_step + 1)
            return (loss, {}) if options.get("return_outputs") else loss
        compute = super().compute_loss
        if self.teacher is None:
            return compute(model, inputs, *args, **options)
        with taught(self.teacher.of(inputs), inputs["labels"], self.teacher.options):
            return compute(model, inputs, *args, **options)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Computes the gradients of a micro-batch; notes its loss."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        now = self._now
        if generates(self):  # `inputs` are prompts.
            inputs = self._buffered_inputs[len(now.losses)]  # A part for each micro-batch.
        now.losses.append(float(loss))
        now.total = now.total + loss.detach().float().cpu()
        # What is generated has no mask of both parts. That of preferences has completions in it.
        masks = [inputs[name] for name in inputs if name.endswith("attention_mask")]
        parts = [name for name in ("prompt_mask", "completion_mask") if name in inputs]
        counts = [int(mask.sum()) for mask in masks or [inputs[name] for name in parts]]
        if self.denoising is not None:
            counts = [int(inputs["num_tokens"].sum())]
        now.num_tokens += sum(counts) if counts else inputs["input_ids"].numel()
        now.rows += digests_of_rows(inputs)  # The loss has waited for the device.
        if not math.isfinite(now.losses[-1]) and now.spoilt is None:
            now.spoilt = (inputs, num_items_in_batch)
        return loss

    def _step_or_skip(self) -> None:
        """Updates the weights. If a loss or the norm of the gradients is not finite on any rank,
        the weights do not change: raises NonFiniteError or, with `train.nonfinite` "skip", goes on,
        unless too many steps in a row were skipped."""
        now = self._now
        now.learning_rate = float(self.offloaded_optimizer.param_groups[0]["lr"])
        now.loss, now.num_tokens = self._of_ranks(float(now.total), now.num_tokens)
        step = self.state.global_step + 1
        try:
            if not math.isfinite(now.loss):
                raise self._nonfinite_loss(step)
            try:
                self._update()
            except NonFiniteError as error:  # The optimizer's own count omits skipped steps.
                raise NonFiniteError("the gradient norm", step=step, unit=error.unit) from None
            finally:
                norm = self.offloaded_optimizer.grad_norm
                now.grad_norm = None if norm is None else float(norm)
            norms = self.offloaded_optimizer.grad_norms
            now.gradients = digest(torch.stack([*norms]).numpy()) if norms else None
            self._num_skipped = 0
        except NonFiniteError as error:
            self.offloaded_optimizer.zero_grad()
            self._num_skipped += 1
            if self._options.nonfinite == "error" or self._num_skipped > MOST_SKIPPED:
                raise
            now.skipped = str(error)

    def _of_ranks(self, loss: float, num_tokens: int) -> tuple[float, int]:
        """Returns the mean loss and the tokens of all ranks, the same on every rank. One loss that
        is not finite makes the mean not finite."""
        if self._rank.count == 1:
            return loss, num_tokens
        found = engine_of(self.model).ranks.all_gather_numbers("the loss", loss, num_tokens)
        total, tokens = (sum(numbers) for numbers in zip(*found, strict=True))
        return float(torch.tensor(total / self._rank.count, dtype=torch.float32)), int(tokens)

    def _nonfinite_loss(self, step: int) -> NonFiniteError:
        self.offloaded_optimizer.zero_grad()
        now = self._now
        value = next((loss for loss in now.losses if not math.isfinite(loss)), now.loss)
        is_spoilt = now.spoilt is not None
        if self._rank.count > 1 and self._options.nonfinite == "skip":
            # The other ranks continue meanwhile.
            unit = None if is_spoilt else "a module on another rank"
            return NonFiniteError(f"the loss ({value})", step=step, unit=unit)
        unit = "the sum of the losses"
        if now.spoilt is not None:  # The forward is repeated.
            inputs, count = now.spoilt
            prepared = inputs if generates(self) else self._prepare_inputs(inputs)
            forward = partial(self.compute_loss, self.model, prepared, num_items_in_batch=count)
            unit = first_nonfinite_module(self.model, forward) or "the loss itself"
        if self._rank.count > 1:
            # A rank that closes takes the shards with it that the others still search with.
            ranks = engine_of(self.model).ranks.all_gather_numbers(
                "the search for the module", is_spoilt
            )
            if not is_spoilt and [1.0] in ranks:
                unit = f"a module on rank {ranks.index([1.0])}"
        return NonFiniteError(f"the loss ({value})", step=step, unit=unit)

    # What the run does around a step.

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        step = self.state.global_step
        if step == self._ended_step:  # The end of an epoch, whose last step has ended already.
            return
        self._ended_step = step
        is_last, now = step >= self.state.max_steps, self._now
        self.control.should_log |= is_last
        self.control.should_evaluate |= is_last and self.args.eval_strategy != "no"
        now.number, now.epoch, now.random = step, self.state.epoch, digest_of_random()
        self._take_evaluation(None)
        now.numbers = self.job_run.end_step(now, is_evaluated=bool(self.control.should_evaluate))
        best = self.state.best_metric
        super()._maybe_log_save_evaluate(*args, **options)
        if self._due is None:
            self._end_step(now, best)

    def _end_step(self, now: Step, best: float | None) -> None:
        is_best = self.state.best_metric != best
        if self.job_run.after_step(now, is_best=is_best):
            self.control.should_training_stop = True

    def _take_evaluation(self, ignore_keys: list[str] | None) -> None:
        may_wait = self.control.should_evaluate and self.teacher is None
        if may_wait and not self.job_run.is_followed(self.state.global_step):
            super()._take_evaluation(ignore_keys)

    def begin_evaluated(self, batches: Sequence[Any]) -> None:
        """Lets a teacher say what it knows of all of them at once."""
        if self.teacher is not None:
            self.teacher.listen(batches)

    def _settle_evaluation(self) -> None:
        """Ends the step whose evaluation has passed with the window of the next one."""
        now, best = self._now, self.state.best_metric
        self._now = ended = now.last_ended()
        super()._settle_evaluation()
        self._now = now
        self._end_step(ended, best)

    def report_unevaluated(self) -> None:
        """Reports the step whose evaluation was to pass with a step that has failed."""
        if self.__dict__.pop("_due", None) is not None:
            self.job_run.report_step(self._now.last_ended())

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Evaluates, and notes the loss for the run."""
        with self.job_run.summary.phase("evaluation_s"):
            found: dict[str, float] = super().evaluate(*args, **options)
        self._now.held_out_loss = found.get("eval_loss")
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Gives trackers the numbers of the step beside TRL's."""
        if "loss" in logs:
            logs |= self._now.numbers
        super().log(logs, start_time)
        self.state.log_history.clear()  # metrics.jsonl keeps it.

    # Resume: `infinity.tools.training.program` loads a checkpoint of its own.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._restore is not None:
            self._restore()
        # Making the first batches draws numbers, which the run that is continued has drawn before.
        self._random_state = random_state()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        restore_random_state(self._random_state)


# -- The module that produced a value which is not finite ------------------------------------------


class _Found(Exception):
    """Ends the search at the first module that produced a value that is not finite.

    The rest of a loss must not run: TRL's gathers metrics from all ranks, of which only those with
    such a value search.
    """

    def __init__(self, name: str) -> None:
        self.name = name


def first_nonfinite_module(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Returns the name of the first module, in order of completion, whose output is not all finite.

    Runs `forward` once more under no_grad, with a hook on every module. A module completes before
    its parents, so the name is that of the smallest one. Returns None if every output is finite,
    for example if the loss itself overflowed. The random state does not change.
    """

    def check(name: str, output: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            raise _Found(name)

    handles = [
        module.register_forward_hook(lambda *call, name=name: check(name, call[-1]))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            forward()
    except _Found as found:
        return found.name
    finally:
        for handle in handles:
            handle.remove()
    return None
