"""Accumulation windows of a Trainer, layer-major: a block is fetched once for all micro-batches.

Trainer collects the micro-batches of an optimizer step (`get_batch_samples`) and calls
`training_step` for each of them. `LayerMajorSteps` runs the whole window at the first of these
calls, each micro-batch's `training_step` in a fiber, and returns the loss of one micro-batch per
call. Everything between the calls (callbacks, logging, counting) is Trainer's own and happens in
its order. `training_step` itself is the trainer's own, too: the fiber ends where it would call
`accelerator.backward`, and the schedule runs the backward. Unless a program asks for this order,
the first window runs in the plain order and is looked at: layer-major order is taken only where it
has the bits of the plain order (`modules/accumulate/trial.py`). Written against transformers 5.23,
accelerate 1.15 and TRL 1.16.
"""

from __future__ import annotations

import contextvars
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy, has_length

import infinity
from infinity.engine.registry import engine_of
from infinity.engine.together import loop_of
from infinity.errors import UnsupportedError
from infinity.integrations.evaluation import MOST_BATCHES, EvaluationSweeps
from infinity.integrations.rollouts import GENERATING, RolloutSteps, generates, is_last_of_window
from infinity.modules.accumulate.module_state import evaluating
from infinity.modules.accumulate.purity import describe, is_trusted, own_code, own_method
from infinity.modules.accumulate.trial import Trial, why_differs, why_forwards_differ

_log = logging.getLogger("infinity")

# Classes whose `training_step` does nothing after the backward that needs its gradients, and whose
# `prediction_step` keeps of a batch its metrics only.
_KNOWN_STEPS = {
    ("transformers.trainer", "Trainer"),
    ("trl.trainer.sft_trainer", "SFTTrainer"),
    ("trl.trainer.dpo_trainer", "DPOTrainer"),
    ("trl.trainer.kto_trainer", "KTOTrainer"),
    ("trl.trainer.reward_trainer", "RewardTrainer"),
    ("trl.experimental.cpo.cpo_trainer", "CPOTrainer"),
    ("trl.experimental.orpo.orpo_trainer", "ORPOTrainer"),
}
# `prediction_step` of those that generate makes completions, which no sweep can.
_KNOWN = {"training_step": _KNOWN_STEPS | GENERATING}
_DPO = ("trl.trainer.dpo_trainer", "DPOTrainer")
_KTO = ("trl.trainer.kto_trainer", "KTOTrainer")

# Methods of a Trainer that run outside of the micro-batches, and events of callbacks that do.
_OUTSIDE_STEPS = frozenset({
    "__init__", "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler",
    "evaluate", "evaluation_loop", "get_decay_parameter_names", "get_eval_dataloader",
    "get_test_dataloader", "get_train_dataloader", "log", "predict", "prediction_step",
    "push_to_hub", "save_model", "save_state", "store_flos", "train",
})  # fmt: skip
_EVENTS_BETWEEN_RUNS = frozenset({
    "__init__", "on_evaluate", "on_init_end", "on_log", "on_predict", "on_prediction_step",
    "on_save", "on_train_begin", "on_train_end",
})  # fmt: skip
_EVENTS_BETWEEN_BATCHES = frozenset(
    name for name in ("__init__", *vars(TrainerCallback)) if name.startswith(("__init__", "on_"))
) - {"on_prediction_step"}
# Events and methods that neither lie between an evaluation and the next window, nor look at its
# numbers.
_EVENTS_APART = _EVENTS_BETWEEN_BATCHES - {
    "on_epoch_begin", "on_epoch_end", "on_evaluate", "on_log", "on_step_begin"
}  # fmt: skip
_METHODS_APART = _OUTSIDE_STEPS - {
    "evaluate", "evaluation_loop", "get_eval_dataloader", "log", "predict", "prediction_step"
}  # fmt: skip
_SHOWS_EVALUATIONS = ("NotebookProgressCallback", "ProgressCallback", "RichProgressCallback")
_FOLLOWS_EVALUATIONS = ("GreedyLR", "ReduceLROnPlateau")  # Schedulers.

_UNSHOWN = "on several ranks, no step has shown yet that they can pass the blocks together"
# PEFT methods that give keys and values to the blocks as a cache.
_CACHING_ADAPTERS = ("PREFIX_TUNING", "CARTRIDGE")

# The losses that `training_step` of the running micro-batch passed to `accelerator.backward`.
_taken: contextvars.ContextVar[list[torch.Tensor]] = contextvars.ContextVar("taken")


def why_plain(trainer: Any) -> str | None:
    """Returns the reason why the accumulation windows of a trainer cannot run layer-major, or
    None."""
    cls = _overrides(trainer, "training_step")
    if cls is not None:
        return f"training_step of {cls} may need gradients between micro-batches"
    if "backward" in vars(trainer.accelerator):
        return "accelerator.backward is replaced"
    context = getattr(trainer, "maybe_activation_offload_context", None)
    if context is not None and not isinstance(context, nullcontext):
        return "args.activation_offloading moves activations by itself"
    return _why_apart(trainer)


def why_unswept(trainer: Any) -> str | None:
    """Returns the reason why the batches of an evaluation cannot pass each block together, or
    None."""
    for method in ("prediction_step", "evaluation_loop"):
        cls = _overrides(trainer, method)
        if cls is not None:
            return f"{method} of {cls} may need one batch after the other"
    if "gather_for_metrics" in vars(trainer.accelerator):
        return "accelerator.gather_for_metrics is replaced"
    reason = _why_apart(trainer)
    if reason is not None or (trainer.is_layer_major and trainer.is_asked_for):
        return reason
    if engine_of(trainer.model).num_ranks > 1:
        return _UNSHOWN
    return why_forwards_differ(trainer.model) or why_unknown(trainer, _EVENTS_BETWEEN_BATCHES)


def _why_apart(trainer: Any) -> str | None:
    """Returns what in the model keeps its calls from passing the blocks together, or None."""
    configs = getattr(trainer.model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind in _CACHING_ADAPTERS:
            return f"an adapter of type {kind} gives a cache to the blocks, which they fill again"
        if kind == "ADAPTION_PROMPT" and hasattr(trainer, "ref_model"):
            return f"an adapter of type {kind} is disabled by other modules, for every micro-batch"
    if not any(hooked.is_block for hooked in engine_of(trainer.model).hooked_modules):
        return "the model has no list of blocks"
    return None


def why_unknown(trainer: Any, harmless_events: frozenset[str]) -> str | None:
    """Returns the first code of a program's own that a window would run, or None. What such code
    keeps from one micro-batch to the next cannot be seen, so a default leaves its order alone."""
    found = own_method(type(trainer), _OUTSIDE_STEPS) or own_code(trainer.model)
    if found is None and "compute_loss" in vars(trainer):
        found = "compute_loss of the trainer object"
    loss = getattr(trainer, "compute_loss_func", None)
    if found is None and loss is not None and not is_trusted(loss):
        found = f"compute_loss_func {describe(loss)}"
    for callback in () if found else trainer.callback_handler.callbacks:
        found = found or own_method(type(callback), harmless_events)
    if found is None:
        return None
    return f"{found}, which may mix micro-batches unseen (layer_major=True says that it does not)"


def _is_needed_now(trainer: Any) -> bool:
    """Whether something may need the numbers of an evaluation, or change what it finds, before the
    window of the next step."""
    args, control, state = trainer.args, trainer.control, trainer.state
    is_end = control.should_training_stop or control.should_epoch_stop
    if is_end or control.should_save or state.global_step >= state.max_steps:
        return True
    decides = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
    follows = type(trainer.lr_scheduler).__name__ in _FOLLOWS_EVALUATIONS
    is_own = trainer.compute_metrics is not None or own_method(type(trainer), _METHODS_APART)
    if decides or follows or is_own or isinstance(trainer.eval_dataset, dict):
        return True
    for callback in trainer.callback_handler.callbacks:
        kind: Any = type(callback)
        looks = kind.on_evaluate is not TrainerCallback.on_evaluate
        if (looks and kind.__name__ not in _SHOWS_EVALUATIONS) or own_method(kind, _EVENTS_APART):
            return True
    return False


def _overrides(trainer: Any, method: str) -> str | None:
    """Returns who gave the trainer a method that is not one of the known ones, or None."""
    if method in vars(trainer):
        return "the trainer object"
    for cls in type(trainer).__mro__:
        is_own = issubclass(LayerMajorSteps, cls) or issubclass(cls, LayerMajorSteps)
        known = _KNOWN.get(method, _KNOWN_STEPS)
        is_known = (cls.__module__, cls.__name__) in known or is_own
        if method in vars(cls) and not is_known:
            return cls.__name__
    return None


def choose_order(trainer: Any, layer_major: bool | None) -> bool:
    """Returns whether the trainer's windows may run layer-major, and logs why not.

    layer_major: None asks for the bits of the plain order; True raises UnsupportedError for what
        cannot run layer-major, instead of going back to the plain loop
    """
    if layer_major is False:
        return False
    reason = why_plain(trainer)
    if reason is None and layer_major is None:
        reason = why_differs(trainer.model) or why_unknown(trainer, _EVENTS_BETWEEN_RUNS)
    if reason is None:
        return True
    if layer_major:
        raise UnsupportedError(f"layer_major=True: {reason}; leave it out to use the plain loop")
    _log_plain(trainer, reason)
    return False


def _log_plain(trainer: Any, reason: str) -> None:
    _log.warning(
        "%s runs its micro-batches one after the other, so every micro-batch fetches every block "
        "again: %s",
        type(trainer).__name__,
        reason,
    )


class LayerMajorSteps(RolloutSteps):
    """The methods of a Trainer that run its accumulation windows layer-major."""

    is_layer_major = False
    is_asked_for = False  # By the program; otherwise the first window is looked at.
    most_together: int | None = None  # Micro-batches.
    _window: Sequence[Any] = ()  # The micro-batches whose `training_step` is to come.
    _losses: Sequence[Any] = ()  # Theirs, once they have run.
    _to_generate: Sequence[Any] = ()  # The micro-batches of a window that lack their completions.
    _trial: Trial | None = None
    _tried: int | None = None  # What the model was set to in the last trial.
    _is_reference_beside = False
    _evaluation: EvaluationSweeps | None = None  # That is running.
    _why_unswept: str | None = None  # What an evaluation has shown.
    _said_unswept: str | None = None
    _has_swept = False  # An evaluation.
    _due: EvaluationSweeps | None = None  # An evaluation whose batches are taken.

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """Keeps the window that begins. Its gradients are complete at its first `training_step`."""
        with engine_of(self.model).counters.timed("data_wait_s", "the batches are made"):
            found = super().get_batch_samples(*args, **options)
        is_worth_it = self._is_worth_it()
        if is_worth_it and self._tried is not None and self._tried != _settings(self.model):
            self.is_asked_for = False  # The model is another than that which was looked at.
        if is_worth_it and not self.is_asked_for:
            hooked = engine_of(self.model).hooked_modules
            is_alone = self.args.gradient_accumulation_steps == 1 and not _has_more_calls(self)
            blocks = [block.module for block in hooked if block.is_block]
            self._trial = Trial(self.model, blocks, len(found[0]), is_alone=is_alone)
        self._window = found[0] if is_worth_it and self.is_asked_for else ()
        self._losses = self._generated = ()
        self._to_generate = found[0] if is_worth_it and generates(self) else ()
        if self._due is not None and len(self._window) < 2:  # A single one has freedoms.
            self._settle_evaluation()
        return found

    def _try(self, trial: Trial, step: Callable[[], Any]) -> Any:
        """Runs a micro-batch in the plain order, and decides behind the last one of the window."""
        plain = self.accelerator.backward

        def backward(loss: torch.Tensor, **options: Any) -> None:
            trial.look_at(loss)
            plain(loss, **options)

        with patch.object(self.accelerator, "backward", backward), trial.micro_batch():
            loss = step()
        if not trial.num_left:
            self._trial = None
            causes = [trial.cause]
            if engine_of(self.model).num_ranks > 1:
                causes = gather_object(causes)
            cause = next(filter(None, causes), None)
            self.is_asked_for = self.is_layer_major = cause is None
            self._tried = _settings(self.model)
            if cause is not None:
                _log_plain(self, f"{cause} (layer_major=True changes the order where it can)")
        return loss

    def _is_worth_it(self) -> bool:
        """Whether a window saves bytes, or the forward is repeated anyway."""
        args = self.args
        is_shared = args.gradient_accumulation_steps > 1 or _has_more_calls(self)
        is_shared = is_shared or loop_of(self.model) is not None
        return self.is_layer_major and (is_shared or bool(args.gradient_checkpointing))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Overrides Trainer's: the first micro-batch of a window runs all of them.

        Returns the loss of this micro-batch, detached, as Trainer's does.
        """
        step = super().training_step
        if self._to_generate:
            batches, self._to_generate = self._to_generate, ()
            self._generate_window(batches)
        if self._trial is not None:
            return self._try(self._trial, partial(step, model, inputs, num_items_in_batch))
        if not self._window or inputs is not self._window[0]:
            return step(model, inputs, num_items_in_batch)
        if not self._losses:
            self._losses = self._run_window(step, model, num_items_in_batch, self._window)
            self._end_window()
        loss, *self._losses = self._losses
        self._window = self._window[1:]
        return loss

    def _run_window(
        self, step: Callable[..., Any], model: Any, num_items: Any, batches: Sequence[Any]
    ) -> list[Any]:
        losses: list[Any] = [None] * len(batches)

        def forward(index: int) -> torch.Tensor:
            taken: list[torch.Tensor] = []
            token = _taken.set(taken)  # A fiber has a context of its own.
            last = is_last_of_window.set(index == len(batches) - 1)
            losses[index] = step(model, batches[index], num_items)
            is_last_of_window.reset(last)
            _taken.reset(token)
            if len(taken) != 1:
                raise UnsupportedError(
                    f"expected training_step of {type(self).__name__} to call accelerator.backward "
                    f"once, got {len(taken)} calls"
                )
            return taken[0]

        forwards = [partial(forward, index) for index in range(len(batches))]
        count = self.most_together or len(forwards)
        with self._in_window():
            if self._due is None:
                self._run(forwards[:count])
            else:
                with self._due.riding(self._predict_beside()) as calls:
                    calls[:] = self._run(forwards[:count], calls)
            for start in range(count, len(forwards), count):
                self._run(forwards[start : start + count])
        if self._due is not None:
            self._settle_evaluation()
            self.model.train()
        return losses

    def _run(
        self,
        forwards: Sequence[Callable[[], torch.Tensor]],
        calls: Sequence[Callable[[], Any]] = (),
    ) -> list[Any]:
        try:
            return engine_of(self.model).sweep(forwards, calls)[1]
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{error}. In a Trainer, use prepare_trainer(trainer, layer_major=False)"
            ) from None

    @contextmanager
    def _in_window(self) -> Iterator[None]:
        """Makes `accelerator.backward` leave the backward to the schedule, and the reference of DPO
        run beside the policy."""
        accelerator, beside = self.accelerator, ("_is_reference_beside", "precompute_ref_logps")

        def backward(loss: torch.Tensor) -> None:
            _taken.get().append(loss / accelerator.gradient_accumulation_steps)

        with ExitStack() as stack:
            stack.enter_context(patch.object(accelerator, "backward", backward))
            for flag in beside if _shares_reference(self) else ():
                stack.enter_context(patch.object(self, flag, True))
            yield

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Overrides Trainer's: up to 32 batches pass each block together."""
        loop = super().evaluation_loop
        is_loss_only = self.args.prediction_loss_only
        if prediction_loss_only is not None:
            is_loss_only = prediction_loss_only
        due, self._due = self._due, None
        cause = self._why_unswept or why_unswept(self) if due is None else None
        if cause is None and not is_loss_only and ignore_keys is not None:
            cause = "ignore_keys may ask for caches of keys and values"
        if cause is None:
            if due is None:
                due = EvaluationSweeps(
                    dataloader, self, self._sweep_calls, is_loss_only=is_loss_only
                )
            dataloader = self._evaluation = due
        try:
            return loop(
                dataloader, description, prediction_loss_only, ignore_keys, *args, **options
            )
        finally:
            if self._evaluation is not None:
                cause = self._why_unswept = self._evaluation.cause
                self._has_swept = cause is None
                self._evaluation = None
            if cause is not None and cause != self._said_unswept:
                self._said_unswept = cause
                _log.log(
                    logging.INFO if cause is _UNSHOWN else logging.WARNING,
                    "%s evaluates one batch after the other, so each of them reads every weight "
                    "again: %s", type(self).__name__, cause,
                )  # fmt: skip

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, epoch: Any, ignore_keys: Any,
        *args: Any, **options: Any,
    ) -> None:  # fmt: skip
        """Overrides Trainer's: an evaluation may pass with the window of the next step."""
        if trial is None:
            self._take_evaluation(ignore_keys)
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys, *args, **options
        )

    def _take_evaluation(self, ignore_keys: list[str] | None) -> None:
        """Takes the batches of an evaluation that Trainer asks for, if they can pass with the next
        window (`evaluation.py`)."""
        control, count = self.control, self.args.gradient_accumulation_steps
        if self._due is not None and not self._due.fits:  # Trainer evaluates now.
            return
        if self._due is not None and (control.should_evaluate or control.should_save):
            self._settle_evaluation()
        is_shared = min(count, self.most_together or count) > 1
        may_wait = is_shared and self._is_worth_it() and self.is_asked_for and self._has_swept
        if not (control.should_evaluate and may_wait) or _is_needed_now(self):
            return
        loader = self.get_eval_dataloader()
        if not has_length(loader) or len(loader) > MOST_BATCHES or why_unswept(self) is not None:
            return
        due = self._due = EvaluationSweeps(
            loader, self, self._sweep_calls, is_loss_only=True, ignore_keys=ignore_keys
        )
        control.should_evaluate = not due.take_all()

    def _settle_evaluation(self) -> None:
        """Ends the evaluation whose batches were taken; it runs now if it has not passed yet."""
        assert self._due is not None
        metrics = self._evaluate(None, self._due.ignore_keys)
        self._determine_best_metric(metrics=metrics, trial=None)

    def _predict_beside(self) -> Callable[[Any], Any]:
        """Returns the `prediction_step` of a batch that passes with a window: in the modes of an
        evaluation, and with what the trainer has counted before the window."""
        assert self._due is not None
        before, ignore_keys = copy.copy(self), self._due.ignore_keys

        def step(batch: Any) -> Any:
            predict = super(LayerMajorSteps, before).prediction_step
            with evaluating(self.model):
                return predict(before.model, batch, True, ignore_keys=ignore_keys)

        return step

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Overrides Trainer's: no window may have come after an evaluation that was to pass."""
        if self._due is not None:
            self._settle_evaluation()
        return super()._finalize_training(*args, **options)

    def _sweep_calls(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        with self._in_window():
            return engine_of(self.model).sweep([], calls)[1]

    def begin_evaluated(self, batches: Sequence[Any]) -> None:
        """Called before the batches of an evaluation pass the blocks together."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Overrides Trainer's: the first batch of a window runs all of them."""
        step = super().prediction_step
        if self._evaluation is None:
            return step(model, inputs, *args, **options)
        return self._evaluation.result_of(
            inputs, lambda batch: step(model, batch, *args, **options)
        )

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Overrides Trainer's: TRL's reference runs beside the policy, block by block."""
        if self._is_reference_beside:
            inputs = {**inputs, **self._reference_beside(model, inputs)}
        return super().compute_loss(model, inputs, *args, **options)

    def _reference_beside(self, model: Any, inputs: Any) -> dict[str, _Late]:
        """Starts the calls of the reference. Returns what a loss takes as precomputed."""
        compute: Any = self.compute_ref_log_probs
        if _owner_of(self, "_compute_loss") == _DPO:
            found = infinity.beside(self.model, partial(compute, model, inputs))
            return {
                f"ref_{side}_logps": _Late(found, index)
                for index, side in enumerate(("chosen", "rejected"))
            }
        # KTO computes those of the completions and then those of its KL term, in the same way.
        alone: Any = copy.copy(self)
        is_more = alone.calculate_KL
        alone.calculate_KL = False
        references = {}
        for part in ("", "KL_") if is_more else ("",):
            names = ("input_ids", "attention_mask", "completion_mask")
            batch = {name: inputs[part + name] for name in names}
            found = infinity.beside(self.model, partial(alone.compute_ref_log_probs, model, batch))
            references[f"ref_{part}logps"] = _Late(found, 0)
        return references

    def _compute_kl_logps(self, model: Any, batch: Any) -> Any:
        """Overrides KTOTrainer's: the KL term of the policy runs beside the rest of its loss."""
        compute = partial(super()._compute_kl_logps, model, batch)
        if not (self._is_reference_beside and self.calculate_KL):
            return compute()
        return _Late(infinity.beside(self.model, compute))


def _settings(model: torch.nn.Module) -> int:
    """Returns a number that follows from what the modules are set to: numbers and names that they
    have, their hooks, and which parameters are trained."""
    trained = tuple(parameter.requires_grad for parameter in model.parameters())
    kinds = (bool, int, float, str)
    modules = [
        (
            type(m),
            len(vars(m)["_forward_hooks"]),
            *(v for k, v in vars(m).items() if type(v) in kinds and k != "training"),
        )
        for m in model.modules()
    ]
    return hash((trained, tuple(modules)))


class _Late:
    """A tensor of a call beside the loss. What the loss does with it waits for the call.

    found: returns the tensor, or tensors of which `index` is one
    """

    def __init__(self, found: Callable[[], Any], index: int | None = None) -> None:
        self.found, self.index = found, index

    def value(self) -> Any:
        """Returns the tensor, when the call has ended."""
        return self.found() if self.index is None else self.found()[self.index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    def __sub__(self, other: Any) -> Any:
        return self.value() - other

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = [arg.value() if isinstance(arg, _Late) else arg for arg in args]
        return function(*args, **(kwargs or {}))


def _owner_of(trainer: Any, method: str) -> tuple[str, str] | None:
    """Returns the module and name of the class that a trainer has a method of, or None."""
    owner = next((cls for cls in type(trainer).__mro__ if method in vars(cls)), None)
    return None if owner is None else (owner.__module__, owner.__name__)


def _has_more_calls(trainer: Any) -> bool:
    """Whether a single micro-batch has calls of the model that pass the blocks together."""
    return generates(trainer) or _shares_reference(trainer)


def _shares_reference(trainer: Any) -> bool:
    """Whether a DPO or KTO trainer computes its reference by another call of the same model."""
    owners = {_owner_of(trainer, name) for name in ("_compute_loss", "compute_ref_log_probs")}
    has_images = vars(trainer).get("_is_vision_dataset", False)  # KTO's methods leave them out.
    is_known = owners == {_DPO} or (owners == {_KTO} and not has_images)
    return is_known and trainer.ref_model is None and not trainer.precompute_ref_logps
