"""Generation batches of TRL's GRPO and RLOO trainers, whose windows run layer-major.

These trainers generate, score and reward completions in the `training_step` of a micro-batch, and
count the micro-batches behind it. `RolloutSteps` does this for all micro-batches of a window before
the first of them, in their order. The passes of the window then compute losses only.
Log-probabilities of a generation batch under the policy and under its reference without the adapter
are calls of one sweep, and so are the scores of an `AdapterReward`. Written against TRL 1.16.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch

from infinity.engine.registry import engine_of, find_engine
from infinity.integrations.evaluation import MOST_BATCHES
from infinity.modules.accumulate.module_state import evaluating
from infinity.modules.accumulate.trial import why_forwards_differ
from infinity.modules.reading.adapters import SCORER

GRPO = ("trl.trainer.grpo_trainer", "GRPOTrainer")
GENERATING = {GRPO, ("trl.trainer.rloo_trainer", "RLOOTrainer")}

# Whether the running micro-batch is the last one of its window; None outside of windows.
is_last_of_window: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "is_last_of_window", default=None
)


def generates(trainer: Any, kinds: Set[tuple[str, str]] = GENERATING) -> bool:
    """Whether a trainer makes its own completions, as these of TRL do."""
    return any((cls.__module__, cls.__name__) in kinds for cls in type(trainer).__mro__)


class AdapterReward:
    """A reward function of TRL: a reward model that is the adapter `SCORER` of the trained model,
    with a head of its own behind the same blocks.

    scorer: a model for sequence classification whose blocks are those of `model`
    """

    __name__ = SCORER  # By which TRL logs the rewards.

    def __init__(self, model: Any, scorer: Any, tokenizer: Any) -> None:
        self._model, self._scorer, self._tokenizer = model, scorer, tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        scorer.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self._texts: list[str] = []
        self.rewards: list[float] | None = None  # Of the texts, once they are scored.

    def take(self, prompts: Sequence[Any], completions: Sequence[Any]) -> None:
        """Takes what `score` will score. TRL would write it so for a reward model in memory."""
        from trl import apply_chat_template

        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        if texts and not isinstance(texts[0], str):
            chats = ({"messages": messages} for messages in texts)
            texts = [apply_chat_template(chat, self._tokenizer)["text"] for chat in chats]
        if texts != self._texts:
            self._texts, self.rewards = texts, None

    def score(self) -> list[float]:
        """Returns the rewards of what was taken, by one forward of the blocks."""
        from trl.trainer.utils import use_adapter

        model, device = self._model, next(self._model.parameters()).device
        for name, head in self._scorer.named_children():
            if name != self._scorer.base_model_prefix:
                head.to(device)
        inputs = self._tokenizer(
            text=self._texts, return_tensors="pt", padding=True, padding_side="right",
            add_special_tokens=False,
        ).to(device)  # fmt: skip
        scored, plain = use_adapter(model, SCORER), torch.inference_mode(False)
        with plain, torch.no_grad(), scored, evaluating(model):
            found = self._scorer(**inputs, use_cache=False).logits[:, 0]
        rewards: list[float] = found.float().tolist()
        return rewards

    def __call__(self, prompts: Any, completions: Any, **_: Any) -> list[float]:
        """Returns the rewards, one for each completion."""
        self.take(prompts, completions)
        return self.score() if self.rewards is None else self.rewards


_Trainer: Any = object  # A class that is mixed into one has its attributes, too.


class RolloutSteps(_Trainer):  # type: ignore[misc]
    """The methods of GRPO and RLOO trainers that differ. Other trainers have none of them."""

    _step: int
    _generated: Sequence[tuple[Any, Any]] = ()  # Micro-batches of a window, and what they learn.
    _is_generating = False
    # The token ids of a generation batch, and their log-probabilities under the reference.
    _reference: tuple[Any, Any] | None = None

    def _generate_window(self, batches: Sequence[Any]) -> None:
        """Makes what a window learns, in the order of the plain loop."""
        self._began_s, first = time.perf_counter(), self._step
        prepare = super()._prepare_inputs
        self.model.train()
        self._is_generating = True
        try:
            generated = []
            for number, batch in enumerate(batches):
                self._step = first + number  # Says when to generate, and which part is next.
                generated.append((batch, prepare(batch)))
            self._generated = generated
        finally:
            self._step, self._is_generating = first, False
        self._current_train_step_time += time.perf_counter() - self._began_s

    def _end_window(self) -> None:
        """Notes the time of the step, to which TRL has added how long micro-batches that take turns
        wait for each other."""
        if self._generated and (times := self._metrics["train"].get("step_time")):
            times[-1] = time.perf_counter() - self._began_s

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Overrides Trainer's: what a window learns is there."""
        for batch, generated in self._generated:
            if batch is inputs:
                return generated
        return super()._prepare_inputs(inputs)

    def _generate(self, prompts: Any) -> Any:
        """Overrides TRL's."""
        found = super()._generate(prompts)
        for reward in self._rewards():
            reward.take(prompts, found[3 if generates(self, {GRPO}) else 2])
        return found

    def _rewards(self) -> list[AdapterReward]:
        return [reward for reward in self.reward_funcs if isinstance(reward, AdapterReward)]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        """Overrides TRL's: the parts of a generation batch pass the blocks together."""
        score = super()._get_per_token_logps_and_entropies
        if self._reference is not None and self._reference[0] is input_ids:
            (_, found), self._reference = self._reference, None
            return found
        is_apart = batch_size is None or any(value is not None for value in options.values())
        if is_apart or not self._may_score_together(model):
            found = score(model, input_ids, attention_mask, logits_to_keep, batch_size, **options)
            if (is_last := is_last_of_window.get()) is not None:  # An entropy bonus asks for it.
                self.accelerator.gradient_state.sync_gradients = is_last
            return found
        assert batch_size is not None
        parts = [slice(at, at + batch_size) for at in range(0, len(input_ids), batch_size)]
        calls = [
            partial(score, model, input_ids[part], attention_mask[part], logits_to_keep, batch_size)
            for part in parts
        ]
        step = 1
        if self._has_reference_beside(model):
            step = 2
            calls = [run for call in calls for run in (call, partial(self._as_reference, call))]
        results = self._in_sweeps(model, calls, len(parts), batch_size * input_ids.shape[1])
        if step == 2:
            self._reference = input_ids, _joined(results[1::2])
        return _joined(results[::step])

    def _in_sweeps(
        self, model: Any, calls: Sequence[Callable[[], Any]], num_parts: int, num_tokens: int
    ) -> list[Any]:
        """Returns the results of calls of `num_tokens` tokens each, in as few sweeps as fit. The
        rewards of all parts pass with the last ones where that sweep has space for all."""
        engine = engine_of(model)
        most = min(MOST_BATCHES, max(2, engine.sweep_tokens // num_tokens // 2 * 2))
        windows = [[*calls[at : at + most]] for at in range(0, len(calls), most)]
        rewards = self._rewards() if model is self.model else []
        if len(windows[-1]) + num_parts * len(rewards) <= most:
            windows[-1] += [reward.score for reward in rewards]
        results = [found for window in windows for found in engine.sweep([], window)[1]]
        for reward, found in zip(rewards, results[len(calls) :], strict=False):
            reward.rewards = found
        return results[: len(calls)]

    def _may_score_together(self, model: Any) -> bool:
        if not (self._is_generating and self.is_layer_major and self.is_asked_for):
            return False
        if model is self.model:
            return True
        # A reference model that is not offloaded stays as it is.
        return find_engine(model) is not None and why_forwards_differ(model) is None

    def _has_reference_beside(self, model: Any) -> bool:
        """Whether TRL asks next for the same rows by the same model without its adapter."""
        trainer: Any = self
        if trainer.beta == 0.0 or trainer.ref_model is not None or model is not self.model:
            return False
        from peft.tuners.tuners_utils import BaseTunerLayer

        layer = next((m for m in model.modules() if isinstance(m, BaseTunerLayer)), None)
        return not (layer is None or layer.disable_adapters or "ref" in layer.active_adapters)

    def _as_reference(self, call: Callable[[], Any]) -> Any:
        from trl.trainer.utils import use_adapter

        with use_adapter(self.model, "ref" if "ref" in self.model.peft_config else None):
            return call()


def _joined(results: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Returns the tensors of all parts, one after the other; what the first part lacks is None."""
    columns = zip(*results, strict=True)
    return tuple(None if column[0] is None else torch.cat(column) for column in columns)
